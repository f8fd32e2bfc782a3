"""Measure the GPU kernels on a model's matrices, and the rates of a model that uses them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_engine.bench import mlx_lm_peer
from mlx_engine.bench.origin import origin
from mlx_engine.bench.run import rows
from mlx_engine.bench.samples import Test
from mlx_engine.checkpoint.model_files import open_checkpoint
from mlx_engine.checkpoint.shapes import SHAPES
from mlx_engine.checkpoint.sources import PREFIX, resolve
from mlx_engine.weights.model import model_file

if TYPE_CHECKING:
    from mlx_engine.kernels.launch import ExecutorName

Row = dict[str, Any]
SCHEMA = 1
# The sizes that determine a model's matrices.
SIZES = ("hidden_size", "intermediate_size", "n_heads", "n_kv_heads", "head_dim", "vocab_size")
# The tests of a model: prefill and decode.
TESTS = (Test(n_prompt=512), Test(n_gen=64))
REPETITIONS = 5
# The backends to time: MLX alone, and this project's kernels, by executor.
BACKENDS = {"metal": ("mlx", "metal"), "cuda": ("mlx", "cuda"), "emulator": ("mlx", "metal")}


def measure(
    model: str, executor: ExecutorName, *, vectors: int = 1, progress: Callable[[int, int], None] | None = None
) -> Row:
    """Every rung of the ladder on a model's matrices, and the machine.

    Raises:
        SourceError: there is no such model.
    """
    from mlx_engine.kernels.lab import chips
    from mlx_engine.kernels.lab.ladder import Product, climb, products

    every: list[Product] = products(**model_sizes(model))
    found: Row = {
        "schema": SCHEMA,
        **origin(),
        "model": model if model.startswith(PREFIX) else Path(model).name,  # a path may contain the user's name
        "executor": executor,
        "chip": chips.chip(),
        "nominal_gbs": chips.nominal_gbs(),
        "read_gbs": None if executor == "emulator" else chips.read_gbs(executor),
        "ladder": [],
    }
    for i, product in enumerate(every):
        found["ladder"] += climb([product], executor, vectors)
        if progress is not None:
            progress(i + 1, len(every))
    return found


def model_sizes(model: str) -> dict[str, int]:
    """Return the values of `SIZES`; for a shape, without writing its file."""
    shape = SHAPES.get(model.removeprefix(PREFIX)) if model.startswith(PREFIX) else None
    if shape is None:
        checkpoint = open_checkpoint(resolve(model))
        shape = model_file(checkpoint).plan(checkpoint).config
    return {name: getattr(shape, name) for name in SIZES}


def add_models(
    found: Row,
    model: str,
    *,
    budget: float | None = None,
) -> None:
    """Add the model's tokens per second with MLX's operations, with this project's kernels, and in mlx-lm."""
    names = BACKENDS[found["executor"]]
    found["tokens"] = list(rows(model, names, TESTS, repetitions=REPETITIONS, budget=budget))
    found["mlx_lm"] = mlx_lm_peer.rates(resolve(model), TESTS, repetitions=REPETITIONS)
