"""The section of BENCHMARKS.md about files quantised by llama.cpp."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.peers.engines import LLAMA, OURS
from benchmarks.text import Row, figure, model, source, spread, table

INTRO = """llama.cpp quantised these files from the first one; in `pure` files all matrices have one type. Each
contestant generates 64 tokens in a fresh process, interleaved; a rate is the median over the rounds, then the slowest
and the fastest. Factors are medians over rounds: over this engine's rate with Q8_0, and over llama.cpp at its best
number of threads. This engine multiplies the stored quants with float32 activations; llama.cpp rounds activations to 8
bits. The error is that of our logits against the same weights as float32."""


def section(rows: Sequence[Row]) -> str:
    """Return the newest measurement as text."""
    rows = [row for row in rows if row["time"] == rows[-1]["time"]]
    decode = [row for row in rows if row["what"] == "decode"]
    errors = {row["file"]: row["error"] for row in rows if row["what"] == "error"}
    ours = {row["file"]: row for row in decode if row["engine"] == OURS}
    theirs: dict[str, Row] = {}
    for row in decode:
        best = theirs.get(row["file"], row)
        if row["engine"] == LLAMA and statistics.median(row["seconds"]) <= statistics.median(best["seconds"]):
            theirs[row["file"]] = row
    base = next(iter(ours.values()))
    lines = []
    for name, row in ours.items():
        other = theirs.get(name)
        lines.append([
            name, figure(row["model_size"] / 1e6), rate(row), factor(row, base), rate(other) if other else "-",
            factor(row, other) if other else "-", f"{errors[name]:.1e}",
        ])  # fmt: skip
    head = ["file", "MB", "tokens/s", "over Q8_0", LLAMA, "factor", "error"]
    parts = [f"{model(base)}.", source(base), INTRO, table(head, lines), *heads(rows, ours)]
    return "\n\n".join(parts) + "\n"


def rate(row: Row) -> str:
    """Return tokens per second, and the setting."""
    setting = f", {row['setting']}" if row["setting"] else ""
    return spread([row["n_gen"] / seconds for seconds in row["seconds"]]) + setting


def factor(row: Row, base: Row) -> str:
    """Return the speed relative to `base`, the median over rounds."""
    return figure(statistics.median(b / a for a, b in zip(row["seconds"], base["seconds"], strict=True)))


def heads(rows: Sequence[Row], ours: dict[str, Row]) -> list[str]:
    """Return the time of the output head, the last product of a token."""
    lines = []
    for row in rows:
        if row["what"] == "head":
            took, token = statistics.median(row["seconds"]), statistics.median(ours[row["file"]]["seconds"])
            share = took / (token / ours[row["file"]]["n_gen"])
            rates = f"{row['nbytes'] / 1e6:,.0f} MB in {took * 1e3:.2f} ms, {row['nbytes'] / took / 1e9:.1f} GB/s"
            lines.append(f"- {row['file']}: a head of {row['type']} reads {rates}: {share:.0%} of a token.")
    return ["\n".join(lines)] if lines else []
