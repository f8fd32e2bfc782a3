"""Measure a model's bottlenecks, and return the bottleneck report as one JSON object."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mlx_engine.backends import EXACT, types_of
from mlx_engine.backends.costs import nbytes_of, shape_of
from mlx_engine.backends.observed import role_of
from mlx_engine.backends.parameters import Linear
from mlx_engine.bench.bottlenecks.analysis import (
    Clock,
    Round,
    kinds,
    measure,
    phase,
    phases,
    profiling_overhead,
    spread,
)
from mlx_engine.bench.bottlenecks.analysis import Limits as Reached
from mlx_engine.bench.bottlenecks.page import command
from mlx_engine.bench.cells import check
from mlx_engine.bench.compare import KIND
from mlx_engine.bench.origin import OtherProcesses, describe, fields, origin
from mlx_engine.bench.roofline import Limits, layers_of, matrices
from mlx_engine.bench.run import Announce, threads_of
from mlx_engine.bench.samples import Test
from mlx_engine.checkpoint.identity import digest
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.checkpoint.sources import resolve
from mlx_engine.engine import Engine, load, open_source
from mlx_engine.options import OFF
from mlx_engine.weights.conversion import AUTO, KEEP, Conversion
from mlx_engine.weights.model import open_model

# A linear layer counts as quantised if it has fewer bits per weight than this. All block formats have fewer.
FLOAT_BITS = 12
FORMATS = {"gguf": "GGUF", "hf": "safetensors"}


def about(engine: Engine, checkpoint: Checkpoint, digest: str) -> dict[str, Any]:
    """Return the model's sizes and formats, in its files and on its backend."""
    config, found = engine.config, layers_of(engine)
    described = describe(checkpoint)
    return {
        "name": described["model_name"],
        "architecture": checkpoint.architecture,
        "format": FORMATS[checkpoint.naming],
        "sha256": digest,
        "parameters": described["model_n_params"],
        "file_bytes": described["model_size"],
        "layers": config.n_layers,
        "width": config.hidden_size,
        "vocabulary": config.vocab_size,
        "context": config.context_length,
        "weight_bytes": sum(nbytes_of(weight) for weight in {id(n.weight): n.weight for n in found}.values()),
        "linears": len(found),
        "linears_quantised": sum(bits_of(linear) < FLOAT_BITS for linear in found),
        "bits": bits(found),
    }


def bits(found: list[Linear]) -> dict[str, float]:
    """Map each role of linear layers, such as "attn_q", to its bits per weight on the backend (8.5 for Q8_0)."""
    sums: dict[str, tuple[int, int]] = {}
    for linear in found:
        role = role_of([linear])
        nbytes, count = sums.get(role, (0, 0))
        sums[role] = nbytes + nbytes_of(linear.weight), count + math.prod(shape_of(linear.weight))
    return {role: 8 * nbytes / count for role, (nbytes, count) in sums.items()}


def bits_of(linear: Linear) -> float:
    """Return the bits per weight of a linear layer on the backend."""
    return 8 * nbytes_of(linear.weight) / math.prod(shape_of(linear.weight))


Report = dict[str, Any]
# The model is loaded up to LOADS times. After LOAD_SECONDS, no further load begins.
LOADS, LOAD_SECONDS = 3, 5.0


@dataclass(frozen=True)
class Settings:
    """The settings of a report."""

    model: str
    backend: str = "auto"
    threads: int | None = None
    n_prompt: int = 128
    n_gen: int = 16
    depth: int = 0
    repetitions: int = 5
    budget: float | None = 90.0
    quant: str = KEEP
    quant_min_dim: int | str = AUTO
    quant_layers: Mapping[str, str] = field(default_factory=dict)
    activations: str = EXACT
    kv_type: str | None = None
    allow_settings: Sequence[str] = field(default_factory=list)

    @property
    def conversion(self) -> Conversion:
        """The conversion of weights on load."""
        return Conversion(self.quant, self.quant_min_dim, self.quant_layers)

    @property
    def test(self) -> Test:
        """The test of `bench` with these sizes."""
        return Test(self.n_prompt, self.n_gen, self.depth)


