"""Measure our speed and error on a Q8_0 file and on files that llama.cpp quantises from it, and llama.cpp's speed.

    python -m benchmarks.llama_quants --python PATH      appends to benchmarks/results/llama_quants.jsonl
    python -m benchmarks.llama_quants --python PATH --files q4_k_m,q5_k_m,q3_k_m --rounds 3 --out new.jsonl

PATH is a Python interpreter that has llama-cpp-python. The files are quantised once from the model `shape:qwen3-0.6b`
in Q8_0, and kept in the same folder. llama.cpp's speed is measured on the files of COMMON. In each round, every
contestant generates 64 tokens in a fresh process, after a warm-up.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.log import FOLDER, Log, Row
from benchmarks.peers.contests import LLAMA, OURS, WARM, Contestant, asked, interpreters, opened
from benchmarks.peers.exact import relative
from benchmarks.peers.process import Process
from mlx_engine import create_backend
from mlx_engine.backends.parameters import Linear
from mlx_engine.bench.origin import describe
from mlx_engine.bench.samples import Test
from mlx_engine.checkpoint.model_files import open_checkpoint
from mlx_engine.checkpoint.sources import resolve
from mlx_engine.machine.memory import usable_cores

RESULTS = FOLDER / "llama_quants.jsonl"
MODEL = "shape:qwen3-0.6b"
ROUNDS, CONTEXT, REPEATS = 7, 600, 15
TEST = Test(n_gen=64)
# The name of the source file; and the files that llama.cpp quantises from it, each with llama.cpp's number of the file
# type, and whether all tensors have that type.
AS_IS = "q8_0"
MADE = {
    "q4_0-pure": (2, True), "q4_0": (2, False), "q4_k_m": (15, False), "q5_k_m": (17, False), "q3_k_m": (12, False),
    "q6_k": (18, False),
}  # fmt: skip
# The most common types of published files: llama.cpp's speed is measured on them. The time of the output head is
# measured on the source and on the first of them.
COMMON = ("q4_k_m", "q5_k_m", "q3_k_m")
PROMPTS = [[(7 * i * i + 31 * i) % 150_000 for i in range(12)], [5], [1000 + i for i in range(33)]]

_QUANTIZE = """
import ctypes, sys, llama_cpp as api
wanted = api.llama_model_quantize_default_params()
wanted.ftype, wanted.pure, wanted.allow_requantize = int(sys.argv[3]), sys.argv[4] == "True", True
sys.exit(api.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), ctypes.byref(wanted)))
"""


@dataclass(frozen=True)
class Entry:
    """A contestant, and the file that it generates tokens with."""

    file: str
    contestant: Contestant


def main() -> None:
    """Quantise the files that are missing, then measure."""
    parser = argparse.ArgumentParser(prog="benchmarks.llama_quants", description="Measure files of llama.cpp's making.")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has llama-cpp-python")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"append to this file instead of {RESULTS.name}")
    parser.add_argument("--files", help=f"measure only these, in addition to {AS_IS}: {', '.join(MADE)}")
    options = parser.parse_args()
    wanted = list(MADE) if options.files is None else options.files.split(",")
    if unknown := set(wanted) - set(MADE):
        parser.error(f"--files: expected names among {', '.join(MADE)}, found {', '.join(sorted(unknown))}")
    log = Log("llama_quants", options.out)
    files = made(resolve(MODEL), options.python, wanted)
    for row in rows(files, options.python, options.rounds):
        log.append(row)


def made(source: Path, python: str, wanted: Sequence[str] = tuple(MADE)) -> dict[str, Path]:
    """Return the source and the wanted files by name; quantise those that are missing."""
    files = {AS_IS: source}
    for name in wanted:
        number, pure = MADE[name]
        files[name] = path = source.with_name(f"{source.stem.removesuffix('-q8_0')}-{name}.gguf")
        if not path.exists():
            part = path.with_suffix(".part")
            command = [python, "-c", _QUANTIZE, str(source), str(part), str(number), str(pure)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                said = [f"exit code {done.returncode}", *done.stderr.strip().splitlines()]
                raise SystemExit(f"{name}: llama.cpp's quantiser, run with {python}, failed: {said[-1]}")
            part.replace(path)
    return files


def rows(files: dict[str, Path], python: str, rounds: int) -> Iterator[Row]:
    """Yield a row per file and contestant, then one per file's error, then the time of the output head of two files."""
    entries = [Entry(name, Contestant(OURS, {"backend": "parallel"})) for name in files]
    cores = usable_cores()
    common = [name for name in COMMON if name in files]
    entries += [Entry(name, Contestant(LLAMA, threads=n)) for name in common for n in sorted({1, cores})]
    seconds: list[list[float]] = [[] for _ in entries]
    for number in range(rounds):
        order = list(zip(entries, seconds, strict=True))
        for entry, found in order if number % 2 == 0 else reversed(order):
            found.append(run(entry, files[entry.file], python))
    for entry, found in zip(entries, seconds, strict=True):
        facts = {"file": entry.file, "engine": entry.contestant.engine, "setting": entry.contestant.setting}
        print(f"{entry.file}, {entry.contestant.engine} {entry.contestant.setting}: "
              f"{TEST.n_gen / statistics.median(found):.1f} tokens/s")  # fmt: skip
        yield {"what": "decode", **facts, **describe(open_checkpoint(files[entry.file])), "n_gen": TEST.n_gen,
               "seconds": found}  # fmt: skip
    for name, path in files.items():
        error = error_of(path)
        print(f"{name}: relative error {error:.1e}")
        yield {"what": "error", "file": name, "error": error}
    for name in (AS_IS, *common[:1]):
        head = head_of(files[name])
        print(f"{name}: a head of {head['type']} takes {statistics.median(head['seconds']) * 1e3:.2f} ms")
        yield {"what": "head", "file": name, **head}


def run(entry: Entry, path: Path, python: str) -> float:
    """Return seconds of the test in a fresh process."""
    contestant = entry.contestant
    with opened(contestant, interpreters({LLAMA: python}), model=str(path), context=CONTEXT) as process:
        process.ask("run", **asked(Test(n_gen=WARM.n_gen), contestant))
        done: dict[str, Any] = process.ask("run", **asked(TEST, contestant))
    return float(done["seconds"])


def error_of(path: Path) -> float:
    """Return the relative error of our logits with weights as stored against the same weights as float32."""
    found: dict[str, list[np.ndarray]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for quant in ("keep", "f32"):
            out = Path(folder) / f"{quant}.npz"
            opening = {"backend": "parallel", "quant": quant}
            with Process("ours", sys.executable, model=str(path), context=CONTEXT, **opening) as process:
                process.ask("logits", prompts=PROMPTS, out=str(out))
            with np.load(out) as arrays:
                found[quant] = list(arrays.values())
    return relative(np.concatenate(found["keep"]), np.concatenate(found["f32"]))


def head_of(path: Path) -> Row:
    """Return type, bytes and seconds of the output head, whose weight is the token embedding."""
    weight = open_checkpoint(path).weight("token_embd.weight")
    backend = create_backend("parallel")
    layer, x = Linear("head", backend.prepare(weight)), backend.array(np.ones((1, weight.shape[1])))
    seconds = []
    with backend.session():
        for _ in range(REPEATS):
            start = time.perf_counter()
            backend.linear(x, layer)
            seconds.append(time.perf_counter() - start)
    return {"type": weight.type.name, "nbytes": weight.nbytes, "seconds": seconds}


if __name__ == "__main__":
    main()
