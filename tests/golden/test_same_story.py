"""The built-in model generates the same 64 tokens on every backend."""

import pytest

import mlx_engine
from tests.contract.check import BACKENDS, EMULATED, load

# The output of `scalar` after "Once upon a time".
STORY = [
    11, 411, 287, 258, 406, 636, 376, 904, 13, 463, 916, 459, 11, 904, 287, 323, 363, 618, 487, 903, 607, 1289, 322,
    258, 1830, 13, 540, 266, 410, 521, 274, 524, 258, 386, 356, 69, 348, 13, 904, 524, 409, 713, 339, 307, 402,
    1326, 260, 1889, 13, 285, 486, 1670, 909, 308, 304, 904, 11, 285, 40, 541, 476, 340, 420, 540,
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
