"""`python -m benchmarks.peers.folders`: GPT-2 and Gemma 3 from Hugging Face folders, compared with transformers.

Decode after a short prompt is measured: this engine with weights quantised on load and in float32, and transformers in
float32. There are three sets; each starts fresh processes, in which the contestants run several times, interleaved. The
rows go to benchmarks/results/folders.jsonl. Run it on an idle machine; it takes six minutes and 12 GB of memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.log import Log, Row
from benchmarks.peers.contests import (
    OURS,
    TRANSFORMERS,
    Contest,
    Contestant,
    Entry,
    contest_row,
    interpreters,
    play,
    report_line,
)
from benchmarks.sections import folders as section
from mlx_engine.bench.origin import describe
from mlx_engine.bench.samples import Test
from mlx_engine.checkpoint.identity import digest
from mlx_engine.checkpoint.model_files import open_checkpoint
from mlx_engine.checkpoint.sources import resolve

RESULTS = Path(__file__).parents[1] / "results" / "folders.jsonl"
MODELS = ("shape:gpt2", "shape:gemma3-1b")
PROMPT, WRITTEN = 16, 32
# Sets of fresh processes, and rounds within each.
FRESH, ROUNDS = 3, 3


def contest(backend: str, *, quick: bool) -> Contest:
    """Return the contest: decode of this engine, quantised and in float32, and of transformers."""
    ours = [Contestant(OURS, {"backend": backend, "quant": quant}) for quant in ("q8_0", "f32")]
    test = Test(n_gen=4 if quick else WRITTEN, depth=PROMPT)
    return Contest(test, (*ours, Contestant(TRANSFORMERS)), rounds=1 if quick else ROUNDS)


def joined(entries: Sequence[Entry]) -> Entry:
    """Return one contestant's entries of all sets as one entry."""
    whole = Entry(entries[0].contestant)
    for entry in entries:
        whole.seconds += entry.seconds
        whole.passes += entry.passes
        whole.facts = entry.facts or whole.facts
        whole.absent = whole.absent or entry.absent
    return whole


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Yield a row per model and contestant."""
    for name in options.model or MODELS:
        path = resolve(name)
        # The digest reads the whole folder, so the files are in memory when the first engine opens them.
        common = {**describe(open_checkpoint(path)), "model_sha256": digest(path)}
        of = contest(options.backend, quick=options.quick)
        sets = [play(of, str(path), options.python) for _ in range(1 if options.quick else FRESH)]
        for entries in zip(*sets, strict=True):
            entry = joined(entries)
            print(f"{name}: {report_line(of, entry)}")
            yield {**common, **contest_row(of, entry), "contest": name}


def main() -> None:
    """Measure, print, and append."""
    parser = argparse.ArgumentParser(prog="benchmarks.peers.folders", description="Compare with transformers.")
    parser.add_argument("--model", action="append", help=f"a folder; may be given several times; else {MODELS}")
    parser.add_argument("--backend", default="auto", help="this engine's backend")
    parser.add_argument("--python", help="the interpreter that has transformers, if not this one")
    parser.add_argument(
        "--quick", action="store_true", help="few tokens, to try the benchmark itself; rows are kept only with --out"
    )
    parser.add_argument("--out", type=Path, help=f"append to this file instead of {RESULTS.name}")
    options = parser.parse_args()
    options.python = interpreters({TRANSFORMERS: options.python} if options.python else {})
    log = Log("folders", options.out or (None if options.quick else RESULTS))
    print(section([log.append(row) for row in rows(options)]))


if __name__ == "__main__":
    main()
