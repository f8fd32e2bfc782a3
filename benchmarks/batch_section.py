"""The section of BENCHMARKS.md about several sequences in one decode step."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.text import Row, figure, source, spread, table


def section(rows: Sequence[Row]) -> str:
    """Return the newest measurement of each depth as a table."""
    newest = {row["depth"]: row for row in rows}
    return "\n\n".join(_table(newest[depth]) for depth in sorted(newest))


def _table(row: Row) -> str:
    lines = []
    for n, rate in row["medians_ts"].items():
        limits = row["limits_ts"][n]
        lines.append([n, spread(row["samples_ts"][n]), *map(figure, limits), f"{rate / min(limits):.2f}"])
    words = (
        f"{source(row)}\n\nOne decode step reads a token of each sequence, after {row['depth']:,} tokens of its own: "
        f"{row['model_name']}, {row['threads']} threads. Limits: all weights, keys and values at {row['read_gbs']:.1f} "
        f"GB/s, and all multiplications at {row['peak_gflops']:.0f} GFLOP/s; the share is that of the smaller.\n\n"
    )
    return words + table(["sequences", "tokens/s", "by memory", "by arithmetic", "share"], lines, n_words=1)
