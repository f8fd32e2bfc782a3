"""The section of BENCHMARKS.md about decode of several sequences beside llama.cpp."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.concurrency import fastest
from benchmarks.peers.engines import LLAMA, OURS
from benchmarks.text import Row, figure, source, spread, table


def section(rows: Sequence[Row]) -> str:
    """Return the newest measurement of each depth as a table."""
    newest = {row["depth"]: row for row in rows}
    return "\n\n".join(_table(newest[depth]) for depth in sorted(newest))


def _table(row: Row) -> str:
    names, lines = list(row["samples_ts"]), []
    for n, rate in row["medians_ts"][OURS].items():
        theirs, smaller = fastest(row, n), min(row["limits_ts"][n])
        factor = "-" if theirs is None else figure(rate / theirs)
        rates = [spread(row["samples_ts"][name][n]) for name in names]
        gain = figure(rate / row["medians_ts"][OURS]["1"])
        lines.append([n, *rates, gain, factor, f"{rate / smaller:.2f}"])
    words = (
        f"{source(row)}\n\nTokens/s of one decode step after another, each with a token of every sequence, after "
        f"{row['depth']:,} tokens of its own: {row['model_name']}, {row['threads']} threads. The gain is over one "
        f"sequence, the factor over {LLAMA} at its fastest setting, and the share that of the smaller limit: all "
        f"weights, keys and values at {row['read_gbs']:.1f} GB/s, or all arithmetic at {row['peak_gflops']:.0f} "
        "GFLOP/s.\n\n"
    )
    return words + table(["sequences", *names, "gain", "factor", "share"], lines, n_words=1)
