"""The section of BENCHMARKS.md about other engines, from the rows of `results/peers.jsonl`. Pure text."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.peers.engines import ENGINES, LLAMA, OURS
from benchmarks.peers.plan import FORMATS, PASSES
from benchmarks.text import Row, figure, model, source, spread, table
from mlx_engine.bench.report import EARLY, LATE, growth_of

START, ERRORS = "start", "errors"

INTRO = """Every engine computes with the same weights. Each runs in a process of its own, and they take turns: in a
round every one runs the test once, so that a machine that slows down slows all of them. Tokens are random ids, chosen
greedily from then on; tokenisation is left out, and so is a first, shorter run. A rate is the median of the rounds,
with the slowest and the fastest behind it; the factor is ours over llama.cpp's, with those of single rounds behind it.
llama.cpp is given every setting listed, of which the fastest of two rounds goes on, and when it writes its default too.
Slow engines run once, on a budget: `~` marks what was extrapolated from fewer tokens than the test has."""


def section(rows: Sequence[Row]) -> str:
    """All of it; what was not measured is left out."""
    rows = latest(rows)
    parts = [f"{model(rows[0])}.\n\n{source(rows[0])}{later(rows)}", INTRO, engines(rows)]
    for title, part in (
        ("Tokens per second", speeds),
        ("How near decode comes to what the memory gives", shares),
        ("A whole process", processes),
        ("Errors of the logits", errors),
        ("Ours against ours", ourselves),
    ):
        text = part(rows)
        parts += [f"### {title}", text] if text else []
    return "\n\n".join(parts) + "\n"


def latest(rows: Sequence[Row]) -> list[Row]:
    """Of each contest those of its newest run: what did not take turns is not compared."""
    newest: dict[str, str] = {}
    for row in rows:
        newest[row["contest"]] = max(row["time"], newest.get(row["contest"], ""))
    return [row for row in rows if row["time"] == newest[row["contest"]]]


def later(rows: Sequence[Row]) -> str:
    """Which contests are of another commit than the first, and on which processor, if that is another one, too."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        if row["commit"] != rows[0]["commit"]:
            same = row["machine"]["processor"] == rows[0]["machine"]["processor"]
            place = "" if same else f"on {row['machine']['processor']}, "
            found.setdefault((place, row["commit"]), {})[row["contest"]] = None
    return "".join(f" Measured since, {on}at commit {commit}: {', '.join(of)}." for (on, commit), of in found.items())


def tests(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by test, of the contests that are about nothing else."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row["contest"] == row.get("test"):
            found.setdefault(row["test"], []).append(row)
    return found


def rates(row: Row) -> list[float]:
    """Tokens per second, one per round."""
    return [(row["n_prompt"] + row["n_gen"]) / seconds for seconds in row["seconds"]]


def fastest(rows: Sequence[Row], engine: str) -> Row | None:
    """The engine's row with the best median, among those that ran in most rounds."""
    measured = [row for row in rows if row["engine"] == engine and row["seconds"]]
    return max(measured, key=lambda row: (len(row["seconds"]), statistics.median(rates(row))), default=None)


def defaults(rows: Sequence[Row]) -> list[Row]:
    """Those of engines that were told nothing but a number of threads."""
    return [row for row in rows if row["default"]]


def engines(rows: Sequence[Row]) -> str:
    """What each one is and computes; of an absent one the reason."""
    lines = []
    for name, engine in ENGINES.items():
        of = [row for row in rows if row.get("engine") == name]
        versions: dict[str, str] = next((row["facts"]["versions"] for row in of if row.get("facts")), {})
        absent = next((row["absent"] for row in of if row["absent"]), None)
        if of:
            told = ", ".join(f"{package} {version}" for package, version in versions.items()) or f"absent: {absent}"
            lines.append([name, told, engine.computes])
    return table(["engine", "versions", "computes with"], lines, n_words=3)


def speeds(rows: Sequence[Row]) -> str:
    """A table of the tests, and the settings that were tried."""
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
    """Tokens per second."""
    return "-" if row is None else ("~" if row["estimated"] else "") + spread(rates(row))


def factor(ours: Row | None, theirs: Row | None) -> str:
    """Median over median, and the same of single rounds."""
    if ours is None or theirs is None:
        return "-"
    mine, other = rates(ours), rates(theirs)
    single = [a / b for a, b in zip(mine, other, strict=False)]
    middle = figure(statistics.median(mine) / statistics.median(other))
    return f"{middle} ({figure(min(single))} to {figure(max(single))})"


def shares(rows: Sequence[Row]) -> str:
    """Bytes that must be read over the time it takes, against reading the same bytes between the rounds."""
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
    head = ["test", "MB per token", "GB/s", "a plain read, GB/s", "share", "in eight places, GB/s", "share"]
    return (
        "Weights and the keys and values looked back at, over the time of the test; the plain read is our own kernel "
        "that only loads, over the same mapped bytes on the same threads, measured after every round. It reads them "
        "one after the other, which is not the fastest way: the last two columns are for reading in eight places of "
        "a matrix in turns, the machine's limit as far as we know it.\n\n" + table(head, lines)
    )


def processes(rows: Sequence[Row]) -> str:
    """Time to the first printed token, and memory."""
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
        lines.append(["ours over llama.cpp's", *map(figure, factors)])
    head = ["engine", "seconds to the first printed token", "peak resident memory, MB"]
    return (
        f"From the start of the process: load the file, read {of[0]['prompt']!r} ({of[0]['n_tokens']} tokens), print "
        "the next token. The file is in the system's memory already; its mapped pages count as resident for both. "
        f"Ours is `python cli.py generate`, llama.cpp's the same in as few lines of Python.\n\n{table(head, lines)}"
    )


def errors(rows: Sequence[Row]) -> str:
    """Relative errors."""
    of = [row for row in rows if row["contest"] == ERRORS]
    lines = [[row["engine"], row["absent"] or f"{row['together']:.1e}"] for row in of]
    if not lines:
        return ""
    return (
        "The Frobenius norm of the difference over that of logits computed in float64 with the weights that the file "
        "stores: a small Qwen3 with random weights as Q8_0, every position of three prompts, the same ids for all.\n\n"
        + table(["engine", "relative error"], lines)
    )


def ourselves(rows: Sequence[Row]) -> str:
    """The stored weights against expanded ones, and whether a pass takes longer the longer the text is."""
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
    """Late passes over early ones, of every run."""
    found = (growth_of({"passes_s": [passes]}) for passes in row["passes_s"])
    return [growth for growth in found if growth is not None]
