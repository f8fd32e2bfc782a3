"""The section of BENCHMARKS.md about single operations, from the rows of `results/ops.jsonl`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.text import Row, figure, source, table

BASE = "scalar"

CASES_INTRO = """The contract suite's cases. Their inputs have a few hundred numbers, so the times are the overhead of a
call: microseconds per call, medians, then the speed relative to `scalar`."""

SIZES_INTRO = """The operations of a Qwen3-0.6B-shaped model for one token (T=1) and for 512. Every call takes another
layer's weights, or another KV cache, so that they are read from memory. GB/s count the bytes that must at least be
moved."""


def section(rows: Sequence[Row]) -> str:
    """Return both tables, each of its newest run."""
    parts = []
    for kind, title, part in (("sizes", "Operations of a model's size", sizes), ("cases", "Overhead of a call", cases)):
        of = [row for row in rows if row["kind"] == kind]
        newest = max((row["time"] for row in of), default="")
        of = [row for row in of if row["time"] == newest]
        if of:
            parts += [f"### {title}", source(of[0]), part(of)]
    return "\n\n".join(parts) + "\n"


def medians(row: Row, key: str) -> dict[str, float]:
    """Return median seconds by entry."""
    return {entry[key]: statistics.median(entry["seconds"]) for entry in row["found"]}


def cases(rows: Sequence[Row]) -> str:
    """Return a line per backend over all cases, then every case in a folded table."""
    found = {row["backend"]: medians(row, "id") for row in rows}
    base = found.get(BASE)
    short, long = [], []
    for name, times in found.items():
        factors = [base[case] / seconds for case, seconds in times.items()] if base else []
        short.append([
            name, figure(statistics.median(times.values()) * 1e6), figure(max(times.values()) * 1e6),
            figure(statistics.geometric_mean(factors)) if factors else "-",
        ])  # fmt: skip
    for case in next(iter(found.values())):
        long.append([case, *(_cell(times[case], base[case] if base else None) for times in found.values())])
    head = ["backend", "median case, us", "slowest case, us", "speed relative to scalar (geometric mean)"]
    fold = f"<details><summary>Every case</summary>\n\n{table(['case', *found], long)}\n\n</details>"
    return f"{CASES_INTRO}\n\n{table(head, short)}\n\n{fold}"


def _cell(seconds: float, base: float | None) -> str:
    factor = f" (x{figure(base / seconds)})" if base is not None and base != seconds else ""
    return f"{figure(seconds * 1e6)}{factor}"


def sizes(rows: Sequence[Row]) -> str:
    """Return a line per operation: time and rates on every backend."""
    lines = []
    for i, entry in enumerate(rows[0]["found"]):
        cells = []
        for row in rows:
            same = row["found"][i]
            seconds = statistics.median(same["seconds"])
            cells += [
                f"{seconds * 1e6:,.0f}",
                figure(same["nbytes"] / seconds / 1e9),
                figure(same["flops"] / seconds / 1e9),
            ]
        lines.append([entry["label"], *cells])
    units = [f"{row['backend']}: {unit}" for row in rows for unit in ("us", "GB/s", "GFLOP/s")]
    return f"{SIZES_INTRO}\n\n{table(['operation', *units], lines)}"