def report(
    settings: Settings,
    *,
    before: Callable[[Report], None] = lambda known: None,
    progress: Announce = lambda done, of, title: None,
) -> Report:
    """Load the model, measure, and return the report. Before measuring, call `before` with the fields known so far.

    Raises:
        OptionError: the test does not fit the model's context.
        BackendUnavailableError, SourceError, FormatError, ModelError: see `engine.load`.
    """
    path = resolve(settings.model)
    progress(0, 1, "loading")
    how: dict[str, Any] = {
        "threads": settings.threads,
        "allow_settings": settings.allow_settings,
        **settings.conversion.options(),
    }
    how |= {"activations": settings.activations, "kv_type": settings.kv_type, "speculate": OFF}
    check(settings.test, open_source(path, settings.backend, **how))
    engine, loads = loaded(lambda: load(path, settings.backend, **how))
    checkpoint = open_model(path, settings.allow_settings)
    known = {"kind": KIND, **origin(), "command": command(asdict(settings)), "settings": asdict(settings)}
    known |= described(engine, checkpoint, digest(path))
    before(known)
    # Limits are measured on the processor, so they do not apply to other devices.
    on_cpu = engine.backend.device == "cpu"
    limits = Limits(matrices(engine, checkpoint), threads_of(engine.backend) or 1) if on_cpu else None
    others = OtherProcesses()
    try:
        rounds = measured(engine, settings, limits, progress)
        known |= fields(others.share())
    finally:
        if limits is not None:
            limits.close()
    return known | summed(engine, settings, loads, rounds, limits)


def loaded(load: Callable[[], Engine], clock: Clock = time.perf_counter) -> tuple[Engine, list[dict[str, float]]]:
    """Load the engine repeatedly. Return the last engine, and per load the seconds of its phases ("load", ...)."""
    start, phases = clock(), []
    while True:
        engine = load()
        phases.append(engine.phases)
        if len(phases) == LOADS or clock() - start > LOAD_SECONDS:
            return engine, phases
        del engine  # frees its memory before the next load


def measured(
    engine: Engine, settings: Settings, limits: Limits | None, progress: Announce, clock: Clock = time.perf_counter
) -> list[Round]:
    """Run the rounds (a plain run and a profiled run each), and sample the machine's limits between all runs."""
    title = f"{settings.test.name} on {engine.backend.name}"
    return measure(
        engine, settings.test, settings.repetitions, budget=settings.budget, clock=clock,
        between=limits.sample if limits is not None else lambda: None,
        progress=lambda done, of: progress(done, of, title),
    )  # fmt: skip


def described(engine: Engine, checkpoint: Checkpoint, digest: str) -> Report:
    """Describe the model and its backend."""
    be = engine.backend
    return {
        "model": about(engine, checkpoint, digest),
        "backend": {
            "name": be.name,
            "device": be.device,
            "threads": threads_of(be),
            "lazy": be.lazy,
            **types_of(be),
        },
        "watched": be.profiler is not None,
        "notes": list(checkpoint.notes),
    }


def summed(
    engine: Engine,
    settings: Settings,
    loads: Sequence[dict[str, float]],
    rounds: Sequence[Round],
    limits: Limits | None,
) -> Report:
    """Return all measured parts of the report."""
    reached = None if limits is None else Reached(statistics.median(limits.read), statistics.median(limits.peak))
    found, held = kinds(rounds), bits(layers_of(engine))
    off = profiling_overhead(found, reached)
    return {
        "rounds": len(rounds),
        "limits": None if limits is None else {
            "read_gbs": spread([rate / 1e9 for rate in limits.read]),
            "peak_gflops": spread([rate / 1e9 for rate in limits.peak]),
        },
        "timing": timing(loads, rounds),
        "phases": {name: phase(kind, reached, off, held, lazy=engine.backend.lazy) for name, kind in found.items()},
        "steps": [step(rounds, i) for i in range(1 + settings.n_gen)],
    }  # fmt: skip


def timing(loads: Sequence[dict[str, float]], rounds: Sequence[Round]) -> dict[str, dict[str, float | int]]:
    """Return the spread of user-visible times in milliseconds: of the loads, and of passes in plain runs."""
    runs = [round_.plain for round_ in rounds]
    samples = {name: [phases[name] * 1e3 for phases in loads] for name in ("load", "warm_up")}
    samples["first_token"] = [run.passes[0] * 1e3 for run in runs]
    if all(run.sampling for run in runs):  # on a lazy backend, `sampling` is empty: the device chooses the tokens
        samples["prefill"] = [(run.passes[0] - run.sampling[0]) * 1e3 for run in runs]
        samples["sampling"] = [s * 1e3 for run in runs for s in run.sampling]
    if len(runs[0].passes) > 1:
        samples["first_step"] = [run.passes[1] * 1e3 for run in runs]
        samples["decode"] = [s * 1e3 for run in runs for s in run.passes[1:]]
    return {name: spread(values) for name, values in samples.items()}


def step(rounds: Sequence[Round], index: int) -> dict[str, float]:
    """For pass `index`, return median milliseconds: of the pass in plain runs, and of its parts in profiled runs."""
    taken = [phases(round_.profiled[index]) for round_ in rounds]
    plain = statistics.median(round_.plain.passes[index] for round_ in rounds) * 1e3
    return {"step": index, **{k: statistics.median(row[k] for row in taken) for k in taken[0]}, "plain": plain}
