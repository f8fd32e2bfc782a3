"""Operation by operation: `python -m benchmarks.ops` appends to benchmarks/results/ops.jsonl. On an idle machine.

Two tables. `--cases`: the contract suite's cases on every backend; their inputs are tiny, so the times are the overhead
of a call. `--sizes`: operations of a real model's size. Without an option both are measured.

A case builds its inputs and calls the operation. The call is recorded once and then repeated alone, so that only the
operation is timed.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.log import Log
from benchmarks.text import Row
from mlx_engine.backends.base import Backend
from tests.contract.cases import CASES, OpCase
from tests.contract.check import BACKENDS, PLAIN, backend

RESULTS = Path(__file__).parent / "results" / "ops.jsonl"

# A sample repeats a call for at least so many seconds; a call that takes longer is made once per sample.
SAMPLE_SECONDS, SAMPLES = 2e-3, 5


@dataclass(frozen=True)
class Call:
    """One call of an operation, with its inputs."""

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def on(self, be: Backend) -> None:
        """Make the call, and wait for the result of a lazy backend."""
        result = getattr(be, self.op)(*self.args, **self.kwargs)
        if be.lazy:
            for part in result if isinstance(result, list | tuple) else [result]:
                be.wait(part)


def recorded(case: OpCase, be: Backend) -> list[Call]:
    """Return the calls that a case makes of its operation; most cases make one."""
    calls: list[Call] = []
    twin = copy.copy(be)
    operation = getattr(be, case.op)

    def record(*args: Any, **kwargs: Any) -> Any:
        calls.append(Call(case.op, args, kwargs))
        return operation(*args, **kwargs)

    setattr(twin, case.op, record)
    case.on(twin)
    return calls


def seconds_per_call(
    be: Backend, calls: list[Call], clock: Callable[[], float] = time.perf_counter, samples: int = SAMPLES
) -> list[float]:
    """Return samples of the mean time of all calls, after a warm-up."""

    def timed(n: int) -> float:
        start = clock()
        for _ in range(n):
            for call in calls:
                call.on(be)
        return clock() - start

    with be.session():
        timed(1)
        n = 1
        while timed(n) < SAMPLE_SECONDS:
            n *= 2
        return [timed(n) / n / len(calls) for _ in range(samples)]


def cases() -> Iterator[Row]:
    """Yield a row per backend, with all cases."""
    # Slowest first: a backend in NumPy before its compiled form.
    for name in sorted(BACKENDS, key=lambda name: (name != "scalar", name != PLAIN)):
        be = backend(name)
        found = [{"id": case.id, "seconds": seconds_per_call(be, recorded(case, be))} for case in CASES]
        yield {"kind": "cases", "backend": name, "found": found}


def main() -> None:
    """Measure one table or both."""
    from benchmarks.ops_sizes import sizes

    parser = argparse.ArgumentParser(prog="benchmarks.ops", description="Time operations one by one.")
    parser.add_argument("--cases", action="store_true", help="only the contract suite's cases")
    parser.add_argument("--sizes", action="store_true", help="only operations of a real model's sizes")
    parser.add_argument("--out", type=Path, default=RESULTS, help="append to this file")
    options = parser.parse_args()
    both = options.cases == options.sizes
    log = Log("ops", options.out)
    for wanted, measure in ((both or options.cases, cases), (both or options.sizes, sizes)):
        for row in measure() if wanted else ():
            log.append(row)
            middle = statistics.median(statistics.median(entry["seconds"]) for entry in row["found"])
            print(f"{row['kind']}: {row['backend']}: {len(row['found'])} entries, median {middle * 1e6:,.1f} us")


if __name__ == "__main__":
    main()
