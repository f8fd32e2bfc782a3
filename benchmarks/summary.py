"""The first table of BENCHMARKS.md: one figure for one thing, taken from the newest rows of the other sections."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.bits import distinct
from benchmarks.bits import newest as newest_bits
from benchmarks.measured_code import mark
from benchmarks.peers.engines import LLAMA, OURS
from benchmarks.peers.section import ERRORS, START, fastest, latest, rates, tests
from benchmarks.text import Row, figure, table

# Tests beside llama.cpp, with their titles.
BESIDE = {
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
    """Return the table. `results` has all rows by the name of their benchmark; one without rows has no line."""
    makers = (("peers", beside_llama), ("rows", rows_in_one_pass), ("batch", sequences), ("bits", bits))
    lines = [line for name, lines_of in makers if results.get(name) for line in lines_of(results[name])]
    head = ["", OURS, "compared with", "factor", "measured"]
    return table(head, [[*cells, measured(row)] for *cells, row in lines], n_words=1)


def measured(row: Row) -> str:
    """Return processor, commit and mark of a row."""
    found = mark(row)
    return f"{row['machine']['processor']}, commit {row['commit'][:8]}" + (f"; **{found}**" if found else "")


def beside_llama(rows: Sequence[Row]) -> Iterator[Line]:
    """Yield speed, bandwidth, the start of a process and errors, beside llama.cpp at its fastest setting."""
    rows = latest(rows)
    by_test = tests(rows)
    for test, title in BESIDE.items():
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
    """Yield the rate of several rows in one pass over that of one row."""
    yield _several(f"{SEVERAL} tokens of one sequence in one pass: tokens/s", "1 token", rows[-1])


def sequences(rows: Sequence[Row]) -> Iterator[Line]:
    """Yield the rate of several sequences over that of one, at each depth."""
    newest = {row["depth"]: row for row in rows}
    for depth in sorted(newest):
        yield _several(f"{SEVERAL} sequences, each after {depth:,} tokens: tokens/s", "1 sequence", newest[depth])


def _several(title: str, one: str, row: Row) -> Line:
    many, single = row["medians_ts"][SEVERAL], row["medians_ts"]["1"]
    return title, figure(many), f"{one}: {figure(single)}", figure(many / single), row


def bits(rows: Sequence[Row]) -> Iterator[Line]:
    """Yield the number of different results of the compiled CPU kernels."""
    of = [row for row in newest_bits(rows) if row["backend"] in COMPILED]
    n = sum(len(row["found"]) for row in of)
    yield "different logits of one prompt", str(len(distinct(of))), f"ways to read the prompt: {n}", "-", of[0]
