"""`python -m benchmarks.peers`: measure other engines and this one, and append rows to benchmarks/results/peers.jsonl.

Run it on an idle machine. The errors of logits are measured on a separate small model (`exact.py`), not on --model.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.log import Log
from benchmarks.peers.contests import ENGINES, ERRORS, ROUNDS, START, contest_row, interpreters, plan, play, report_line
from benchmarks.peers.exact import MODEL as EXACT_MODEL
from benchmarks.peers.exact import errors
from benchmarks.peers.start import commands, prompt, starts
from mlx_engine import load_tokenizer
from mlx_engine.bench.origin import describe
from mlx_engine.checkpoint.identity import digest
from mlx_engine.checkpoint.model_files import open_checkpoint
from mlx_engine.checkpoint.sources import resolve
from mlx_engine.machine.memory import usable_cores

RESULTS = Path(__file__).parents[1] / "results" / "peers.jsonl"
MODEL = "shape:qwen3-0.6b"
Row = dict[str, Any]


def main() -> None:
    """Measure the contests that the command line names."""
    options = parse()
    log = Log("peers", options.out or (None if options.quick else RESULTS))
    for row in rows(options):
        log.append(row)
    if log.path is not None:
        print(f"every sample is in {log.path}; python -m benchmarks.report makes the page")


def parse() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.peers", description="Compare with other engines.")
    parser.add_argument("--model", default=MODEL, help=f"a GGUF file of a Qwen3, or {MODEL}")
    parser.add_argument("--backend", default="auto", help="the backend of mlx_engine")
    parser.add_argument(
        "--python", action="append", default=[], metavar="ENGINE=PATH",
        help=f"the Python that runs ENGINE, by default the one of this process; engines: {', '.join(ENGINES)}",
    )  # fmt: skip
    parser.add_argument(
        "--only", action="append", default=[], metavar="TITLE",
        help=f"one contest, {START} or {ERRORS}; may be given several times",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, help="rounds of every contest, instead of its own number")
    parser.add_argument(
        "--quick", action="store_true", help="few tokens, to try the benchmark itself; rows are kept only with --out"
    )
    parser.add_argument("--out", type=Path, help=f"append to this file instead of {RESULTS.name}")
    options = parser.parse_args()
    given = dict(item.partition("=")[::2] for item in options.python)
    if not set(given) <= set(ENGINES) or not all(given.values()):
        parser.error(f"--python: expected ENGINE=PATH with one of {', '.join(ENGINES)}, found {options.python}")
    options.python = interpreters(given)
    options.contests = plan(options.backend, usable_cores(), quick=options.quick)
    if options.rounds is not None:
        options.contests = [dataclasses.replace(contest, rounds=options.rounds) for contest in options.contests]
    titles = [*(contest.title for contest in options.contests), START, ERRORS]
    unknown = [title for title in options.only if title not in titles]
    if unknown:
        parser.error(f"--only: expected {', '.join(map(repr, titles))}, found {unknown}")
    return options


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of the contests (one per engine and setting), then of START, then of ERRORS (one per engine)."""
    path = resolve(options.model)
    # The digest reads the whole file, so the file is in memory when the first engine opens it.
    common = facts(path)
    wanted = options.only or [*(c.title for c in options.contests), START, ERRORS]
    for contest in options.contests:
        if contest.title in wanted:
            for entry in play(contest, str(path), options.python):
                print(report_line(contest, entry))
                yield {**common, **contest_row(contest, entry)}
    if START in wanted:
        tokenizer = load_tokenizer(path)
        text = prompt(tokenizer)
        n_tokens = len(tokenizer.encode(text))
        started = commands(str(path), text, options.backend, options.python)
        for start in starts(started, options.rounds or (1 if options.quick else ROUNDS)):
            print(f"{START}: {start}")
            yield {**common, "contest": START, "prompt": text, "n_tokens": n_tokens, **dataclasses.asdict(start)}
    if ERRORS in wanted:
        measured = facts(EXACT_MODEL)
        for error in errors(options.python, options.backend):
            print(f"{ERRORS}: {error}")
            yield {**measured, "contest": ERRORS, **dataclasses.asdict(error)}


def facts(path: Path) -> Row:
    """Return the name, sizes and digest of the model that a row is measured on."""
    return {**describe(open_checkpoint(path)), "model_sha256": digest(path)}


if __name__ == "__main__":
    main()
