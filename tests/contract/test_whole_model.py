"""A tiny Q8_0 model on every backend: equal logits for any chunking of the prompt and any batch."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest

import mlx_engine
from mlx_engine.cache import SequenceInput
from mlx_engine.loop.forward import forward
from tests.contract.check import BACKENDS
from tests.contract.check import load as load_on
from tests.decoding import prefill

MODEL = Path(__file__).parents[1] / "data" / "qwen3-micro" / "model-q8_0.gguf"
IDS = [5, 9, 300, 17, 2, 44, 8]


@cache
def load(name: str) -> mlx_engine.Engine:
    return load_on(name, MODEL)


def relative(found: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(found - want) / np.linalg.norm(want))


@pytest.fixture(scope="module")
def definition() -> np.ndarray:
    return np.asarray(mlx_engine.load(MODEL, "scalar").logits(IDS))


@pytest.mark.some(2)
@pytest.mark.parametrize("name", BACKENDS)
def test_logits_equal_those_of_the_definition(name: str, definition: np.ndarray):
    assert relative(np.asarray(load(name).logits(IDS)), definition) < 2e-6


@pytest.mark.some(2)
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("chunk", [1, 2, 3, 7])
def test_chunked_prefill_equals_the_whole(name: str, chunk: int, definition: np.ndarray):
    engine = load(name)
    with engine.backend.session():
        logits = prefill(engine.model, IDS, engine.model.new_kv(16), chunk=chunk)
    assert relative(engine.backend.host(logits)[0], definition[-1]) < 1e-6


@pytest.mark.some(2)
@pytest.mark.parametrize("name", BACKENDS)
def test_a_row_of_logits_depends_on_no_later_token(name: str):
    engine = load(name)
    whole, part = np.asarray(engine.logits(IDS)), np.asarray(engine.logits(IDS[:3]))
    assert relative(whole[:3], part) < 1e-6


@pytest.mark.some(2)
@pytest.mark.parametrize("name", BACKENDS)
def test_sequences_in_one_pass_are_as_each_alone(name: str, definition: np.ndarray):
    """Two passes: prompts of different lengths, then the rest of each; the first pass has only one token of one."""
    engine = load(name)
    pool = engine.model.new_pool(24, n_sequences=3, page=2)
    first, second = pool.sequence(), pool.sequence()
    with engine.backend.session():
        one = engine.backend.host(
            forward(engine.model, SequenceInput(IDS[:3], first, None), SequenceInput(IDS[:1], second, 0))
        )
        other = engine.backend.host(
            forward(
                engine.model,
                SequenceInput(IDS[3:7], first, 2),
                SequenceInput(IDS[1:3], second, 1),
                SequenceInput(IDS[:5], pool.sequence(), None),
            )
        )
    assert relative(one, definition[:3]) < 2e-6
    assert relative(other, definition[[5, 6, 2, 0, 1, 2, 3, 4]]) < 2e-6
