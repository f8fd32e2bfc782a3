"""Recurrent states: the cache of short convolutions, gated delta nets and Mamba2 mixers, in place of keys and values.

A state has a fixed size. A slot of a `StatePool` holds the states of all layers after some number of a sequence's
tokens. A pass reads the newest slot of a sequence and writes another one. No later pass changes a written slot, so
rollback needs no copy, and sequences and a prefix cache can share a slot. Slots are reference-counted; a slot without a
reference is free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mlx_engine.backends.base import Backend
from mlx_engine.backends.parameters import Array

BYTES_PER_FLOAT = 4
# Slots for each sequence of a pool: the committed state, the states of two passes that a lazy backend may have in
# flight, and a state at a page boundary inside a prompt. A prefix cache uses the slots that sequences do not need.
SLOTS_PER_SEQUENCE = 4
# The slot of the state before the first token, which is all zeros. No pass writes to this slot.
ZERO = 0


@dataclass(frozen=True)
class StateLayer:
    """The shapes of the arrays of one layer's recurrent state."""

    shapes: tuple[tuple[int, ...], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of one state in float32."""
        return sum(math.prod(shape) for shape in self.shapes) * BYTES_PER_FLOAT


def n_slots(n_sequences: int, *, kept: bool = True, n_proposed: int = 0) -> int:
    """Return the number of slots of a pool for `n_sequences` sequences, including the slot of zeros.

    With `kept`, later passes read the states of earlier passes; else one slot per sequence is enough. A pass that
    checks proposed tokens also writes a state after each of these tokens, at most `n_proposed` in total.
    """
    return 1 + n_sequences * (SLOTS_PER_SEQUENCE if kept else 1) + n_proposed


class StatePool:
    """The slots of the states of all sequences of a `KVPool`.

    Attributes:
        stores: for each layer, a store (the memory of all slots) for each array of its state; an empty tuple for a
            layer without a state.
        n_slots: the number of slots, free or in use, including the slot of zeros; 0 if no layer has a state.
        generations: for each slot, how often it has been allocated. While this count is the same, the contents of the
            slot are unchanged.
        nbytes_each: bytes of one slot: the states of all layers.
        reclaim: a function that the prefix cache sets, or None. If fewer than n slots are free, `make_room(n)` calls
            `reclaim(n)`, which frees cached states.
    """

    def __init__(
        self,
        backend: Backend,
        layers: Sequence[StateLayer | None],
        n_sequences: int,
        *,
        kept: bool = True,
        n_proposed: int = 0,
    ) -> None:
        """Allocate the memory. If states are not kept for later passes, layers of the same shapes share stores."""
        self._backend, self._kept = backend, kept
        found = [layer for layer in layers if layer is not None]
        self.nbytes_each = sum(layer.nbytes for layer in found)
        self.n_slots = n_slots(n_sequences, kept=kept, n_proposed=n_proposed) if found else 0
        shared: dict[StateLayer, tuple[Array, ...]] = {}
        self.stores: list[tuple[Array, ...]] = []
        for layer in layers:
            if layer is not None and (kept or layer not in shared):
                shared[layer] = tuple(backend.state_empty(shape, self.n_slots) for shape in layer.shapes)
            self.stores.append(() if layer is None else shared[layer])
        self.reclaim: Callable[[int], object] | None = None
        self._references = np.zeros(self.n_slots, dtype=np.int64)
        self.generations = np.zeros(self.n_slots, dtype=np.int64)
        self._free = list(range(self.n_slots - 1, ZERO, -1))

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(self._backend.state_nbytes(store) for store in self.arrays)

    @property
    def arrays(self) -> list[Array]:
        """All stores, each once: layers may share stores."""
        return list({id(store): store for of_layer in self.stores for store in of_layer}.values())

    @property
    def n_free(self) -> int:
        """The number of free slots."""
        return len(self._free)

    def references(self, slot: int) -> int:
        """Return the reference count of a slot."""
        return int(self._references[slot])

    def make_room(self, n: int) -> bool:
        """Reclaim cached states until n slots are free; return whether this succeeded."""
        if len(self._free) < n and self.reclaim is not None:
            self.reclaim(n)
        return len(self._free) >= n

    def take(self) -> int:
        """Allocate a slot; at least one must be free. The caller holds one reference."""
        slot = self._free.pop()
        self._references[slot] = 1
        self.generations[slot] += 1
        return slot

    def retain(self, slot: int) -> None:
        """Add a reference to a slot that is in use. References to the slot of zeros are not counted."""
        if slot != ZERO:
            self._references[slot] += 1

    def give_back(self, slot: int) -> None:
        """Remove a reference, and free the slot if that was the last one.

        Raises:
            ValueError: the slot is free.
        """
        if slot == ZERO:
            return
        if self._references[slot] < 1:
            raise ValueError(f"give_back: expected a slot that is in use, found {slot}, which is free")
        self._references[slot] -= 1
        if not self._references[slot]:
            self._free.append(slot)


class Snapshot(NamedTuple):
    """The slot of the state after `length` tokens of a sequence."""

    length: int
    slot: int


class SequenceState:
    """The states of one sequence: the committed state, and the states of passes that are not committed yet.

    Attributes:
        committed: the newest committed state.
        runs: the runs (n, source, target) of the pass that was begun last. In a run, n tokens advance the state in slot
            `source` to the state in slot `target`. A pass has two runs if a state inside the pass is kept. A pass with
            proposed tokens has a run for each token, so that any number of the tokens can be committed.
    """

    def __init__(self, pool: StatePool) -> None:
        self._pool = pool
        self.committed = Snapshot(0, ZERO)
        self.runs: list[tuple[int, int, int]] = []
        # The states of passes that are not committed yet, oldest first.
        self._pending: list[Snapshot] = []
        # A state inside the last committed pass, which is kept for the prefix cache.
        self._inside: Snapshot | None = None
        # Which state of the pass that was begun last may become `_inside`. If the pass has a run for each token, only
        # the state after `_only` tokens may, and none if `_only` is 0. For other passes, `_only` is None: a pass of two
        # runs has one state inside, which becomes `_inside`.
        self._only: int | None = None

    @property
    def newest(self) -> Snapshot:
        """The state that the next pass reads."""
        return self._pending[-1] if self._pending else self.committed

    def begin(self, first: int, n: int, inside: int | None = None, *, each: bool = False) -> None:
        """Take slots for the states of a pass over n tokens from position `first` on.

        Without `each`, the state after the last token is kept. The state after `inside` tokens is kept, too, if this
        position is inside the pass and two slots are free. With `each`, which needs n free slots, the state after every
        token is kept until the pass is committed; then only the newest, and the one after `inside` tokens.

        Raises:
            ValueError: the newest state is not the state after `first` tokens, because only a part of a pass was
                committed or rolled back.
        """
        if self.newest.length != first:
            raise ValueError(f"begin: expected the state after {first} tokens, found that after {self.newest.length}")
        ends = list(range(first + 1, first + n + 1)) if each else [first + n]
        if not each and inside is not None and first < inside < first + n and self._pool.make_room(2):
            ends.insert(0, inside)
        self.runs, self._only = [], (inside or 0) if each else None
        for end in ends:
            source, target = self.newest, self._pool.take()
            self.runs.append((end - source.length, source.slot, target))
            self._pending.append(Snapshot(end, target))

    def commit(self, length: int) -> None:
        """Commit the states after at most `length` tokens: keep the newest, and at most one older one as `_inside`."""
        done = [state for state in self._pending if state.length <= length]
        if not done:
            return
        self._pending = self._pending[len(done) :]
        self._forget_inside()
        self._pool.give_back(self.committed.slot)
        *before, self.committed = done
        for state in reversed(before):
            if self._inside is None and (self._only is None or state.length == self._only):
                self._inside = state
            else:
                self._pool.give_back(state.slot)

    def roll_back(self, length: int) -> None:
        """Discard the uncommitted states after more than `length` tokens."""
        while self._pending and self._pending[-1].length > length:
            self._pool.give_back(self._pending.pop().slot)

    def snapshots(self, length: int) -> list[Snapshot]:
        """Return the committed states after 1 to `length` tokens that this sequence holds, fewest tokens first."""
        found = [self.committed] if self._inside is None else [self._inside, self.committed]
        return [state for state in found if 0 < state.length <= length and state.slot != ZERO]

    def adopt(self, state: Snapshot) -> None:
        """Begin with a state that another sequence or the prefix cache holds. This sequence must be empty."""
        self._pool.retain(state.slot)
        self.committed = state

    def close(self) -> None:
        """Give back all slots."""
        self._forget_inside()
        self.roll_back(-1)
        self._pool.give_back(self.committed.slot)
        self.committed, self.runs = Snapshot(0, ZERO), []

    def _forget_inside(self) -> None:
        if self._inside is not None:
            self._pool.give_back(self._inside.slot)
            self._inside = None
