"""Measure the time to a prompt's first token after a restart: keys and values computed, or read from `--prefix-dir`.

    python -m benchmarks.prefix_disk [MODEL [TOKENS]]      appends to benchmarks/results/prefix_disk.jsonl

Three cases are interleaved, for each type of keys and values: a prompt without files; and the same prompt on a new
engine that reads the files of an earlier engine, once from the system's page cache and once from the disk itself.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import mlx_engine
from benchmarks.log import FOLDER, Log, Row
from mlx_engine.cache.disk import files_in
from mlx_engine.cache.pool import pool_nbytes
from mlx_engine.loop.output import NoText, Output
from mlx_engine.loop.request import Request
from mlx_engine.options import Options

RESULTS = FOLDER / "prefix_disk.jsonl"
TYPES, ROUNDS = ("f32", "f16", "q8_0"), 3
WAYS = ("cold", "page cache", "disk")


def main(source: str = "shape:qwen3-0.6b", n_tokens: str = "2048") -> None:
    """Measure all types."""
    log = Log("prefix_disk", RESULTS)
    for kv_type in TYPES:
        with tempfile.TemporaryDirectory(dir=os.environ.get("PREFIX_DISK_DIR")) as folder:
            row = measure(source, int(n_tokens), kv_type, Path(folder))
        cold = row["medians_s"]["cold"]
        for way in WAYS:
            seconds = row["medians_s"][way]
            print(f"{kv_type:5} {way:10} first token after {seconds:7.3f} s, {seconds / cold:.4f} of cold")
        print(f"{kv_type:5} {row['nbytes'] / 1e6:,.0f} MB of files, the disk reads {row['disk_gbs']:.2f} GB/s")
        log.append(row)


def measure(source: str, n_tokens: int, kv_type: str, folder: Path) -> Row:
    """Return every sample and the medians: the seconds to the first token, for each of the three cases."""
    samples: dict[str, list[float]] = {way: [] for way in WAYS}
    rates = []
    first_token(source, n_tokens, kv_type, folder)  # writes the files
    for _ in range(ROUNDS):
        samples["cold"].append(first_token(source, n_tokens, kv_type, None))
        samples["page cache"].append(first_token(source, n_tokens, kv_type, folder))
        rates.append(disk_rate(folder))
        drop(folder)
        samples["disk"].append(first_token(source, n_tokens, kv_type, folder))
    nbytes = sum(size for _, size, _ in files_in(folder))
    medians = {way: statistics.median(of) for way, of in samples.items()}
    about = {"kv_type": kv_type, "n_tokens": n_tokens, "nbytes": nbytes, "disk_gbs": statistics.median(rates)}
    return {"model_name": source, **about, "samples_s": samples, "medians_s": medians}


def first_token(source: str, n_tokens: int, kv_type: str, folder: Path | None) -> float:
    """Load the model, and return the seconds from the submission of a prompt to its first token."""
    with mlx_engine.load(source, "parallel", kv_type=kv_type, prefix_dir=folder, speculate="off") as engine:
        ids = [(7 * i) % 5000 for i in range(n_tokens)]
        kv_memory = pool_nbytes(engine.model.kv_layers, n_tokens + 256)
        scheduler = engine.scheduler(slots=1, kv_memory=kv_memory, whole_pages=True)
        options = Options(ignore_eos=True)
        warm = Request(ids[:2], options, [Output(options, max_tokens=1, text=NoText(), end_ids=())])
        request = Request(ids, options, [Output(options, max_tokens=1, text=NoText(), end_ids=())])
        for each in (warm, request):
            began = time.perf_counter()
            scheduler.submit(each)
            while scheduler.has_work:
                scheduler.step()
        return time.perf_counter() - began


def drop(folder: Path) -> None:
    """Drop the files from the system's page cache."""
    for _, _, path in files_in(folder):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def disk_rate(folder: Path) -> float:
    """Return the GB/s at which the disk reads all files."""
    drop(folder)
    began, n = time.perf_counter(), 0
    for _, _, path in files_in(folder):
        n += len(path.read_bytes())
    return n / (time.perf_counter() - began) / 1e9


if __name__ == "__main__":
    main(*sys.argv[1:])
