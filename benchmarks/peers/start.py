"""Measure whole processes: seconds from the start to the first printed token, and peak resident memory.

Each engine does the same work once per process: load the file, read a prompt of a few tokens, print the next token.
`stopwatch.py` measures the process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.peers.contests import LLAMA, OURS
from benchmarks.peers.process import ROOT
from mlx_engine.tokenizer import Tokenizer

TEXT = "Once upon a time"
N_TOKENS = 4


@dataclass
class Start:
    """An engine's samples, one per process."""

    engine: str
    seconds: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    absent: str | None = None


def prompt(tokenizer: Tokenizer) -> str:
    """Return the longest beginning of TEXT that has at most N_TOKENS tokens in this vocabulary."""
    lengths = range(len(TEXT), 0, -1)
    return next(TEXT[:n] for n in lengths if len(tokenizer.encode(TEXT[:n])) <= N_TOKENS)


def commands(model: str, text: str, backend: str, interpreters: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the command line of each engine: `cli.py generate`, and a script that does the same with llama.cpp."""
    options = ["--model", model, "--backend", backend, "--max-tokens", "1", "--ignore-eos", "--no-echo"]
    return {
        OURS: [interpreters[OURS], "cli.py", "generate", text, *options],
        LLAMA: [interpreters[LLAMA], "-m", "benchmarks.peers.llama", model, text],
    }


def starts(started: Mapping[str, Sequence[str]], rounds: int) -> list[Start]:
    """Run every engine once per round, after a warm-up round that brings the files into the page cache."""
    found = {engine: Start(engine) for engine in started}
    for number in range(rounds + 1):
        for engine, command in started.items():
            if found[engine].absent is None:
                sample(found[engine], command, counts=number > 0)
    return list(found.values())


def sample(start: Start, command: Sequence[str], *, counts: bool) -> None:
    """Run one process, and add its figures if it counts."""
    watching = [sys.executable, "-m", "benchmarks.peers.stopwatch", *command]
    # With this variable, Python would compile all modules at every start. Without it, Python keeps the
    # compiled modules, as for users.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(watching, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        start.absent = done.stderr.strip().splitlines()[-1]
        return
    took = json.loads(done.stdout)
    if took["exit_code"] != 0 or took["seconds"] is None:
        start.absent = took["said"] or f"exit code {took['exit_code']}, nothing printed"
    elif counts:
        start.seconds.append(took["seconds"])
        start.peak_bytes.append(took["peak_bytes"])
