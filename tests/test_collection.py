"""The collection of other projects' kernels: what it compares and counts. Its cases run by hand only."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from tests.collection.__main__ import print_table
from tests.collection.compare import difference
from tests.collection.outcome import Outcome
from tests.collection.suite import judged


def test_differences_are_relative_to_the_largest_value_of_an_array():
    found = [mx.array([1.0, 2.5]), {"y": mx.array([np.nan, 3.0])}]
    assert difference(found, [np.array([1.0, 2.0]), {"y": np.array([np.nan, 3.0])}]) == 0.25
    assert np.isnan(difference(mx.array([np.nan]), np.array([1.0])))
    assert difference(mx.array([np.inf, 1.0]), np.array([np.inf, 1.0])) == 0
    with pytest.raises(ValueError, match="expected shape"):
        difference(mx.array([1.0]), np.array(1.0))


def test_a_suite_is_right_if_kernels_ran_and_nothing_was_found():
    report = {"places": {"a.py:1": []}, "tests": {"passed": 2}, "failed": {}}
    assert judged(report) == ("right", "1 kernels, 2 tests passed, 0 failed, 0 skipped")
    assert judged(report | {"places": {}})[0] == "failed"
    assert judged(report | {"failed": {"test": "why"}})[0] == "failed"
    verdict, text = judged(report | {"places": {"a.py:1": [], "a.py:2": ["RaceError: two threads"]}})
    assert verdict == "RaceError"
    assert "a.py:2: RaceError: two threads" in text


def test_the_table_counts_kernels_by_their_place(capsys: pytest.CaptureFixture[str]):
    print_table([
        Outcome("owner/a", "one", "right", ["a.py:1", "a.py:2"]),
        Outcome("owner/a", "two", "RaceError", ["a.py:2", "a.py:3"], ["a.py:3"], bug="no barrier"),
        Outcome("owner/b", "three", "differs", ["a.py:1"]),
        Outcome("owner/b", "four", "MemoryFaultError", ["a.py:4"], ["a.py:4"]),
        Outcome("owner/b", "five", "right", [], bug="what the emulator does not see"),
    ])  # fmt: skip
    rows = capsys.readouterr().out.splitlines()
    assert rows[0].split() == ["owner/a", "3", "kernels", "2", "cases:", "1", "right,", "1", "RaceError"]
    assert rows[1].split()[:5] == ["owner/b", "2", "kernels", "3", "cases:"]
    assert (
        rows[2]
        == "5 kernels of 2 repositories; 2 of them without a finding in sound cases, or in cases with a bug elsewhere"
    )
    assert rows[3] == "of 3 cases of sound kernels 1 are right; of 2 cases with a bug 1 were reported"
