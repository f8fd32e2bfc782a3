"""Plant bugs and expect the default tests to fail: `python -m tests.mutants [--part K/N] [--jobs N] [NAME ...]`.

Each bug is planted in a copy of the checkout; the tests that run are the default ones, stopped at the first failure.
They run once without a bug, which records what each test executes. The tests that execute the bug's lines and few other
files run first, then the test files near its module (`near.py`), which finds the tests of compiled code, then all.
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
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tests.mutants.bugs import MUTANTS
from tests.mutants.executed import FOLDER, Executed
from tests.mutants.near import NOT_RUN, is_compiled, near
from tests.mutants.plant import Mutant, found, lines, planted

ROOT = Path(__file__).parents[2]
NOT_COPIED = (".git", ".venv", "build", "dist", "*.egg-info", ".*_cache", ".hypothesis")

# pytest's exit status if a test failed, and if all tests of the given files are deselected.
FAILED, NOTHING_RAN = 1, 5
# A bug may keep the tests from ending. The first ones take `executed.MOST_SECONDS`, those near a bug as long, all of
# them five minutes in one process.
FIRST_SECONDS, NEAR_SECONDS, ALL_SECONDS = 180, 360, 1800


def first_failure(mutant: Mutant, executed: Executed) -> str | None:
    """Return the test that catches the bug, or None."""
    with copied() as root:
        file, where = found(mutant, ROOT)
        source = (root / file).read_text()
        (root / file).write_text(planted(mutant, source, where))
        fails = partial(_failure, root=root, more={})
        tests = [] if is_compiled(file) else executed.tests(file, lines(mutant, source, where))
        # A bug that keeps a test from being collected is left to the whole files: pytest's status is that of a mistyped
        # name.
        if tests and (caught := fails(tests, only=FAILED, seconds=FIRST_SECONDS)):
            return caught
        runs = near(root, file, executed.seconds_of_files)
        return next(filter(None, map(fails, runs)), None) or fails([], seconds=ALL_SECONDS)


def failure_without_bug(records: Path) -> str | None:
    """Run the tests once, on all cores, and record what each executes; return a test that fails."""
    plugin = ["-p", "tests.mutants.executed", "-n", str(len(os.sched_getaffinity(0))), "--dist", "loadfile"]
    return _failure(plugin, ROOT, more={FOLDER: str(records)}, seconds=ALL_SECONDS)


@contextmanager
def copied() -> Iterator[Path]:
    """Lend a copy of the checkout."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "copy"
        shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(*NOT_COPIED))
        yield root


def _failure(
    words: list[str], root: Path, *, more: Mapping[str, str], only: int | None = None, seconds: float = NEAR_SECONDS
) -> str | None:
    """Run the tests that these words choose, or all, and return the first failure; `only`: with this status alone.

    `more` are environment variables.
    """
    # The copy comes first on the path, also in tests that start a process of their own.
    environment = {**os.environ, "PYTHONPATH": str(root), **more}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", "--tb=no", *words]
    command += ["--hypothesis-profile=no shrinking"]
    command += [f"--ignore-glob=*/{name}" for name in NOT_RUN]
    try:
        result = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, check=False, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return f"tests that do not end within {seconds} s"
    if result.returncode in (0, NOTHING_RAN) or only not in (None, result.returncode):
        return None
    failed = [line for line in result.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(" - ")[0] if failed else f"pytest ended with {result.returncode}"


def chosen(names: list[str], part: str) -> list[Mutant]:
    """Return the mutants whose names contain one of `names`, or all, of the K-th of N parts."""
    k, n = map(int, part.split("/"))
    named = [mutant for mutant in MUTANTS if not names or any(name in mutant.name for name in names)]
    # Every n-th, since some modules' mutants take longer to be caught.
    return named[k - 1 :: n]


def main(arguments: list[str]) -> int:
    """Run the chosen mutants, or all."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("names", nargs="*", metavar="NAME", help="parts of the names of mutants; all without")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="only the K-th of N equal parts")
    n_cores = len(os.sched_getaffinity(0))
    parser.add_argument("--jobs", type=int, default=n_cores, help="bugs at the same time; one per core without")
    options = parser.parse_args(arguments)
    survivors, mutants = [], chosen(options.names, options.part)
    with tempfile.TemporaryDirectory() as records:
        wrong = failure_without_bug(Path(records))
        if wrong is not None:
            print(f"without any bug the tests already fail: {wrong}")
            return 2
        executed = Executed(Path(records), ROOT)

        def run(mutant: Mutant) -> None:
            start = time.monotonic()
            caught = first_failure(mutant, executed)
            survivors.extend([] if caught else [mutant.name])
            print(f"{mutant.name:<45} {caught or 'SURVIVES':<90}{time.monotonic() - start:6.1f} s", flush=True)

        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(run, mutants))
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
