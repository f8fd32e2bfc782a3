"""The built-in model generates the same 64 tokens on every backend."""

import pytest

import mlx_engine
from tests.contract.check import BACKENDS, EMULATED, load

# The output of `scalar` after "Once upon a time".
STORY = [
    11, 389, 289, 258, 413, 801, 351, 1148, 13, 408, 763, 447, 11, 1148, 289, 1371, 374, 422, 404, 1262, 331, 261,
    1351, 13, 479, 424, 947, 458, 920, 1124, 1605, 11, 279, 1547, 308, 729, 576, 311, 13, 299, 1680, 311, 280, 347,
    320, 317, 1148, 11, 299, 65, 68, 549, 648, 342, 548, 280, 541, 374, 311, 467, 299, 1771, 321, 352,
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
