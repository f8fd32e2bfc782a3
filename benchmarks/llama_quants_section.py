"""The section on files of llama.cpp's making. Pure text."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.peers.engines import LLAMA, OURS
from benchmarks.text import Row, figure, model, source, spread, table

INTRO = """Files that llama.cpp's own quantiser made of the first one; `pure` is one type for all matrices. Each
contestant writes 64 tokens in a fresh process, and they take turns; a rate is the median of the rounds, with the
slowest and the fastest behind it. Factors are of rounds, medians: over our own rate with Q8_0, and over llama.cpp's
at its best number of threads. Ours multiplies the stored codes with float32 activations; llama.cpp rounds these to 8
bits. The error is that of our logits against the same weights as float32."""


def section(rows: Sequence[Row]) -> str:
    """The newest measurement."""
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
    """Tokens per second, and the setting."""
    told = f", {row['setting']}" if row["setting"] else ""
    return spread([row["n_gen"] / seconds for seconds in row["seconds"]]) + told


def factor(row: Row, base: Row) -> str:
    """How many times as fast, the median of rounds."""
    return figure(statistics.median(b / a for a, b in zip(row["seconds"], base["seconds"], strict=True)))


def heads(rows: Sequence[Row], ours: dict[str, Row]) -> list[str]:
    """What the last product of a token takes."""
    lines = []
    for row in rows:
        if row["what"] == "head":
            took, token = statistics.median(row["seconds"]), statistics.median(ours[row["file"]]["seconds"])
            share = took / (token / ours[row["file"]]["n_gen"])
            rates = f"{row['nbytes'] / 1e6:,.0f} MB in {took * 1e3:.2f} ms, {row['nbytes'] / took / 1e9:.1f} GB/s"
            lines.append(f"- {row['file']}: a head of {row['type']} reads {rates}: {share:.0%} of a token.")
    return ["\n".join(lines)] if lines else []
