"""Measure decode if the experts do not fit into memory: with half of the memory, compared with all of it.

    python -m benchmarks.experts --python PATH      appends to benchmarks/results/experts.jsonl
    python -m benchmarks.experts --layers 2 --tokens 32 --rounds 1 --out new.jsonl

PATH is a Python that has llama-cpp-python; without it only this engine is measured. Each run is a process in a control
group of its own, which needs root on Linux; the group counts everything, page cache and buffers too. The file is
dropped from the page cache before each run. The tokens are the same for all runs, one per pass, so no run can profit
from an answer that repeats itself.

The model has the layers of Qwen3-30B-A3B with random weights in Q8_0 (`--type` for others), but its routers prefer some
experts: one channel of the hidden state is the same for every token, and gives each expert's logit a constant. The
constants are chosen so that the shares of the experts fall geometrically, as `SKEW` describes.

There are two texts of random tokens. In the first, tokens are independent. In the second, the embedding of each token
resembles that of the token before (`LOCALITY`), because in real text a token often chooses experts that the tokens
before have chosen.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import mmap
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
# Published for Qwen3-30B-A3B on three prompts of 512 tokens: 45 % of a token's choices were also choices of the token
# before, 80 % of one of the eight tokens before, and a cache of the 40 % of experts that were used last had 90.0 to
# 95.3 % of them (github.com/kekzl/imp/pull/1359). The embeddings are sums of two sequences. In each sequence, a vector
# is the vector before, times a factor, plus noise. LOCALITY has the factor and the share of the variance of each.
LOCALITY = ((0.98, 0.52), (0.2, 0.48))
# The number of tokens before the measured ones. They bring the most used experts into memory.
WARM = 128
OURS, LLAMA, CHOICES = "mlx_engine", "llama.cpp", "choices"
INDEPENDENT, LOCAL = "independent", "as in text"
# With limited memory, experts may take the limit, minus the memory that the rest of the process took without a limit,
# minus this number of bytes.
SPARE = 12 << 20

Found = dict[str, Any]
Step = Callable[[int], np.ndarray]


def main() -> None:
    """Measure, and print a line per run."""
    parser = argparse.ArgumentParser(prog="benchmarks.experts", description="Decode with half of the memory.")
    parser.add_argument("--python", help="the interpreter that has llama-cpp-python")
    parser.add_argument("--model", type=Path, help="where the model is, or is written to; default: a temporary file")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--type", default="q8_0", help="a type of `quantize`, such as q4_K_M")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.5, help="the limit, divided by the memory used without one")
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"append to this file instead of {RESULTS.name}")
    parser.add_argument("--run", metavar="ENGINE", help=argparse.SUPPRESS)
    parser.add_argument("--text", help=argparse.SUPPRESS)
    parser.add_argument("--resident", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--experts-memory", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        if options.resident:  # all of the file is in memory before the first token
            with opened(options.model) as file:
                while os.read(file, 1 << 24):
                    pass
        print(json.dumps((choices if options.run == CHOICES else measured)(options)))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = options.model or Path(folder) / f"{SHAPE}-{options.layers}.gguf"
        if not path.exists():
            write(path, options.layers, options.type)
        measure(path, options)


def measure(path: Path, options: argparse.Namespace) -> None:
    """Run all engines in turns, with all memory and with a share of it."""
    from benchmarks.log import Log

    log, limits, runs = Log("experts", options.out), dict[str, int](), dict[tuple[str, str, bool], list[Found]]()
    about: Found = {
        "n_gen": options.tokens,
        "type": options.type,
        "disk": disk_rate(path),
        "experts": expert_bytes(path),
    }
    print(f"the disk reads {about['disk'] / 1e9:.2f} GB/s past the page cache, {PIECE >> 10} KiB at a time", flush=True)
    chosen = {text: run(sys.executable, CHOICES, text, path, options, None) for text in (INDEPENDENT, LOCAL)}
    for text, found in chosen.items():
        print(f"{text}: " + ", ".join(f"{name} {value:.3g}" for name, value in found.items()), flush=True)
    turns = [(engine, text, is_limited) for engine in (OURS, LLAMA) for text in chosen for is_limited in (False, True)]
    for turn in (turn for _ in range(options.rounds) for turn in turns):
        engine, text, is_limited = turn
        if engine == LLAMA and not options.python:
            continue
        limit = limits[engine] if is_limited else None
        found = run(options.python if engine == LLAMA else sys.executable, engine, text, path, options, limit)
        if not is_limited:
            limits.setdefault(engine, int(options.share * found["memory"]))
            about.setdefault("rest", found["memory"] - about["experts"])
        options.rest = about["rest"]
        runs.setdefault(turn, []).append(found)
        memory = f"{found['memory'] / 1e9:.2f} GB{' allowed' if is_limited else ''}"
        read = f"{found['read'] / 1e6:.1f} MB read per token"
        print(f"{engine:12} {text:12} {memory:16} {found['rate']:7.2f} tokens/s, {read}", flush=True)
    for (engine, text, is_limited), each in runs.items():
        base = runs[engine, text, False]
        rate, of_all, read = (
            statistics.median(one[key] for one in of) for of, key in ((each, "rate"), (base, "rate"), (each, "read"))
        )
        same = len({one["digest"] for one in (*each, *base)}) == 1
        limited = f", the disk allows {about['disk'] / read:.1f}" if is_limited else ""
        print(f"{engine}, {text}: {rate:.2f} tokens/s, {rate / of_all:.2f}{limited}, same bits: {same}")
        row = {"engine": engine, "text": text, "is_limited": is_limited, "has_same_bits": same, **about, **chosen[text]}
        log.append({"model_name": path.stem, "file_bytes": path.stat().st_size, **row, "runs": each})


@contextlib.contextmanager
def opened(path: Path, flags: int = 0) -> Iterator[int]:
    """Yield a descriptor of a file, for reading."""
    file = os.open(path, os.O_RDONLY | flags)
    try:
        yield file
    finally:
        os.close(file)


# Bytes of a read: a matrix of an expert in Q8_0.
PIECE = 408 * 4096


def disk_rate(path: Path, seconds: float = 3.0) -> float:
    """Return how many bytes per second the disk reads past the page cache, in pieces at random places of a file."""
    rng, buffer, n = np.random.default_rng(0), mmap.mmap(-1, PIECE), 0
    with opened(path, os.O_DIRECT) as file:
        start = time.perf_counter()
        while (taken := time.perf_counter() - start) < seconds:
            n += os.preadv(file, [buffer], int(rng.integers((path.stat().st_size - PIECE) // 4096)) * 4096)
    return n / taken


def expert_bytes(path: Path) -> int:
    """Return the bytes of all experts of a file."""
    from mlx_engine.checkpoint import open_gguf

    with open_gguf(path) as file:
        return sum(info.nbytes for name, info in file.tensors.items() if "_exps." in name)


def run(python: str, engine: str, text: str, path: Path, options: argparse.Namespace, limit: int | None) -> Found:
    """Return what a process measures, and its memory in bytes: the limit or, without one, the most that was used."""
    with opened(path) as file:
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    command = [python, "-m", "benchmarks.experts", "--run", engine, "--text", text, "--model", str(path)]
    command += ["--tokens", str(options.tokens)]
    if limit is None:
        command += ["--resident"]
    elif engine == OURS:
        command += ["--experts-memory", str(limit - options.rest - SPARE)]
    with group(limit) as (join, used):
        done = subprocess.run(command, preexec_fn=join, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{engine}: {done.stderr[-2000:]}")
        found: Found = json.loads(done.stdout.splitlines()[-1])
        return found if engine == CHOICES else {**found, "memory": limit or used()}


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


def measured(options: argparse.Namespace) -> Found:
    """Read tokens one by one; return tokens/s, bytes read per token, and the digest of all logits."""
    ids = tokens(options.text, WARM + options.tokens)
    step = llama_step(options.model, len(ids)) if options.run == LLAMA else our_step(options, len(ids))[0]
    digest, before, start = hashlib.sha256(), 0, 0.0
    for i, token in enumerate(ids):
        if i == WARM:
            before, start = bytes_read(), time.perf_counter()
        digest.update(step(token).tobytes())
    rate, n = options.tokens / (time.perf_counter() - start), options.tokens
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    return {"rate": rate, "read": (bytes_read() - before) / n, "faults": faults, "digest": digest.hexdigest()}


def tokens(text: str, n: int) -> list[int]:
    """Return n token ids: independent ones, or consecutive ones, whose embeddings are alike."""
    if text == LOCAL:
        return list(range(1000, 1000 + n))
    return [int(i) for i in np.random.default_rng(0).integers(256, 12_000, n)]


def bytes_read() -> int:
    """Return the bytes that this process has read from disks."""
    rows = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(rows["read_bytes"])


def our_step(options: argparse.Namespace, n_tokens: int) -> tuple[Step, Any]:
    """Load the model; return a function that reads a token and returns the logits, and the backend."""
    import mlx_engine
    from mlx_engine.cache import SequenceInput
    from mlx_engine.loop.forward import forward_logits

    how = {"speculate": "off", "experts_memory": options.experts_memory}
    model = mlx_engine.load(str(options.model), "parallel", **how).model
    kv = model.new_kv(n_tokens)

    def step(token: int) -> np.ndarray:
        with model.backend.session():
            return model.backend.host(forward_logits(model, SequenceInput([token], kv)))

    return step, model.backend


def llama_step(path: Path, n_tokens: int) -> Step:
    """Load the model in llama.cpp; return a function that reads a token and returns the logits."""
    from benchmarks.peers.llama import Llama

    peer = Llama(str(path), context=n_tokens + 8)

    def step(token: int) -> np.ndarray:
        peer.read([token])
        return peer._row(-1)

    return step


def choices(options: argparse.Namespace) -> Found:
    """Return figures about the routers' choices, means over layers and tokens."""
    options.experts_memory = expert_bytes(options.model) // 4
    step, backend = our_step(options, options.tokens)
    mixtures = backend.expert_cache._reader._mixtures
    counts, guesses = [[mixture.n_chosen.copy() for mixture in mixtures]], []
    for token in tokens(options.text, options.tokens):
        step(token)
        counts.append([mixture.n_chosen.copy() for mixture in mixtures])
        guesses.append([mixture.is_guessed.copy() for mixture in mixtures[1:]])
    chosen, guessed = np.diff(np.array(counts), axis=0), np.array(guesses)  # (tokens, layers, experts)
    shares = np.sort(chosen.sum(axis=0) / chosen[:, 0].sum(), axis=1)[:, ::-1]
    entropy = -(shares * np.log(np.maximum(shares, 1e-9))).sum(axis=1)
    recent = np.array([chosen[t - 8 : t].any(axis=0) for t in range(8, len(chosen))])
    return {
        "experts_for_90_percent": float((shares.cumsum(axis=1) < 0.9).sum(axis=1).mean() + 1),
        "share_of_the_first": float(shares[:, 0].mean()),
        "concentration": float(1 - entropy.mean() / np.log(128)),
        "guessed_by_the_layer_before": float((chosen[:, 1:] & guessed).sum() / chosen[:, 1:].sum()),
        "chosen_by_the_token_before": float((chosen[1:] & chosen[:-1]).sum() / chosen[1:].sum()),
        "chosen_by_the_eight_before": float((chosen[8:] & recent).sum() / chosen[8:].sum()),
    }


