"""Fuzz Hugging Face folders: a randomly damaged file either loads or raises one EngineError, in bounded memory.

usage: python -m tests.properties.folder_damage [--kind config index safetensors tokenizer] [--count 20000] [--seed 0]
"""

import argparse
import json
import random
import resource
import shutil
import struct
import tempfile
import time
import tracemalloc
import warnings
from collections import Counter
from pathlib import Path

import numpy as np

import mlx_engine
from mlx_engine.checkpoint.hf_folder import INDEX
from mlx_engine.errors import EngineError
from tests.published import PUBLISHED, write_folder

MICRO = Path(__file__).parents[1] / "data" / "qwen3-micro" / "hf"
MODELS = ("openai-community/gpt2", "meta-llama/Llama-3.2-1B", "google/gemma-3-4b-it", "Qwen/Qwen3-0.6B")
SHARD = "model-00001-of-00002.safetensors"
# The damaged file of each kind.
KINDS = {
    "config": "config.json", "index": INDEX, "safetensors": "model.safetensors", "tokenizer": "tokenizer.json",
}  # fmt: skip
# A message may have the names of several tensors, as long as they are.
LONGEST_MESSAGE = 30_000
VALUES = [
    None, True, False, 0, 1, -1, 2, 3, 2**31, 2**63, 2**64, 10**400, -1e-30, 1e-300, 1e308, float("nan"), float("inf"),
    "", "x", "../x.safetensors", "F16", "\ud800", "x" * 5000, [], [0], [-1, 2**62], {}, {"a": 1}, [[[[]]]], {"": None},
]  # fmt: skip


def folders(kind, folder):
    """Write sound folders for a kind into `folder`, and return their paths."""
    if kind == "tokenizer":
        return [Path(shutil.copytree(MICRO, folder / "micro", ignore=shutil.ignore_patterns("model.safetensors")))]
    made = [write_folder(folder / str(i), PUBLISHED[name]) for i, name in enumerate(MODELS)]
    if kind == "index":
        for path in made:
            shutil.move(path / "model.safetensors", path / SHARD)
            (length,) = struct.unpack("<Q", (path / SHARD).read_bytes()[:8])
            names = [n for n in json.loads((path / SHARD).read_bytes()[8 : 8 + length]) if n != "__metadata__"]
            empty = struct.pack("<Q", 2) + b"{}"
            (path / SHARD.replace("00001", "00002", 1)).write_bytes(empty)
            (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, SHARD)}))
    return made


def damaged(good, kind, rng):
    """Return the bytes of a file with one to three random changes, of its JSON or of its bytes."""
    if kind != "safetensors":
        return damaged_text(good, rng)
    (length,) = struct.unpack("<Q", good[:8])
    choice = rng.random()
    if choice < 0.1:
        return good[: rng.randrange(len(good))]
    if choice < 0.2:
        return struct.pack("<Q", rng.choice([0, 1, length - 1, length + 1, 2**31, 2**63, 2**64 - 1])) + good[8:]
    text = damaged_text(good[8 : 8 + length], rng)
    return struct.pack("<Q", len(text)) + text + good[8 + length :]


def damaged_text(good, rng):
    if rng.random() < 0.3:
        return damaged_bytes(bytearray(good), rng)
    value = json.loads(good)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        change(value, rng)
    text = json.dumps(value)
    if rng.random() < 0.02:
        text = text.replace(":", ":" + rng.choice(["[" * 100_000, '{"a":' * 50_000, "9" * 5000]), 1)
    return text.encode("utf-8", "surrogatepass")


def change(value, rng):
    """Replace, remove, add or double a random element of a JSON value."""
    while isinstance(value, dict | list) and value:
        key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        inner = value[key]
        if isinstance(inner, dict | list) and inner and rng.random() < 0.8:
            value = inner
            continue
        kind = rng.randrange(4)
        if kind == 0:
            del value[key]
        elif kind == 1 and isinstance(value, dict):
            value[str(key) + rng.choice(["x", ".", "_config"])] = inner
        elif kind == 2 and isinstance(inner, int | float) and abs(inner) < 1e300 and not isinstance(inner, bool):
            value[key] = rng.choice([inner + 1, inner - 1, inner * 2, inner // 2, -inner, float(inner), str(inner)])
        else:
            value[key] = rng.choice(VALUES)
        return


def damaged_bytes(data, rng):
    for _ in range(rng.choice([1, 1, 2, 4])):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(5)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[at:]
        elif kind == 2:
            data[at:at] = rng.randbytes(rng.randrange(1, 20))
        elif kind == 3:
            data[at:at] = data[at : at + rng.randrange(1, 64)]
        else:
            del data[at : at + rng.randrange(1, 20)]
        if not data:
            break
    return bytes(data)


def outcome(path, kind):
    """Load the folder and run it; return the outcome. Errors other than EngineError are raised."""
    try:
        if kind == "tokenizer":
            tokenizer = mlx_engine.load_tokenizer(path)
            tokenizer.decode(tokenizer.encode("Once upon a time"))
        else:
            with np.errstate(all="ignore"), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # damaged scales overflow
                mlx_engine.load(path, "simd", jit=False).logits([1, 2, 3])
    except EngineError as error:
        if len(str(error)) > LONGEST_MESSAGE:
            raise AssertionError(f"a message of {len(str(error)):,} characters") from error
        return type(error).__name__
    return "loaded"


def run(kind, count, seed, folder, *, measure=False):
    """Return the counts of outcomes of `count` files, and the largest memory use of one in bytes."""
    rng, counts, most = random.Random(seed), Counter(), 0
    paths = folders(kind, Path(folder))
    goods = {path: (path / KINDS[kind]).read_bytes() for path in paths}
    for i in range(count):
        path = rng.choice(paths)
        # A new file: the old one may still be mapped.
        (path / KINDS[kind]).unlink()
        (path / KINDS[kind]).write_bytes(damaged(goods[path], kind, rng))
        if measure:
            tracemalloc.start()
        try:
            counts[outcome(path, kind)] += 1
        except Exception as error:
            raise AssertionError(f"{kind} {i} of seed {seed}: {type(error).__name__}: {error}") from error
        finally:
            if measure:
                most = max(most, tracemalloc.get_traced_memory()[1])
                tracemalloc.stop()
    return counts, most


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", nargs="*", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for kind in options.kind:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            counts, _ = run(kind, options.count, options.seed, folder)
        shares = ", ".join(f"{n:,} {name}" for name, n in counts.most_common())
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(f"{kind}: {options.count:,} files in {time.perf_counter() - start:.1f} s: {shares}; at most {most:,} KiB")


if __name__ == "__main__":
    main()
