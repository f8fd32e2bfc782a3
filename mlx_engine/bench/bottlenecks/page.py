"""Format the report as Markdown that is also readable in a terminal. The JSON has the same numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from mlx_engine.bench.bottlenecks.method import method
from mlx_engine.bench.bottlenecks.page_tables import (
    breakdown,
    figure,
    is_longer_apart,
    layers,
    model_table,
    ms,
    operations,
    split,
    steps,
    timing,
)
from mlx_engine.bench.tables import aligned, printable
from mlx_engine.weights.conversion import Conversion

Report = dict[str, Any]

TITLE = {"decode": "a decode step", "prefill": "prefill"}


def page(report: Report, rounds: str | None = None) -> str:
    """Return the whole page; `rounds` is the section of `against.py`."""
    return "\n\n".join(part for part in _parts(report, rounds) if part) + "\n"


def _parts(report: Report, rounds: str | None) -> Iterator[str | None]:
    model, found = report["model"], report["phases"]
    yield f"# Bottlenecks: {printable(model['name'])} on {report['backend']['name']}"
    yield origin(report)
    yield from finding(report)
    for name, phase in found.items():
        yield f"## Remaining bottlenecks of {TITLE[name]}, ranked"
        yield ranking(phase, name)
        yield sentences(phase)
    yield rounds
    yield "## Model"
    yield model_table(report)
    yield "## Timing"
    yield timing(report)
    for name, phase in found.items():
        yield f"## {TITLE[name].capitalize()}, profiled"
        yield breakdown(phase)
        yield operations(phase, report["limits"] is not None)
        yield layers(phase)
    yield "## Every pass"
    yield steps(report["steps"])
    yield "## Method"
    yield method(report)


def origin(report: Report) -> str:
    """Return time, commit, machine, model and settings."""
    machine, be, at = report["machine"], report["backend"], report["settings"]
    memory = f", {machine['memory_bytes'] / 2**30:.0f} GiB" if machine["memory_bytes"] else ""
    threads = f", {be['threads']} thread{'s' if be['threads'] > 1 else ''}" if be["threads"] else ""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    limits, weights = report["limits"], Conversion(at["quant"], at["quant_min_dim"], at["quant_layers"])
    reached = (
        f"read {figure(limits['read_gbs'])} GB/s, arithmetic {figure(limits['peak_gflops'])} GFLOP/s"
        if limits is not None
        else f"unknown for {be['device']}: no shares of limits and no gains; the ranking is by time"
    )
    lines = [
        f"{report['time']}, commit {report['commit'] or 'unknown'}; {versions}",
        f"{machine['processor']}, {machine['cores']} cores{memory}, {machine['system']}",
        f"model {printable(at['model'])}, backend {be['name']} on {be['device']}{threads}; weights: {weights}",
        f"{at['n_prompt']} prompt tokens at depth {at['depth']}, {at['n_gen']} decode steps; {report['rounds']} rounds",
        f"machine limits, median (quartiles): {reached}",
    ]
    if report["watched"]:
        lines.append("MLX_ENGINE_LOG was set: plain runs were timed by operation too, and are slower for it")
    return "\n".join(f"- {line}" for line in lines)


def finding(report: Report) -> Iterator[str]:
    """Yield a summary sentence for each kind of pass."""
    for name, phase in report["phases"].items():
        whole, first = phase["plain_ms"]["median"], phase["ranking"][:3]
        tokens = report["settings"]["n_prompt"] if name == "prefill" else 1
        of = "; shares are of the sum of all operations" if is_longer_apart(phase) else ""
        text = f"**{TITLE[name].capitalize()}** takes {ms(whole)} ms ({1e3 * tokens / whole:,.1f} tokens/s)"
        at_limit = [op["limit_ms"] for op in phase["operations"]]
        if None not in at_limit:
            text += (
                f"; at the machine's limits it would take {ms(sum(at_limit))} ms, {sum(at_limit) / whole:.0%} of that"
            )
            most = ", ".join(f"{row['role']} {ms(row['gain_ms'])} ms ({row['share']:.0%})" for row in first)
            yield f"{text}. Largest possible gains: {most}{of}."
        else:
            most = ", ".join(f"{row['role']} {ms(row['ms'])} ms ({row['share']:.0%})" for row in first)
            yield f"{text}. Largest parts: {most}{of}."


def ranking(phase: Report, name: str) -> str:
    """Return the table of bottlenecks, by possible gain."""
    of = "of their sum" if is_longer_apart(phase) else "of the step" if name == "decode" else "of prefill"
    rows = [["#", "operation", "ms", "at the limit", "gain ms", of]]
    shown, rest = split(phase["ranking"])
    for i, row in enumerate(shown, start=1):
        rows.append(
            [str(i), row["role"], ms(row["ms"]), ms(row["limit_ms"]), ms(row["gain_ms"]), f"{row['share']:.1%}"]
        )
    if rest:
        sums = [total(row[key] for row in rest) for key in ("ms", "limit_ms", "gain_ms")]
        share = sum(row["share"] for row in rest)
        rows.append(["", f"{len(rest)} more", *map(ms, sums), f"{share:.1%}"])
    return aligned(rows)


def total(values: Iterable[float | None]) -> float | None:
    """Return the sum, or None if a value is None."""
    known = list(values)
    return None if None in known else sum(value for value in known if value is not None)


def sentences(phase: Report) -> str:
    """Return the advice for each line of the ranking."""
    return "\n".join(f"{i}. {row['role']}: {row['says']}" for i, row in enumerate(split(phase["ranking"])[0], start=1))
