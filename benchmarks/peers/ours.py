"""Run mlx_engine for the benchmarks, by the same loops as the other engines."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from mlx_engine.kernels.cached import cached_property

import mlx_engine
from benchmarks.peers.loop import Answer, BatchPeer, Peer, Request, prompts
from mlx_engine.backends.base import Backend
from mlx_engine.bench.origin import versions
from mlx_engine.bench.roofline import Limits, matrices
from mlx_engine.bench.run import threads_of
from mlx_engine.bench.work import bytes_per_weight, sizes
from mlx_engine.cache import SequenceInput
from mlx_engine.cache.pool import LONGEST_PASS, PAGE, CacheSize, KVLayer
from mlx_engine.checkpoint.model_files import Checkpoint, open_checkpoint
from mlx_engine.loop.forward import forward, forward_logits
from mlx_engine.loop.sampler import Sampler
from mlx_engine.options import Options, Sampling
from mlx_engine.weights.conversion import STORED, Conversion

# Samples of the memory bandwidth per request.
SAMPLES = 3


def open_peer(request: Request) -> Peer | BatchPeer:
    """Load the file on a backend: with weights as stored or converted, or for several sequences."""
    if "n_sequences" in request:
        n, depth, spare, backend = (request[name] for name in ("n_sequences", "depth", "spare", "backend"))
        return OursBatch(Path(request["model"]), n, depth, spare, backend, request.get("activations", "f32"))
    return Ours(
        Path(request["model"]),
        context=request["context"],
        backend=request.get("backend", "auto"),
        quant=request.get("quant", "keep"),
        **{name: request[name] for name in ("activations", "kv_type") if name in request},
    )


def facts(backend: Backend, checkpoint: Checkpoint, conversion: Conversion) -> Answer:
    """Return versions, backend, threads, and the sizes of weights and caches."""
    of = sizes(checkpoint, lambda type_: bytes_per_weight(backend, type_), conversion)
    about = {"versions": versions(), "backend": backend.name, "threads": threads_of(backend)}
    return {**about, "sizes": dataclasses.asdict(of)}


class Ours(Peer):
    """An engine and one sequence."""

    def __init__(self, path: Path, *, context: int, backend: str = "auto", quant: str = "keep", **types: Any) -> None:
        self._engine = mlx_engine.load(path, backend, quant, speculate="off", **types)
        self._conversion = Conversion(quant)
        self._checkpoint = open_checkpoint(path)
        self._model, self._backend = self._engine.model, self._engine.backend
        self._kv = self._model.new_kv(context)
        self._sampler = Sampler(self._backend, Sampling(), ())
        self.n_vocab = self._engine.config.vocab_size

    def facts(self) -> Answer:
        """Return versions, backend, threads, and the bytes and multiplications of a pass."""
        return facts(self._backend, self._checkpoint, self._conversion)

    def session(self) -> AbstractContextManager[None]:
        """Return the backend's session, which `bench` also enters around a whole run."""
        return self._backend.session()

    def rewind(self, length: int) -> None:
        """Truncate the sequence. At length 0, begin a new one in the same pool, because a state cannot be truncated."""
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
        for start in range(0, len(ids) - LONGEST_PASS, LONGEST_PASS):
            forward(self._model, SequenceInput(ids[start : start + LONGEST_PASS], self._kv, wanted=0))
            self._backend.wait(self._kv.pool.stores.arrays)
        rest = (len(ids) - 1) // LONGEST_PASS * LONGEST_PASS
        return self._sampler(forward_logits(self._model, SequenceInput(ids[rest:], self._kv)))

    def fill(self, ids: Sequence[int]) -> None:
        """Write random numbers as keys and values, which takes seconds.

        Read the ids instead if layers differ, or have windows, latents or states.
        """
        layers, n, stores = self._model.kv_layers, len(ids), self._kv.pool.stores.layers
        first = layers[0]
        if (
            not isinstance(first, KVLayer)
            or (first.window, first.n_arrays, first.state) != (None, 2, None)
            or layers.count(first) < len(layers)
        ):
            self.read(ids)
            return
        self._kv.begin(n)
        slots, draws = self._kv.slots(0, 0, n), np.random.default_rng(0)
        shape = 2, n, first.n_kv_heads, first.head_dim
        k, v = map(self._backend.array, draws.standard_normal(shape, dtype=np.float32))
        for i, store in enumerate(stores):
            stores[i] = self._backend.kv_write(store, slots, k, v)
        self._kv.commit(n)

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


class OursBatch(BatchPeer):
    """An engine and its scheduler. The prefix cache keeps the prompts, so that each run reads them only once."""

    def __init__(
        self, path: Path, n_sequences: int, depth: int, spare: int, backend: str, activations: str = "f32"
    ) -> None:
        self._engine = mlx_engine.load(path, backend, activations=activations, speculate="off")
        self._checkpoint = open_checkpoint(path)
        n_tokens = 2 * n_sequences * (depth + spare + PAGE)
        memory = CacheSize(self._engine.model.kv_layers, n_tokens).whole
        self._scheduler = self._engine.scheduler(slots=n_sequences, kv_memory=memory)
        self._prompts = prompts(self._engine.config.vocab_size, n_sequences, depth)
        self.begin(n_sequences, spare)

    def facts(self) -> Answer:
        """Return versions, backend, threads, and the sizes of weights and caches."""
        return facts(self._engine.backend, self._checkpoint, STORED)

    def begin(self, n_sequences: int, n_steps: int) -> None:
        """Submit requests, and run their prompts."""
        scheduler = self._scheduler
        for answer in list(scheduler.running):
            scheduler.cancel(answer.request)
        options = Options.of(n_steps + 2, ignore_eos=True)
        requests = [self._engine.request(ids, options) for ids in self._prompts[:n_sequences]]
        for request in requests:
            scheduler.submit(request)
        while any(request.times.first_token is None for request in requests):
            scheduler.step()
        # Answers that began early have more tokens than others. The rate depends only on the number of answers.
        self._n = n_sequences

    def step(self) -> None:
        """Run a step of the scheduler; raise RuntimeError unless each sequence has got one token."""
        report = self._scheduler.step()
        if (report.n_decode, report.n_prefill) != (self._n, 0):
            raise RuntimeError(f"expected a step of {self._n} answers, found {report.n_decode}, {report.n_prefill}")

    def limits(self) -> dict[str, float]:
        """Return memory bandwidth over the weights of a pass, and peak arithmetic, on the same threads."""
        self._limits.sample()
        return self._limits.take()

    @cached_property
    def _limits(self) -> Limits:
        return Limits(matrices(self._engine, self._checkpoint), threads_of(self._engine.backend) or 1)
