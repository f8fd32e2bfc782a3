"""The section on the width from which on quantising pays."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.crossover import crossover
from benchmarks.text import Row, figure, source, table


def newest(rows: Sequence[Row]) -> list[Row]:
    """The rows of the last measurement."""
    return [row for row in rows if row["time"] == rows[-1]["time"]]


def section(rows: Sequence[Row]) -> str:
    """The newest measurement as a table."""
    rows = newest(rows)
    types = list(rows[0]["medians_us"])
    lines = []
    for row in rows:
        medians = row["medians_us"]
        factors = [figure(medians["F32"] / medians[name]) for name in types if name != "F32"]
        lines.append([row["backend"], str(row["width"]), *(figure(medians[name]) for name in types), *factors])
    words = (
        f"{source(rows[0])}\n\nOne product of a vector with a square matrix that lies in memory, in microseconds, and "
        f"how many times as fast as F32. From a width of {crossover(rows)} on Q8_0 is nowhere slower; layers that are "
        "narrower stay as they are with `--quant-min-dim auto`.\n\n"
    )
    head = ["backend", "width", *types, *(f"{name} factor" for name in types if name != "F32")]
    return words + table(head, lines, n_words=1)
