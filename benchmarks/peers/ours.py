"""mlx_engine, measured by the same loop as the other engines."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path

import numpy as np

import mlx_engine
from benchmarks.peers.loop import Answer, Peer, Request
from mlx_engine.bench.model_memory import matrices
from mlx_engine.bench.origin import versions
from mlx_engine.bench.roofline import Limits
from mlx_engine.bench.run import threads_of
from mlx_engine.bench.sizes import bytes_per_weight, sizes
from mlx_engine.checkpoint.model_files import open_checkpoint
from mlx_engine.decode.loop import prefill
from mlx_engine.decode.sampler import Sampler
from mlx_engine.options import Sampling
from mlx_engine.weights.conversion import Conversion

# Samples of the memory bandwidth per request.
SAMPLES = 3


def open_peer(request: Request) -> Peer:
    """Load the file on a backend, with weights as stored or converted."""
    return Ours(
        Path(request["model"]),
        context=request["context"],
        backend=request.get("backend", "auto"),
        quant=request.get("quant", "keep"),
    )


class Ours(Peer):
    """An engine and one sequence."""

    def __init__(self, path: Path, *, context: int, backend: str = "auto", quant: str = "keep") -> None:
        self._engine, self._conversion = mlx_engine.load(path, backend, quant), Conversion(quant)
        self._checkpoint = open_checkpoint(path)
        self._model, self._backend = self._engine.model, self._engine.backend
        self._kv = self._model.new_kv(context)
        self._pick = Sampler(self._backend, Sampling(), ())
        self.n_vocab = self._engine.config.vocab_size

    def facts(self) -> Answer:
        """Return versions, backend, threads, and the bytes and multiplications of a pass."""
        of = sizes(self._checkpoint, lambda type_: bytes_per_weight(self._backend, type_), self._conversion)
        return {
            "versions": versions(),
            "backend": self._backend.name,
            "threads": threads_of(self._backend),
            "sizes": dataclasses.asdict(of),
        }

    def session(self) -> AbstractContextManager[None]:
        """Return the backend's session, which `bench` also enters around a whole run."""
        return self._backend.session()

    def rewind(self, length: int) -> None:
        """Truncate the sequence. At length 0 begin another one in the same pool: a state cannot go back."""
        if length:
            self._kv.truncate(length)
        else:
            pool = self._kv.pool
            self._kv.close()
            self._kv = pool.sequence()

    def cache(self) -> Answer:
        """Return the bytes of pages and of states in use; the first slot of states, all zeros, does not count."""
        pool, kv = self._kv.pool, self._kv
        pages = [pool.used_pages(group) * nbytes for group, nbytes in enumerate(pool.page_nbytes)]
        slots = max(0, pool.states.n_slots - 1 - pool.states.n_free)
        return {"tokens": kv.length, "kv_bytes": sum(pages), "state_bytes": slots * pool.states.nbytes_each}

    def read(self, ids: Sequence[int]) -> int:
        """Read a prompt in chunks, as `generate` does."""
        return self._pick(prefill(self._model, ids, self._kv))

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Return the logits of the public API."""
        return np.asarray(self._engine.logits(ids))

    def read_rates(self) -> dict[str, list[float]]:
        """Return the bandwidth over the weights of a pass on the same threads: in one stream, and in eight."""
        limits = self._limits
        limits.in_order.clear()
        limits.read.clear()
        for _ in range(SAMPLES):
            limits.sample()
            limits.sample_in_order()
        return {"in_order": list(limits.in_order), "fastest": list(limits.read)}

    @cached_property
    def _limits(self) -> Limits:
        return Limits(matrices(self._engine, self._checkpoint), threads_of(self._backend) or 1)
