"""Plan a model on several machines without running anything: what would lie where.

Every size comes from the model's outline. `times.py` has the rates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from mlx_engine.cache import KVLayer
from mlx_engine.cache.pool import LONGEST_PASS
from mlx_engine.cache.size import pool_nbytes
from mlx_engine.distributed.balance import balanced
from mlx_engine.distributed.hosts import Host
from mlx_engine.distributed.model_parts import ModelParts, Part, Pass, Work, held
from mlx_engine.errors import Words, require
from mlx_engine.weights.need import ACTIVATIONS

FLOAT_BYTES = 4


@dataclass(frozen=True)
class Asked:
    """What the machines shall do.

    Attributes:
        context: tokens of each sequence in the cache.
        slots: sequences at the same time.
        prompt: tokens of the prompt whose time is estimated.
        best: how many of the largest logits the choice of a token needs; None for all.
    """

    context: int
    slots: int
    prompt: int
    best: int | None = None


@dataclass(frozen=True)
class Rank:
    """What one rank holds.

    Attributes:
        host: its machine; `host.memory` is what this rank may take.
        first: the index of its first layer.
        layers: its layers; with tensor parallelism, its slices of all of them.
        tables: the embedding tables, if it has them.
        head: the head, if it has it.
        weights: bytes of its weights.
        kv_token: bytes of keys and values of a token, where no window limits them.
        kv: bytes of the pages of all sequences, and of their states.
        workspace: bytes of activations and logits.
    """

    host: Host
    first: int
    layers: tuple[Part, ...]
    tables: Part | None
    head: Part | None
    weights: int
    kv_token: int
    kv: int
    workspace: int

    @property
    def needed(self) -> int:
        """Bytes of all."""
        return self.weights + self.kv + self.workspace

    @property
    def left(self) -> int:
        """Bytes of the host that are left; negative if it lacks them."""
        return self.host.memory - self.needed

    def work(self, of: Pass) -> Work:
        """Return the rank's work in a pass."""
        return sum((part.work(of) for part in (self.tables, *self.layers, self.head) if part), Work(0.0, 0.0))


def pipeline(model: ModelParts, hosts: Sequence[Host], asked: Asked, split: Sequence[int] | None = None) -> list[Rank]:
    """Return the ranks of a pipeline, in which each rank has a run of layers.

    Without `split` the slowest rank takes as little time per token as it can while every rank fits. If no split fits,
    the fullest rank lacks as little as it can.

    Raises:
        OptionError: there are more ranks than layers, or `split` does not cut the layers that the model has.
    """
    n_layers = len(model.layers)
    require(
        len(hosts) <= len(model.cuts) + 1,
        option="--hosts",
        expected=f"at most {len(model.cuts) + 1:,} ranks, as many as the model's {n_layers:,} layers can be cut into",
        found=len(hosts),
    )
    if split is not None:
        _check_split(model, hosts, split)
        return _cut(model, hosts, asked, split)
    runs = _Runs(model, asked)

    def seconds(rank: int, first: int, end: int) -> float:
        host = hosts[rank]
        return host.seconds(runs.work(first, end)) if runs.needed(first, end) <= host.memory else math.inf

    def fullness(rank: int, first: int, end: int) -> float:
        return runs.needed(first, end) / hosts[rank].memory

    found = balanced(n_layers, len(hosts), model.cuts, seconds) or balanced(n_layers, len(hosts), model.cuts, fullness)
    return _cut(model, hosts, asked, found or [])


def tensor(slices: Sequence[ModelParts], hosts: Sequence[Host], asked: Asked) -> list[Rank]:
    """Return the ranks of tensor parallelism, of which each has its slice of the model."""
    every = range(len(slices[0].layers))
    return [
        _rank(model, host, asked, every, is_first=True, is_last=True) for model, host in zip(slices, hosts, strict=True)
    ]


