"""One tiny model with Q8_0 weights on every backend: the same logits, however the tokens come."""

from pathlib import Path

import numpy as np
import pytest

import mlx_engine
from mlx_engine.decode.loop import prefill
from tests.contract.check import BACKENDS
from tests.contract.check import load as load_on

MODEL = Path(__file__).parents[1] / "data" / "qwen3-micro" / "model-q8_0.gguf"
IDS = [5, 9, 300, 17, 2, 44, 8]


def load(name: str) -> mlx_engine.Engine:
    return load_on(name, MODEL)


def relative(found: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(found - want) / np.linalg.norm(want))


@pytest.fixture(scope="module")
def definition() -> np.ndarray:
    return np.asarray(mlx_engine.load(MODEL, "scalar").logits(IDS))


@pytest.mark.parametrize("name", BACKENDS)
def test_logits_equal_those_of_the_definition(name: str, definition: np.ndarray):
    assert relative(np.asarray(load(name).logits(IDS)), definition) < 2e-6


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("chunk", [1, 2, 3, 7])
def test_chunked_prefill_equals_the_whole(name: str, chunk: int, definition: np.ndarray):
    engine = load(name)
    with engine.backend.session():
        logits = prefill(engine.model, IDS, engine.model.new_cache(16), chunk=chunk)
    assert relative(engine.backend.host(logits)[0], definition[-1]) < 1e-6


@pytest.mark.parametrize("name", BACKENDS)
def test_a_row_of_logits_depends_on_no_later_token(name: str):
    engine = load(name)
    whole, part = np.asarray(engine.logits(IDS)), np.asarray(engine.logits(IDS[:3]))
    assert relative(whole[:3], part) < 1e-6
