"""The section of BENCHMARKS.md about the smallest job for several threads."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.text import Row, figure, source, table


def section(rows: Sequence[Row]) -> str:
    """Return the newest measurement as a table."""
    newest = [row for row in rows if row["time"] == rows[-1]["time"]]
    lines = [
        [f"{row['bytes'] / 1024:,.0f} KiB", figure(row["alone_us"]), figure(row["handed_out_us"]),
         figure(row["alone_us"] / row["handed_out_us"])]
        for row in newest
    ]  # fmt: skip
    words = (
        f"{source(newest[0])}\n\nOne gemv with a Q8_0 matrix that is in memory and not in a cache, on one thread and "
        f"on {newest[0]['threads']}, in microseconds. Up to {newest[0]['chunk_bytes'] // 1024} KiB the engine uses one "
        "thread.\n\n"
    )
    head = ["weights", "1 thread", f"{newest[0]['threads']} threads", "factor"]
    return words + table(head, lines, n_words=1)
