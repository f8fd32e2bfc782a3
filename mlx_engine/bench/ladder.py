"""The ladder of `bench --sweep`: its rungs (backends with settings), and the report of their rates and speedups."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlx_engine.bench.origin import disturbed
from mlx_engine.bench.tables import Row, aligned, figure, printable

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Rung:
    """A backend with its settings; each rung up to `parallel` adds one optimisation to the previous one."""

    title: str
    backend: str
    kv: bool = True
    jit: bool = True


RUNGS = (
    Rung("scalar, no cache", "scalar", kv=False),
    Rung("scalar", "scalar"),
    Rung("simd, NumPy", "simd", jit=False),
    Rung("simd, compiled", "simd"),
    Rung("parallel", "parallel"),
    Rung("mlx", "mlx"),
    Rung("metal", "metal"),
    Rung("cuda", "cuda"),
)
# The end of the title of every rung without a KV cache, in `RUNGS` and in `Sweep.passes`.
NO_CACHE = ", no cache"


@dataclass(frozen=True)
class Speedup:
    """The speedup of a test from one rung to the next, or from F32 to another type of weights on the same rung.

    `old` and `new` name the rungs or types. `weights` is the type of weights on the rung `new`; if `weights` is None,
    `text` names no type in brackets.
    """

    test: str
    old: str
    new: str
    weights: str | None
    factor: float
    estimated: bool

    @property
    def text(self) -> str:
        """A text such as `simd, compiled -> parallel (Q8_0) x1.90`, with ~ if a rate was estimated."""
        weights = f" ({self.weights})" if self.weights else ""
        return f"{self.old} -> {self.new}{weights} {'~' if self.estimated else ''}x{figure(self.factor)}"


def measured(rows: Sequence[Row]) -> list[Row]:
    """Return the rows whose throughput was measured."""
    return [row for row in rows if not row["unavailable"]]


def steps(rows: Sequence[Row], test: str) -> list[Speedup]:
    """Return the speedups of a test.

    First come the speedups from each rung to the next, for each type of weights. If a rung has only rows of F32,
    because it expands all weights, each type of the next rung is compared with F32. Then come the speedups from F32 to
    the other types of weights on the same rung.
    """
    cells: dict[str, dict[str, Row]] = {}
    for row in measured(rows):
        if row["test"] == test:
            cells.setdefault(row["rung"], {})[row["weights"]] = row
    found = []
    names = list(cells)
    for old, new in itertools.pairwise(names):
        for weights, row in cells[new].items():
            before = cells[old].get(weights) or cells[old].get("F32")
            if before is not None:
                kind = weights if len(cells[new]) > 1 or weights != "F32" else None
                found.append(_step(test, old, new, kind, before, row))
    for name, kinds in cells.items():
        found += [
            _step(test, f"{name}: F32", weights, None, kinds["F32"], row)
            for weights, row in kinds.items()
            if weights != "F32" and "F32" in kinds
        ]
    return found


def _step(test: str, old: str, new: str, weights: str | None, before: Row, after: Row) -> Speedup:
    estimated = bool(before["estimated"] or after["estimated"])
    return Speedup(test, old, new, weights, after["median_ts"] / before["median_ts"], estimated)


def tests(rows: Sequence[Row]) -> tuple[list[str], list[str]]:
    """Return the names of the prefill tests, shortest first, and of the decode tests that run on the most rungs.

    Leave out rows at a depth above 0 (after a context), and rows whose rung is not in `RUNGS`.
    """
    of_rungs = [row for row in rows if not row["n_depth"] and row["rung"] in {rung.title for rung in RUNGS}]
    by_prompt = {row["test"]: row["n_prompt"] for row in of_rungs if row["n_prompt"] and not row["n_gen"]}
    counts = {row["test"]: len({r["rung"] for r in of_rungs if r["test"] == row["test"]}) for row in of_rungs}
    by_gen = {row["test"]: row["n_gen"] for row in of_rungs if row["n_gen"] and not row["n_prompt"]}
    most = max((counts[name] for name in by_gen), default=0)
    return sorted(by_prompt, key=lambda n: by_prompt[n]), [n for n in by_gen if counts[n] == most]


# Two ranges of passes, counted from 1. The ratio of their median times shows how passes slow down as the text grows.
EARLY, LATE = (8, 23), (241, 256)


def text(rows: Sequence[Row]) -> str:
    """Return the report as Markdown that is also readable in a terminal."""
    prompts, gens = tests(rows)
    moved = [moves("prefill", prompts[-1], rows)] if prompts else []
    moved += [moves("decode", gens[0], rows)] if gens else []
    return "\n\n".join(part for part in [disturbed(rows), ladder(rows), *notes(rows), *moved, passes(rows)] if part)


def moves(phase: str, test: str, rows: Sequence[Row]) -> str | None:
    """Return a line with the largest speedup of a test, then a list of all speedups; None if there are none."""
    found = steps(rows, test)
    if not found:
        return None
    most = max(found, key=lambda step: step.factor)
    first = f"{phase} ({test}): the largest speedup is {most.text}; all changes:"
    lines = [first, *(f"- {step.text}" for step in found)]
    return "\n".join([lines[0], "", *lines[1:]])


def ladder(rows: Sequence[Row]) -> str:
    """Return a table with a line per rung and type of weights.

    MB/token, GB/s and `of read` (the share of the memory bandwidth) are figures of decode. GFLOP/s and `of peak` (the
    share of peak arithmetic) are figures of the longest prefill.
    """
    prompts, gens = tests(rows)
    head = ["rung", "weights", "threads", *prompts, *gens, "MB/token", "GB/s", "of read", "GFLOP/s", "of peak"]
    lines = [head]
    for rung, weights in dict.fromkeys((row["rung"], row["weights"]) for row in measured(rows)):
        cells = {row["test"]: row for row in measured(rows) if (row["rung"], row["weights"]) == (rung, weights)}
        if any(name in cells for name in [*prompts, *gens]):
            lines.append([rung, weights, *_numbers(cells, prompts, gens)])
    return aligned(lines)


def _numbers(cells: dict[str, Row], prompts: Sequence[str], gens: Sequence[str]) -> list[str]:
    some = next(iter(cells.values()))
    rates = [_rate(cells[name]) if name in cells else "-" for name in [*prompts, *gens]]
    decode = next((cells[name] for name in gens if name in cells), None)
    prefill = next((cells[name] for name in reversed(prompts) if name in cells), None)
    return [
        "-" if some["threads"] is None else str(some["threads"]),
        *rates,
        *([figure(decode["bytes_per_token"] / 1e6), figure(decode["gbs"])] if decode else ["-", "-"]),
        _share(decode, "read_share"),
        figure(prefill["gflops"]) if prefill else "-",
        _share(prefill, "peak_share"),
    ]


def _rate(row: Row) -> str:
    return f"{'~' if row['estimated'] else ''}{figure(row['median_ts'])}"


def _share(row: Row | None, name: str) -> str:
    return "-" if row is None or row.get(name) is None else f"{row[name]:.1%}"


def notes(rows: Sequence[Row]) -> list[str]:
    """Return the notes below the table."""
    found = ["Rates are medians in tokens per second; ~ marks estimates of tests that did not fit into the budget."]
    reasons = {row["rung"]: row["unavailable"] for row in rows if row["unavailable"]}
    found += [f"{rung}: not measured, {reason}." for rung, reason in reasons.items()]
    done = measured(rows)
    expanding = [row["rung"] for row in done if row["quant"] == "keep" and row["weights"] == "F32"]
    others = {row["weights"] for row in done} - {"F32"}
    if expanding and others:
        names = list(dict.fromkeys(f"`{name}`" for name in expanding if not name.endswith(NO_CACHE)))
        stored = ", ".join(sorted(others))
        where = f"With {' and with '.join(names)}"
        found.append(f"{where}, {stored} weights are expanded to F32 on load, so there are only rows of F32.")
    found += [line for line in (in_cache(done), machine_limits(done)) if line]
    if any(row["watched"] for row in done):
        found.append("MLX_ENGINE_LOG was set, so every operation was timed: rates are lower than without it.")
    return found


def in_cache(rows: Sequence[Row]) -> str | None:
    """If weights fit into the processor's cache, return a note that GB/s is not memory bandwidth; otherwise None."""
    kinds: dict[str, float] = {}
    for row in rows:
        kinds[row["weights"]] = min(row["weight_bytes"], kinds.get(row["weights"], row["weight_bytes"]))
    size = rows[0]["machine"].get("cache_bytes") if rows else None
    fitting = [f"{kind} ({n / 1e6:.1f} MB)" for kind, n in kinds.items() if size is not None and n < size]
    if size is None or not fitting:
        return None
    return (
        f"The weights in {' and in '.join(fitting)} fit into the processor's cache of {size / 2**20:.0f} MiB: "
        "GB/s and its share are those of the cache, not of memory."
    )


