"""Write BENCHMARKS.md from the committed results: `python -m benchmarks.report`. A test checks that it is current.

The page begins with a summary of single figures, taken from the newest rows of the sections.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks import sections
from benchmarks.bits import distinct
from benchmarks.log import FOLDER, Row
from benchmarks.peers.contests import ERRORS, LLAMA, OURS, START
from benchmarks.sections import fastest, figure, last_run, latest, model, rates, source, table, tests_of
from mlx_engine.bench.ladder import text as sweep_text

PAGE = Path(__file__).parents[1] / "BENCHMARKS.md"

HEAD = """# Benchmarks

This table summarises the newest rows; the sections below have the spread of each figure. The model has the shape of
Qwen3 0.6B and Q8_0 weights, and runs on the CPU. The errors were measured on a small Qwen3, the bits on the built-in
model.
"""

LEGEND = """`python -m benchmarks.report` generates this page from the samples in `benchmarks/results/`. Tests are named
as in llama-bench: `pp64` is prefill of 64 tokens, `tg64` decode of 64 tokens, one per pass, and `@ d4096` after 4,096
tokens of context. A rate is the median of the samples, then the slowest and the fastest; `~` marks a rate that did not
fit its time budget and was extrapolated.

Every row has the version of mlx-engine that was measured. Rows are measured again for each release; a row with an older
version has not been measured since.

The built-in model fits into a processor's cache, so memory does not limit its rates; the 0.6B shape does not fit.
We have no Mac: Apple GPU speed is unmeasured. `python cli.py bench -b all` measures it.
"""

LADDER_INTRO = (
    "The factor is relative to the first of these that was measured: `scalar` without a KV cache, `scalar` with one, "
    "another backend without one, another backend with one."
)


def read(path: Path) -> list[Row]:
    """Return all rows of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def results() -> list[Path]:
    """Return the files of results, in the order of the page."""
    order = {stem: place for place, stem in enumerate(SECTIONS)}
    return sorted(FOLDER.glob("*.jsonl"), key=lambda path: (order.get(path.stem, len(order)), path.stem))


def page(files: Iterable[Path]) -> str:
    """Return the whole page: the summary, then a section per file."""
    rows = {path.stem: read(path) for path in files}
    parts = [HEAD, summary(rows), LEGEND]
    for stem, of in rows.items():
        title, section = SECTIONS.get(stem, (stem.replace("-", " ").capitalize(), ladder))
        parts.append(f"## {title}\n\n{section(of)}")
    return "\n\n".join(part.strip() for part in parts) + "\n"


def ladder(rows: Sequence[Row]) -> str:
    """Return the rows of `cli.py bench`: a table per model, the newest measurement of each cell."""
    rows = newest(rows)
    parts = [f"{source(rows[0])}\n\n{LADDER_INTRO}\n"]
    for name in dict.fromkeys(row["model_name"] for row in rows):
        of = [row for row in rows if row["model_name"] == name]
        parts.append(f"### {model(of[0])}\n\n{cells(of)}\n")
    return "\n".join(parts)


def newest(rows: Iterable[Row]) -> list[Row]:
    """Return the last row of each cell."""
    found: dict[tuple[object, ...], Row] = {}
    for row in rows:
        found[row["model_name"], row["backend"], row["kv"], row["test"]] = row
    return list(found.values())


def cells(rows: Sequence[Row]) -> str:
    """Return one line per cell of a model."""
    lines = []
    for test in dict.fromkeys(row["test"] for row in rows):
        of = [row for row in rows if row["test"] == test]
        base = min(of, key=lambda row: (row["backend"] != "scalar", row["kv"]))
        for row in of:
            rate, rates = figure(row["median_ts"]), row["samples_ts"]
            lines.append([
                test, row["backend"], "yes" if row["kv"] else "no", ("~" if row["estimated"] else "") + rate,
                f"{figure(min(rates))} to {figure(max(rates))}", figure(row["median_ts"] / base["median_ts"]),
            ])  # fmt: skip
    return table(["test", "backend", "cache", "tokens/s", "slowest to fastest", "factor"], lines, n_words=3)


def sweeps(rows: Sequence[Row]) -> str:
    """Return the newest sweep of each model, as `cli.py bench --sweep` prints it."""
    parts = []
    for name in dict.fromkeys(row["model_name"] for row in rows):
        of = [row for row in rows if row["model_name"] == name]
        newest_time = max(row["time"] for row in of)
        of = [row for row in of if row["time"] == newest_time]
        parts.append(f"### {model(of[0])}\n\n{source(of[0])}\n\n{sweep_text(of)}\n")
    return "\n".join(parts)


