"""Plots of `bench`.

A sweep has three plots: the time of each pass, the ladder (tokens per second of each rung) and the roofline. A rung is
a backend with its settings (`ladder.py`). A benchmark of several clients at once has one plot.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import LogFormatter, LogLocator, NullLocator, StrMethodFormatter

from mlx_engine.bench.ladder import NO_CACHE, measured, tests
from mlx_engine.bench.samples import rest
from mlx_engine.bench.tables import Row, figure, printable

# A palette for colour-blind readers.
COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#332288", "#bb5500", "#44aa99", "#999933")
GRAY = "#777777"
DARK = "#444444"


def write(rows: Sequence[Row], folder: Path) -> list[str]:
    """Draw all plots that the rows have data for, as PNG and SVG. Return the names of the PNG files."""
    of_clients = [row for row in rows if "concurrency" in row]
    drawn: dict[str, Callable[[Sequence[Row]], Figure | None]] = {
        "passes": passes, "ladder": ladder, "roofline": roofline,
    }  # fmt: skip
    names = []
    for name, draw in ({"concurrency": clients} if of_clients else drawn).items():
        made = draw(rows)
        if made is not None:
            for suffix in ("png", "svg"):
                made.savefig(folder / f"{name}.{suffix}", dpi=130)
            names.append(f"{name}.png")
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
    """Plot the duration of every decode pass, one panel for each rung that was measured with and without a KV cache."""
    pairs = _pairs([row for row in measured(rows) if row["passes_s"] and row["n_gen"] > 1 and not row["n_prompt"]])
    if not pairs:
        return None
    made = titled_figure(rows, "Time of each pass, with and without a KV cache", 6.4 * len(pairs), 4.8)
    for axes, (with_cache, without) in zip(made.subplots(1, len(pairs), squeeze=False)[0], pairs, strict=True):
        for row, color, name in ((without, COLORS[1], "without a cache"), (with_cache, COLORS[0], "with a cache")):
            _line(axes, row, color, name)
        axes.set(title=f"{with_cache['rung']}, {with_cache['weights']}", xlabel="pass", ylabel="ms per pass")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    return made


def _pairs(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Return pairs of rows (with a cache, without a cache) of the same rung, type of weights and test."""
    without = {(row["rung"].removesuffix(NO_CACHE), row["weights"], row["test"]): row for row in rows if not row["kv"]}
    with_cache = {(row["rung"], row["weights"], row["test"]): row for row in rows if row["kv"]}
    return [(row, without[key]) for key, row in with_cache.items() if key in without]


def _line(axes: Any, row: Row, color: str, name: str) -> None:
    """Plot the median time of each pass over the repetitions, and a band from the fastest to the slowest repetition.

    A dotted line shows the estimated times of passes that did not fit into the budget.
    """
    n = min(len(run) for run in row["passes_s"])
    runs = [[run[i] * 1e3 for run in row["passes_s"]] for i in range(n)]
    ms = [statistics.median(run) for run in runs]
    axes.plot(range(1, n + 1), ms, color=color, linewidth=1.2, label=name)
    axes.fill_between(range(1, n + 1), [*map(min, runs)], [*map(max, runs)], color=color, alpha=0.2, linewidth=0)
    if n < row["n_gen"]:
        first = row["n_depth"] + 1
        lengths = [1 if row["kv"] else first + i for i in range(row["n_gen"])]
        axes.plot(
            range(n + 1, row["n_gen"] + 1), rest(ms, lengths), color=color, linestyle=":", label=f"{name}, estimated"
        )


def ladder(rows: Sequence[Row]) -> Figure | None:
    """Plot tokens per second of every rung, one panel for the longest prompt and one for decode.

    A bar is a median; its error bar reaches from the slowest to the fastest repetition.
    """
    prompts, gens = tests(rows)
    chosen = [("prefill", prompts[-1])] if prompts else []
    chosen += [("decode", gens[0])] if gens else []
    # (rung, type of weights) in the order of the ladder. The type is None for rungs that were not measured.
    lines = [key for key in dict.fromkeys((row["rung"], row["weights"]) for row in rows) if _has(rows, key, chosen)]
    if not chosen or not any(weights for _, weights in lines):
        return None
    made = titled_figure(rows, "The ladder", 6.2 * len(chosen), 2.2 + 0.42 * len(lines))
    for axes, (phase, test) in zip(made.subplots(1, len(chosen), squeeze=False, sharey=True)[0], chosen, strict=True):
        cells = {(row["rung"], row["weights"]): row for row in measured(rows) if row["test"] == test}
        rates = [row["median_ts"] for row in cells.values()] or [1.0]
        left = min(rates) / 2
        axes.set(title=f"{phase}, {test}", xlabel="tokens per second (log scale)", xscale="log")
        # Leave room for the numbers after the bars: a fifth of a panel, on this logarithmic axis.
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
        above = _error_bar(axes, (row["median_ts"], i), row.get("samples_ts"), is_x=True)
        rate = f" {'~' if row['estimated'] else ''}{figure(row['median_ts'])}"
        axes.text(row["median_ts"] + above, i, rate, va="center", fontsize=9)


