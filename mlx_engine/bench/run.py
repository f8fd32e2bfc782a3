"""All cells of one benchmark: every backend with every test, and what the rows say besides the samples."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterator, Sequence
from typing import Any

from mlx_engine.backends import unavailable
from mlx_engine.bench import machine
from mlx_engine.bench.cells import Test, check, measure
from mlx_engine.checkpoint.model_files import Checkpoint, open_checkpoint
from mlx_engine.checkpoint.sources import resolve
from mlx_engine.engine import Engine, load

Row = dict[str, Any]
SCHEMA = 1


def rows(
    model: str,
    backends: Sequence[str],
    tests: Sequence[Test],
    *,
    kv: Sequence[bool] = (True,),
    quant: str = "keep",
    threads: int | None = None,
    repetitions: int = 5,
    budget: float | None = None,
    jit: bool = True,
) -> Iterator[Row]:
    """One row per backend, cache and test, as they are measured. A backend is never replaced by another.

    Raises:
        BackendUnavailableError: no backend has one of these names.
        OptionError: a test does not fit the model's context.
    """
    reasons = {name: None if name == "auto" else unavailable(name) for name in backends}
    path = resolve(model)
    checkpoint = open_checkpoint(path)
    common = {**origin(), **describe(checkpoint), "model_sha256": machine.digest(path), "quant": quant, "jit": jit}
    for name in backends:
        reason = reasons[name]
        engine: Engine | None = None  # the one before is let go of first
        if reason is None:
            engine = load(path, name, quant, threads, jit=jit)
            for test in tests:
                check(test, engine)
        for cached in kv:
            for test in tests:
                row = {**common, "backend": name, "threads": threads, "kv": cached, "unavailable": reason}
                if engine is None:
                    yield {**row, **test.numbers}
                else:
                    result = measure(engine, test, kv=cached, repetitions=repetitions, budget=budget)
                    yield {**row, "backend": engine.backend.name, **_load(engine), **result.summary()}


def _load(engine: Engine) -> Row:
    return {"load_s": engine.phases["load"], "device": engine.backend.device}


def origin() -> Row:
    """When, where and with what."""
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
