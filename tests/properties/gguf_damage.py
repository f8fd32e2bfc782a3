"""Fuzz the GGUF reader: a randomly damaged file either opens or raises one FormatError.

usage: python -m tests.properties.gguf_damage [--count 20000] [--seed 0]
"""

import argparse
import random
import struct
import tempfile
import time
import tracemalloc
from collections import Counter
from pathlib import Path

from mlx_engine.checkpoint import open_gguf
from mlx_engine.errors import FormatError, UnsupportedTypeError
from tests import gguf_bytes as g

EXTREMES = [
    0,
    1,
    2,
    7,
    8,
    9,
    31,
    32,
    33,
    255,
    256,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**60,
    2**63 - 1,
    2**63,
    2**64 - 1,
]


def damaged(good, rng):
    """Return `good` with one to four random changes."""
    data = bytearray(good)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(7)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(data):
            data[at] = rng.randrange(256)
        elif kind == 2:
            number = rng.choice(EXTREMES)
            raw = struct.pack("<Q", number) if rng.random() < 0.6 else struct.pack("<I", number & 0xFFFFFFFF)
            data[at : at + len(raw)] = raw
        elif kind == 3:
            del data[at:]
        elif kind == 4:
            data[at:at] = rng.randbytes(rng.randrange(1, 20))
        elif kind == 5:
            data[at:at] = data[at : at + rng.randrange(1, 64)]
        else:
            del data[at : at + rng.randrange(1, 20)]
        if not data:
            break
    return bytes(data)


def outcome(path):
    """Open the file and load all tensors; return the outcome. Errors other than FormatError are raised."""
    try:
        with open_gguf(path) as file:
            repr((file.metadata, file.typed_metadata()))
            refused = 0
            for name in file.tensors:
                try:
                    file.load_tensor(name)
                except UnsupportedTypeError:
                    refused += 1
            return (
                "opened, a tensor refused" if refused > 1 else "opened"
            )  # the undamaged file has one tensor of type I8
    except FormatError as error:
        if not (error.where and error.expected and error.found and error.hint):
            raise AssertionError("a FormatError without its facts") from error
        return "FormatError"


def run(count, seed, folder, *, measure=False):
    """Return the counts of outcomes of `count` files, and the largest memory use beyond 8 times a file's size."""
    rng = random.Random(seed)
    good = g.small_file()
    counts, excess = Counter(), 0
    path = Path(folder) / "damaged.gguf"
    for i in range(count):
        data = damaged(good, rng)
        # A new file: to overwrite one takes some file systems milliseconds.
        path.unlink(missing_ok=True)
        path.write_bytes(data)
        if measure:
            tracemalloc.start()
        try:
            counts[outcome(path)] += 1
        except Exception as error:
            raise AssertionError(f"file {i} of seed {seed}: {type(error).__name__}: {error}") from error
        finally:
            if measure:
                excess = max(excess, tracemalloc.get_traced_memory()[1] - 8 * len(data))
                tracemalloc.stop()
    return counts, excess


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        counts, _ = run(options.count, options.seed, folder)
    for name, n in counts.most_common():
        print(f"{n:8,} {name}")
    print(f"{options.count:8,} files of seed {options.seed} in {time.perf_counter() - start:.1f} s, no other exception")


if __name__ == "__main__":
    main()
