"""`python -m benchmarks.peers.folders`: GPT-2 and Gemma 3 from Hugging Face folders, beside transformers.

Decode behind a short prompt: ours quantised on load, ours in float32, transformers in float32. Every round has fresh
processes, in which each runs several times in turn; the rows go to benchmarks/results/folders.jsonl. Run it on an idle
machine; it takes some six minutes, and 12 GB of memory.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.peers.engines import OURS, TRANSFORMERS, interpreters
from benchmarks.peers.plan import Contest, Contestant
from benchmarks.peers.rounds import Entry, contest_row, play, told
from benchmarks.peers.section import factor, latest, rate
from benchmarks.text import Row, model, source, table
from mlx_engine.bench import machine
from mlx_engine.bench.cells import Test
from mlx_engine.bench.run import describe, origin
from mlx_engine.checkpoint.model_files import open_checkpoint
from mlx_engine.checkpoint.sources import resolve

RESULTS = Path(__file__).parents[1] / "results" / "folders.jsonl"
MODELS = ("shape:gpt2", "shape:gemma3-1b")
PROMPT, WRITTEN = 16, 32
# Sets of fresh processes, and rounds within each.
FRESH, ROUNDS = 3, 3

INTRO = """Tokens per second of writing behind a prompt of 16 tokens, random weights of the real shapes: the median of
all runs, with the slowest and the fastest behind it. Each engine has a process of its own, three times a fresh one, and
they take turns. The factors are ours, quantised on load, over transformers in float32 and over our own float32."""


def contest(backend: str, *, quick: bool) -> Contest:
    """Who takes turns at what."""
    ours = [Contestant(OURS, {"backend": backend, "quant": quant}) for quant in ("q8_0", "f32")]
    test = Test(n_gen=4 if quick else WRITTEN, depth=PROMPT)
    return Contest(test, (*ours, Contestant(TRANSFORMERS)), rounds=1 if quick else ROUNDS)


def joined(entries: Sequence[Entry]) -> Entry:
    """One contestant's entries of all sets, as one."""
    whole = Entry(entries[0].contestant)
    for entry in entries:
        whole.seconds += entry.seconds
        whole.passes += entry.passes
        whole.facts = entry.facts or whole.facts
        whole.absent = whole.absent or entry.absent
    return whole


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """One per model and contestant."""
    for name in options.model or MODELS:
        path = resolve(name)
        # The digest has read the whole folder, so it lies in memory when the first engine opens it.
        common = {**origin(), **describe(open_checkpoint(path)), "model_sha256": machine.digest(path)}
        of = contest(options.backend, quick=options.quick)
        sets = [play(of, str(path), options.python) for _ in range(1 if options.quick else FRESH)]
        for entries in zip(*sets, strict=True):
            entry = joined(entries)
            print(f"{name}: {told(of, entry)}")
            yield {**common, **contest_row(of, entry), "contest": name}


def section(rows: Sequence[Row]) -> str:
    """The section of BENCHMARKS.md."""
    rows = latest(rows)
    lines = []
    for name in dict.fromkeys(row["contest"] for row in rows):
        quantized, plain, theirs = (
            next(
                (row for row in rows if row["seconds"] and (row["contest"], row["engine"], row["setting"]) == key), None
            )
            for key in ((name, OURS, "q8_0"), (name, OURS, "f32"), (name, TRANSFORMERS, ""))
        )
        cells = [rate(quantized), rate(plain), rate(theirs), factor(quantized, theirs), factor(quantized, plain)]
        lines.append([model(next(row for row in rows if row["contest"] == name)), *cells])
    head = ["model", "ours, Q8_0", "ours, float32", "transformers, float32", "over transformers", "over our float32"]
    return f"{source(rows[0])}\n\n{INTRO}\n\n{table(head, lines)}\n"


def main() -> None:
    """Measure, print, and append."""
    parser = argparse.ArgumentParser(prog="benchmarks.peers.folders", description="Measure transformers beside ours.")
    parser.add_argument("--model", action="append", help=f"a folder; may be given several times; else {MODELS}")
    parser.add_argument("--backend", default="auto", help="ours")
    parser.add_argument("--python", help="the interpreter that has transformers, if not this one")
    parser.add_argument("--quick", action="store_true", help="few tokens, to try the machinery; nothing is kept")
    parser.add_argument("--out", type=Path, help=f"append to this file instead of {RESULTS.name}")
    options = parser.parse_args()
    options.python = interpreters({TRANSFORMERS: options.python} if options.python else {})
    out = options.out or (None if options.quick else RESULTS)
    found = list(rows(options))
    if out is not None:
        with out.open("a") as stream:
            stream.writelines(json.dumps(row) + "\n" for row in found)
    print(section(found))


if __name__ == "__main__":
    main()
