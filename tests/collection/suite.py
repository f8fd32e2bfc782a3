"""Run a project's own tests under `--emulate-metal`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.collection.case import Suite
from tests.collection.outcome import Outcome, ended

# Tests whose kernel never ends must not hold up the others.
LIMIT_SECONDS = 900
# Many projects need modules of mlx-lm, and import what they need for text, not for kernels.
MLX_LM = "ml-explore+mlx-lm"
MISSING = ("--left-empty=mlx_lm", "--stand-in=transformers", "--stand-in=safetensors")


def outcome_of_tests(one: Suite, folder: Path, root: str) -> Outcome:
    """Run a project's own tests in a process of their own, whose packages may have the names of ours."""
    start = time.perf_counter()
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
    verdict, text = judged(report)
    return ended(one, verdict, text, report["places"], start)


def judged(report: dict[str, Any]) -> tuple[str, str]:
    """Return the verdict on what the plugin has reported, and the text that explains it."""
    places, tests = report["places"], Counter(report["tests"])
    findings = [(place, text) for place, texts in places.items() for text in texts]
    failed = [f"{test}: {text}" for test, text in report["failed"].items()]
    counts = (
        f"{len(places)} kernels, {tests['passed']} tests passed, {tests['failed']} failed, {tests['skipped']} skipped"
    )
    verdict = "right" if places and tests["passed"] and not failed else "failed"
    if findings:
        verdict = findings[0][1].split(":")[0]
    return verdict, "\n".join([counts, *(f"{place}: {text}" for place, text in findings), *failed])


def pytest_command(one: Suite, folder: Path, report: Path) -> list[str]:
    """Return the command that runs the tests, without the project's settings, which ask for plugins."""
    tests = [str(path) for pattern in one.tests for path in sorted(folder.glob(pattern))]
    if not tests:
        raise FileNotFoundError(f"{folder}: expected tests {one.tests}, found none; fetch the project again")
    plugins = ["kernels.emulator.pytest_plugin", "suite_plugin", "no:cacheprovider"]
    return [
        sys.executable, "-m", "pytest", "-q", "-c", os.devnull, f"--rootdir={folder}", "--emulate-metal",
        "--continue-on-collection-errors", f"--kernels-to={report}",
        *(word for plugin in plugins for word in ("-p", plugin)), *MISSING, *one.options, *tests,
    ]  # fmt: skip


def environment(folder: Path, root: str) -> dict[str, str]:
    """Return an environment in which the project's packages come before ours."""
    here = Path(__file__).parent
    path = [folder / root, folder, here, here.parent.parent, folder.parent / MLX_LM, os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "PYTHONDONTWRITEBYTECODE": "1"}
