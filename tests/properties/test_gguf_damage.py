"""A damaged file opens or raises a FormatError. `python -m tests.properties.gguf_damage` tries more."""

import pytest

from tests.properties.gguf_damage import run


def test_random_damage_is_survived_or_refused_with_one_kind_of_error(tmp_path):
    counts, _ = run(1_500, seed=1, folder=tmp_path)
    assert counts["FormatError"] > 300
    assert counts["opened"] > 100  # otherwise all damage would be found by the first check


@pytest.mark.slow
def test_random_damage_costs_little_memory(tmp_path):
    _, excess = run(300, seed=2, folder=tmp_path, measure=True)
    assert excess < 1 << 20
