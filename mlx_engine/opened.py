"""A model whose files have been opened and checked: what is known of it before its weights are read."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_engine.backends import create_backend
from mlx_engine.backends.profiled import watched
from mlx_engine.cache import New
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.decode.step import forward_logits
from mlx_engine.models import Loaded, Planned
from mlx_engine.models.parameters import Progress
from mlx_engine.prompts import Prompts


@dataclass(frozen=True)
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
    """

    path: Path
    planned: Planned
    backend: str
    threads: int | None
    jit: bool
    seconds: float
    prompts: Prompts = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompts", Prompts(self.checkpoint, self.path, self.config))

    @property
    def checkpoint(self) -> Checkpoint:
        """The contents of the files."""
        return self.planned.checkpoint

    @property
    def config(self) -> Any:
        """The model's config, see the model file."""
        return self.planned.config

    def build(self, progress: Progress | None = None) -> Loaded:
        """Read the weights and build the model; add the seconds of both phases to those of `prompts`.

        Raises:
            EngineError: a weight cannot be read.
        """
        start = time.perf_counter()
        backend = watched(create_backend(self.backend, threads=self.threads, jit=self.jit))
        created = time.perf_counter()
        loaded = self.planned.build(backend, progress)
        backend.read_ahead()
        built = time.perf_counter()
        if backend.profiler is None:  # a profiler would count the warm-up
            backend.warm_up(lambda: forward_logits(loaded.model, New([0], loaded.model.scratch_kv(1))))
        ended = time.perf_counter()
        phases = {"load": self.seconds + built - created, "warm_up": created - start + ended - built}
        self.prompts.begin_with(phases)
        return loaded
