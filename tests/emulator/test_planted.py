"""The bugs that `python -m tests.collection plant` plants; those in our own kernels fit the kernels as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kernels.lab.catalog import entry
from tests.collection.plant.bug import Bug, Swap
from tests.collection.plant.bugs import BUGS
from tests.collection.plant.subjects import OURS, Body
from tests.collection.repositories import REPOSITORIES

OWN = [bug for bug in BUGS if bug.kernel.startswith(f"{OURS} ")]


def test_there_are_many_bugs_of_many_kinds():
    assert len(BUGS) >= 60
    assert len({bug.kind for bug in BUGS}) >= 20
    assert len({(bug.kernel, bug.kind, bug.name) for bug in BUGS}) == len(BUGS)
    assert {bug.kernel.split()[0] for bug in BUGS} <= {OURS, *(repository.path for repository in REPOSITORIES)}


@pytest.mark.some(3)
@pytest.mark.parametrize("bug", OWN, ids=lambda bug: f"{bug.kernel.split()[1]}-{bug.kind}-{bug.name}".replace(" ", "-"))
def test_bugs_fit_our_kernels(bug: Bug):
    case = entry(bug.kernel.split()[1]).cases()[0]
    (planted,) = Body(bug.kernel, [case]).planted(bug, Path())
    assert planted.launch != case.launch


def test_a_bug_that_does_not_fit_is_an_error():
    bug = Bug("kernel", "kind", "name", (Swap("a+", "b", 1),), after="x")
    assert bug.edited("aax aa aaa") == "aax aa b"
    with pytest.raises(ValueError, match=re.escape("expected 2 matches of 'a+', found 1")):
        bug.edited("x aa")
    with pytest.raises(ValueError, match="expected text that matches 'x'"):
        bug.edited("aa aa")
