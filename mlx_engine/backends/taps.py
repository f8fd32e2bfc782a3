"""Taps: run a forward pass with every block in its composed form, and pass each intermediate value to a callback."""

from __future__ import annotations

import copy
from collections.abc import Callable

from mlx_engine.backends.base import Backend
from mlx_engine.backends.parameters import Array
from mlx_engine.backends.primitives import OPERATIONS

# The methods that note intermediate values; fused blocks and compiled programs do not.
COMPOSED = (*OPERATIONS["block"], *OPERATIONS["dispatch"], "note", "compile")


def tapped(backend: Backend, tap: Callable[[str, Array], None]) -> Backend:
    """Return a copy of `backend` that calls `tap(name, array)` for every named intermediate value.

    Names are the GGUF stem of the norm or linear layer that computed the value ("blk.0.attn_norm", "blk.0.ffn_gate"),
    and the names that models pass to `note` ("blk.0.q_rope", "blk.0.attn_out", "blk.0.layer_out"). The copy shares the
    original's arrays.
    """
    copied = copy.copy(backend)
    composed = {name: getattr(Backend, name) for name in COMPOSED}
    copied.__class__ = type(f"Tapped{type(backend).__name__}", (type(backend),), composed)
    copied.tap = tap
    return copied
