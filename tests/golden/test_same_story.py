"""The built-in model generates the same 64 tokens on every backend."""

import pytest

import mlx_engine
from tests.contract.check import BACKENDS, EMULATED, load

# The output of `scalar` after "Once upon a time".
STORY = [
    11, 366, 295, 256, 414, 675, 312, 1204, 13, 350, 616, 402, 11, 1204, 295, 1693, 770, 262, 980, 1121, 309, 729,
    256, 1307, 1345, 13, 512, 295, 256, 431, 1081, 0, 1204, 748, 455, 528, 415, 327, 295, 1566, 302, 328, 1289, 666,
    13, 339, 1210, 406, 330, 1282, 11, 368, 703, 406, 1452, 83, 385, 379, 1204, 1923, 13, 746, 507, 506,
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
