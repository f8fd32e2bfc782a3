"""States: the cache of recurrent and convolution layers, in place of keys and values.

A state has a fixed size and does not grow with the sequence. It is stored in a slot, which holds the state of all such
layers after a number of tokens. A slot is written by one pass and never changed afterwards: the next pass reads it and
writes another slot. So a pass that fails or is rolled back has changed nothing that was committed, and sequences and a
prefix cache share a state by reference. Slots are reference-counted; a slot without a reference is free.
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
# Slots for each sequence of a pool: its committed state, the states of two passes that a lazy backend may have
# submitted, and a state inside a prompt. A prefix cache uses the slots that sequences leave free.
SLOTS_PER_SEQUENCE = 4
# The state before the first token, which is all zeros. No pass writes to this slot.
ZERO = 0


@dataclass(frozen=True)
class StateLayer:
    """The shapes of the arrays that one layer keeps of a sequence; they do not depend on its length."""

    shapes: tuple[tuple[int, ...], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of one state in float32."""
        return sum(math.prod(shape) for shape in self.shapes) * BYTES_PER_FLOAT


def n_slots(n_sequences: int, *, kept: bool = True, n_proposed: int = 0) -> int:
    """Return the number of slots of a pool for `n_sequences` sequences, including the slot of zeros.

    A pass that checks proposed tokens writes a state after each of them: `n_proposed` in total.
    """
    return 1 + n_sequences * (SLOTS_PER_SEQUENCE if kept else 1) + n_proposed


class StatePool:
    """The slots of the states of all sequences of a `KVPool`.

    Attributes:
        stores: for each layer of the model the stores of its arrays; empty for a layer of attention.
        n_slots: the number of slots, free or in use, including the slot of zeros; 0 if no layer has a state.
        generations: how often each slot has been allocated. While this number is the same, the contents of a held slot
            are unchanged.
        nbytes_each: bytes of the state of all layers in one slot.
        reclaim: called as `reclaim(n)` if fewer than n slots are free. A prefix cache sets it.
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
        """The different stores."""
        return list({id(store): store for of_layer in self.stores for store in of_layer}.values())

    @property
    def n_free(self) -> int:
        """The number of free slots."""
        return len(self._free)

    def references(self, slot: int) -> int:
        """Return how often a slot is held."""
        return int(self._references[slot])

    def make_room(self, n: int) -> bool:
        """Return whether n slots are free, after reclaiming slots if they are not."""
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
        """Add a reference to a slot in use; the slot of zeros is not counted."""
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
    """The state after `length` tokens of a sequence, and its slot."""

    length: int
    slot: int


class SequenceState:
    """The states of one sequence: the committed state, and the states of uncommitted passes.

    Attributes:
        committed: the newest committed state.
        runs: the runs (n, source, target) of the pass that was begun last: n tokens advance the state in slot `source`
            to the state in slot `target`. A pass has two runs if a state inside the pass is kept, and a run per token
            if the pass may be committed in part.
    """

    def __init__(self, pool: StatePool) -> None:
        self._pool = pool
        self.committed = Snapshot(0, ZERO)
        self.runs: list[tuple[int, int, int]] = []
        # The states of passes that were begun, oldest first; and a committed state inside the last prompt chunk.
        self._pending: list[Snapshot] = []
        self._inside: Snapshot | None = None
        # After a pass that may be committed in part: the only length within the pass whose state is kept.
        self._only: int | None = None

    @property
    def newest(self) -> Snapshot:
        """The state that the next pass reads."""
        return self._pending[-1] if self._pending else self.committed

    def has_room(self, n: int = 1) -> bool:
        """Return whether there are slots for n states of a pass."""
        return self._pool.make_room(n)

    def begin(self, first: int, n: int, inside: int | None = None, *, each: bool = False) -> None:
        """Take slots for a pass of n tokens from position `first` on; keep the state after `inside` tokens.

        If only one slot is free, the state after `inside` tokens is not kept. With `each`, the state after every token
        is kept until the pass is committed, which needs n free slots.

        Raises:
            ValueError: the state before these tokens was never computed, because a pass was committed or rolled back in
                part.
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
        """Commit the states of passes that end at `length` tokens or before."""
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
        """Discard the states of passes that end after `length` tokens."""
        while self._pending and self._pending[-1].length > length:
            self._pool.give_back(self._pending.pop().slot)

    def snapshots(self, length: int) -> list[Snapshot]:
        """Return the committed states of the first `length` tokens that are still held."""
        found = [self.committed] if self._inside is None else [self._inside, self.committed]
        return [state for state in found if 0 < state.length <= length and state.slot != ZERO]

    def adopt(self, state: Snapshot) -> None:
        """Begin with another holder's state. The sequence must be empty."""
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
