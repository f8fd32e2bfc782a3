"""The section of BENCHMARKS.md about several rows in one forward pass."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.rows import DEPTH, limit
from benchmarks.text import Row, figure, source, spread, table


def section(rows: Sequence[Row]) -> str:
    """Return the newest measurement as a table."""
    row = rows[-1]
    medians = row["medians_ts"]
    lines = [
        [n, spread(row["samples_ts"][n]), figure(limit(medians, int(n))), f"{rate / limit(medians, int(n)):.2f}"]
        for n, rate in medians.items()
    ]
    words = (
        f"{source(row)}\n\nOne forward pass of several tokens after {DEPTH} others, with the logits of every token: "
        f"{row['model_name']}, {row['threads']} threads. The limit is the smaller of rows x one row's rate (memory) "
        "and the rate of the longest pass (arithmetic).\n\n"
    )
    return words + table(["rows", "tokens/s", "limit", "share"], lines, n_words=1)