def _error_bar(
    axes: Any, at: tuple[float, float], samples: Sequence[float] | None, *, is_x: bool = False, color: str = DARK
) -> float:
    """Draw an error bar at the point `at`; return the distance from the point to the largest sample.

    The bar reaches from the smallest to the largest sample. With fewer than two samples, draw nothing and return 0.
    Samples are x coordinates if `is_x`, else y coordinates.
    """
    if not samples or len(samples) == 1:
        return 0.0
    middle = at[0] if is_x else at[1]
    below, above = max(0.0, middle - min(samples)), max(0.0, max(samples) - middle)
    errors = {"xerr" if is_x else "yerr": [[below], [above]]}
    axes.errorbar(*at, **errors, fmt="none", ecolor=color, elinewidth=1.0, capsize=2.5)
    return above


def _plain_numbers(axis: Any) -> None:
    """Label ticks with numbers without exponents; label minor ticks only if the axis spans few powers of ten."""
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
    """Plot operations per second over operations per byte, with the machine's limits measured between the runs."""
    cells = [
        row for row in measured(rows) if row.get("read_gbs") is not None and not (row["n_prompt"] and row["n_gen"])
    ]
    if not cells:
        return None
    made = titled_figure(rows, "Roofline: rates and the machine's limits", 9.6, 6.4)
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
    axes.plot(at, [min(peak, read * x) for x in at], color=DARK, linestyle=style, label=name)


def _points(axes: Any, rows: Sequence[Row], color: str, name: str) -> None:
    for i, row in enumerate(rows):
        marker = "o" if row["n_prompt"] else "v"
        at = row["flops_per_token"] / row["bytes_per_token"]
        face = "none" if row["estimated"] else color
        samples = [row["gflops"] / row["median_ts"] * rate for rate in row.get("samples_ts", ())]
        _error_bar(axes, (at, row["gflops"]), samples, color=color)
        axes.plot(at, row["gflops"], marker, color=color, markerfacecolor=face, label=name if i == 0 else None)


LATENCIES = (
    ("first token, median", "ttft_ms", "o-"),
    ("first token, p99", "ttft_p99_ms", "o:"),
    ("gap, median", "gap_ms", "v-"),
    ("gap, p99", "gap_p99_ms", "v:"),
)


def clients(rows: Sequence[Row]) -> Figure | None:
    """Plot two panels over the number of clients: throughput with the limits of memory and arithmetic, and latencies.

    A point is the median over the rounds; its error bar reaches from the smallest to the largest value of a round.
    """
    rows = [row for row in rows if row.get("total_ts")]
    if not rows:
        return None
    made = titled_figure(rows, f"Clients at once, {rows[0]['test']}", 11.0, 5.8)
    rates, latencies = made.subplots(1, 2)
    for backend, color in zip(dict.fromkeys(row["backend"] for row in rows), COLORS, strict=False):
        of = [row for row in rows if row["backend"] == backend]
        _clients_line(rates, of, "total_ts", "o-", color, f"{backend}: all clients")
        _clients_line(rates, of, "memory_limit_ts", "--", color, f"{backend}: limit of memory")
        _clients_line(rates, of, "arithmetic_limit_ts", ":", color, f"{backend}: limit of arithmetic")
        for title, name, style in LATENCIES:
            _clients_line(latencies, of, name, style, color, f"{backend}: {title}")
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


def _clients_line(axes: Any, rows: Sequence[Row], name: str, style: str, color: str, label: str) -> None:
    """Plot the field `name` of the rows over the number of clients; leave out rows without a value."""
    known = sorted((row for row in rows if row.get(name) is not None), key=lambda row: int(row["concurrency"]))
    if not known:
        return
    numbers, middles = [row["concurrency"] for row in known], [row[name] for row in known]
    axes.plot(numbers, middles, style, color=color, linewidth=1.2, markersize=4, label=label)
    for row in known:
        samples = [one[name] for one in row["samples"] if one.get(name) is not None]
        _error_bar(axes, (row["concurrency"], row[name]), samples, color=color)
