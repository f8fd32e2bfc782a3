"""Run a model on several ranks (processes): connect them, compare versions and files, choose each rank's share.

For the options `--shard` and `--split`, `commands/options/shard.py` calls `join`. With the returned `Shard`, the
engine loads this rank's share of the model. Then rank 0 begins the passes (`Shard.lead`), and the other ranks follow it
(`Shard.follow`).
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, cast

from mlx_engine.backends.base import Backend
from mlx_engine.checkpoint.identity import identity
from mlx_engine.distributed.group import HOSTFILE, RANK, Group, Ring, gather_values, launched
from mlx_engine.distributed.heartbeat import FAILED, Heartbeat
from mlx_engine.distributed.leader import SharedModel, drawing, free_memory, nothing, this_computer
from mlx_engine.distributed.pipeline import (
    CONTEXT,
    Pipeline,
    best_split,
    follow,
    layer_bytes,
    machines_of,
    measured_speed,
    stages_of,
)  # fmt: skip
from mlx_engine.distributed.plan import model_parts
from mlx_engine.distributed.tensor import TensorParallel, follow_tensor, sliced
from mlx_engine.errors import DistributedError, OptionError, shown
from mlx_engine.machine.memory import available_memory
from mlx_engine.models.decoder import Decoder
from mlx_engine.weights.model import Model, Planned
from mlx_engine.weights.outline import outlined


class Shard(ABC):
    """The way in which the ranks of a group share a model: a pipeline or tensor parallelism. `join` returns a `Shard`.

    Args:
        group: the ranks.
        split: the number of layers of each rank of a pipeline; None to choose them by measured speed and memory.
        heartbeat: ends the process if another rank dies.

    Attributes:
        kind: the value of `--shard`.
        leads: implements `lead`. Arguments: rank 0's share of the model, the ranks, and a function that wakes sleeping
            ranks, or None.
        follows: implements `follow`. Arguments: this rank's share of the model, the ranks, and a function that sleeps
            until rank 0 has work.
        notes: lines for the user about the shares of the model.
        timeline: lines that draw when each rank computed its part of each pass; empty until `end` sets them.
    """

    kind: str
    leads: Callable[[Decoder, Group, Callable[[], None] | None], SharedModel]
    follows: Callable[[Decoder, Group, Callable[[], None]], None]

    def __init__(self, group: Group, split: Sequence[int] | None = None, heartbeat: Heartbeat | None = None) -> None:
        self.group, self._split, self._heartbeat = group, split, heartbeat
        self._model: SharedModel | None = None
        self.notes: tuple[str, ...] = ()
        self.timeline: list[str] = []

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0, which reads prompts, prints and serves."""
        return self.group.rank == 0

    def assigned(self, planned: Planned, path: Path, backend: Backend, settings: Mapping[str, Any]) -> Planned:
        """Check that all ranks have the same version, files and settings; return the plan of this rank's share.

        Raises:
            DistributedError: a rank has another version, other files or other settings than rank 0.
            OptionError, NotShardableError, NotEnoughMemoryError: the model cannot be shared in this way.
        """
        files = {"version": version(), "files": identity(path), "backend": backend.name}
        agree(self.group, {**files, "shard": self.kind, **settings})
        return self.share(planned, backend)

    @abstractmethod
    def share(self, planned: Planned, backend: Backend) -> Planned:
        """Return the plan of this rank's share of a model. All ranks must call this method."""

    def lead(self, model: Model) -> Model:
        """Return a model for rank 0 that runs on all ranks; `model` is rank 0's share."""
        wake = None if self._heartbeat is None else self._heartbeat.wake
        self._model = self.leads(cast(Decoder, model), self.group, wake)
        self._model.free = free_memory(self.group, cast(Decoder, model))
        return self._model

    def follow(self, model: Model) -> None:
        """Run this rank's part of every pass that rank 0 begins, until rank 0 ends the run."""
        free_memory(self.group, cast(Decoder, model))
        self.follows(cast(Decoder, model), self.group, nothing if self._heartbeat is None else self._heartbeat.sleep)

    def end(self, *, timeline: bool) -> bool:
        """On rank 0, end the other ranks after the last pass, and return True. With `timeline`, set `self.timeline`.

        In these cases, send nothing and return False: this is another rank than 0, `lead` has not been called, this
        method has been called before, or a pass failed or was interrupted.
        """
        model, self._model = self._model, None
        if model is None or model.is_broken:
            return False
        self.timeline = drawing(model.end(timeline=timeline))
        return True

    def close(self, code: int = 0, *, error: str = "", timeline: bool = False) -> None:
        """End the run with an exit code.

        If rank 0 calls this method, the other ranks end with the same code: after the last pass if the code is 0,
        otherwise at once. If `end` returns False, code 0 becomes 1. If another rank calls this method with code 0, only
        the calling rank ends; with an error code, rank 0 prints `error` and ends all ranks.
        """
        if self.is_leader and code == 0 and not self.end(timeline=timeline):
            code = FAILED
        if self._heartbeat is None:
            return
        if self.is_leader:
            self._heartbeat.close(code)
        else:
            self._heartbeat.leave(code, error)


