"""mlx_engine's scheduler, measured by the same loop as the other engines."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from pathlib import Path

import mlx_engine
from benchmarks.peers.batches import BatchPeer, prompts
from benchmarks.peers.loop import Answer, Request
from mlx_engine.bench.model_memory import matrices
from mlx_engine.bench.origin import versions
from mlx_engine.bench.roofline import Limits
from mlx_engine.bench.run import threads_of
from mlx_engine.bench.sizes import bytes_per_weight, sizes
from mlx_engine.cache.pool import PAGE
from mlx_engine.cache.size import CacheSize
from mlx_engine.checkpoint.model_files import open_checkpoint
from mlx_engine.options import Options


def open_peer(request: Request) -> BatchPeer:
    """Load the file on a backend."""
    return OursBatch(
        Path(request["model"]), request["n_sequences"], request["depth"], request["spare"], request["backend"]
    )


class OursBatch(BatchPeer):
    """An engine and its scheduler. The prefix cache keeps the prompts, so that each run reads them only once."""

    def __init__(self, path: Path, n_sequences: int, depth: int, spare: int, backend: str) -> None:
        self._engine, self._checkpoint = mlx_engine.load(path, backend), open_checkpoint(path)
        n_tokens = 2 * n_sequences * (depth + spare + PAGE)
        memory = CacheSize(self._engine.model.kv_layers, n_tokens).whole
        self._scheduler = self._engine.scheduler(slots=n_sequences, kv_memory=memory)
        self._prompts = prompts(self._engine.config.vocab_size, n_sequences, depth)
        self.begin(n_sequences, spare)

    def facts(self) -> Answer:
        """Return versions, backend, threads, and the sizes of weights and caches."""
        backend = self._engine.backend
        of = sizes(self._checkpoint, lambda type_: bytes_per_weight(backend, type_))
        facts = {"versions": versions(), "backend": backend.name, "threads": threads_of(backend)}
        return {**facts, "sizes": dataclasses.asdict(of)}

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
        # Answers that began early get more steps than others; only their number of rows matters.
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