def machine_limits(rows: Sequence[Row]) -> str | None:
    """Return a sentence with the medians of the machine's limits for each number of threads; None if unmeasured."""
    limited = [row for row in rows if row.get("read_gbs") is not None]
    by_threads = {t: [r for r in limited if (r["threads"] or 1) == t] for t in {r["threads"] or 1 for r in limited}}
    limits = [
        f"{_median(group, 'read_gbs'):.1f} GB/s and {_median(group, 'peak_gflops'):.0f} GFLOP/s on {threads} "
        f"thread{'s' if threads > 1 else ''}"
        for threads, group in sorted(by_threads.items())
    ]
    return f"Between the runs the machine itself reached {', '.join(limits)}." if limits else None


def _median(rows: Sequence[Row], name: str) -> float:
    return statistics.median(float(row[name]) for row in rows)


def passes(rows: Sequence[Row]) -> str | None:
    """Return a Markdown list of the decode tests of at least 256 tokens and their growth; None without such tests."""
    lines = []
    for row in measured(rows):
        if row["n_gen"] < LATE[1] or row["n_prompt"]:
            continue
        growth = growth_of(row)
        cache = "with a cache" if row["kv"] else "without a cache"
        text = row["estimated"] and f"not known, {row['estimated']}" if growth is None else f"x{figure(growth)}"
        lines.append(f"- {row['rung'].removesuffix(NO_CACHE)}, {row['weights']}, {cache}: {text}")
    early, late = ("{} to {}".format(*span) for span in (EARLY, LATE))
    head = f"Median time of passes {late}, divided by the median time of passes {early}:"
    return f"{head}\n\n" + "\n".join(lines) if lines else None


