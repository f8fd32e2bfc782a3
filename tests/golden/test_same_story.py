"""The built-in model generates the same 64 tokens on every backend."""

import pytest

import mlx_engine
from tests.contract.check import BACKENDS, EMULATED, load

# The output of `scalar` after "Once upon a time".
STORY = [
    11, 366, 439, 256, 414, 675, 312, 1153, 389, 546, 291, 957, 262, 1375, 13, 350, 616, 402, 11, 1153, 295, 1693,
    405, 506, 442, 1110, 334, 262, 997, 13, 525, 557, 262, 1576, 11, 435, 748, 256, 730, 983, 1016, 334, 262, 671,
    1118, 13, 339, 40, 748, 327, 1207, 11, 436, 327, 329, 650, 1795, 379, 370, 1153, 13, 339, 45, 78,
]  # fmt: skip


@pytest.mark.some(1)
@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "scalar"])
def test_the_story_is_the_one_that_scalar_writes(name: str):
    n = 6 if name == EMULATED else len(STORY)  # a token takes the emulator a tenth of a second
    assert load(name, "builtin").generate("Once upon a time", n).token_ids == STORY[:n]


@pytest.mark.some(2)
@pytest.mark.parametrize("name", [name for name in BACKENDS if name not in ("scalar", EMULATED)])
def test_its_beginning_is_the_same_without_a_cache(name: str):
    """Without a cache, every token recomputes the whole story."""
    assert load(name, "builtin").generate("Once upon a time", 8, kv=False).token_ids == STORY[:8]


@pytest.mark.slow
def test_scalar_writes_it():
    assert mlx_engine.load(backend="scalar").generate("Once upon a time", len(STORY)).token_ids == STORY
