"""Plots of a sweep: passes with and without a cache, the ladder, a roofline."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# Not pyplot: a plain Figure needs no window system and is saved directly to a file.
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import LogFormatter, StrMethodFormatter

from mlx_engine.bench.estimate import rest
from mlx_engine.bench.ladder import NO_CACHE, figure, measured, tests
from mlx_engine.bench.tables import printable

Row = dict[str, Any]

# A palette for colour-blind readers.
COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#332288", "#bb5500", "#44aa99", "#999933")
GRAY = "#777777"


def write(rows: Sequence[Row], folder: Path) -> list[str]:
    """Draw all plots that the rows have data for. Return the names of the PNG files."""
    drawn: dict[str, Callable[[Sequence[Row]], Figure | None]] = {
        "passes.png": passes,
        "ladder.png": ladder,
        "roofline.png": roofline,
    }
    names = []
    for name, draw in drawn.items():
        made = draw(rows)
        if made is not None:
            made.savefig(folder / name, dpi=130)
            names.append(name)
    return names


def titled_figure(rows: Sequence[Row], title: str, width: float, height: float) -> Figure:
    """Return an empty figure with title, model, machine and commit; the size is in inches."""
    row, n_params = rows[0], rows[0]["model_n_params"]
    size = "" if n_params is None else f", {n_params / 1e6:,.1f} M parameters"
    made = Figure(figsize=(width, height), layout="constrained")
    made.suptitle(f"{title}\n{printable(row['model_name'])}{size}")
    commit = row["commit"] or row["versions"]["mlx-engine"]
    where = f"{row['machine']['processor']}, {row['machine']['cores']} cores; {row['time'][:10]}, {commit}"
    made.supxlabel(where, fontsize=8, color=GRAY)
    return made


def passes(rows: Sequence[Row]) -> Figure | None:
    """Plot the duration of every decode pass, a panel for each rung measured with and without a cache."""
    pairs = _pairs([row for row in measured(rows) if row["passes_s"] and row["n_gen"] > 1 and not row["n_prompt"]])
    if not pairs:
        return None
    made = titled_figure(rows, "How long each pass takes, with a cache and without", 6.4 * len(pairs), 4.8)
    for axes, (with_cache, without) in zip(made.subplots(1, len(pairs), squeeze=False)[0], pairs, strict=True):
        for row, color, name in ((without, COLORS[1], "without a cache"), (with_cache, COLORS[0], "with a cache")):
            _line(axes, row, color, name)
        axes.set(title=f"{with_cache['rung']}, {with_cache['weights']}", xlabel="pass", ylabel="ms per pass")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    return made


def _pairs(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Return pairs of rows (with a cache, without) of one test and rung, slowest rung first."""
    without = {(row["rung"].removesuffix(NO_CACHE), row["weights"], row["test"]): row for row in rows if not row["kv"]}
    keys = {(row["rung"], row["weights"], row["test"]): row for row in rows if row["kv"]}
    return [(row, without[key]) for key, row in keys.items() if key in without]


def _line(axes: Any, row: Row, color: str, name: str) -> None:
    """Plot the median over repetitions, continued by the estimate if a budget ended the passes."""
    n = min(len(run) for run in row["passes_s"])
    ms = [statistics.median(run[i] for run in row["passes_s"]) * 1e3 for i in range(n)]
    axes.plot(range(1, n + 1), ms, color=color, linewidth=1.2, label=name)
    if n < row["n_gen"]:
        first = row["n_depth"] + 1
        lengths = [1 if row["kv"] else first + i for i in range(row["n_gen"])]
        axes.plot(
            range(n + 1, row["n_gen"] + 1), rest(ms, lengths), color=color, linestyle=":", label=f"{name}, estimated"
        )


def ladder(rows: Sequence[Row]) -> Figure | None:
    """Plot tokens per second of every rung, one panel for the longest prompt and one for decode."""
    prompts, gens = tests(rows)
    chosen = [("prefill", prompts[-1])] if prompts else []
    chosen += [("decode", gens[0])] if gens else []
    # In the order of the ladder; rungs that were not measured have no weights.
    lines = [key for key in dict.fromkeys((row["rung"], row["weights"]) for row in rows) if _has(rows, key, chosen)]
    if not chosen or not any(weights for _, weights in lines):
        return None
    made = titled_figure(rows, "The ladder", 6.2 * len(chosen), 2.2 + 0.42 * len(lines))
    for axes, (phase, test) in zip(made.subplots(1, len(chosen), squeeze=False, sharey=True)[0], chosen, strict=True):
        cells = {(row["rung"], row["weights"]): row for row in measured(rows) if row["test"] == test}
        rates = [row["median_ts"] for row in cells.values()] or [1.0]
        left = min(rates) / 2
        axes.set(title=f"{phase}, {test}", xlabel="tokens per second (log scale)", xscale="log")
        # Room for the numbers after the bars, on a log scale.
        axes.set_xlim(left, max(rates) * (max(rates) / left) ** 0.25)
        _plain_numbers(axes.xaxis)
        _bars(axes, lines, cells, left)
    axes.set_yticks(range(len(lines)), [f"{rung}, {kind}" if kind else rung for rung, kind in lines])
    axes.set_ylim(len(lines) - 0.4, -0.6)
    made.legend(handles=_keys(measured(rows)), loc="outside lower right", ncols=4, fontsize=8)
    return made


