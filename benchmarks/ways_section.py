"""The section of BENCHMARKS.md about reading memory in several interleaved streams."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.text import Row, figure, source, spread, table


def section(rows: Sequence[Row]) -> str:
    """Return the newest measurement as a table."""
    newest = [row for row in rows if row["time"] == rows[-1]["time"]]
    lines = []
    for row in newest:
        in_order, interleaved = (row["samples_gbs"][way] for way in ("in_order", "in_turns"))
        single = statistics.median(b / a for a, b in zip(in_order, interleaved, strict=True))
        lines.append([row["what"], spread(in_order), spread(interleaved), figure(single)])
    words = (
        f"{source(newest[0])}\n\n{newest[0]['nbytes'] / 2**20:,.0f} MiB on {newest[0]['threads']} threads. The "
        "plain read is one stream in order against eight interleaved streams; the products are gemv row by row against "
        "four interleaved streams of rows. The factor is the median over rounds.\n\n"
    )
    return words + table(["", "in order, GB/s", "interleaved, GB/s", "factor"], lines)
