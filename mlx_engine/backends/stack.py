"""A model's layers as machine code has them: the blocks that each is made of, and where its keys and values lie."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kernels.cpu import layout
from kernels.cpu.library import Library
from mlx_engine.backends.matrices import Block, address
from mlx_engine.backends.parameters import Layer, Visible


@dataclass(frozen=True)
class Blocks:
    """What one layer is made of; `heads` is the address of its words."""

    qkv: Block
    heads: int
    output: Block
    up: Block
    down: Block


class Stack:
    """Layers of one shape, run one after the other."""

    def __init__(
        self, layers: Sequence[Layer], blocks: Sequence[Blocks], head_dim: int, scale: float, library: Library
    ) -> None:
        self._width = max(b.output.n_inputs for b in blocks)
        self._found = self._width // head_dim * (head_dim + layout.LANES)
        self._hidden = max(b.down.n_inputs for b in blocks)
        self._products = max(b.qkv.n_outputs for b in blocks)
        self._words = words = np.zeros(layout.LAYERS + len(layers) * layout.DEEP, dtype=np.int64)
        self.address = address(words)
        called = ("project", "attend", "attend_few", "attend_many")
        words[layout.PROJECT : layout.SCORE_SCALE] = [library.address(name) for name in called]
        words[layout.SCORE_SCALE :].view(np.float64)[0] = scale
        self._table = words[layout.LAYERS :].reshape(-1, layout.DEEP)
        self._table[:, : layout.COS] = [
            (b.qkv.address, b.heads, b.output.address, b.up.address, b.down.address) for b in blocks
        ]
        # Positions for which there are rotations.
        self.positions = 0

    def turn_by(self, tables: Sequence[tuple[np.ndarray, np.ndarray] | None]) -> None:
        """Say where the cosines and sines of each layer lie; None for one whose heads are not rotated."""
        self._tables = tables  # which the words know by address alone
        self._table[:, layout.COS : layout.KV_STORE] = [
            (0, 0) if turns is None else (address(turns[0]), address(turns[1])) for turns in tables
        ]
        self.positions = min((len(turns[0]) for turns in tables if turns is not None), default=sys.maxsize)

    def look_at(self, rooms: Sequence[Visible]) -> None:
        """Say where the keys and values of each layer lie, the new ones last."""
        self._table[:, layout.KV_STORE :] = [
            (address(seen.store), seen.store.shape[2], seen.start, seen.stop, seen.window or 0, seen.first)
            for seen in rooms
        ]

    def room(self, n_tokens: int, n_keys: int) -> int:
        """Floats that a layer needs for its intermediate values where each token sees at most `n_keys` keys."""
        # What attention finds in each block of keys: a row of every head, which is wider by a vector.
        parts = n_tokens * self._found * (-(-n_keys // layout.BLOCK) + 1) if n_tokens <= layout.FEW else 0
        return max(n_tokens * (self._products + 2 * self._width) + parts, n_tokens * self._hidden)
