"""Plant bugs, one at a time, and expect the default tests to fail: `python -m tests.mutants [--part K/N] [NAME ...]`.

Each bug is planted in a copy of the checkout; the tests that run are the default ones, stopped at the first failure.
Test files that name the changed module run first, because they usually catch the bug in seconds.
`--part 2/8` runs the second of eight equal parts. Exits with 1 if a bug survives, with 2 if the tests fail without one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.mutants import MUTANTS
from tests.mutants.plant import Mutant, planted

ROOT = Path(__file__).parents[2]
NOT_COPIED = (".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis")

# They look for the code that the bug has replaced, or at its hash, and would catch every bug.
NOT_RUN = ("test_mutants.py", "test_benchmarks_page.py")
# pytest's exit status if all tests of the given files are deselected.
NOTHING_RAN = 5


def first_failure(mutant: Mutant | None) -> str | None:
    """Return the test that catches the bug, or None; without a mutant, a test that fails by itself."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "copy"
        shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(*NOT_COPIED))
        if mutant is not None:
            path = root / mutant.file
            path.write_text(planted(mutant, path.read_text()))
        # The copy comes first on the path, also in tests that start a process of their own.
        environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
        near = [] if mutant is None else naming(root, mutant.file)
        return (_failure(near, root, environment) if near else None) or _failure([], root, environment)


def naming(root: Path, file: str) -> list[str]:
    """Return the test files that name the module of a source file."""
    module = file.removesuffix(".py").replace("/", ".")
    package, _, name = module.rpartition(".")
    # `kernels/metal/x.h.metal` and other files that are no modules are named by their file name.
    words = (module, f"from {package} import {name}") if file.endswith(".py") else (Path(file).name,)
    tests = sorted((root / "tests").rglob("test_*.py"))
    return [
        str(test.relative_to(root))
        for test in tests
        if test.name not in NOT_RUN and any(word in test.read_text() for word in words)
    ]


def _failure(files: list[str], root: Path, environment: dict[str, str]) -> str | None:
    """Run these test files, or all, and return the first test that fails."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", "--tb=no", *files]
    command += [f"--ignore-glob=*/{name}" for name in NOT_RUN]
    result = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    if result.returncode in (0, NOTHING_RAN):
        return None
    lines = [line for line in result.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return lines[0].split(" - ")[0] if lines else f"pytest ended with {result.returncode}"


def chosen(names: list[str], part: str) -> list[Mutant]:
    """Return the mutants whose names contain one of `names`, or all, of the K-th of N parts."""
    k, n = map(int, part.split("/"))
    found = [mutant for mutant in MUTANTS if not names or any(name in mutant.name for name in names)]
    # Dealt out in turn, since some modules' mutants take longer to be caught.
    return found[k - 1 :: n]


def main(arguments: list[str]) -> int:
    """Run the chosen mutants, or all."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("names", nargs="*", metavar="NAME", help="parts of the names of mutants; all without")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="only the K-th of N equal parts")
    options = parser.parse_args(arguments)
    wrong = first_failure(None)
    if wrong is not None:
        print(f"without any bug the tests already fail: {wrong}")
        return 2
    survivors, mutants = [], chosen(options.names, options.part)
    for mutant in mutants:
        start = time.monotonic()
        caught = first_failure(mutant)
        survivors += [] if caught else [mutant.name]
        print(f"{mutant.name:<45}{caught or 'SURVIVES':<90}{time.monotonic() - start:6.1f} s", flush=True)
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