def smallest(model: ModelParts, host: Host, asked: Asked) -> int | None:
    """Return the smallest number of such hosts that hold the model as a pipeline; None if no number does."""
    runs, ends, first, n = _Runs(model, asked), sorted({*model.cuts, len(model.layers)}), 0, 0
    while first < len(model.layers):
        # A rank that takes as many layers as fit leaves the fewest to the others.
        fitting = [end for end in ends if end > first and runs.needed(first, end) <= host.memory]
        if not fitting:
            return None
        first, n = fitting[-1], n + 1
    return n


def _check_split(model: ModelParts, hosts: Sequence[Host], split: Sequence[int]) -> None:
    n_layers, text = len(model.layers), ",".join(map(str, split))
    expected = f"{len(hosts):,} numbers of at least 1 that add up to the model's {n_layers:,} layers"
    sound = len(split) == len(hosts) and min(split) >= 1 and sum(split) == n_layers
    require(sound, option="--split", expected=expected, found=Words(text))
    starts = [sum(split[:i]) for i in range(1, len(split))]
    expected = "layers that share keys and values on the rank of the layer that has them"
    require(set(starts) <= model.cuts, option="--split", expected=expected, found=Words(text))


def _cut(model: ModelParts, hosts: Sequence[Host], asked: Asked, split: Sequence[int]) -> list[Rank]:
    ends = [sum(split[: i + 1]) for i in range(len(split))]
    return [
        _rank(model, host, asked, range(end - n, end), is_first=end == n, is_last=end == len(model.layers))
        for host, n, end in zip(hosts, split, ends, strict=True)
    ]


def _rank(model: ModelParts, host: Host, asked: Asked, layers: range, *, is_first: bool, is_last: bool) -> Rank:
    parts = model.layers[layers.start : layers.stop]
    head = model.head if is_last else None
    tables = None if not is_first else model.tables if is_last else model.tables.without_tables()
    kept = [part.kept for part in parts if part.kept is not None]
    return Rank(
        host=host,
        first=layers.start,
        layers=parts,
        tables=tables,
        head=head,
        weights=held([part for part in (tables, *parts, head) if part is not None]),
        kv_token=sum(layer.token_nbytes for layer in kept if isinstance(layer, KVLayer)),
        kv=pool_nbytes(kept, asked.context * asked.slots, asked.slots),
        workspace=_workspace(model, is_last=is_last),
    )


def _workspace(model: ModelParts, *, is_last: bool) -> int:
    return FLOAT_BYTES * (ACTIVATIONS * LONGEST_PASS * model.widest + (model.vocab_size if is_last else 0))


class _Runs:
    """Bytes and work of every run of layers, from sums over the layers before each: there are many runs to compare."""

    def __init__(self, model: ModelParts, asked: Asked) -> None:
        token = Pass(1, 1, asked.context)
        kept = [[] if part.kept is None else [part.kept] for part in model.layers]
        each = [pool_nbytes(layer, asked.context * asked.slots, asked.slots) for layer in kept]
        sizes = [held([part]) + kv for part, kv in zip(model.layers, each, strict=True)]
        self._needed = list(accumulate(sizes, initial=0))
        self._work = list(accumulate((part.work(token) for part in model.layers), initial=Work(0.0, 0.0)))
        self._model, self._tables, self._head = model, model.tables.work(token), model.head.work(token)

    def needed(self, first: int, end: int) -> int:
        """Return what a rank with these layers needs."""
        is_last = end == len(self._model.layers)
        tables = self._model.tables if is_last else self._model.tables.without_tables()
        around = [*([tables] if first == 0 else []), *([self._model.head] if is_last else [])]
        return self._needed[end] - self._needed[first] + held(around) + _workspace(self._model, is_last=is_last)

    def work(self, first: int, end: int) -> Work:
        """Return the work of a rank with these layers in a pass of one token."""
        found = self._work[end] - self._work[first]
        found = found + self._tables if first == 0 else found
        return found + self._head if end == len(self._model.layers) else found
