"""Messages of rank 0 to the other ranks, about KV pools, copies of pages, and forward passes.

A store is the memory of a layer's keys and values, or of its states. In rank 0's `KVPool`, each store is only a number
and a size (`RemoteStore`). Each rank, including rank 0, allocates the stores of its own layers under these numbers
(`StagePools`). The message of a pass contains the page tables of its sequences. So the other ranks keep no page tables,
and rolling back a pass needs no message. Messages are JSON, because unpickling data from a network is unsafe.
"""

from __future__ import annotations

import json
import math
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from mlx_engine.backends.base import Backend
from mlx_engine.backends.batch import Batch, KVGroup, KVSpan, Stores
from mlx_engine.backends.parameters import Array
from mlx_engine.cache import CacheLayer, KVLayer, KVPool
from mlx_engine.cache.pool import kv_layers, state_of
from mlx_engine.cache.states import BYTES_PER_FLOAT
from mlx_engine.distributed.group import Group
from mlx_engine.quant.key_values import row_nbytes

Message = dict[str, Any]


def send_message(group: Group, message: Message, rank: int) -> None:
    """Send a message to a neighbour, without waiting until it has been received."""
    data = np.frombuffer(json.dumps(message, separators=(",", ":")).encode(), dtype=np.uint8)
    group.send(np.array([data.size], dtype=np.int64), rank)
    group.send(data, rank)


def receive_message(group: Group, rank: int) -> Message:
    """Wait for the next message of a neighbour."""
    (n,) = group.receive((1,), np.int64, rank).tolist()
    return cast(Message, json.loads(group.receive((n,), np.uint8, rank).tobytes()))


@dataclass(frozen=True, eq=False)
class RemoteStore:
    """A store in rank 0's pool. With tensor parallelism, `nbytes` counts only rank 0's slice of the store."""

    number: int
    n_slots: int
    nbytes: int


class RemotePool:
    """Replaces the backend in the `KVPool` of rank 0: numbers the stores, and records copies for the next message."""

    def __init__(self, pool: int, changes: deque[list[Any]], kv_type: str) -> None:
        self._pool, self._changes, self._kv_type, self._n = pool, changes, kv_type, 0

    def kv_empty(self, n_kv_heads: int, head_dim: int, n_slots: int, n_arrays: int = 2) -> RemoteStore:
        """Return a new store for keys and values, without memory."""
        return self._entry(n_slots, n_arrays * n_kv_heads * row_nbytes(head_dim, self._kv_type))

    def state_empty(self, shape: tuple[int, ...], n_slots: int) -> RemoteStore:
        """Return a new store for states, without memory."""
        return self._entry(n_slots, math.prod(shape) * BYTES_PER_FLOAT)

    def kv_copy(self, store: RemoteStore, source: int, target: int, n: int) -> RemoteStore:
        """Record a copy for ranks with the store: n slots (places of tokens), from slot `source` on, to `target` on."""
        self._changes.append(["copy", self._pool, store.number, source, target, n])
        return store

    def kv_nbytes(self, store: RemoteStore) -> int:
        """Return the bytes of a store."""
        return store.nbytes

    state_nbytes = kv_nbytes

    def _entry(self, n_slots: int, slot_nbytes: int) -> RemoteStore:
        self._n += 1
        return RemoteStore(self._n - 1, n_slots, n_slots * slot_nbytes)


