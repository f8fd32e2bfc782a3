"""Run the cases of one repository in this process, and say of each how it ended."""

from __future__ import annotations

import importlib
import pkgutil
import time
from collections.abc import Iterator
from pathlib import Path

from kernels.emulator import EmulatorError, emulate
from kernels.emulator.intercept import Calls
from tests.collection import cases
from tests.collection.case import CASES, SUITES, Case, Checkout
from tests.collection.compare import difference
from tests.collection.outcome import Outcome, ended
from tests.collection.repositories import Repository
from tests.collection.suite import outcome_of_tests
from tests.collection.suite_plugin import Places, noted
from tests.collection.whole import launched


def run_cases(repository: Repository, folder: Path, names: list[str]) -> Iterator[Outcome]:
    """Run the cases of a repository whose names contain one of `names`, or all."""
    load_cases()
    root = (folder / repository.folder).resolve()
    checkout = Checkout(root, repository.root)
    with emulate() as seen, noted(root) as places:  # once, since modules keep the kernels that they make
        for one in CASES:
            if one.repository == repository.path and (not names or any(name in one.name for name in names)):
                seen.findings.clear()
                places.clear()
                yield outcome(one, checkout, seen, places)
    for tests in SUITES:
        if tests.repository == repository.path and (not names or any(name in tests.name for name in names)):
            yield outcome_of_tests(tests, root, repository.root)


def load_cases() -> None:
    """Import all cases, which register themselves."""
    for module in pkgutil.iter_modules(cases.__path__):
        importlib.import_module(f"{cases.__name__}.{module.name}")


def outcome(one: Case, checkout: Checkout, seen: Calls, places: Places) -> Outcome:
    """Run a case and compare its results."""
    start, text, verdict = time.perf_counter(), "", "right"
    launched.clear()
    try:
        found, expected = one.run(checkout)
        worst = difference(found, expected)
        if not worst <= one.tolerance:
            verdict, text = "differs", f"by {worst:.1e} of the largest value, allowed {one.tolerance:.0e}"
    except EmulatorError as error:
        verdict, text = type(error).__name__, str(error)
    except Exception as error:
        verdict, text = "error", f"{type(error).__name__}: {error}"
    for finding in seen.findings:  # also those that the project has caught
        verdict, text = type(finding).__name__, str(finding)
    for made, _ in launched:
        places.setdefault(f"{made.file.relative_to(checkout.folder)}: {made.kernel}", [])
    if launched and verdict.endswith("Error"):
        places[f"{launched[-1][0].file.relative_to(checkout.folder)}: {launched[-1][0].kernel}"].append(text)
    return ended(one, verdict, text, places, start)
