"""`bench --sweep`: measure every rung (a backend with settings, see `ladder.py`) with weights as float32 and as stored.

A rung is not measured if it is unavailable on this machine, if it does not support the chosen type of activations, if
its weights (without experts) would take more than half of the memory, or if one token would take longer than the budget
of a test. The rows of such a rung have the reason. Finally, the fastest rung on the CPU decodes a longer text with and
without a KV cache, to show the duration of every pass.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlx_engine.backends import (
    EXACT,
    activations_of,
    backend_names,
    check_backend,
    create_backend,
    kv_type_of,
    refused,
    unavailable,
)
from mlx_engine.backends.base import Backend
from mlx_engine.backends.parameters import Linear
from mlx_engine.bench.ladder import NO_CACHE, RUNGS, Rung, measured
from mlx_engine.bench.origin import describe, memory_bytes, origin
from mlx_engine.bench.run import Announce, Bench, held_type
from mlx_engine.bench.samples import Test, check_context
from mlx_engine.bench.tables import Row
from mlx_engine.bench.work import bytes_per_weight, sizes
from mlx_engine.checkpoint.identity import digest
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.checkpoint.sources import resolve
from mlx_engine.engine import load
from mlx_engine.errors import listed, require
from mlx_engine.machine.memory import bounded_threads
from mlx_engine.options import OFF
from mlx_engine.quant.types import F32
from mlx_engine.quant.weight import Weight
from mlx_engine.weights.conversion import F32_LAYERS, STORED, Conversion
from mlx_engine.weights.model import architecture_of, open_model

# Seconds per cell (one test on one rung with one type of weights). With this default, a sweep of the built-in model
# takes 2 to 3 minutes.
BUDGET = 10.0
# Number of passes of the long decode test, with and without a cache.
PASSES = 256
# Default prompt lengths: for models with a context of at least 1,024 tokens, and for other models.
PROMPTS, SHORT_PROMPTS = (128, 512), (16, 64, 256)


@dataclass(frozen=True)
class Plan:
    """The settings of a sweep.

    If `prompts` is None, the lengths of `PROMPTS` or `SHORT_PROMPTS` that fit the model's context are used, and `n_gen`
    is limited to the context.
    """

    prompts: Sequence[int] | None = None
    n_gen: int = 64
    quant: Conversion = STORED
    threads: int | None = None
    repetitions: int = 5
    budget: float = BUDGET
    backends: Sequence[str] | None = None
    activations: str = EXACT
    kv_type: str | None = None
    passes: int = PASSES
    allow_settings: Sequence[str] = ()
    allow_too_large: bool = False

    def rungs(self) -> list[Rung]:
        """Return the rungs of the chosen backends.

        Raises:
            BackendUnavailableError: a name in `backends` is not the name of a backend.
            OptionError: none of the chosen rungs supports the type of activations.
        """
        refused("auto", self.activations)  # raises OptionError if no backend has this type of activations
        for name in self.backends or ():
            if all(rung.backend != name for rung in RUNGS):
                check_backend(name)
        rungs = [rung for rung in RUNGS if self.backends is None or rung.backend in self.backends]
        having = [name for name in backend_names() if self.activations in activations_of(name)]
        message = f"no chosen rung of the sweep has activations {self.activations}; choose --backend {listed(having)}"
        found = list(dict.fromkeys(rung.backend for rung in rungs))
        can_run = any(refused(rung.backend, self.activations, jit=rung.jit) is None for rung in rungs)
        require(can_run, option="--activations", expected=listed(having), found=found, message=message)
        return rungs

    def tests(self, context: int) -> list[Test]:
        """Return the tests of a rung; raise OptionError if there is no test, or a test does not fit the context."""
        defaults = PROMPTS if context >= 2 * max(PROMPTS) else SHORT_PROMPTS
        fitting = [n for n in defaults if n <= context]
        lengths = fitting if self.prompts is None else [n for n in self.prompts if n]
        n_gen = min(self.n_gen, context) if self.prompts is None else self.n_gen
        tests = [Test(n_prompt=n) for n in lengths] + ([Test(n_gen=n_gen)] if n_gen else [])
        message = "give at least one test: prompt tokens with -p, or generated tokens with -n"
        require(len(tests) > 0, option="-p, -n", expected="at least one test", found=len(tests), message=message)
        for test in tests:
            check_context(test.name, test.n_tokens, context)
        return tests


# The largest share of the machine's memory that a rung's weights may take.
MEMORY = 0.5


def sweep(model: str, plan: Plan, announce: Announce = lambda done, total, title: None) -> Iterator[Row]:
    """Yield rows as they are measured.

    Before each test, call `announce` with (rungs done, number of rungs, title). The long decode test at the end counts
    as one rung.

    Raises:
        BackendUnavailableError: a name in `plan.backends` is not the name of a backend.
        OptionError: a test does not fit the model's context, or no chosen rung supports the type of activations.
    """
    rungs = plan.rungs()
    path = resolve(model)
    state = Sweep(path, open_model(path, plan.allow_settings), plan, announce, len(rungs) + 1)
    found: list[Row] = []
    for done, rung in enumerate(rungs):
        for row in state.rung(rung, done):
            found.append(row)
            yield row
    yield from state.passes(found, len(rungs))


class Sweep:
    """The state of a sweep. It holds one engine at a time, for all consecutive cells with the same settings."""

    def __init__(self, path: Path, checkpoint: Checkpoint, plan: Plan, announce: Announce, total: int) -> None:
        self.path, self.checkpoint, self.plan, self.total = path, checkpoint, plan, total
        self._announce = announce
        context = architecture_of(checkpoint).plan(checkpoint).config.context_length
        self.tests, self.n_passes = plan.tests(context), min(plan.passes, context)
        self.common = {**origin(), **describe(checkpoint), "model_sha256": digest(path), "unavailable": None}
        self._bench: Bench | None = None
        self._key: tuple[str, bool, str] | None = None

    def rung(self, rung: Rung, done: int) -> Iterator[Row]:
        """Measure all cells of a rung."""
        for quant, reason in self._attempts(rung):
            for test in self.tests:
                if reason is None:
                    yield self._cell(rung, quant, test, done)
                else:
                    asked = {"threads": self.plan.threads, "weights": None, **test.numbers, "unavailable": reason}
                    yield {**self._described(rung, quant), **asked}

    def passes(self, found: Sequence[Row], done: int) -> Iterator[Row]:
        """Yield the rows of the long decode test on the fastest rung of the CPU, with and without a KV cache."""
        cells = [row for row in measured(found) if row["n_gen"] and row["kv"] and row["device"] == "cpu"]
        if not cells or self.n_passes < 1:
            return
        tried = {str(quant): quant for quant in (F32_LAYERS, self.plan.quant)}
        best = max(cells, key=lambda row: float(row["median_ts"]))
        for kv in (True, False):
            rung = Rung(best["rung"] + ("" if kv else NO_CACHE), best["backend"], kv, best["jit"])
            test = Test(n_gen=self.n_passes)
            if kv and test in self.tests:
                continue
            yield self._cell(rung, tried[best["quant"]], test, done)

    def _attempts(self, rung: Rung) -> list[tuple[Conversion, str | None]]:
        """Return the conversions of weights to measure, each with the reason to skip it, or with None.

        If `plan.quant` is STORED (no conversion), the conversions are F32_LAYERS (all layers as float32) and STORED.
        Return only `plan.quant` if it is another conversion, or if the rung cannot run, or expands all weights to
        float32.
        """
        reason = unavailable(rung.backend) or refused(rung.backend, self.plan.activations, jit=rung.jit)
        if reason is not None:
            return [(self.plan.quant, reason)]
        how: dict[str, Any] = {
            "threads": bounded_threads(self.plan.threads),
            "jit": rung.jit,
            "activations": self.plan.activations,
            "kv_type": self.plan.kv_type,
        }
        backend = create_backend(rung.backend, **how)
        quants, held = [self.plan.quant], held_type(self.checkpoint, backend, STORED)
        if self.plan.quant == STORED and held != held_type(self.checkpoint, backend, F32_LAYERS):
            quants = [F32_LAYERS, STORED]
        return [(quant, self._too_much(backend, quant)) for quant in quants]

    def _too_much(self, backend: Backend, quant: Conversion) -> str | None:
        """Return the reason to skip an available rung (weights too large, or tokens too slow), or None."""
        of = sizes(self.checkpoint, lambda type_: bytes_per_weight(backend, type_), quant, backend.kv_type)
        memory = memory_bytes()
        if memory is not None and of.nbytes > MEMORY * memory:
            machine = f"{MEMORY:.0%} of this machine's {memory / 1e9:.1f} GB"
            return f"its weights would take {of.nbytes / 1e9:.1f} GB, more than {machine}"
        seconds = (of.layers + of.head) * seconds_per_weight(backend)
        if seconds > self.plan.budget:
            about = f"{seconds:,.0f}" if seconds >= 10 else f"{seconds:.2g}"
            return f"a token would take about {about} s, and a test has {self.plan.budget:g} s"
        return None

    def _described(self, rung: Rung, quant: Conversion) -> Row:
        ours = {"rung": rung.title, "backend": rung.backend, "jit": rung.jit, "kv": rung.kv, "quant": str(quant)}
        types = {"activations": self.plan.activations}
        types["kv_type"] = kv_type_of(self.plan.activations, self.plan.kv_type)
        return {**self.common, **types, **ours}

    def _cell(self, rung: Rung, quant: Conversion, test: Test, done: int) -> Row:
        self._announce(done, self.total, f"{rung.title} {quant} {test.name}")
        bench, plan = self._engine(rung, quant), self.plan
        measured_row = bench.cell(test, kv=rung.kv, repetitions=plan.repetitions, budget=plan.budget, profile=True)
        return {**self._described(rung, quant), **measured_row}

    def _engine(self, rung: Rung, quant: Conversion) -> Bench:
        key = (rung.backend, rung.jit, str(quant))
        if self._bench is None or self._key != key:
            if self._bench is not None:
                self._bench.close()
            self._bench = None  # frees its weights before the next ones are loaded
            how: dict[str, Any] = {"threads": self.plan.threads, **quant.options()}
            how["allow_settings"] = self.plan.allow_settings
            how |= {"activations": self.plan.activations, "kv_type": self.plan.kv_type, "speculate": OFF}
            engine = load(self.path, rung.backend, jit=rung.jit, allow_too_large=self.plan.allow_too_large, **how)
            self._bench, self._key = Bench(engine, self.checkpoint, quant=quant, jit=True), key
        return self._bench


def seconds_per_weight(backend: Backend) -> float:
    """Return the seconds per weight of a backend's product of one token with a small float32 matrix.

    With large matrices, the time per weight differs by a small factor.
    """
    shape = (32, 512)
    zeros = np.zeros(shape, dtype=np.float32)
    linear: Any = Linear("small", backend.prepare(Weight.pack("small", zeros, F32)))
    x = backend.as_activations(zeros[:1])
    with backend.session():
        backend.wait(backend.linear(x, linear))
        start = time.perf_counter()
        backend.wait(backend.linear(x, linear))
        return (time.perf_counter() - start) / zeros.size
