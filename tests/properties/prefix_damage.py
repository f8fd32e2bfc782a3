"""Fuzz prefixes on disk: with randomly damaged files every answer has the bits of a cold run.

usage: python -m tests.properties.prefix_damage [--count 100000] [--seed 0] [--only N]

Each case damages one to three files: cut short, longer, bits flipped, ranges overwritten, two files swapped, headers of
another page, model or version, and files replaced by folders, links or pipes. Then a new process of the model, as far
as files are concerned, answers a prompt with them.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from mlx_engine.cache import disk
from tests.golden.test_prefix_disk import PAGE, answers, model, opened

# A model with states and one with windows, whose files depend on each other in other ways.
MODELS = ("gemma3", "qwen35", "qwen3")
PROMPT = [(7 * i) % 300 for i in range(3 * PAGE + 5)]


def cut(rng: random.Random, path: Path, _: list[Path]) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def lengthen(rng: random.Random, path: Path, _: list[Path]) -> None:
    with path.open("ab") as file:
        file.write(rng.randbytes(rng.choice((1, 100, 5000))))


def flip(rng: random.Random, path: Path, _: list[Path]) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 1, 3, 50))):
        at = rng.randrange(rng.choice((150, len(content))))
        content[at] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def overwrite(rng: random.Random, path: Path, _: list[Path]) -> None:
    content = bytearray(path.read_bytes())
    first = rng.randrange(len(content))
    n = min(rng.choice((16, 64, 512, 4096)), len(content) - first)
    content[first : first + n] = rng.choice((bytes(n), rng.randbytes(n)))
    path.write_bytes(content)


def swap(rng: random.Random, path: Path, files: list[Path]) -> None:
    other = rng.choice(files)
    a, b = path.read_bytes(), other.read_bytes()
    path.write_bytes(b)
    other.write_bytes(a)


def rewrite(rng: random.Random, path: Path, _: list[Path]) -> None:
    """Another version, model, page, part or length, with a checksum that is right."""
    content = path.read_bytes()
    fields = list(disk._HEADER.unpack_from(content))
    i = rng.randrange(len(fields))
    value = fields[i]
    fields[i] = (value + rng.choice((-1, 1))) % 2**31 if isinstance(value, int) else rng.randbytes(len(value))
    header, body = disk._HEADER.pack(*fields), content[disk._HEADER.size + disk._CHECK :]
    path.write_bytes(header + disk.hashlib.sha256(header + body).digest() + body)


def replace(rng: random.Random, path: Path, files: list[Path]) -> None:
    path.unlink()
    kind = rng.randrange(4)
    if kind == 0:
        path.mkdir()
    elif kind == 1:
        path.symlink_to(rng.choice(files))
    elif kind == 2:
        os.mkfifo(path)
    # else it is removed


DAMAGES: tuple[Callable[[random.Random, Path, list[Path]], None], ...] = (
    cut, lengthen, flip, flip, overwrite, swap, rewrite, replace
)  # fmt: skip


class Cases:
    """Sound files of each model, and the digest of a cold answer."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.used = folder, Counter[str]()
        self.cold: dict[str, list[str]] = {}
        for name in MODELS:
            of = model(name, "simd", "f32")
            self.cold[name], _ = answers(of, [PROMPT], prefix=False)
            kept = opened(of, folder / name)
            assert answers(of, [PROMPT], kept)[0] == self.cold[name]
            kept.close()

    def run(self, seed: int) -> None:
        """Damage some files and compare the answer with the cold one."""
        rng = random.Random(seed)
        name = rng.choice(MODELS)
        trial = self.folder / "trial"
        shutil.rmtree(trial, ignore_errors=True)
        shutil.copytree(self.folder / name, trial)
        files = sorted(trial.glob(f"*/*{disk.ENDING}"))
        for _ in range(rng.choice((1, 1, 2, 3))):
            damage, path = rng.choice(DAMAGES), rng.choice(files)
            if path.is_file() and not path.is_symlink() and path.stat().st_size > 300:
                damage(rng, path, [file for file in files if file.is_file() and file.stat().st_size > 300])
        of = model(name, "simd", "f32")
        kept = opened(of, trial)
        found, (request,) = answers(of, [PROMPT], kept)
        kept.close()
        self.used["from files" if request.n_from_disk else "computed"] += 1
        self.used["damaged"] += kept.stats.damaged
        if found != self.cold[name]:
            raise AssertionError(f"{name}, case {seed}: another answer than the cold one")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cases, began = Cases(Path(folder)), time.monotonic()
        seeds = [given.only] if given.only is not None else range(given.seed, given.seed + given.count)
        for i, seed in enumerate(seeds):
            cases.run(seed)
            if i % 5000 == 4999:
                print(f"{i + 1:,} cases, {time.monotonic() - began:,.0f} s, {dict(cases.used)}", flush=True)
        print(f"{len(seeds):,} cases: every answer as the cold one; {dict(cases.used)}")


if __name__ == "__main__":
    main()
