"""Look inside a forward pass: the same backend with every block in its composed form, each value shown by name."""

from __future__ import annotations

import copy
from collections.abc import Callable

from mlx_engine.backends.base import OPERATIONS, Backend
from mlx_engine.backends.parameters import Array

# What composes and shows values; a compiled program would show none.
COMPOSED = (*OPERATIONS["block"], *OPERATIONS["dispatch"], "note", "compile")


def tapped(backend: Backend, tap: Callable[[str, Array], None]) -> Backend:
    """A twin of `backend` that calls `tap(name, array)` for every named value of every pass.

    Names are the GGUF stems of the layer that made the value ("blk.0.attn_norm", "blk.0.ffn_gate"), and what the
    model itself notes ("blk.0.q_rope", "blk.0.attn_out", "blk.0.layer_out"). The twin shares the original's arrays.
    """
    twin = copy.copy(backend)
    composed = {name: getattr(Backend, name) for name in COMPOSED}
    twin.__class__ = type(f"Tapped{type(backend).__name__}", (type(backend),), composed)
    twin.tap = tap
    return twin
