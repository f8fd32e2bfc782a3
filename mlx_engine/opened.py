"""A model whose files have been opened and checked: what is known of it before its weights are read."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_engine.backends import create_backend
from mlx_engine.backends.base import Backend
from mlx_engine.backends.profiled import watched
from mlx_engine.cache import New
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.decode.step import forward_logits
from mlx_engine.errors import out_of_memory
from mlx_engine.machine.memory import available_memory, give_back_freed
from mlx_engine.observe import log
from mlx_engine.prompts import Prompts
from mlx_engine.weights.model import Loaded, Planned
from mlx_engine.weights.need import expansions, need_of
from mlx_engine.weights.outline import outlined
from mlx_engine.weights.parameters import Progress

if TYPE_CHECKING:
    from mlx_engine.distributed.shard import Shard

# A model with fewer parameters is loaded without a look at the memory.
FEW_PARAMETERS = 1 << 26


@dataclass(eq=False)
class Opened:
    """A model's files, and what was asked for.

    Attributes:
        path: the file or folder.
        planned: the model's config and tensors, and their conversion.
        backend: the name of the backend, or "auto".
        threads: number of threads of the backend; None takes all cores that this process may use.
        jit: whether the backend uses compiled kernels.
        seconds: the time that opening the files took.
        prompts: makes requests from prompts.
        allow_too_large: whether to load a model that needs more memory than is free.
        shard: the ranks that share the model; None if this process has it alone. `planned` becomes this rank's share.
    """

    path: Path
    planned: Planned
    backend: str
    threads: int | None
    jit: bool
    seconds: float
    allow_too_large: bool = False
    shard: Shard | None = None
    prompts: Prompts = field(init=False)
    _is_checked: bool = False

    def __post_init__(self) -> None:
        if self.shard is not None:
            config = hashlib.sha256(repr(self.config).encode()).hexdigest()
            settings = {"config": config, "conversion": str(self.planned.conversion), "jit": self.jit}
            self.planned = self.shard.assigned(self.planned, self.path, self.made, settings)
        self.prompts = Prompts(self.checkpoint, self.path, self.config)

    @property
    def checkpoint(self) -> Checkpoint:
        """The contents of the files."""
        return self.planned.checkpoint

    @property
    def config(self) -> Any:
        """The model's config, see the model file."""
        return self.planned.config

    @cached_property
    def made(self) -> Backend:
        """The backend."""
        return create_backend(self.backend, threads=self.threads, jit=self.jit)

    def check_memory(self, n_tokens: int = 1, *, kv: int | None = None) -> None:
        """Compare the memory that the model needs with what is free, and warn of weights that are expanded.

        Args:
            n_tokens: tokens of all sequences in the cache.
            kv: bytes of the cache, in place of tokens.

        Raises:
            NotEnoughMemoryError: the model cannot run in what is free.
        """
        self._is_checked = True
        if self.checkpoint.is_converted or self.planned.n_parameters < FEW_PARAMETERS:
            return
        outline = outlined(self.planned, self.made)
        for line in expansions(outline, self.made.name):
            log.warn(line)
        need = need_of(outline, n_tokens, kv=kv)
        need.check(self.checkpoint.where, available_memory(), allowed=self.allow_too_large)

    def build(self, progress: Progress | None = None) -> Loaded:
        """Read the weights and build the model; add the seconds of both phases to those of `prompts`.

        Raises:
            NotEnoughMemoryError: the model cannot run in the memory that is free.
            EngineError: a weight cannot be read.
        """
        start = time.perf_counter()
        backend, loaded, created = self._load(progress)
        _read_ahead(backend)
        if self.shard is not None:
            loaded = loaded._replace(model=self.shard.lead(loaded.model))
        built = time.perf_counter()
        if backend.profiler is None:  # a profiler would count the warm-up
            backend.warm_up(lambda: forward_logits(loaded.model, New([0], loaded.model.scratch_kv(1))))
        ended = time.perf_counter()
        phases = {"load": self.seconds + built - created, "warm_up": created - start + ended - built}
        self.prompts.begin_with(phases)
        return loaded

    def follow(self) -> None:
        """Read this rank's share of the weights, and run its part of every pass until rank 0 ends the run.

        Raises:
            NotEnoughMemoryError, EngineError: as `build`.
        """
        if self.shard is None:
            raise ValueError("follow: expected a model that ranks share, found one that this process has alone")
        backend, loaded, _ = self._load()
        del self.planned, self.prompts  # frees the metadata: 27 MB of strings for a vocabulary of 150,000 tokens
        _read_ahead(backend)
        self.shard.follow(loaded.model)

    def _load(self, progress: Progress | None = None) -> tuple[Backend, Loaded, float]:
        """Return the backend, the model, and the time when the backend had been made."""
        if not self._is_checked:
            self.check_memory()
        backend = watched(self.made)
        created = time.perf_counter()
        try:
            loaded = self.planned.build(backend, progress)
        except MemoryError as error:
            raise out_of_memory(self.checkpoint.where, error) from error
        return backend, loaded, created


def _read_ahead(backend: Backend) -> None:
    """Return the memory that loading freed to the system, then start reading the mapped weights.

    In the other order, the peak would be their sum.
    """
    give_back_freed()
    backend.read_ahead()
