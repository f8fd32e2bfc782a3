"""Run all cells of a benchmark.

A cell is a test on a backend, with or without a KV cache. Its result is a row: a dict with the samples, and with their
origin (machine, time, versions, model).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from mlx_engine.backends import EXACT, kv_type_of, refused, unavailable
from mlx_engine.backends.base import Backend
from mlx_engine.bench.cells import affordable, check, components, measure
from mlx_engine.bench.origin import OtherProcesses, describe, fields, origin
from mlx_engine.bench.roofline import Limits, matrices
from mlx_engine.bench.samples import Result, Test
from mlx_engine.bench.tables import Row
from mlx_engine.bench.work import Sizes, bytes_per_weight, sizes, work
from mlx_engine.checkpoint.identity import digest
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.checkpoint.sources import resolve
from mlx_engine.engine import CheckedCheckpoint, Engine, open_source
from mlx_engine.options import OFF
from mlx_engine.quant import BY_NAME
from mlx_engine.quant.types import F32, GGMLType
from mlx_engine.weights.conversion import STORED, Conversion
from mlx_engine.weights.model import open_model

if TYPE_CHECKING:
    from mlx_engine.distributed.shard import Shard

Announce = Callable[[int, int, str], None]
# If a cell has no budget of time, its profile takes at most this number of seconds.
COMPONENT_SECONDS = 2.0
# Backends that ignore --threads.
ONE_THREAD = ("scalar", "simd")


def rows(
    model: str,
    backends: Sequence[str],
    tests: Sequence[Test],
    *,
    kv: Sequence[bool] = (True,),
    repetitions: int = 5,
    budget: float | None = None,
    profile: bool = False,
    overlap: bool = True,
    announce: Announce = lambda done, total, title: None,
    **how: Any,
) -> Iterator[Row]:
    """Yield one row per backend, cache setting and test, as soon as it is measured.

    Rows of an unavailable backend have the reason in place of samples. With `profile`, rows with a KV cache also have
    the profile of a pass. `announce` is called with (runs done, runs in total, title) at the start of each cell, and
    after each of its runs: the warm-up and the repetitions. `how` is passed to `engines`.

    Raises:
        BackendUnavailableError: a name in `backends` is not the name of a backend.
        OptionError: a test does not fit the model's context.
    """

    def check_all(opened: CheckedCheckpoint) -> None:
        for test in tests:
            check(test, opened)

    runs: dict[str, Any] = {"repetitions": repetitions, "budget": budget, "profile": profile, "overlap": overlap}
    each, cells = repetitions + 1, [(cached, test) for cached in kv for test in tests]
    total = len(backends) * len(cells) * each
    announce(0, total, f"{tests[0].name} on {backends[0]}")
    for place, (row, reason, bench) in enumerate(engines(model, backends, check_all, overlap=overlap, **how)):
        for number, (cached, test) in enumerate(cells, start=place * len(cells)):
            title = f"{test.name} on {row['backend']}"
            runs["progress"] = partial(_announce, announce, number * each, total, title)
            cell = test.numbers if bench is None else bench.cell(test, kv=cached, **runs)
            yield {**row, "kv": cached, "unavailable": reason, **cell}
        del bench  # frees the engine before the next one is loaded


def _announce(announce: Announce, before: int, total: int, title: str, runs: int, of: int) -> None:
    """Announce how many runs are done: those of earlier cells (`before`), and `runs` of this cell."""
    announce(before + runs, total, title)


def engines(
    model: str,
    backends: Sequence[str],
    check: Callable[[CheckedCheckpoint], None],
    *,
    shared: Row | None = None,
    quant: Conversion = STORED,
    threads: int | None = None,
    jit: bool = True,
    activations: str = EXACT,
    kv_type: str | None = None,
    allow_settings: Sequence[str] = (),
    allow_too_large: bool = False,
    experts_memory: int | None = None,
    overlap: bool = True,
    shard: Shard | None = None,
    speculate: str = OFF,
    draft: str | None = None,
) -> Iterator[tuple[Row, str | None, Bench | None]]:
    """Yield a tuple per backend: the fields that its rows share, a reason and a `Bench`.

    If the backend is unavailable, the reason says why, and there is no `Bench`; otherwise the reason is None. A `Bench`
    is closed when the next tuple is requested. Before weights are read, `check` is called with the opened model.
    `shared` has fields to add to all rows. `shard` has the ranks that share the model with this process (rank 0).
    """
    reasons = {name: None if name == "auto" else unavailable(name) for name in backends}
    # If one of several backends does not support these activations, its rows have the reason. If the only backend does
    # not support them, `open_source` raises an error.
    if len(backends) > 1:
        reasons = {name: reason or refused(name, activations, jit=jit) for name, reason in reasons.items()}
    path = resolve(model)
    checkpoint = open_model(path, allow_settings)
    common = {**origin(), **describe(checkpoint), "model_sha256": digest(path)}
    common |= {"quant": str(quant), "jit": jit, "activations": activations, "overlap": overlap, **(shared or {})}
    common["kv_type"] = kv_type_of(activations, kv_type)
    for name in backends:
        row = {**common, "backend": name, "threads": threads}
        if reasons[name] is not None:
            yield row, reasons[name], None
            continue
        how: dict[str, Any] = {
            "threads": threads,
            "jit": jit,
            "activations": activations,
            "kv_type": kv_type,
            "allow_settings": allow_settings,
        }
        how |= {**quant.options(), "speculate": speculate, "draft": draft, "experts_memory": experts_memory}
        opened = open_source(path, name, allow_too_large=allow_too_large, shard=shard, **how)
        check(opened)
        bench = Bench(Engine(opened), checkpoint, quant=quant, jit=jit)
        try:
            yield row, None, bench
        finally:
            bench.close()
        del bench, opened


class Bench:
    """An engine to measure, and the `Limits` that measure the machine meanwhile."""

    def __init__(self, engine: Engine, checkpoint: Checkpoint, *, quant: Conversion, jit: bool) -> None:
        self.engine, self.checkpoint, self.quant = engine, checkpoint, quant
        be = engine.backend
        self.sizes: Sizes = sizes(checkpoint, lambda type_: bytes_per_weight(be, type_), quant, be.kv_type)
        self.threads = threads_of(engine.backend)
        # The limits of this processor apply neither to other devices nor to a model on several machines.
        on_cpu = engine.backend.device == "cpu" and not engine.model.is_shared
        self.limits = Limits(matrices(engine, checkpoint), self.threads or 1, jit=jit) if on_cpu else None

    def cell(
        self,
        test: Test,
        *,
        kv: bool,
        repetitions: int,
        budget: float | None,
        profile: bool,
        overlap: bool = True,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Row:
        """Measure a test; return its row: samples, backend, shares of the machine's limits, load of other processes.

        `progress` is called with (runs done, runs in total) before the first run and after each run.
        """
        between = self.limits.sample if self.limits is not None else lambda: None
        how: dict[str, Any] = {"kv": kv, "overlap": overlap, "repetitions": repetitions, "budget": budget}
        others = OtherProcesses()
        result = measure(self.engine, test, **how, between=between, progress=progress)
        # If ranks share the model, other processes may be these ranks, so their load is not reported as a disturbance.
        share = None if self.engine.model.is_shared else others.share()
        row = {**self.about(), "kv": kv, **result.summary(), **self._rates(result, kv=kv), **fields(share)}
        if profile and kv:
            seconds = COMPONENT_SECONDS if budget is None else budget / 4
            row["components"] = components(self.engine, test, affordable(result, seconds))
        return row

    def about(self) -> Row:
        """Return the fields that the rows of all cells share."""
        return {
            "backend": self.engine.backend.name,
            "device": self.engine.backend.device,
            "threads": self.threads,
            "weights": held_type(self.checkpoint, self.engine.backend, self.quant).name,
            "weight_bytes": self.sizes.nbytes,
            "load_s": self.engine.phases["load"],
            "warm_up_s": self.engine.phases["warm_up"],
            "watched": self.engine.backend.profiler is not None,
        }

    def _rates(self, result: Result, *, kv: bool) -> Row:
        needed, seconds = work(self.sizes, result.test, kv=kv), statistics.median(result.seconds)
        row = {
            "bytes_per_token": needed.nbytes / result.test.n_tokens,
            "flops_per_token": needed.flops / result.test.n_tokens,
            "gbs": needed.nbytes / seconds / 1e9,
            "gflops": needed.flops / seconds / 1e9,
        }
        if self.limits is None:
            return row
        limits = self.limits.take()
        shares = {"read_share": row["gbs"] / limits["read_gbs"], "peak_share": row["gflops"] / limits["peak_gflops"]}
        return {**row, **limits, **shares}

    def close(self) -> None:
        """End the threads of `limits`."""
        if self.limits is not None:
            self.limits.close()


def threads_of(backend: Backend) -> int | None:
    """Return the number of threads of a backend, or None if it has no such setting."""
    threads = None if backend.name in ONE_THREAD else getattr(backend, "threads", None)
    return threads if isinstance(threads, int) else None


def held_type(checkpoint: Checkpoint, backend: Backend, quant: Conversion) -> GGMLType:
    """Return the type in which the backend holds the largest matrix.

    The conversion `quant` gives the matrix a type. If the backend has no kernel for this type, it expands the matrix to
    the type of the activations, or to F32 for `i16`.
    """
    weights = [checkpoint.weight(name) for name, shape in checkpoint.shapes.items() if len(shape) == 2]
    largest = max(weights, key=lambda weight: weight.nbytes)
    loaded, _ = quant.type_of("", largest.shape, largest.type)
    is_kept = bytes_per_weight(backend, loaded) < bytes_per_weight(backend, F32)
    # `BY_NAME` also has a type I16, but with activations i16, weights without a fixed-point kernel are expanded to F32.
    expanded = F32 if backend.activations == "i16" else BY_NAME.get(backend.activations.upper(), F32)
    return loaded if is_kept else expanded
