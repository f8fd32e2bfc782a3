"""The tables of a bottleneck report."""

from __future__ import annotations

from typing import Any

from mlx_engine.bench.bottlenecks.gains import BETWEEN
from mlx_engine.bench.tables import aligned

Report = dict[str, Any]

# Lines with a smaller share of the pass than this are combined into one.
SMALL = 0.005
TITLES = {
    "load": "load", "warm_up": "warm-up", "prefill": "prefill, {n_prompt} tokens",
    "first_token": "first token (prefill and sampling)", "first_step": "first decode step",
    "decode": "decode, per token", "sampling": "sampling of a token",
}  # fmt: skip


def model_table(report: Report) -> str:
    """Return the table of the model. MB per token are all bytes that a decode step reads and writes."""
    model, step = report["model"], report["phases"].get("decode")
    bits: dict[str, list[str]] = {}
    for role, of in model["bits"].items():
        bits.setdefault(f"{of:.3g}", []).append(role)
    held = "; ".join(f"{of} bits per weight: {', '.join(roles)}" for of, roles in bits.items())
    facts = {
        "format": model["format"],
        "architecture": model["architecture"],
        "parameters": f"{model['parameters'] / 1e6:,.1f} M",
        "layers": str(model["layers"]),
        "width": str(model["width"]),
        "vocabulary": f"{model['vocabulary']:,}",
        "weights MB": f"{model['weight_bytes'] / 1e6:,.1f}",
        "MB per token": "-" if step is None else f"{step['bytes'] / 1e6:,.1f}",
        "quantised": f"{model['linears_quantised']} of {model['linears']} linear layers",
    }
    return (
        f"{aligned([list(facts), list(facts.values())])}\n\nStored on the backend as {held}. SHA-256 {model['sha256']}."
    )


def timing(report: Report) -> str:
    """Return the table of user-visible times."""
    rows = [["", "median ms", "quartiles", "min", "max", "samples"]]
    for name, title in TITLES.items():
        of = report["timing"].get(name)
        if of is not None:
            quartiles = f"{ms(of['q1'])} to {ms(of['q3'])}"
            title = title.format(**report["settings"])
            rows.append([title, ms(of["median"]), quartiles, ms(of["min"]), ms(of["max"]), str(of["n"])])
    return aligned(rows)


def breakdown(phase: Report) -> str:
    """Return the table of the parts of a pass, and the time outside of operations."""
    whole = phase["plain_ms"]["median"]
    parts = [(name, value) for name, value in phase["parts"].items() if value > 0]
    rows = [["part", "ms", "share"], *([name, ms(value), f"{value / whole:.1%}"] for name, value in parts)]
    rest, by_round = BETWEEN if phase["between_ms"] >= 0 else "longer when profiled", phase["between_by_round_ms"]
    rows.append([rest, ms(phase["between_ms"]), f"{phase['between_ms'] / whole:.1%}"])
    rows.append(["the plain pass", ms(whole), "100.0%"])
    off = phase["off_every_call_us"]
    text = f"Profiled, the operations take {ms(phase['operations_ms'])} ms together, and the whole pass "
    text += f"{ms(phase['watched_ms']['median'])} ms. "
    if off:
        text += f"For this overhead, {off:.1f} us are subtracted from each of {phase['calls']:,.0f} calls."
    if by_round["q1"] <= 0 and abs(phase["between_ms"]) > SMALL * whole:
        slower = "is not noise: some operation is slower when layers run operation by operation"
        noise = "may be noise" if by_round["q3"] >= 0 else slower
        text += f" The rest {noise}, {ms(by_round['q1'])} to {ms(by_round['q3'])} ms from round to round."
    if is_longer_apart(phase):
        text += " Shares of operations are of their sum."
    return f"{aligned(rows)}\n\n{text.strip()}"


