"""Measure decode if the experts do not fit into memory: with half of the memory, compared with all of it.

    python -m benchmarks.experts --python PATH      appends to benchmarks/results/experts.jsonl
    python -m benchmarks.experts --layers 2 --tokens 32 --rounds 1 --out new.jsonl

PATH is a Python interpreter that has llama-cpp-python; without it, only this engine is measured. Each run is a process
in its own control group, which limits the memory and needs root on Linux. The file is dropped from the page cache
before each run. All runs read the same random tokens, one per pass, because an answer that repeats itself would use the
same experts again.

The model has the layers of Qwen3-30B-A3B with random weights in Q8_0. Random routers would use all experts equally, so
one channel of the hidden state is made the same for every token, and adds a constant to each expert's logit. The
constants are chosen so that the shares of the experts fall geometrically, by the factor `SKEW`.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results" / "experts.jsonl"
SHAPE = "qwen3-30b-a3b"
GROUPS = Path("/sys/fs/cgroup")
# Published for Qwen3-30B-A3B on about a thousand tokens of prose, code and mathematics: 65 of 128 experts have 90 % of
# the choices, the first one 4.3 %, and 1 - entropy / log(128) is 0.111
# (mcp-tool-shop-org.github.io/gpu-container/handbook/derisk). If the shares fall by this factor from expert to expert,
# 65 experts have 90 % of the choices, the first one has 3.5 %, and 1 - entropy / log(128) is 0.107.
SKEW = 0.9663
# Tokens that are read before the measured ones, so that the most used experts are in memory.
WARM = 64
OURS, NO_AHEAD, LLAMA, CHOICES = "mlx_engine", "mlx_engine, nothing read ahead", "llama.cpp", "choices"

Found = dict[str, Any]
Step = Callable[[int], np.ndarray]


def main() -> None:
    """Measure, and print a line per run."""
    parser = argparse.ArgumentParser(prog="benchmarks.experts", description="Decode with half of the memory.")
    parser.add_argument("--python", help="the interpreter that has llama-cpp-python")
    parser.add_argument("--model", type=Path, help="where the model is, or is written to; default: a temporary file")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.5, help="of the memory that the engine uses if it may use all")
    parser.add_argument("--read-ahead-kb", type=int, help="the setting of the model's disk while this runs; needs root")
    parser.add_argument("--no-ahead", action="store_true", help="measure without reading ahead, too")
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"append to this file instead of {RESULTS.name}")
    parser.add_argument("--run", metavar="ENGINE", help=argparse.SUPPRESS)
    parser.add_argument("--resident", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        if options.resident:  # all of the file is in memory before the first token
            with opened(options.model) as file:
                while os.read(file, 1 << 24):
                    pass
        found = (choices if options.run == CHOICES else measured)(options.run, str(options.model), options.tokens)
        print(json.dumps(found))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = options.model or Path(folder) / f"{SHAPE}-{options.layers}.gguf"
        if not path.exists():
            write(path, options.layers)
        with read_ahead_kb(path, options.read_ahead_kb):
            measure(path, options)


def measure(path: Path, options: argparse.Namespace) -> None:
    """Run all engines in turns, with all memory and with a share of it."""
    from benchmarks.log import Log

    log, limits, runs = Log("experts", options.out), dict[str, int](), dict[tuple[str, bool], list[Found]]()
    chosen = run(sys.executable, CHOICES, path, options.tokens, None)
    print(", ".join(f"{name} {value:.3g}" for name, value in chosen.items()), flush=True)
    turns = [(OURS, False), (OURS, True), *([(NO_AHEAD, True)] if options.no_ahead else [])]
    turns += [(LLAMA, False), (LLAMA, True)] if options.python else []
    for _ in range(options.rounds):
        for engine, is_limited in turns:
            whose, python = (LLAMA, options.python) if engine == LLAMA else (OURS, sys.executable)
            found = run(python, engine, path, options.tokens, limits[whose] if is_limited else None)
            if not is_limited:
                limits.setdefault(whose, int(options.share * found["memory"]))
            runs.setdefault((engine, is_limited), []).append(found)
            memory = f"{found['memory'] / 1e9:.2f} GB{' allowed' if is_limited else ''}"
            read = f"{found['read'] / 1e6:.1f} MB read per token"
            print(f"{engine:32} {memory:16} {found['rate']:7.2f} tokens/s, {read}", flush=True)
    for (engine, is_limited), each in runs.items():
        base = runs[LLAMA if engine == LLAMA else OURS, False]
        rate, of_all = (statistics.median(one["rate"] for one in of) for of in (each, base))
        same = len({one["digest"] for one in (*each, *base)}) == 1
        allowed = "limited" if is_limited else "all memory"
        print(f"{engine}, {allowed}: {rate:.2f} tokens/s, {rate / of_all:.2f}, same bits: {same}")
        about = {"engine": engine, "is_limited": is_limited, "n_gen": options.tokens, "has_same_bits": same}
        about["read_ahead_kb"] = options.read_ahead_kb
        log.append({"model_name": path.stem, "file_bytes": path.stat().st_size, **about, **chosen, "runs": each})


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """Yield a descriptor of a file, for reading."""
    file = os.open(path, os.O_RDONLY)
    try:
        yield file
    finally:
        os.close(file)


def run(python: str, engine: str, path: Path, n_tokens: int, limit: int | None) -> Found:
    """Return what a process measures, and its memory in bytes: the limit or, without one, the most that was used."""
    with opened(path) as file:
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    command = [python, "-m", "benchmarks.experts", "--run", engine, "--model", str(path), "--tokens", str(n_tokens)]
    command += ["--resident"] if limit is None else []
    with group(limit) as (join, used):
        done = subprocess.run(command, preexec_fn=join, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{engine}: {done.stderr[-2000:]}")
        found: Found = json.loads(done.stdout.splitlines()[-1])
        return found if engine == CHOICES else {**found, "memory": limit or used()}


@contextlib.contextmanager
def read_ahead_kb(path: Path, value: int | None) -> Iterator[None]:
    """Change how much Linux reads around a page fault of a file, 128 KiB on most systems."""
    device = path.stat().st_dev
    setting = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
    before = setting.read_text() if value is not None else ""
    try:
        if value is not None:
            setting.write_text(str(value))
        yield
    finally:
        if value is not None:
            setting.write_text(before)


@contextlib.contextmanager
def group(limit: int | None) -> Iterator[tuple[Callable[[], None], Callable[[], int]]]:
    """Make a control group; yield a function that joins it, and one that returns the most bytes that it has used."""
    is_v1 = (GROUPS / "memory").is_dir()
    folder = (GROUPS / "memory" if is_v1 else GROUPS) / f"mlx_engine-{os.getpid()}"
    folder.mkdir()
    most, peak = ("memory.limit_in_bytes", "memory.max_usage_in_bytes") if is_v1 else ("memory.max", "memory.peak")

    def join() -> None:
        (folder / "cgroup.procs").write_text(str(os.getpid()))

    try:
        if limit is not None:
            (folder / most).write_text(str(limit))
        yield join, lambda: int((folder / peak).read_text())
    finally:
        folder.rmdir()


# ---- in the process of a run ----


def measured(engine: str, path: str, n_tokens: int) -> Found:
    """Read random tokens one by one; return tokens/s, bytes read per token, and the digest of all logits."""
    ids = random_ids(WARM + n_tokens)
    step = llama_step(path, len(ids)) if engine == LLAMA else our_step(path, engine, len(ids))
    digest, before, start = hashlib.sha256(), 0, 0.0
    for i, token in enumerate(ids):
        if i == WARM:
            before, start = bytes_read(), time.perf_counter()
        digest.update(step(token).tobytes())
    rate = n_tokens / (time.perf_counter() - start)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    return {"rate": rate, "read": (bytes_read() - before) / n_tokens, "faults": faults, "digest": digest.hexdigest()}


def random_ids(n: int) -> list[int]:
    """Return n random token ids."""
    return [int(i) for i in np.random.default_rng(0).integers(256, 12_000, n)]


def bytes_read() -> int:
    """Return the bytes that this process has read from disks."""
    rows = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(rows["read_bytes"])


def our_step(path: str, engine: str, n_tokens: int) -> Step:
    """Load the model; return a function that reads a token and returns the logits."""
    import mlx_engine
    from mlx_engine.backends.cpu.backend import CompiledBackend
    from mlx_engine.cache import SequenceInput
    from mlx_engine.loop.forward import forward_logits

    if engine == NO_AHEAD:
        CompiledBackend.stream_experts = lambda self: None  # type: ignore[method-assign]
    model = mlx_engine.load(path, "parallel", speculate="off").model
    kv = model.new_kv(n_tokens)
    if engine == CHOICES:
        model.backend.stream_experts()

    def step(token: int) -> np.ndarray:
        with model.backend.session():
            return model.backend.host(forward_logits(model, SequenceInput([token], kv)))

    return step


def llama_step(path: str, n_tokens: int) -> Step:
    """Load the model in llama.cpp; return a function that reads a token and returns the logits."""
    from benchmarks.peers.llama import Llama

    peer = Llama(path, context=n_tokens + 8)

    def step(token: int) -> np.ndarray:
        peer.read([token])
        return peer._row(-1)

    return step


def choices(engine: str, path: str, n_tokens: int) -> Found:
    """Return how unequally the routers choose experts, and which share of the choices was guessed one layer ahead.

    Both are means over the layers.
    """
    from mlx_engine.kernels.cpu.build.layout import NOTE_BITS, NOTE_WIDTH

    from mlx_engine.backends.cpu import experts_ahead

    notes: list[bytes] = []

    def collect(source: int, *_: object) -> None:
        notes.extend(iter(lambda: os.read(source, 1 << 12), b""))

    experts_ahead._read = collect  # type: ignore[assignment]
    step = our_step(path, engine, n_tokens)
    for token in random_ids(n_tokens):
        step(token)
    time.sleep(1)  # until the last notes are read
    # Each token has the choices of the first layer; then, for each further layer, a guess and the choices.
    words = np.frombuffer(b"".join(notes), np.int64).reshape(n_tokens, -1, NOTE_WIDTH)[:, :, NOTE_BITS:]
    bits = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=-1, bitorder="little")[:, :, :128]
    chosen, guessed = bits[:, ::2], bits[:, 1::2]
    shares = np.sort(chosen.sum(axis=0) / chosen[:, 0].sum(), axis=1)[:, ::-1]
    entropy = -(shares * np.log(np.maximum(shares, 1e-9))).sum(axis=1)
    return {
        "experts_for_90_percent": float((shares.cumsum(axis=1) < 0.9).sum(axis=1).mean() + 1),
        "share_of_the_first": float(shares[:, 0].mean()),
        "concentration": float(1 - entropy.mean() / np.log(128)),
        "guessed_by_the_layer_before": float((chosen[:, 1:] & guessed).sum() / chosen[:, 1:].sum()),
    }


# ---- the model ----


def write(path: Path, n_layers: int) -> None:
    """Write the model with routers that prefer some experts."""
    from mlx_engine.checkpoint import shapes

    @dataclass(frozen=True)
    class Skewed(shapes.RandomTensor):
        """A random tensor; the first channel of hidden states is constant, and routers read it."""

        @property
        def data(self) -> np.ndarray:
            data = super().data.copy()
            rows = data.reshape(self.shape[-2] if len(self.shape) > 1 else 1, -1)
            if self.name == "token_embd.weight":
                # With larger embeddings, layers change hidden states little, as in trained models. The constant is the
                # largest quant.
                data.reshape(-1, 34)[:, :2].view(np.float16)[:] *= np.float16(self.shape[1] ** 0.5)
                rows[:, 2] = 127
            elif "ffn_down" in self.name:
                data.reshape(*self.shape[:2], -1)[:, 0] = 0
            elif "attn_output" in self.name:
                rows[0] = 0
            elif "ffn_gate_inp" in self.name:
                values = data.view(np.float32).reshape(self.shape)
                layer = int(self.name.split(".")[1])
                values[:, 0] = constants(self.shape[0], 8)[np.random.default_rng(layer).permutation(self.shape[0])]
                values[:, 0] /= CONSTANT
            elif self.name.endswith("norm.weight") and len(self.shape) == 1:
                data.view(np.float32)[0] = 1
            return data

    shape: Any = replace(shapes.SHAPES[SHAPE], n_layers=n_layers)  # type: ignore[type-var]
    tensors = shape.drawn()
    object.__setattr__(shape, "drawn", lambda: [Skewed(**vars(tensor)) for tensor in tensors])
    shape.write(path, SHAPE)


# The value of the first channel after the norm.
CONSTANT = 1.7


def constants(n: int, n_used: int) -> np.ndarray:
    """Return the constants of n experts for which the shares of choices fall by `SKEW`, if logits have deviation 1."""
    target = SKEW ** np.arange(n)
    target *= n_used / target.sum()
    noise = np.random.default_rng(0).standard_normal((4000, n)).astype(np.float32)
    found = np.log(target)
    for _ in range(60):
        chosen = np.argpartition(-(found + noise), n_used, axis=1)[:, :n_used]
        shares = (np.bincount(chosen.reshape(-1), minlength=n) + 0.5) / len(noise)
        found += 0.3 * np.log(target / shares)
    constants: np.ndarray = found - found.mean()
    return constants


if __name__ == "__main__":
    main()