# ---- the model ----


def write(path: Path, n_layers: int, type_name: str) -> None:
    """Write the model with routers that prefer some experts."""
    from mlx_engine.checkpoint import shapes
    from mlx_engine.quant import BY_NAME
    from mlx_engine.quant.weight import Weight

    @dataclass(frozen=True)
    class Skewed(shapes.RandomTensor):
        """A random tensor; the first channel of hidden states is constant, and routers read it."""

        @property
        def data(self) -> np.ndarray:
            data = super().data.copy()
            rows = data.reshape(self.shape[-2] if len(self.shape) > 1 else 1, -1)
            if self.name == "token_embd.weight":
                data = Weight.pack(self.name, embeddings(*self.shape), BY_NAME["Q8_0"]).data.copy()
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
    if type_name == "q8_0":
        shape.write(path, SHAPE)
        return
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        shape.write(Path(folder) / "q8_0.gguf", SHAPE)
        command = [sys.executable, "-m", "mlx_engine", "quantize", str(Path(folder) / "q8_0.gguf"), str(path)]
        subprocess.run([*command, "--to", type_name], check=True)


def embeddings(n_tokens: int, width: int) -> np.ndarray:
    """Return embeddings, each of which resembles the one before. Layers change them little, as in trained models.

    The first channel is constant.
    """
    rng, rows = np.random.default_rng(1), np.zeros((n_tokens, width), dtype=np.float32)
    for factor, share in LOCALITY:
        noise = rng.standard_normal((n_tokens, width), dtype=np.float32)
        noise[1:] *= (1 - factor**2) ** 0.5
        for t in range(1, n_tokens):
            noise[t] += factor * noise[t - 1]
        rows += share**0.5 * noise
    rows[:, 0] = CONSTANT
    return rows


# The value of the first channel after the norm.
CONSTANT = 1.7


def constants(n: int, n_used: int) -> np.ndarray:
    """Return the constants of n experts for which the shares of choices fall by `SKEW`.

    The logits without the constants are taken to be normally distributed, with standard deviation 1.
    """
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
