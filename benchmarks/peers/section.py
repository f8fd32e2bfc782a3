"""The section of BENCHMARKS.md about other engines, from the rows of `results/peers.jsonl`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.peers.engines import ENGINES, LLAMA, OURS
from benchmarks.peers.plan import FORMATS, PASSES
from benchmarks.text import Row, figure, model, note, source, spread, table
from mlx_engine.bench.ladder import EARLY, LATE, growth_of

START, ERRORS = "start", "errors"

INTRO = """Every engine computes with the same weights, in its own process. Runs are interleaved: in a round every
engine runs the test once, so that a machine that slows down slows all engines. Prompts are random ids; decode is
greedy. Tokenisation and a warm-up run are not timed. A rate is the median over the rounds, then the slowest and the
fastest; the factor is this engine over llama.cpp, then the smallest and the largest factor of a round. llama.cpp runs
with every setting listed; the fastest of the first two rounds continues, in decode its default too. Slow engines run
once, with a time budget: `~` marks figures extrapolated from fewer tokens than the test has."""


def section(rows: Sequence[Row]) -> str:
    """Return the whole section, without the parts that were not measured."""
    rows = latest(rows)
    parts = [f"{model(rows[0])}.\n\n{source(rows[0])}{later(rows)}", INTRO, engines(rows)]
    for title, part in (
        ("Tokens per second", speeds),
        ("Decode and memory bandwidth", shares),
        ("A whole process", processes),
        ("Errors of the logits", errors),
        ("Formats, and late passes", ourselves),
    ):
        text = part(rows)
        parts += [f"### {title}", text] if text else []
    return "\n\n".join(parts) + "\n"


def latest(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of each contest's newest run: rows that were not interleaved are not compared."""
    newest: dict[str, str] = {}
    for row in rows:
        newest[row["contest"]] = max(row["time"], newest.get(row["contest"], ""))
    return [row for row in rows if row["time"] == newest[row["contest"]]]


def later(rows: Sequence[Row]) -> str:
    """Return which contests were measured at another commit than the first, and on which processor if it differs."""
    found: dict[tuple[str, str, str], dict[str, None]] = {}
    for row in rows:
        if row["commit"] != rows[0]["commit"]:
            same = row["machine"]["processor"] == rows[0]["machine"]["processor"]
            place = "" if same else f"on {row['machine']['processor']}, "
            found.setdefault((place, row["commit"], note(row)), {})[row["contest"]] = None
    return "".join(
        f" Measured since, {place}at commit {commit}: {', '.join(of)}.{marked}"
        for (place, commit, marked), of in found.items()
    )


