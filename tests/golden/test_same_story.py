"""The built-in model generates the same 64 tokens on every backend."""

import pytest

import mlx_engine
from tests.contract.check import BACKENDS, EMULATED, load

# The output of `scalar` after "Once upon a time".
STORY = [
    11, 366, 439, 256, 414, 675, 312, 1153, 389, 546, 291, 574, 768, 13, 350, 616, 402, 11, 1153, 295, 621, 643, 256,
    431, 910, 1314, 523, 506, 1037, 13, 339, 677, 329, 436, 431, 379, 370, 1153, 11, 339, 420, 290, 327, 1873, 594,
    371, 953, 491, 540, 599, 746, 300, 543, 256, 414, 1776, 11, 1472, 262, 1314, 334, 11, 294, 1598,
]  # fmt: skip


@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "scalar"])
def test_the_story_is_the_one_that_scalar_writes(name: str):
    n = 6 if name == EMULATED else len(STORY)  # a token takes the emulator a tenth of a second
    assert load(name, "builtin").generate("Once upon a time", n).token_ids == STORY[:n]


@pytest.mark.parametrize("name", [name for name in BACKENDS if name not in ("scalar", EMULATED)])
def test_its_beginning_is_the_same_without_a_cache(name: str):
    """Without a cache, every token recomputes the whole story."""
    assert load(name, "builtin").generate("Once upon a time", 8, kv=False).token_ids == STORY[:8]


@pytest.mark.slow
def test_scalar_writes_it():
    assert mlx_engine.load(backend="scalar").generate("Once upon a time", len(STORY)).token_ids == STORY
