"""Programs of the compiled CPU backend: lowered steps, bound to memory, rotary tables and page tables, and run."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kernels.cpu import layout
from mlx_engine.backends.batch import Batch, KVSpan, Stores, Wanted
from mlx_engine.backends.lowering import Lowered
from mlx_engine.backends.matrices import address
from mlx_engine.backends.parameters import Array
from mlx_engine.backends.program import Program

if TYPE_CHECKING:
    from mlx_engine.backends.compiled import CompiledBackend


class CompiledProgram(Program):
    """Layers as steps of the compiled kernels: all in one call for few tokens, else one by one."""

    def __init__(self, backend: CompiledBackend, variants: Mapping[Wanted, Lowered]) -> None:
        self.fused = variants["every"].fused
        self._variants = {want: _Steps(backend, lowered) for want, lowered in variants.items()}

    def run(self, x: Array, batch: Batch) -> Array:
        """Run the steps for what is wanted."""
        return self._variants[batch.want].run(x, batch)


class _Steps:
    """The words of a program, and the memory that its values take."""

    def __init__(self, backend: CompiledBackend, lowered: Lowered) -> None:
        self._backend, self._of, self._positions = backend, lowered, 0
        library = backend.library
        called = ("project", "attend", "attend_decode", "attend_prefill", "put_span")
        self._words = np.zeros(layout.STEPS + lowered.words.size, dtype=np.int64)
        self._words[: layout.STEPS] = [library.address(name) for name in called]
        self._words[layout.STEPS :] = lowered.words.reshape(-1)
        self._steps = self._words[layout.STEPS :].reshape(lowered.words.shape)
        self._tables: list[tuple[np.ndarray, np.ndarray]] = []
        # The stores that the words of the layers are about; they may go when nobody else needs them.
        self._stores: Callable[[], Stores | None] = lambda: None
        self._layers = np.zeros((len(lowered.kv), layout.KV_WIDTH), dtype=np.int64)
        self._groups = np.zeros((len(lowered.kv), layout.GROUP_WIDTH), dtype=np.int64)

    def _bind_rope(self, length: int) -> None:
        """Write where the cosines and sines of at least `length` positions lie."""
        tables = [self._backend.rope_table(rope, length) for rope in self._of.ropes.values()]
        # The words know tables by address alone: old and new ones are kept while they are written.
        self._tables += tables
        for i, (cos, sin) in zip(self._of.ropes, tables, strict=True):
            self._steps[i, [layout.COS, layout.SIN]] = address(cos), address(sin)
        self._tables = tables
        self._positions = min((len(cos) for cos, _ in tables), default=sys.maxsize)

    def _bind_stores(self, batch: Batch) -> None:
        """Write where keys and values of each layer lie."""
        stores = batch.stores
        found = [store.shape[1::2] for store in stores.layers]
        if found != self._of.kv:
            raise ValueError(f"expected keys and values of (heads, width) {self._of.kv} by layer, found {found}")
        for layer, (words, store) in enumerate(zip(self._layers, stores.layers, strict=True)):
            words[layout.KV_STORE], words[layout.KV_SLOTS] = address(store), store.shape[2]
            words[layout.KV_WINDOW] = batch.group(layer).window or 0
            words[layout.KV_GROUP] = address(self._groups[stores.group_of[layer]])
        self._stores = weakref.ref(stores)

    def run(self, x: np.ndarray, batch: Batch) -> np.ndarray:
        """Return the hidden states behind the last step."""
        n, of, be = len(x), self._of, self._backend
        length = max(batch.positions) + 1
        if self._positions < length:
            self._bind_rope(length)
        if self._stores() is not batch.stores:
            self._bind_stores(batch)
        sequences = [sequence_words(group.spans, batch.lengths, batch.wanted) for group in batch.groups]
        for words, of_group, group in zip(self._groups, sequences, batch.groups, strict=False):
            words[:] = address(of_group), address(group.slots)
        forward_pass = _pass_words(batch)
        parts = max(parts_of(batch.groups[0].spans, counts) for counts in (batch.lengths, batch.wanted))
        work = max(min(n, layout.PANEL_TOKENS) * layout.whole_vectors(of.inputs), n * layout.whole_vectors(of.normed))
        room = be.room_for(n * of.floats + work + parts * of.parts)
        values = be.room[: n * of.floats]
        values[n * of.x.at : n * (of.x.at + of.x.width)] = x.reshape(-1)
        at_work = room + 4 * n * of.floats
        arguments = address(forward_pass), address(self._layers), room, at_work, at_work + 4 * work
        # More tokens are worth a call for each step; Ctrl-C waits for a call to end.
        together = len(self._steps) if n <= layout.PROGRAM_TOKENS else 1
        for first in range(0, len(self._steps), together):
            last = min(first + together, len(self._steps))
            be.run_entry(be.library.run_steps, address(self._words), first, last, *arguments)
        n_rows = len(batch.rows) if of.y.is_wanted else n
        y = values[n * of.y.buffer.at :][: n_rows * of.y.width]
        return np.array(y.reshape(n_rows, of.y.width))


def _pass_words(batch: Batch) -> np.ndarray:
    """Return the words of a pass, and behind them its tokens' positions and the numbers of the wanted rows."""
    n, n_rows = len(batch.positions), len(batch.rows)
    words = np.empty(layout.PASS_WIDTH + n + n_rows, dtype=np.int64)
    positions = address(words) + words.itemsize * layout.PASS_WIDTH
    words[: layout.PASS_WIDTH] = (
        n, n_rows, len(batch.lengths), batch.stores.page, positions, positions + words.itemsize * n,
    )  # fmt: skip
    words[layout.PASS_WIDTH : layout.PASS_WIDTH + n] = batch.positions
    words[layout.PASS_WIDTH + n :] = batch.rows
    return words


def sequence_words(spans: Sequence[KVSpan], lengths: Sequence[int], wanted: Sequence[int]) -> np.ndarray:
    """Return the words (B, SEQ_WIDTH) of the sequences of a pass, with their numbers of new and of wanted tokens."""
    words = np.empty((len(spans), layout.SEQ_WIDTH), dtype=np.int64)
    words[:, : layout.SEQ_WANTED + 1] = [
        (address(span.pages), span.length, n_new, n_wanted)
        for span, n_new, n_wanted in zip(spans, lengths, wanted, strict=True)
    ]
    return words


def parts_of(spans: Sequence[KVSpan], counts: Sequence[int]) -> int:
    """Return how many results of blocks attention keeps for each head, with `counts` queries of the sequences.

    More queries than a few join the results of blocks as they come.
    """
    if sum(counts) > layout.SMALL_BATCH:
        return 0
    return sum(n * -(-span.length // layout.BLOCK) for span, n in zip(spans, counts, strict=True))