# Title and section by the name of the file, in the order of the page. Any other file has rows of `cli.py bench`, at the
# end of the page.
SECTIONS: dict[str, tuple[str, Callable[[Sequence[Row]], str]]] = {
    "peers": ("Compared with other engines", sections.peers),
    "folders": ("Hugging Face folders, compared with transformers", sections.folders),
    "llama_quants": ("Files quantised by llama.cpp", sections.llama_quants),
    "activations": ("Activations in fixed point", sections.activations),
    "precision": ("Errors of rounded types", sections.precision),
    "kv_types": ("Types of keys and values", sections.kv_types),
    "prefix_disk": ("The first token after a restart", sections.prefix_disk),
    "experts": ("Experts that do not fit into memory", sections.experts),
    "states": ("Models with states or latents, compared with llama.cpp", sections.states),
    "sweep": ("The ladder", sweeps),
    "speculation": ("Proposed tokens, compared with llama.cpp's lookup", sections.speculation),
    "rows": ("Several rows in one pass", sections.rows_in_one_pass),
    "batch": ("Several sequences in one decode step", sections.batch),
    "concurrency": ("Several sequences, compared with llama.cpp", sections.concurrency),
    "server": ("The server", sections.server),
    "bits": ("Bits of the logits", sections.bits),
    "ways": ("Memory read in several streams", sections.ways),
    "chunks": ("The smallest job for several threads", sections.chunks),
    "crossover": ("The width from which quantised layers are faster", sections.crossovers),
    "ops": ("Single operations", sections.operations),
    "emulator": ("Metal kernels in the emulator", sections.emulator),
}


# Tests compared with llama.cpp, with their titles.
COMPARED = {
    "tg64": "decode, 64 tokens: tokens/s",
    "tg64 @ d4096": "decode after 4,096 tokens: tokens/s",
    "pp512": "prefill, 512 tokens: tokens/s",
    "pp2048": "prefill, 2,048 tokens: tokens/s",
}
DECODE = "tg64"
SEVERAL = "8"
COMPILED = ("simd", "parallel")

Line = tuple[str, str, str, str, Row]


def summary(results: Mapping[str, Sequence[Row]]) -> str:
    """Return the table. `results` has all rows by the name of their benchmark; benchmarks without rows have no line."""
    makers = (("peers", compared_with_llama), ("rows", rows_in_one_pass), ("batch", sequences), ("bits", bits_line))
    lines = [line for name, lines_of in makers if results.get(name) for line in lines_of(results[name])]
    head = ["", OURS, "compared with", "factor", "version, processor"]
    return table(head, [[*cells, measured(row)] for *cells, row in lines], n_words=1)


def measured(row: Row) -> str:
    """Return version and processor of a row."""
    return f"{row['versions']['mlx-engine']}, {row['machine']['processor']}"


def compared_with_llama(rows: Sequence[Row]) -> Iterator[Line]:
    """Yield speed, start and errors, compared with llama.cpp, and the bandwidth of decode with that of the machine."""
    rows = latest(rows)
    by_test = tests_of(rows)
    for test, title in COMPARED.items():
        ours, theirs = (fastest(by_test.get(test, []), engine) for engine in (OURS, LLAMA))
        if ours is not None and theirs is not None:
            mine, other = statistics.median(rates(ours)), statistics.median(rates(theirs))
            yield title, figure(mine), f"{LLAMA}: {figure(other)}", figure(mine / other), ours
    decode = fastest(by_test.get(DECODE, []), OURS)
    if decode is not None and decode.get("fastest_read_rates"):
        mine = statistics.median(decode["nbytes"] / seconds / 1e9 for seconds in decode["seconds"])
        limit = statistics.median(decode["fastest_read_rates"]) / 1e9
        yield "decode: GB/s read", figure(mine), f"memory bandwidth: {figure(limit)}", figure(mine / limit), decode
    started = {row["engine"]: row for row in rows if row["contest"] == START and row["seconds"]}
    if OURS in started and LLAMA in started:
        mine, other = (statistics.median(started[engine]["seconds"]) for engine in (OURS, LLAMA))
        line = "new process to first token: seconds", figure(mine), f"{LLAMA}: {figure(other)}", figure(mine / other)
        yield (*line, started[OURS])
    wrong = {row["engine"]: row for row in rows if row["contest"] == ERRORS and row["together"]}
    if OURS in wrong and LLAMA in wrong:
        mine, other = (wrong[engine]["together"] for engine in (OURS, LLAMA))
        yield "relative error of logits", f"{mine:.1e}", f"{LLAMA}: {other:.1e}", figure(mine / other), wrong[OURS]


def rows_in_one_pass(rows: Sequence[Row]) -> Iterator[Line]:
    """Yield the rate of several rows in one pass, divided by the rate of one row."""
    yield _several(f"{SEVERAL} tokens of one sequence in one pass: tokens/s", "1 token", rows[-1])


def sequences(rows: Sequence[Row]) -> Iterator[Line]:
    """Yield the rate of several sequences, divided by the rate of one, at each depth."""
    newest = {row["depth"]: row for row in rows}
    for depth in sorted(newest):
        yield _several(f"{SEVERAL} sequences, each after {depth:,} tokens: tokens/s", "1 sequence", newest[depth])


def _several(title: str, one: str, row: Row) -> Line:
    many, single = row["medians_ts"][SEVERAL], row["medians_ts"]["1"]
    return title, figure(many), f"{one}: {figure(single)}", figure(many / single), row


def bits_line(rows: Sequence[Row]) -> Iterator[Line]:
    """Yield the number of different results of the compiled CPU kernels."""
    of = [row for row in last_run(rows) if row["backend"] in COMPILED]
    n = sum(len(row["found"]) for row in of)
    yield "different logits of one prompt", str(len(distinct(of))), f"ways to read the prompt: {n}", "-", of[0]


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(results()))


if __name__ == "__main__":
    main()
