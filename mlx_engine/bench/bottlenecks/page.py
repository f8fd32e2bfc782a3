"""Format a bottleneck report (`report.py`) as Markdown that is also readable in a terminal."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from typing import Any

from mlx_engine.backends import EXACT
from mlx_engine.bench.bottlenecks.analysis import BETWEEN
from mlx_engine.bench.origin import disturbed
from mlx_engine.bench.tables import aligned, printable
from mlx_engine.quant.key_values import default_type, types_text
from mlx_engine.weights.conversion import Conversion

Report = dict[str, Any]

TITLE = {"decode": "a decode step", "prefill": "prefill"}


def page(report: Report, changes: str | None = None) -> str:
    """Return the report as Markdown. `changes` compares it with an earlier report (`compare.section`), or is None."""
    return "\n\n".join(part for part in _parts(report, changes) if part) + "\n"


def _parts(report: Report, changes: str | None) -> Iterator[str | None]:
    model, found = report["model"], report["phases"]
    yield f"# Bottlenecks: {printable(model['name'])} on {report['backend']['name']}"
    yield origin(report)
    yield disturbed([report])
    yield from finding(report)
    for name, phase in found.items():
        yield f"## Remaining bottlenecks of {TITLE[name]}, ranked"
        yield ranking(phase, name)
        yield sentences(phase)
    yield changes
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
    """Return a Markdown list of the time, the commit, the machine, the model and the settings."""
    machine, be, at = report["machine"], report["backend"], report["settings"]
    memory = f", {machine['memory_bytes'] / 2**30:.0f} GiB" if machine["memory_bytes"] else ""
    threads = f", {be['threads']} thread{'s' if be['threads'] > 1 else ''}" if be["threads"] else ""
    activations = be.get("activations", EXACT)
    rounded = types_text(activations, be.get("kv_type", default_type(activations)))
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
        f"model {printable(at['model'])}, backend {be['name']} on {be['device']}{threads}{rounded}; weights: {weights}",
        f"{at['n_prompt']} prompt tokens at depth {at['depth']}, {at['n_gen']} decode steps; {report['rounds']} rounds",
        f"machine limits, median (quartiles): {reached}",
    ]
    if report["watched"]:
        lines.append("MLX_ENGINE_LOG was set: plain runs were timed by operation, too, and are therefore slower")
    return "\n".join(f"- {line}" for line in lines)


def finding(report: Report) -> Iterator[str]:
    """Yield a summary for each kind of pass, decode and prefill."""
    for name, phase in report["phases"].items():
        whole, first = phase["plain_ms"]["median"], [row for row in phase["ranking"][:3] if row["share"] > 0]
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
    """Return the table of bottlenecks in descending order of their gain, or of their time if limits are unknown."""
    of = "of the sum" if is_longer_apart(phase) else "of the step" if name == "decode" else "of prefill"
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
    """Return a numbered list: the advice for each numbered line of `ranking`."""
    return "\n".join(f"{i}. {row['role']}: {row['says']}" for i, row in enumerate(split(phase["ranking"])[0], start=1))


# Shares of a pass that are less than this are small: rows with small shares are combined into one line (`split`).
SMALL = 0.005
TITLES = {
    "load": "load", "warm_up": "warm-up", "prefill": "prefill, {n_prompt} tokens",
    "first_token": "first token (prefill and sampling)", "first_step": "first decode step",
    "decode": "decode, per token", "sampling": "sampling of a token",
}  # fmt: skip


def model_table(report: Report) -> str:
    """Return the table of the model. "MB per token" counts all bytes that a decode step reads and writes."""
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
    """Return a table of the parts of a pass and of the time outside of operations, with a text below the table."""
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
        text += f"To correct for this, {off:.1f} us are subtracted from each of {phase['calls']:,.0f} calls."
    if by_round["q1"] <= 0 and abs(phase["between_ms"]) > SMALL * whole:
        slower = "is not noise: some operation is slower when layers run op by op"
        noise = "may be noise" if by_round["q3"] >= 0 else slower
        quartiles = f"quartiles over the rounds: {ms(by_round['q1'])} to {ms(by_round['q3'])} ms"
        text += f" The line '{rest}' {noise} ({quartiles})."
    if is_longer_apart(phase):
        text += " Shares in the next table are of the sum of all operations."
    return f"{aligned(rows)}\n\n{text.strip()}"


def operations(phase: Report, limits_known: bool) -> str:
    """Return the table of operations. If the machine's limits are unknown, leave out the columns about them."""
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
    return aligned(rows if limits_known else [row[:-2] for row in rows])


