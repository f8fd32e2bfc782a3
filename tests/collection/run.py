"""Run the cases of one repository in this process, and say of each how it ended."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from kernels.emulator import EmulatorError, emulate
from tests.collection import cases
from tests.collection.case import CASES, SUITES, Case, Checkout, Suite
from tests.collection.repositories import Repository
from tests.collection.suite_plugin import Places, noted

# Tests whose kernel never ends must not hold up the others.
LIMIT_SECONDS = 900
# Many projects need modules of mlx-lm, and import what they need for text, not for kernels.
MLX_LM = "ml-explore+mlx-lm"
MISSING = ("--left-empty=mlx_lm", "--stand-in=transformers", "--stand-in=safetensors")


@dataclass
class Outcome:
    """How a case ended.

    Attributes:
        verdict: "right", "differs", "failed" for a project's own tests, the name of the emulator's error, or "error" if the
            case itself failed.
        kernels: the places in the project that made the kernels that ran: file and line.
        wrong: those of them in which the emulator found a mistake.
        text: the error, or by how much the results differ.
    """

    repository: str
    case: str
    verdict: str
    kernels: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    text: str = ""
    bug: str | None = None
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        """Whether a sound kernel ran and was right, or the bug of another was reported."""
        return self.verdict.endswith(("Error", "differs")) if self.bug else self.verdict == "right"


def run_cases(repository: Repository, folder: Path, names: list[str]) -> Iterator[Outcome]:
    """Run the cases of a repository whose names contain one of `names`, or all."""
    for module in pkgutil.iter_modules(cases.__path__):
        importlib.import_module(f"{cases.__name__}.{module.name}")
    root = (folder / repository.folder).resolve()
    checkout = Checkout(root, repository.root)
    for one in CASES:
        if one.repository == repository.path and (not names or any(name in one.name for name in names)):
            yield outcome(one, checkout, root)
    for one in SUITES:
        if one.repository == repository.path and (not names or any(name in one.name for name in names)):
            yield outcome_of_tests(one, root, repository.root)


def outcome(one: Case, checkout: Checkout, root: Path) -> Outcome:
    """Run a case and compare its results."""
    start, text, verdict = time.perf_counter(), "", "right"
    with emulate() as seen, noted(root) as places:
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
    return ended(one, verdict, text, places, start)


def outcome_of_tests(one: Suite, folder: Path, root: str) -> Outcome:
    """Run a project's own tests in a process of their own, whose packages may have the names of ours."""
    start, places = time.perf_counter(), {}
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary, "report.json")
        try:
            ran = subprocess.run(
                pytest_command(one, folder, file), cwd=folder, env=environment(folder, root), timeout=LIMIT_SECONDS,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return ended(one, "error", f"took longer than {LIMIT_SECONDS} seconds", {}, start)
        if not file.exists():
            return ended(one, "error", f"pytest ended with {ran.returncode}: {ran.stdout[-500:]}", {}, start)
        report = json.loads(file.read_text())
    places, tests = report["places"], Counter(report["tests"])
    findings = [f"{place}: {text}" for place, texts in places.items() for text in texts]
    failed = [f"{test}: {text}" for test, text in report["failed"].items()]
    counts = f"{tests['passed']} tests passed, {tests['failed']} failed, {tests['skipped']} skipped"
    verdict = "right" if tests["passed"] and not failed else "failed"
    if findings:
        verdict = findings[0].removeprefix(f"{next(p for p in places if places[p])}: ").split(":")[0]
    return ended(one, verdict, "\n".join([counts, *findings, *failed]), places, start)


def pytest_command(one: Suite, folder: Path, report: Path) -> list[str]:
    """Return the command that runs the tests, without the project's settings, which ask for plugins."""
    tests = [str(path) for pattern in one.tests for path in sorted(folder.glob(pattern))]
    plugins = ["kernels.emulator.pytest_plugin", "suite_plugin", "no:cacheprovider"]
    return [
        sys.executable, "-m", "pytest", "-q", "-c", os.devnull, f"--rootdir={folder}", "--emulate-metal", "--continue-on-collection-errors",
        f"--kernels-to={report}", *(word for plugin in plugins for word in ("-p", plugin)), *MISSING, *one.options, *tests,
    ]  # fmt: skip


def environment(folder: Path, root: str) -> dict[str, str]:
    """Return an environment in which the project's packages come before ours."""
    here = Path(__file__).parent
    path = [folder / root, folder, here, here.parent.parent, folder.parent / MLX_LM, os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "PYTHONDONTWRITEBYTECODE": "1"}


def ended(one: Case | Suite, verdict: str, text: str, places: Places, start: float) -> Outcome:
    """Return the outcome of a case that began at `start`."""
    wrong = sorted(place for place in places if places[place])
    seconds = round(time.perf_counter() - start, 1)
    return Outcome(one.repository, one.name, verdict, sorted(places), wrong, text, one.bug, seconds)


def difference(found: Any, expected: Any) -> float:
    """Return the largest difference of two trees of arrays, relative to the largest expected value of an array."""
    if isinstance(expected, dict):
        return max(difference(found[key], value) for key, value in expected.items())
    if isinstance(expected, list | tuple):
        if len(found) != len(expected):
            raise ValueError(f"expected {len(expected)} results, found {len(found)}")
        return max(difference(*pair) for pair in zip(found, expected, strict=True))
    x, y = values(found), values(expected)
    if x.shape != y.shape:
        raise ValueError(f"expected shape {y.shape}, found {x.shape}")
    if not np.array_equal(np.isnan(x), np.isnan(y)):
        return float("nan")
    equal = (x == y) | np.isnan(y)
    scale = np.abs(y[np.isfinite(y)]).max(initial=0.0) or 1.0
    return float(np.abs(np.where(equal, 0, x - y)).max(initial=0.0) / scale)


def values(array: Any) -> Any:
    """Return an array of MLX or NumPy as float64, or as complex numbers."""
    if isinstance(array, mx.array):
        array = np.array(array.astype(mx.float32) if array.dtype == mx.bfloat16 else array)
    array = np.asarray(array)
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)


def as_dictionary(one: Outcome) -> dict[str, Any]:
    """Return an outcome as JSON can hold it."""
    return asdict(one)
