"""A damaged file of a folder loads or raises an EngineError. `python -m tests.properties.folder_damage` tries more."""

import pytest

from tests.properties.folder_damage import KINDS, OF_TEXT, run

# Kinds whose sandbox processes take time to start; the command measures their memory.
STARTING = (*OF_TEXT, "template")
# Bytes of Python and NumPy for one load; the sound folders need less than a tenth.
MOST = 32 << 20


@pytest.mark.some(1)
@pytest.mark.parametrize("kind", KINDS)
def test_random_damage_is_survived_or_refused_with_one_kind_of_error(kind, tmp_path):
    count = 20 if kind in STARTING else 75
    counts, _ = run(kind, count, seed=1, folder=tmp_path)
    assert counts["loaded"] > 2  # otherwise all damage would be found by the first check
    assert sum(counts.values()) - counts["loaded"] > count / 6


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in STARTING])
def test_random_damage_costs_little_memory(kind, tmp_path):
    _, most = run(kind, 40, seed=2, folder=tmp_path, measure=True)
    assert most < MOST