def layers(phase: Report) -> str | None:
    """Return the table of the fastest, median, slowest and first layer; None if no layer was timed."""
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
    return f"{aligned(rows)}\n\nTimes of {len(known)} profiled layers; slowest divided by fastest: " + (
        f"{by_time[-1]['ms'] / by_time[0]['ms']:.2f}." if by_time[0]["ms"] > 0 else "-."
    )


def steps(rows: list[Report]) -> str:
    """Return a table with a line per pass: prefill, then every decode step."""
    names = ("embedding", "layers", "norm", "projection", "sampling", "sum", "watched", "plain")
    table = [["pass", *names]]
    for row in rows:
        table.append([f"step {row['step']}" if row["step"] else "prefill", *(ms(row[name]) for name in names)])
    plain = [row["plain"] for row in rows[1:]]
    text = "ms, medians of all rounds; watched: the profiled pass. If norm is 0, its time is counted in projection."
    if plain and min(plain) > 0:
        text += f" Longest plain step over shortest: {max(plain) / min(plain):.2f}."
    return f"{aligned(table)}\n\n{text}"


def figure(of: Report) -> str:
    """Format median and quartiles."""
    return f"{of['median']:,.1f} ({of['q1']:,.1f} to {of['q3']:,.1f})"


def ms(value: float | None) -> str:
    """Format milliseconds with three decimals below 10, two below 100, else one."""
    if value is None:
        return "-"
    digits = 3 if abs(value) < 10 else 2 if abs(value) < 100 else 1
    return f"{value:,.{digits}f}"


def is_longer_apart(phase: Report) -> bool:
    """Return whether the operations together take longer than the plain pass, by more than `SMALL` of the pass."""
    return bool(phase["between_ms"] < -SMALL * phase["plain_ms"]["median"])


def split(rows: list[Report]) -> tuple[list[Report], list[Report]]:
    """Return the rows that get a line each, and the rows that share one line (none, or at least two)."""
    small = [row for row in rows if row["share"] < SMALL and row["role"] != BETWEEN]
    return ([row for row in rows if row not in small], small) if len(small) > 1 else (rows, [])


# Maps each setting of a report to its command-line option.
OPTIONS = {
    "model": "--model", "backend": "--backend", "quant": "--quant", "quant_min_dim": "--quant-min-dim",
    "threads": "--threads", "activations": "--activations", "kv_type": "--kv-type", "n_prompt": "-p", "n_gen": "-n",
    "depth": "--depth", "repetitions": "-r", "budget": "--budget",
}  # fmt: skip


def command(settings: Report) -> str:
    """Return the command that reproduces the report."""
    given = [(OPTIONS[name], value) for name, value in settings.items() if name in OPTIONS and value is not None]
    given += [("--quant-layer", f"{name}={quant}") for name, quant in settings["quant_layers"].items()]
    given += [("--allow-setting", name) for name in settings.get("allow_settings", ())]
    return shlex.join(["python", "cli.py", "report", *(str(word) for pair in given for word in pair)])


def method(report: Report) -> str:
    """Describe what was run, what is excluded, and how the limits were measured."""
    at, rounds = report["settings"], report["rounds"]
    excluded = "after a warm-up round" if rounds > 1 else "after a warm-up round, unless the budget allowed only one"
    limits = (
        "The limits are medians of samples between all runs: memory bandwidth of a kernel that only reads the model's "
        "matrices, and multiply-adds in registers, both on as many threads as the backend has."
        if report["limits"] is not None
        else "The device's limits are unknown, and none are assumed."
    )
    lines = [
        *report.get("notes", ()),
        f"{rounds} rounds, {excluded}. Each is a plain run, as in `generate`, and a profiled run: every operation is "
        "timed, layers run operation by operation, and a lazy backend waits for each operation.",
        "Whole passes are medians of the plain runs; prefill and decode are reported separately, and every decode step "
        "counts.",
        "Operations are medians of the profiled passes. In a profiled decode step, they take longer together than the "
        "step in a plain run. So the same time is subtracted from each call, to make their sum equal to the plain "
        "step. No operation is reduced below its limit, and the subtracted time is at most twice the median of (time "
        "of a call - its time at the limit). The time found for decode is subtracted from calls of prefill, too.",
        "Bytes count each input and the result once. FLOP are multiplications and additions, in attention only for "
        "visible keys.",
        "At the limit, an operation takes the time to read its bytes or the time of its arithmetic, whichever is "
        "longer; its gain is the rest of its time. Data in the processor's cache can be read faster than this limit.",
        limits,
        "Tokens are random, end tokens are ignored, and text is not tokenised.",
    ]
    again = f"```sh\n{command(at)}\n```"
    return "\n".join(f"- {line}" for line in lines) + f"\n\nTo reproduce:\n\n{again}"