def tests(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return rows by test, of contests whose title is their test."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row["contest"] == row.get("test"):
            found.setdefault(row["test"], []).append(row)
    return found


def rates(row: Row) -> list[float]:
    """Return tokens per second, one per round."""
    return [(row["n_prompt"] + row["n_gen"]) / seconds for seconds in row["seconds"]]


def fastest(rows: Sequence[Row], engine: str) -> Row | None:
    """Return the engine's row with the best median among the settings that ran in most rounds."""
    measured = [row for row in rows if row["engine"] == engine and row["seconds"]]
    return max(measured, key=lambda row: (len(row["seconds"]), statistics.median(rates(row))), default=None)


def defaults(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of settings that give nothing but a number of threads."""
    return [row for row in rows if row["default"]]


def engines(rows: Sequence[Row]) -> str:
    """Return a table of the engines: versions and types of the computation, or why an engine is absent."""
    lines = []
    for name, engine in ENGINES.items():
        of = [row for row in rows if row.get("engine") == name]
        versions: dict[str, str] = next((row["facts"]["versions"] for row in of if row.get("facts")), {})
        absent = next((row["absent"] for row in of if row["absent"]), None)
        if of:
            packages = ", ".join(f"{package} {version}" for package, version in versions.items())
            lines.append([name, packages or f"absent: {absent}", engine.computes])
    return table(["engine", "versions", "computes with"], lines, n_words=3)


def speeds(rows: Sequence[Row]) -> str:
    """Return a table of the tests, and the settings that were tried."""
    others = [name for name in ENGINES if name not in (OURS, LLAMA)]
    lines, tried = [], []
    for test, of in tests(rows).items():
        ours, llama, default = (fastest(rows, name) for rows, name in ((of, OURS), (of, LLAMA), (defaults(of), LLAMA)))
        cells = [rate(ours), rate(llama), factor(ours, llama), rate(default), factor(ours, default)]
        lines.append([test, *cells, *(rate(fastest(of, name)) for name in others)])
        tried += [
            f"- {test}, llama.cpp, {row['setting']}: {rate(row)} in {len(row['seconds'])} "
            f"round{'s' * (len(row['seconds']) > 1)}"
            for row in of
            if row["engine"] == LLAMA and row["seconds"]
        ]
    text = table(["test", OURS, f"{LLAMA}, fastest", "factor", f"{LLAMA}, default", "factor", *others], lines)
    notes = [
        f"- {row['test']}, {row['engine']}: {row['estimated'] or 'one run'}"
        for of in tests(rows).values()
        for row in of
        if row["engine"] in others and row["seconds"]
    ]
    return "\n\n".join(part for part in [text, "\n".join(tried), "\n".join(notes)] if part) if lines else ""


def rate(row: Row | None) -> str:
    """Return tokens per second as text."""
    return "-" if row is None else ("~" if row["estimated"] else "") + spread(rates(row))


def factor(ours: Row | None, theirs: Row | None) -> str:
    """Return median over median, then the smallest and the largest factor of a round."""
    if ours is None or theirs is None:
        return "-"
    mine, other = rates(ours), rates(theirs)
    single = [a / b for a, b in zip(mine, other, strict=False)]
    middle = figure(statistics.median(mine) / statistics.median(other))
    return f"{middle} ({figure(min(single))} to {figure(max(single))})"


def shares(rows: Sequence[Row]) -> str:
    """Return a table of the bandwidth that decode reaches beside the bandwidth measured between the rounds."""
    lines = []
    for test, of in tests(rows).items():
        ours = fastest(of, OURS)
        if ours is not None and ours["read_rates"]:
            n_tokens = ours["n_prompt"] + ours["n_gen"]
            reached = [ours["nbytes"] / seconds / 1e9 for seconds in ours["seconds"]]
            line = [test, figure(ours["nbytes"] / n_tokens / 1e6), spread(reached)]
            for rates_ in (ours["read_rates"], ours.get("fastest_read_rates")):
                if rates_:
                    limit = [found / 1e9 for found in rates_]
                    line += [spread(limit), f"{statistics.median(reached) / statistics.median(limit):.0%}"]
                else:
                    line += ["-", "-"]
            lines.append(line)
    if not lines:
        return ""
    head = ["test", "MB per token", "GB/s", "plain read, GB/s", "share", "eight streams, GB/s", "share"]
    return (
        "GB/s: the bytes of weights, keys and values that the test reads over its time. The plain read is a kernel "
        "that only loads, over the same mapped bytes on the same threads, measured after every round, in one stream. "
        "Eight interleaved streams are faster: the last two columns compare with them, the highest bandwidth that we "
        "measured.\n\n" + table(head, lines)
    )


def processes(rows: Sequence[Row]) -> str:
    """Return a table of time to the first printed token and peak memory."""
    of = [row for row in rows if row["contest"] == START]
    if not of:
        return ""
    lines = [
        [row["engine"], spread(row["seconds"]), spread([peak / 1e6 for peak in row["peak_bytes"]])]
        if row["seconds"]
        else [row["engine"], row["absent"], "-"]
        for row in of
    ]
    measured = {row["engine"]: row for row in of if row["seconds"]}
    if OURS in measured and LLAMA in measured:
        ours, theirs = measured[OURS], measured[LLAMA]
        factors = [
            statistics.median(ours[what]) / statistics.median(theirs[what]) for what in ("seconds", "peak_bytes")
        ]
        lines.append(["mlx_engine over llama.cpp", *map(figure, factors)])
    head = ["engine", "seconds to the first printed token", "peak resident memory, MB"]
    return (
        f"From the start of the process: load the file, read {of[0]['prompt']!r} ({of[0]['n_tokens']} tokens), print "
        "the next token. The file is in the page cache; its mapped pages count as resident for both engines. "
        f"mlx_engine runs `python cli.py generate`, llama.cpp a script that does the same.\n\n{table(head, lines)}"
    )


def errors(rows: Sequence[Row]) -> str:
    """Return a table of relative errors."""
    of = [row for row in rows if row["contest"] == ERRORS]
    lines = [[row["engine"], row["absent"] or f"{row['together']:.1e}"] for row in of]
    if not lines:
        return ""
    return (
        "Relative error in the Frobenius norm against logits computed in float64 with the stored weights: a small "
        "Qwen3 with random Q8_0 weights, every position of three prompts, the same ids for all engines.\n\n"
        + table(["engine", "relative error"], lines)
    )


def ourselves(rows: Sequence[Row]) -> str:
    """Return stored weights against expanded ones, and the time of late passes over early ones."""
    lines = []
    both = [row for row in rows if row["contest"] == FORMATS and row["seconds"]]
    if len(both) == 2:
        kept, expanded = both
        lines.append(
            f"- `{kept['test']}` with Q8_0 weights as stored, {rate(kept)}, against the same weights as float32, "
            f"{rate(expanded)}: factor {factor(kept, expanded)}."
        )
    for row in rows:
        if row["contest"] == PASSES and row["seconds"]:
            lines.append(
                f"- Passes {LATE[0]} to {LATE[1]} of a text take {spread(growths(row))} times as long as passes "
                f"{EARLY[0]} to {EARLY[1]}, medians of each run."
            )
    return "\n".join(lines)


def growths(row: Row) -> list[float]:
    """Return the time of late passes over early ones, of every run."""
    found = (growth_of({"passes_s": [passes]}) for passes in row["passes_s"])
    return [growth for growth in found if growth is not None]