def growth_of(row: Row) -> float | None:
    """Return the median time of the passes LATE divided by that of the passes EARLY; None if no run has 256 passes."""
    whole = [run for run in row.get("passes_s", ()) if len(run) >= LATE[1]]
    if not whole:
        return None
    early, late = ([float(s) for run in whole for s in run[first - 1 : last]] for first, last in (EARLY, LATE))
    return statistics.median(late) / statistics.median(early)


def bars(rows: Sequence[Row]) -> Iterator[Table]:
    """Yield the bars of prefill and decode for a terminal: tokens per second on a log scale, as in `plots.ladder`."""
    from rich.bar import Bar
    from rich.table import Table

    prompts, gens = tests(rows)
    for phase, test in [("prefill", prompts[-1:]), ("decode", gens[:1])]:
        cells = [row for row in measured(rows) if row["test"] in test]
        if not cells:
            continue
        rates = [row["median_ts"] for row in cells]
        left = min(rates) / 2
        made = Table(
            title=f"{phase}, {test[0]}: tokens per second (log scale)", box=None, show_header=False, expand=True
        )
        made.add_column(no_wrap=True)
        made.add_column(ratio=1)
        made.add_column(justify="right", no_wrap=True)
        for row in cells:
            length = math.log(row["median_ts"] / left) / math.log(max(rates) / left)
            bar = Bar(1.0, 0.0, length, color="blue" if row["weights"] == "F32" else "green")
            made.add_row(f"{row['rung']}, {row['weights']}", bar, _rate(row))
        yield made


def page(rows: Sequence[Row], plots: Sequence[str]) -> str:
    """Return the page of the output folder: model, machine, the report and the plots."""
    row = rows[0]
    machine, versions = row["machine"], ", ".join(f"{name} {version}" for name, version in row["versions"].items())
    memory = f", {machine['memory_bytes'] / 2**30:.0f} GiB" if machine["memory_bytes"] else ""
    head = (
        f"# {printable(row['model_name'])}\n\n{row['model_n_params'] / 1e6:.2f} M parameters, "
        f"{row['model_size'] / 1e6:.1f} MB, SHA-256 {row['model_sha256']}.\n\n{machine['processor']}, "
        f"{machine['cores']} cores{memory}, {machine['system']}; {versions}; commit {row['commit']}, {row['time']}."
    )
    return "\n\n".join([head, text(rows), *(f"![{name}]({name})" for name in plots)]) + "\n"
