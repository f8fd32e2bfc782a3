"""The plot of a measurement: throughput with both limits, and latencies, over the number of clients."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from mlx_engine.bench.plots import COLORS, titled_figure

Row = dict[str, Any]
NAME = "concurrency.png"
LATENCIES = (
    ("first token, median", "ttft_ms", "o-"),
    ("first token, p99", "ttft_p99_ms", "o:"),
    ("gap, median", "gap_ms", "v-"),
    ("gap, p99", "gap_p99_ms", "v:"),
)


def write(rows: Sequence[Row], folder: Path) -> list[str]:
    """Draw the plot if the rows have throughput. Return the names of the PNG files."""
    made = draw([row for row in rows if row.get("total_ts")])
    if made is None:
        return []
    made.savefig(folder / NAME, dpi=130)
    return [NAME]


def draw(rows: Sequence[Row]) -> Figure | None:
    """Return two panels: tokens per second beside both limits, and latencies; None without rows."""
    if not rows:
        return None
    made = titled_figure(rows, f"Clients at once, {rows[0]['test']}", 11.0, 5.8)
    rates, latencies = made.subplots(1, 2)
    for backend, color in zip(dict.fromkeys(row["backend"] for row in rows), COLORS, strict=False):
        of = [row for row in rows if row["backend"] == backend]
        _line(rates, of, "total_ts", "o-", color, f"{backend}: all clients")
        _line(rates, of, "memory_limit_ts", "--", color, f"{backend}: limit of memory")
        _line(rates, of, "arithmetic_limit_ts", ":", color, f"{backend}: limit of arithmetic")
        for title, name, style in LATENCIES:
            _line(latencies, of, name, style, color, f"{backend}: {title}")
    rates.set(title="generated tokens per second", yscale="log")
    latencies.set(title="latency in ms", yscale="log")
    clients = sorted({row["concurrency"] for row in rows})
    for axes in (rates, latencies):
        axes.set(xlabel="clients (log scale)", xscale="log")
        axes.set_xticks(clients, [str(n) for n in clients])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)
    return made


def _line(axes: Any, rows: Sequence[Row], name: str, style: str, color: str, label: str) -> None:
    """Plot a figure over the number of clients, where it is known."""
    points = sorted((row["concurrency"], row[name]) for row in rows if row.get(name) is not None)
    if points:
        axes.plot(*zip(*points, strict=True), style, color=color, linewidth=1.2, markersize=4, label=label)
