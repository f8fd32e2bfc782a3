"""Run the default tests while other processes keep all cores busy: `python -m tests.busy --runs 3`.

No default test may fail because the machine is busy. Each run prints a line: the load average, in which the tests' own
processes count, too, the seconds, pytest's last line, and the tests that failed. The exit code is 1 if a run failed.
Further arguments are pytest's.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
# As `make test` runs them.
PYTEST = ["-m", "pytest", "-n", "auto", "--maxprocesses", "4", "--dist", "loadfile"]
# The parent may be killed: a burner whose parent has changed ends.
BURN = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    for _ in range(1 << 20): pass"


@contextmanager
def burners(n: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Keep n processes busy in the context, at the priority of the tests."""
    with ExitStack() as stack:
        started = []
        for _ in range(n):
            started.append(subprocess.Popen([sys.executable, "-c", BURN, str(os.getpid())]))
            stack.callback(started[-1].wait)
            stack.callback(started[-1].kill)
        yield started


def run(arguments: Sequence[str]) -> tuple[int, str]:
    """Run pytest, whose lines are printed as they come; return its exit code and the line about this run."""
    begin, used, told, last = time.monotonic(), _cpu_seconds(), list[str](), ""
    process = subprocess.Popen(
        [sys.executable, *PYTEST, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    with process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
            if line.startswith(("FAILED ", "ERROR ")):
                told.append(line.split(" - ")[0].strip())
    load = ", ".join(f"{of:.1f}" for of in os.getloadavg())
    seconds, cpu = time.monotonic() - begin, _cpu_seconds() - used
    return (
        process.returncode,
        f"load {load}; {seconds:.0f} s, {cpu:.0f} CPU s; {last}; {', '.join(told) or 'no failure'}",
    )


def _cpu_seconds() -> float:
    """Return the CPU time of the children that have ended; burners have not."""
    found = resource.getrusage(resource.RUSAGE_CHILDREN)
    return found.ru_utime + found.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.busy", description=__doc__)
    parser.add_argument("--runs", type=int, default=1, help="how often the tests run")
    parser.add_argument("--burners", type=int, default=6, help="how many other processes keep the cores busy")
    given, arguments = parser.parse_known_args()
    lines, codes = [], []
    with burners(given.burners):
        for number in range(1, given.runs + 1):
            code, line = run(arguments)
            codes.append(code)
            lines.append(f"run {number} of {given.runs}: exit code {code}; {line}")
            print(lines[-1], flush=True)
    print(*lines, sep="\n")
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
