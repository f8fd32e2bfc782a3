"""Many small cells in one test: pytest takes 3 ms for each test, which is longer than such a cell runs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

Test = Callable[..., None]


def each(names: str, values: Iterable[Any]) -> Callable[[Test], Test]:
    """Run a test for each of some values, as `pytest.mark.parametrize` does, but as one test.

    All cells share the test's fixtures. The test fails after its last cell, and names every cell that failed.

    Args:
        names: parameters of the test, separated by commas.
        values: one per cell; with several names, a tuple per cell.
    """
    parameters, cells = [name.strip() for name in names.split(",")], list(values)
    assert cells, f"{names}: expected at least one cell, found none"

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            failed = []
            for cell in cells:
                given = cell if len(parameters) > 1 else (cell,)
                try:
                    test(**fixtures, **dict(zip(parameters, given, strict=True)))
                except (Exception, pytest.fail.Exception) as error:
                    failed.append(f"{names} = {cell}: {type(error).__name__}: {error}")
            assert failed == [], f"{len(failed)} of {len(cells)} cells failed:\n" + "\n".join(failed)

        signature = inspect.signature(test)
        others = [parameter for name, parameter in signature.parameters.items() if name not in parameters]
        run.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return run

    return decorate
