"""What several files ask about: the micro checkpoint of Qwen3. A file with another `golden` or `engine` has its own."""

from pathlib import Path

import numpy as np
import pytest

import mlx_engine

DATA = Path(__file__).parents[1] / "data" / "qwen3-micro"


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    """Prompts, logits and greedy ids, made by another program."""
    with np.load(DATA / "golden.npz") as file:
        return dict(file)


@pytest.fixture(scope="module")
def engine() -> mlx_engine.Engine:
    """Its float32 weights on `simd`."""
    return mlx_engine.load(str(DATA / "model-f32.gguf"), backend="simd")