class BatchMessages:
    """Makes rank 0's pools, and the messages about passes and pools for the other ranks."""

    def __init__(self) -> None:
        self._changes: deque[list[Any]] = deque()
        self._pools: weakref.WeakKeyDictionary[Stores, int] = weakref.WeakKeyDictionary()
        self._n_pools = 0

    def pool(self, layers: Sequence[CacheLayer], n_tokens: int, **options: Any) -> KVPool:
        """Return a KV pool; the ranks allocate its memory at the next message. `options` are arguments of `KVPool`."""
        number = self._n_pools
        self._n_pools += 1
        kv_type = next((layer.type for layer in kv_layers(layers)), "f32")
        remote = RemotePool(number, self._changes, kv_type)
        pool = KVPool(cast(Backend, remote), layers, n_tokens, **options)
        stores, states = pool.stores, pool.states
        of_layers = [
            [group, [] if kv is None else [kv.number, kv.n_slots], [[s.number, s.n_slots] for s in cast(Any, state)]]
            for group, kv, state in zip(stores.group_of, stores.layers, states.stores, strict=True)
        ]
        self._changes.append(["pool", number, stores.page, stores.are_kept, list(pool.windows), of_layers])
        self._pools[stores] = number
        weakref.finalize(stores, self._changes.append, ["drop", number])
        return pool

    def message(self, batch: Batch) -> Message:
        """Return the message of a forward pass, with all changes of pools since the last message."""
        page, ends = batch.stores.page, [kv.length for kv in batch.groups[0].spans] if batch.groups else []
        if not ends:  # a model with only recurrent states has no groups: compute the ends of sequences from positions
            last = np.cumsum(batch.lengths) - 1
            ends = [batch.positions[i] + 1 for i in last.tolist()]
        changes = [self._changes.popleft() for _ in range(len(self._changes))]
        return {
            "changes": changes,
            "pool": self._pools[batch.stores],
            "ids": [int(cast(int, token)) for token in batch.ids],
            "lengths": batch.lengths,
            "wanted": batch.wanted,
            "ends": ends,
            "pages": [[kv.pages[: -(-kv.length // page)].tolist() for kv in group.spans] for group in batch.groups],
            "runs": batch.runs.tolist(),
        }


@dataclass
class StagePool:
    """This rank's part of one pool.

    Attributes:
        stores: the stores, by layer.
        windows: the attention window of each group of the model; a group (`KVGroup`) is all layers with equal windows.
        groups: the indices of the groups that have layers of this rank.
        layers_of: maps the number of each KV store to the layers that use it, as indices among this rank's layers.
    """

    stores: Stores
    windows: list[int | None]
    groups: list[int]
    layers_of: dict[int, list[int]]


class StagePools:
    """The stores of a rank's own layers, in all pools. Makes the `Batch` of each pass from rank 0's message.

    `layers` describes the cache of each of this rank's layers; `first` is the index of the first one in the model.
    """

    def __init__(self, backend: Backend, layers: Sequence[CacheLayer], first: int = 0) -> None:
        self._backend, self._layers, self._first = backend, layers, first
        self._pools: dict[int, StagePool] = {}

    def apply(self, message: Message) -> Batch:
        """Apply the changes in a message, and return the batch of its pass with this rank's stores."""
        for kind, pool, *of in message["changes"]:
            if kind == "pool":
                self._pools[pool] = self._made(*of)
            elif kind == "copy":
                self._copy(self._pools[pool], *of)
            else:
                del self._pools[pool]
        return _batch(self._pools[message["pool"]], message)

    def _made(self, page: int, are_kept: bool, windows: list[int | None], layers: list[Any]) -> StagePool:
        """Allocate the stores of this rank's layers, for a change "pool" of a message.

        `layers` has for each layer of the model: the index of its group (-1: none); its KV store (an empty list: none);
        a list of its state stores. A store is a list: its number, and its number of slots. Layers whose stores have the
        same number share this store.
        """
        own = layers[self._first : self._first + len(self._layers)]
        groups = sorted({group for group, _, _ in own} - {-1})
        kv: dict[int, Array] = {}
        states: dict[int, Array] = {}
        layers_of: dict[int, list[int]] = {}
        for i, (layer, (_, of_kv, of_states)) in enumerate(zip(self._layers, own, strict=True)):
            if isinstance(layer, KVLayer):
                number, n_slots = of_kv
                layers_of.setdefault(number, []).append(i)
                if number not in kv:
                    kv[number] = self._backend.kv_empty(layer.n_kv_heads, layer.head_dim, n_slots, layer.n_arrays)
            state = state_of(layer)
            for (number, n_slots), shape in zip(of_states, () if state is None else state.shapes, strict=True):
                if number not in states:
                    states[number] = self._backend.state_empty(shape, n_slots)
        stores = Stores(
            [kv[of_kv[0]] if of_kv else None for _, of_kv, _ in own],
            [groups.index(group) if group >= 0 else -1 for group, _, _ in own],
            page,
            are_kept,
            [tuple(states[number] for number, _ in of_states) for _, _, of_states in own],
        )
        return StagePool(stores, windows, groups, layers_of)

    def _copy(self, held: StagePool, number: int, source: int, target: int, n: int) -> None:
        for i in held.layers_of.get(number, [])[:1]:
            copied = self._backend.kv_copy(held.stores.layers[i], source, target, n)
            for layer in held.layers_of[number]:
                held.stores.layers[layer] = copied


def _batch(held: StagePool, message: Mapping[str, Any]) -> Batch:
    """Return the batch of a message, with the groups of layers that this rank has."""
    lengths, ends, page = tuple(message["lengths"]), message["ends"], held.stores.page
    positions = [np.arange(end - n, end) for end, n in zip(ends, lengths, strict=True)]
    groups = []
    for number in held.groups:
        tables = [np.array(pages, dtype=np.int64) for pages in message["pages"][number]]
        spans = tuple(KVSpan(table, end, n) for table, end, n in zip(tables, ends, lengths, strict=True))
        slots = [table[at // page] + at % page for table, at in zip(tables, positions, strict=True)]
        groups.append(KVGroup(held.windows[number], spans, np.concatenate(slots)))
    return Batch(
        ids=message["ids"],
        lengths=lengths,
        positions=tuple(np.concatenate(positions).tolist()),
        wanted=tuple(message["wanted"]),
        kv=(),
        stores=held.stores,
        groups=tuple(groups),
        runs=np.array(message["runs"], dtype=np.int64).reshape(-1, 4),
    )