def operations(phase: Report, limited: bool) -> str:
    """Return the table of operations with their rates."""
    rows = [["operation", "calls", "ms", "share", "us per call", "MB", "GB/s", "GFLOP/s", "bound by", "of the limit"]]
    shown, rest = split(sorted(phase["operations"], key=lambda op: -op["ms"]))
    for op in shown:
        rate = [f"{op[key]:,.1f}" if op[key] and op[key] >= 0.05 else "-" for key in ("gbs", "gflops")]
        reached = f"{op['reached']:.0%}" if op["bound"] in ("memory", "arithmetic") else "-"
        calls, us = f"{op['calls']:,.0f}", f"{op['ms'] / op['calls'] * 1e3:,.1f}"
        took = [op["role"], calls, ms(op["ms"]), f"{op['share']:.1%}", us]
        rows.append([*took, f"{op['bytes'] / 1e6:,.2f}", *rate, op["bound"] or "-", reached])
    if rest:
        calls, took, share, nbytes = (sum(op[key] for op in rest) for key in ("calls", "ms", "share", "bytes"))
        line = [f"{len(rest)} more", f"{calls:,.0f}", ms(took), f"{share:.1%}", "-", f"{nbytes / 1e6:,.2f}"]
        rows.append([*line, *["-"] * 4])
    return aligned(rows if limited else [row[:-2] for row in rows])


def layers(phase: Report) -> str | None:
    """Return the table of the fastest, median, slowest and first layer, since layers are alike."""
    known = phase["layers"]
    if not known:
        return None
    by_time = sorted(known, key=lambda row: row["ms"])
    middle = by_time[len(by_time) // 2]
    named = {"fastest": by_time[0], "median": middle, "slowest": by_time[-1], "first": known[0]}
    rows = [["layer", "", "attention ms", "feed-forward ms", "ms", "max/min over passes"]]
    for title, row in named.items():
        jitter = f"{row['jitter']:.2f}" if row["jitter"] else "-"
        numbers = [ms(row[key]) for key in ("attention", "feed_forward", "ms")]
        rows.append([title, str(row["layer"]), *numbers, jitter])
    return f"{aligned(rows)}\n\nTimes of {len(known)} profiled layers; the slowest takes " + (
        f"{by_time[-1]['ms'] / by_time[0]['ms']:.2f} times the fastest's." if by_time[0]["ms"] > 0 else "all the time."
    )


def steps(rows: list[Report]) -> str:
    """Return a table with a line per pass: prefill, then every decode step."""
    names = ("embedding", "layers", "norm", "projection", "sampling", "sum", "watched", "plain")
    table = [["pass", *names]]
    for row in rows:
        table.append([f"step {row['step']}" if row["step"] else "prefill", *(ms(row[name]) for name in names)])
    plain = [row["plain"] for row in rows[1:]]
    text = "ms, medians of all rounds; a norm of 0 is computed with the projection."
    if plain and min(plain) > 0:
        text += f" Longest plain step over shortest: {max(plain) / min(plain):.2f}."
    return f"{aligned(table)}\n\n{text}"


def figure(of: Report) -> str:
    """Format median and quartiles."""
    return f"{of['median']:,.1f} ({of['q1']:,.1f} to {of['q3']:,.1f})"


def ms(value: float | None) -> str:
    """Format milliseconds with three significant digits or decimals."""
    if value is None:
        return "-"
    digits = 3 if abs(value) < 10 else 2 if abs(value) < 100 else 1
    return f"{value:,.{digits}f}"


def is_longer_apart(phase: Report) -> bool:
    """Return whether the operations together exceed the plain pass; shares then refer to their sum."""
    return bool(phase["between_ms"] < -SMALL * phase["plain_ms"]["median"])


def split(rows: list[Report]) -> tuple[list[Report], list[Report]]:
    """Split rows into those shown one by one and those combined into one line."""
    small = [row for row in rows if row["share"] < SMALL]
    return ([row for row in rows if row["share"] >= SMALL], small) if len(small) > 1 else (rows, [])
