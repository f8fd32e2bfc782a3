"""Count how many different results the logits of one prompt have, for all chunk sizes, page sizes, batches and threads.

    python -m benchmarks.bits                appends to benchmarks/results/bits.jsonl

A result is the SHA-256 of the float32 bits of the built-in model's logits at every position of the prompt. The compiled
kernels add in an order that does not depend on the shape of the pass, so they have one result. NumPy's and MLX's
products, whose order depends on the shape, are measured for comparison.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

import mlx_engine
from benchmarks.log import FOLDER, Log, Row
from mlx_engine.cache import SequenceInput
from mlx_engine.loop.forward import forward_logits
from mlx_engine.machine.memory import usable_cores

RESULTS = FOLDER / "bits.jsonl"

MODEL, LENGTH = "builtin", 150
BACKENDS = (
    ("simd", 1),
    *(("parallel", n) for n in sorted({1, 2, usable_cores()})),
    ("simd, NumPy", None),
    ("mlx", None),
)
CHUNKS, PAGES, SEQUENCES = (1, 2, 3, 8, 9, 17, 64, LENGTH), (16, 64), (1, 2, 4)


def main() -> None:
    """Count the results of every backend."""
    log = Log("bits", RESULTS)
    for backend, threads in BACKENDS:
        name, _, plain = backend.partition(", ")
        found = list(results(mlx_engine.load(MODEL, name, threads=threads, jit=not plain)))
        row = log.append({"model_name": MODEL, "backend": backend, "threads": threads, "found": found})
        print(f"{backend}, threads: {threads}: {len(found)} ways, {len(distinct([row]))} different results")


def results(engine: mlx_engine.Engine) -> Iterator[Row]:
    """Yield the digest of the logits for every length of chunk, size of page and number of sequences."""
    for chunk, page, n_sequences in itertools.product(CHUNKS, PAGES, SEQUENCES):
        logits = read(engine, chunk=chunk, page=page, n_sequences=n_sequences)
        digest = hashlib.sha256(logits.tobytes()).hexdigest()
        yield {"chunk": chunk, "page": page, "sequences": n_sequences, "sha256": digest}


def read(engine: mlx_engine.Engine, *, chunk: int, page: int, n_sequences: int) -> np.ndarray:
    """Return the logits (LENGTH, V) of the first of several prompts that are read together, in chunks."""
    model, n_vocab = engine.model, engine.config.vocab_size
    prompts = [[(7 * i * i + 31 * i + 5 * b) % n_vocab for i in range(LENGTH)] for b in range(n_sequences)]
    pool = model.new_pool(n_sequences * LENGTH, n_sequences=n_sequences, page=page)
    sequences, rows = [pool.sequence() for _ in prompts], []
    with engine.backend.session():
        for at in range(0, LENGTH, chunk):
            new = [
                SequenceInput(ids[at : at + chunk], kv, wanted=None) for ids, kv in zip(prompts, sequences, strict=True)
            ]
            logits = forward_logits(model, *new)
            rows.append(np.array(engine.backend.host(logits)[: len(new[0].ids)]))
    return np.concatenate(rows)


def distinct(rows: Sequence[Row]) -> set[str]:
    """Return the different digests of some rows."""
    return {way["sha256"] for row in rows for way in row["found"]}


if __name__ == "__main__":
    main()
