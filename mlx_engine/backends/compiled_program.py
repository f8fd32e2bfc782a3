"""Programs of the compiled CPU backend: lowered steps, bound to memory, rotary tables and KV views, and run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kernels.cpu import layout
from mlx_engine.backends.lowering import Lowered
from mlx_engine.backends.matrices import address
from mlx_engine.backends.parameters import Array, Visible
from mlx_engine.backends.program import Layers, OpByOp, Program

if TYPE_CHECKING:
    from mlx_engine.backends.compiled import CompiledBackend


class CompiledProgram(Program):
    """Layers as steps of the compiled kernels: all in one call for few tokens, else one by one."""

    def __init__(self, backend: CompiledBackend, layers: Layers, every: Lowered, last: Lowered) -> None:
        self._backend, self._op_by_op, self.fused = backend, OpByOp(backend, layers), every.fused
        self._variants = {True: _Steps(backend, every), False: _Steps(backend, last)}

    def run(self, x: Array, cache: Any, offset: int, *, every: bool) -> Array:
        """Run the steps; a cache without slots is written to operation by operation."""
        views = cache.kv_views(len(x))
        if views is None:
            return self._op_by_op.run(x, cache, offset, every=every)
        return self._variants[every].run(x, views, offset)


class _Steps:
    """The words of a program, and the memory that its values take."""

    def __init__(self, backend: CompiledBackend, lowered: Lowered) -> None:
        self._backend, self._of, self._positions = backend, lowered, 0
        library = backend.library
        called = ("project", "attend", "attend_few", "attend_many", "put_span")
        self._words = np.zeros(layout.STEPS + lowered.words.size, dtype=np.int64)
        self._words[: layout.STEPS] = [library.address(name) for name in called]
        self._words[layout.STEPS :] = lowered.words.reshape(-1)
        self._steps = self._words[layout.STEPS :].reshape(lowered.words.shape)
        self._tables: list[tuple[np.ndarray, np.ndarray]] = []

    def _bind_rope(self, length: int) -> None:
        """Write where the cosines and sines of at least `length` positions lie."""
        tables = [self._backend.rope_table(rope, length) for rope in self._of.ropes.values()]
        # The words know tables by address alone: old and new ones are kept while they are written.
        self._tables += tables
        for i, (cos, sin) in zip(self._of.ropes, tables, strict=True):
            self._steps[i, [layout.COS, layout.SIN]] = address(cos), address(sin)
        self._tables = tables
        self._positions = min((len(cos) for cos, _ in tables), default=sys.maxsize)

    def run(self, x: np.ndarray, views: Sequence[Visible], offset: int) -> np.ndarray:
        """Return the hidden states behind the last step; one KV view per layer includes the new tokens' slots."""
        n, of, be = len(x), self._of, self._backend
        if self._positions < offset + n:
            self._bind_rope(offset + n)
        if [view.store.shape[1::2] for view in views] != of.kv:
            raise ValueError(f"expected a cache with (heads, width) {of.kv} by layer, found one for another model")
        kv = np.array(
            [(address(v.store), v.store.shape[2], v.start, v.stop, v.window or 0, v.first) for v in views],
            dtype=np.int64,
        )
        n_blocks = max(v.stop - v.start for v in views) // layout.BLOCK + 2
        # Of more tokens than a few, the last one alone may attend to blocks side by side.
        parts = (n if n <= layout.FEW else 1) * of.parts * n_blocks
        work = max(min(n, layout.PANEL_TOKENS) * layout.whole_vectors(of.inputs), n * layout.whole_vectors(of.normed))
        room = be.room_for(n * of.floats + work + parts)
        values = be.room[: n * of.floats]
        values[n * of.x.at : n * (of.x.at + of.x.width)] = x.reshape(-1)
        at_work = room + 4 * n * of.floats
        arguments = n, offset, address(kv), room, at_work, at_work + 4 * work
        # More tokens are worth a call for each step; Ctrl-C waits for a call to end.
        together = len(self._steps) if n <= layout.PROGRAM_TOKENS else 1
        for first in range(0, len(self._steps), together):
            last = min(first + together, len(self._steps))
            be.run_entry(be.library.run_steps, address(self._words), first, last, *arguments)
        rows = 1 if of.y.one_row else n
        y = values[n * of.y.buffer.at :][: rows * of.y.width]
        return np.array(y.reshape(rows, of.y.width))