def _has(rows: Sequence[Row], key: tuple[str, str], chosen: Sequence[tuple[str, str]]) -> bool:
    return any((row["rung"], row["weights"]) == key and row["test"] in {test for _, test in chosen} for row in rows)


def _bars(axes: Any, lines: Sequence[tuple[str, str]], cells: dict[tuple[str, str], Row], left: float) -> None:
    for i, key in enumerate(lines):
        row = cells.get(key)
        if row is None:
            axes.text(left * 1.1, i, "-" if key[1] else "not measured", color=GRAY, va="center", fontsize=8)
            continue
        hatch = "///" if row["estimated"] else None
        axes.barh(i, row["median_ts"], color=_color(row["weights"]), hatch=hatch, edgecolor="white")
        rate = f" {'~' if row['estimated'] else ''}{figure(row['median_ts'])}"
        axes.text(row["median_ts"], i, rate, va="center", fontsize=9)


def _plain_numbers(axis: Any) -> None:
    """Label ticks with plain numbers (400); label minor ticks only if there are few powers of ten."""
    axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.4)))


def _color(weights: str) -> str:
    return COLORS[0] if weights == "F32" else COLORS[2]


def _keys(rows: Sequence[Row]) -> list[Patch]:
    """Return the legend of the bar colours."""
    keys = [Patch(color=_color(kind), label=kind) for kind in sorted({row["weights"] for row in rows})]
    if any(row["estimated"] for row in rows):
        keys.append(Patch(facecolor="white", edgecolor=GRAY, hatch="///", label="estimated"))
    return keys


def roofline(rows: Sequence[Row]) -> Figure | None:
    """Plot operations per second over operations per byte, with the machine limits measured at the same time."""
    cells = [
        row for row in measured(rows) if row.get("read_gbs") is not None and not (row["n_prompt"] and row["n_gen"])
    ]
    if not cells:
        return None
    made = titled_figure(rows, "How near to the machine's limits", 9.6, 6.4)
    axes = made.subplots()
    intensities = [row["flops_per_token"] / row["bytes_per_token"] for row in cells]
    span = min(intensities) / 2, max(intensities) * 2
    threads = sorted({row["threads"] or 1 for row in cells})
    for n, style in zip(threads, ("--", "-", "-."), strict=False):
        _roof(axes, [row for row in cells if (row["threads"] or 1) == n], span, style, n)
    names = list(dict.fromkeys((row["rung"], row["weights"]) for row in cells))
    for name, color in zip(names, COLORS * (1 + len(names) // len(COLORS)), strict=False):
        _points(axes, [row for row in cells if (row["rung"], row["weights"]) == name], color, ", ".join(name))
    for marker, face, what in (("o", GRAY, "prefill"), ("v", GRAY, "decode"), ("o", "none", "estimated")):
        axes.plot([], [], marker, color=GRAY, markerfacecolor=face, label=what)
    axes.set(xscale="log", yscale="log", xlim=span, xlabel="floating-point operations per byte read (log scale)")
    axes.set_ylabel("GFLOP/s (log scale)")
    _plain_numbers(axes.xaxis)
    _plain_numbers(axes.yaxis)
    axes.grid(alpha=0.3, which="both")
    made.legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    return made


def _roof(axes: Any, rows: Sequence[Row], span: tuple[float, float], style: str, threads: int) -> None:
    read, peak = (statistics.median(row[name] for row in rows) for name in ("read_gbs", "peak_gflops"))
    corner = min(max(peak / read, span[0]), span[1])
    at = [span[0], corner, span[1]]
    name = f"{threads} thread{'s' if threads > 1 else ''}: {read:.0f} GB/s, {peak:.0f} GFLOP/s"
    axes.plot(at, [min(peak, read * x) for x in at], color="#444444", linestyle=style, label=name)


def _points(axes: Any, rows: Sequence[Row], color: str, name: str) -> None:
    for i, row in enumerate(rows):
        marker = "o" if row["n_prompt"] else "v"
        at = row["flops_per_token"] / row["bytes_per_token"]
        face = "none" if row["estimated"] else color
        axes.plot(at, row["gflops"], marker, color=color, markerfacecolor=face, label=name if i == 0 else None)
