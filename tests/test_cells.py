"""`each` runs all cells, gives them the test's fixtures, and fails with the name of every cell that failed."""

from pathlib import Path

import pytest

from tests.cells import each

SEEN = []


@each("a", [1, 2])
@each("b,c", [(3, 4), (5, 6)])
def test_every_cell_is_run_with_fixtures(tmp_path: Path, a: int, b: int, c: int):
    assert tmp_path.is_dir()
    SEEN.append((a, b, c))


def test_all_cells_have_run():
    assert SEEN in ([], [(1, 3, 4), (1, 5, 6), (2, 3, 4), (2, 5, 6)])


def test_all_cells_that_fail_are_named():
    @each("n", range(4))
    def check(n: int) -> None:
        if n == 1:
            pytest.fail("one")
        assert n != 2, "two"

    with pytest.raises(AssertionError, match=r"2 of 4 cells failed:\nn = 1: Failed: one\nn = 2: AssertionError: two"):
        check()


def test_no_cells_are_an_error():
    with pytest.raises(AssertionError, match="n: expected at least one cell"):
        each("n", [])