class PipelineShard(Shard):
    """A pipeline: each rank runs a range of layers."""

    kind, leads, follows = "pipeline", Pipeline, staticmethod(follow)

    def share(self, planned: Planned, backend: Backend) -> Planned:
        counts = self._split
        if counts is None:
            mine = [this_computer(), measured_speed(backend), available_memory()]
            machines = machines_of(gather_values(self.group, mine))
            parts = model_parts(outlined(planned, backend))
            sizes = layer_bytes(parts, min(CONTEXT, int(planned.config.context_length)))
            counts = gather_values(self.group, best_split(*sizes, machines, parts.cuts))[0]
        stages = stages_of(counts, self.group.size, planned.config)
        layers = ", ".join(f"{stage.first} to {stage.end - 1}" for stage in stages)
        self.notes = (f"pipeline of {self.group.size} ranks with layers {layers}",)
        return planned._replace(stage=stages[self.group.rank])


class TensorShard(Shard):
    """Tensor parallelism: each rank runs all layers with its slices of the matrices."""

    kind, leads, follows = "tensor", TensorParallel, staticmethod(follow_tensor)

    def share(self, planned: Planned, backend: Backend) -> Planned:
        own = sliced(planned, self.group.rank, self.group.size)
        backend.group = self.group
        self.notes = (f"tensor parallelism on {self.group.size} ranks",)
        return own


KINDS: dict[str, type[Shard]] = {shard.kind: shard for shard in (PipelineShard, TensorShard)}


def join(kind: str, split: Sequence[int] | None = None) -> Shard:
    """Connect this process with the other ranks of its run, and return its `Shard`.

    Raises:
        OptionError: there is no such kind, `split` is given for tensor parallelism, or the process was not started by
            `mlx.launch`.
        DistributedError: the other ranks cannot be reached.
    """
    if kind not in KINDS:
        message = f"--shard: unknown kind {shown(kind)}; choose {' or '.join(KINDS)}"
        raise OptionError(message, option="--shard", found=kind)
    if kind == TensorShard.kind and split is not None:
        raise OptionError("--split needs --shard pipeline", option="--split", found=list(split))
    if not launched():
        raise OptionError("--shard needs mlx.launch: mlx.launch -n 2 --backend ring -- ...", option="--shard")
    addresses = [of[0].rpartition(":") for of in json.loads(Path(os.environ[HOSTFILE]).read_text())]
    importlib.import_module("mlx.core")  # takes long; in `connected`, it would count towards the time limit
    heartbeat = Heartbeat(int(os.environ[RANK]), [host for host, _, _ in addresses])
    heartbeat.join(int(addresses[0][2]))  # the port at which rank 0 later listens for MLX's ring
    group = heartbeat.connected(Ring)
    group.on_loss, heartbeat.report = heartbeat.wait, lambda: group.report
    return KINDS[kind](group, split, heartbeat)


PACKAGE = Path(__file__).parents[1]


def version() -> str:
    """Return the version of MLX and a digest of our source: two checkouts of one release may differ.

    A checkout has a file `kernels.py` in the package, and the folder `kernels` next to the package. A wheel has this
    folder inside the package.
    """
    hashed, kernels = hashlib.sha256(), PACKAGE.parent / "kernels"
    folders = [PACKAGE, kernels] if (PACKAGE / "kernels.py").exists() else [PACKAGE]
    for file in sorted(file for folder in folders for file in folder.rglob("*")):
        if file.suffix in {".py", ".metal", ".cuh", ".h", ".c"}:
            hashed.update(f"{file.relative_to(PACKAGE.parent)}\n".encode() + file.read_bytes())
    return f"MLX {metadata.version('mlx')}, source {hashed.hexdigest()[:12]}"


def agree(group: Group, facts: Mapping[str, Any]) -> None:
    """Check that `facts`, such as the version and the digest of the files, are the same on every rank.

    Raises:
        DistributedError: a rank differs from rank 0; the error names the first such rank and fact.
    """
    first, *others = gather_values(group, facts)
    for rank, of in enumerate(others, start=1):
        for name in {**first, **of}:
            if first.get(name) != of.get(name):
                found, expected = shown(of.get(name)), shown(first.get(name))
                raise DistributedError(
                    f"differs from rank 0 in {name}: {found}, and rank 0 has {expected}", where=f"rank {rank}",
                    expected=expected, found=found, hint="start all ranks with the same version, files and options",
                )  # fmt: skip
