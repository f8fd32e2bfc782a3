"""The section of BENCHMARKS.md about a model whose layers have states."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.peers.engines import LLAMA, OURS
from benchmarks.text import Row, figure, model, source, spread, table

INTRO = """Both engines are interleaved; a rate is the median over the rounds, then the slowest and the fastest. Factors
are medians over rounds, over llama.cpp. The bytes are those of this engine's cache at the end of the test: the state
has the same size at every depth, and only the keys and values of the layers with attention grow."""


def section(rows: Sequence[Row]) -> str:
    """Return the newest measurement as text."""
    rows = [row for row in rows if row["time"] == rows[-1]["time"]]
    lines = []
    for name in dict.fromkeys(row["what"] for row in rows):
        ours, theirs = (next(r for r in rows if r["what"] == name and r["engine"] == one) for one in (OURS, LLAMA))
        factors = [b / a for a, b in zip(ours["seconds"], theirs["seconds"], strict=True)]
        cache = ours["cache"]
        lines.append([
            name, rate(ours), rate(theirs), figure(statistics.median(factors)),
            figure(cache["state_bytes"] / 1e6), figure(cache["kv_bytes"] / 1e6),
        ])  # fmt: skip
    head = ["test", "tokens/s", LLAMA, "factor", "state, MB", "keys and values, MB"]
    return "\n\n".join([f"{model(rows[0])}.", source(rows[0]), INTRO, table(head, lines, n_words=1)]) + "\n"


def rate(row: Row) -> str:
    """Return tokens per second."""
    return spread([(row["n_prompt"] + row["n_gen"]) / seconds for seconds in row["seconds"]])
