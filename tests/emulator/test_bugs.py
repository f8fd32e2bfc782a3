"""Every planted bug is caught, in the way that the list says; the kernel without one passes everywhere."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from kernels.emulator import CompileError, EmulatorError, MetalKernel, prepare, unavailable
from tests.emulator import bugs, bugs_of_values, matvec
from tests.emulator.bugs import BUILDS, SEEDS, Bug

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

BUGS = [*bugs.BUGS, *bugs_of_values.BUGS]
# Ragged in every way: a threadgroup with surplus rows, lanes without weights, more than one vector.
PROBLEM = matvec.problem(n=5, k=288, vectors=2)


@pytest.mark.parametrize("build", BUILDS)
def test_the_kernel_without_a_bug(build: str):
    right = matvec.kernel()
    results = [matvec.run(right, PROBLEM, build=build, seed=seed) for seed in SEEDS]
    assert matvec.errors(results[0], PROBLEM).max() < 4
    assert all(np.array_equal(result, results[0]) for result in results)


def planted(bug: Bug) -> tuple[str, str]:
    """The kernel's body and header with the bug in it."""
    text = matvec.HEADER if bug.header else matvec.SOURCE
    assert bug.old in text, f"{bug.name}: the kernel has changed"
    wrong = text.replace(bug.old, bug.new, 1)
    return (matvec.SOURCE, wrong) if bug.header else (wrong, matvec.HEADER)


def outcome(wrong: MetalKernel, bug: Bug) -> tuple[list[np.ndarray[Any, Any]], EmulatorError | None]:
    """What comes out for each seed, up to the first error."""
    results = []
    try:
        for seed in SEEDS:
            results.append(matvec.run(wrong, PROBLEM, build=bug.build, seed=seed, **bug.switches))
    except EmulatorError as error:
        return results, error
    return results, None


@pytest.fixture(scope="module")
def compiled() -> dict[str, MetalKernel]:
    """All kernels that compile, a unit per build."""
    kernels = {bug.name: matvec.kernel(*planted(bug)) for bug in BUGS}
    for build in BUILDS:
        here = [bug for bug in BUGS if bug.build == build and not issubclass(bug.caught or EmulatorError, CompileError)]
        prepare([matvec.request(kernels[bug.name], PROBLEM) for bug in here], build=build)
    return kernels


@pytest.mark.some(8)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name.replace(" ", "-"))
def test_every_bug_is_caught(bug: Bug, compiled: dict[str, MetalKernel]):
    results, error = outcome(compiled[bug.name], bug)
    assert type(error) is (bug.caught or type(None)), error
    if bug.note:
        seen = compiled[bug.name]
        notes = (*seen.notes, *(seen.statistics.notes if seen.statistics else ()))
        assert any(re.search(bug.note, str(note), re.DOTALL) for note in notes), notes
    if error:
        assert re.search(bug.says, str(error), re.DOTALL), error
        assert str(error).startswith("kernel 'matvec'")
        return
    if bug.note:
        return  # values may be right
    within = np.max(matvec.errors(results[0], PROBLEM)) < 4  # False for NaN
    assert not within or any(not np.array_equal(result, results[0]) for result in results)


def test_there_are_many_kinds():
    assert len(BUGS) >= 25
    assert len({bug.name for bug in BUGS}) == len(BUGS)
