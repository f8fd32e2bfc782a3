"""All cells of one benchmark: every backend with every test, and what the rows say besides the samples."""

from __future__ import annotations

import datetime
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from mlx_engine.backends import unavailable
from mlx_engine.backends.base import Backend
from mlx_engine.bench import machine
from mlx_engine.bench.cells import Result, Test, check, measure
from mlx_engine.bench.components import affordable, components
from mlx_engine.bench.roofline import Limits, matrices
from mlx_engine.bench.work import Sizes, bytes_per_weight, sizes, work
from mlx_engine.checkpoint.model_files import Checkpoint, open_checkpoint
from mlx_engine.checkpoint.sources import resolve
from mlx_engine.engine import Engine, load
from mlx_engine.models.conversion import STORED, Conversion
from mlx_engine.quant.types import F32, GGMLType

Row = dict[str, Any]
SCHEMA = 1
# Of a cell that has no budget, its components may take so many seconds.
COMPONENT_SECONDS = 2.0
# Backends that take no notice of --threads.
ONE_THREAD = ("scalar", "simd")


def rows(
    model: str,
    backends: Sequence[str],
    tests: Sequence[Test],
    *,
    kv: Sequence[bool] = (True,),
    quant: Conversion = STORED,
    threads: int | None = None,
    repetitions: int = 5,
    budget: float | None = None,
    jit: bool = True,
    overlap: bool = True,
    apart: bool = False,
) -> Iterator[Row]:
    """One row per backend, cache and test, as they are measured. A backend is never replaced by another.

    With `apart` a row also has the components of one pass.

    Raises:
        BackendUnavailableError: no backend has one of these names.
        OptionError: a test does not fit the model's context.
    """
    reasons = {name: None if name == "auto" else unavailable(name) for name in backends}
    path = resolve(model)
    checkpoint = open_checkpoint(path)
    common = {**origin(), **describe(checkpoint), "model_sha256": machine.digest(path)}
    common |= {"quant": str(quant), "jit": jit, "overlap": overlap}
    how: dict[str, Any] = {"repetitions": repetitions, "budget": budget, "apart": apart, "overlap": overlap}
    for name in backends:
        bench: Bench | None = None  # the one before is let go of first
        if reasons[name] is None:
            engine = load(path, name, threads=threads, jit=jit, **quant.options())
            bench = Bench(engine, checkpoint, quant=quant, jit=jit)
            for test in tests:
                check(test, bench.engine)
        for cached in kv:
            for test in tests:
                row = {**common, "backend": name, "threads": threads, "kv": cached, "unavailable": reasons[name]}
                if bench is None:
                    yield {**row, **test.numbers}
                else:
                    yield {**row, **bench.cell(test, kv=cached, **how)}
        if bench is not None:
            bench.close()


class Bench:
    """An engine that is measured, and the machine beside it."""

    def __init__(self, engine: Engine, checkpoint: Checkpoint, *, quant: Conversion, jit: bool) -> None:
        self.engine, self.checkpoint, self.quant = engine, checkpoint, quant
        self.sizes: Sizes = sizes(checkpoint, lambda type_: bytes_per_weight(engine.backend, type_), quant)
        self.threads = threads_of(engine.backend)
        # Another device's limits are not those of the processor.
        on_cpu = engine.backend.device == "cpu"
        self.limits = Limits(matrices(engine, checkpoint), self.threads or 1, jit=jit) if on_cpu else None

    def cell(
        self, test: Test, *, kv: bool, repetitions: int, budget: float | None, apart: bool, overlap: bool = True
    ) -> Row:
        """Measure a test; what a row says of it, its backend, and how near it came to the machine's limits."""
        between = self.limits.sample if self.limits is not None else lambda: None
        how: dict[str, Any] = {"kv": kv, "overlap": overlap, "repetitions": repetitions, "budget": budget}
        result = measure(self.engine, test, **how, between=between)
        row = {**self.about(), "kv": kv, **result.summary(), **self._rates(result, kv=kv)}
        if apart and kv:
            seconds = COMPONENT_SECONDS if budget is None else budget / 4
            row["components"] = components(self.engine, test, affordable(result, seconds))
        return row

    def about(self) -> Row:
        """What the rows of all cells have in common."""
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
        """End the threads that measured the machine."""
        if self.limits is not None:
            self.limits.close()


def threads_of(backend: Backend) -> int | None:
    """Threads that it was told to compute with; None for a backend that has no such setting."""
    threads = None if backend.name in ONE_THREAD else getattr(backend, "threads", None)
    return threads if isinstance(threads, int) else None


def held_type(checkpoint: Checkpoint, backend: Backend, quant: Conversion) -> GGMLType:
    """The type that most of the weights are multiplied in: the one they were loaded in, or F32 if that is expanded."""
    weights = [checkpoint.weight(name) for name, shape in checkpoint.shapes.items() if len(shape) == 2]
    largest = max(weights, key=lambda weight: weight.nbytes)
    loaded, _ = quant.type_of("", largest.shape, largest.type)
    is_kept = bytes_per_weight(backend, loaded) < bytes_per_weight(backend, F32)
    return loaded if is_kept else F32


def origin() -> Row:
    """Return the time, commit, machine and versions of a measurement."""
    return {
        "schema": SCHEMA,
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": machine.commit(),
        "machine": machine.machine(),
        "versions": machine.versions(),
    }


def describe(checkpoint: Checkpoint) -> Row:
    """The model's name, bytes and parameters."""
    weights = [checkpoint.weight(name) for name in checkpoint.shapes]
    return {
        "model_name": str(checkpoint.metadata.get("general.name") or checkpoint.architecture),
        "model_size": sum(weight.nbytes for weight in weights),
        "model_n_params": sum(math.prod(weight.shape) for weight in weights),
    }
