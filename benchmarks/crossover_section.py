"""The section of BENCHMARKS.md about the width from which on quantised weights are faster."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.crossover import crossover
from benchmarks.text import Row, figure, source, table


def newest(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the last measurement."""
    return [row for row in rows if row["time"] == rows[-1]["time"]]


def section(rows: Sequence[Row]) -> str:
    """Return the newest measurement as a table."""
    rows = newest(rows)
    types = list(rows[0]["medians_us"])
    lines = []
    for row in rows:
        medians = row["medians_us"]
        factors = [figure(medians["F32"] / medians[name]) for name in types if name != "F32"]
        lines.append([row["backend"], str(row["width"]), *(figure(medians[name]) for name in types), *factors])
    words = (
        f"{source(rows[0])}\n\nOne gemv with a square matrix that is in memory and not in a cache, in microseconds, "
        f"and the speed relative to F32. From a width of {crossover(rows)} on Q8_0 is not slower on any backend; "
        "`--quant-min-dim auto` leaves narrower layers unquantised.\n\n"
    )
    head = ["backend", "width", *types, *(f"{name} factor" for name in types if name != "F32")]
    return words + table(head, lines, n_words=1)
