"""Taps: run a forward pass with every block in its composed form, and pass each intermediate value to a callback.

`tapped` replaces fused blocks by their composed forms, whose results may differ in the last bits. `observed` runs both:
the composed form for the callback, and the backend's own block for the result of the pass.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from mlx_engine.backends.base import Backend
from mlx_engine.backends.parameters import Array, HeadNorms, Norm, RMSNorm
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


def observed(backend: Backend, tap: Callable[[str, Array], None]) -> Backend:
    """Return a copy of `backend` that calls `tap` as `tapped` does, and whose results have the bits of `backend`.

    The composed forms use the backend's own norms and products, and their inputs are results of its fused blocks. So
    their values are bit-identical to the values inside the fused blocks. There are two exceptions with compiled
    kernels: inside experts and linear attention, NumPy computes the activations.
    """
    copied = copy.copy(backend)
    blocks = {name: _twice(getattr(Backend, name), getattr(backend, name)) for name in OPERATIONS["block"]}

    def norm(self: Backend, x: Array, norm: Norm | None) -> Array:
        return x if norm is None else self.note(norm.name, backend.norm(x, norm))

    def norm_rope(self: Backend, x: Array, head_dim: int, norm: RMSNorm, *rotation: Any) -> Array:
        _note_heads(self, backend, x, head_dim, norm)
        return backend.norm_rope(x, head_dim, norm, *rotation)

    def head_norm_rope(
        self: Backend, q: Array, k: Array, v: Array, head_dim: int, norms: HeadNorms, *rotation: Any
    ) -> tuple[Array, Array, Array]:
        for x, of_heads in zip((q, k), norms or (), strict=False):
            _note_heads(self, backend, x, head_dim, of_heads)
        return backend.head_norm_rope(q, k, v, head_dim, norms, *rotation)

    own = {"norm": norm, "norm_rope": norm_rope, "head_norm_rope": head_norm_rope}
    own |= {"note": Backend.note, "compile": Backend.compile}
    copied.__class__ = type(f"Observed{type(backend).__name__}", (type(backend),), blocks | own)
    copied.tap = tap
    return copied


def _note_heads(observed: Backend, own: Backend, x: Array, head_dim: int, norm: RMSNorm) -> None:
    """Note x (T, N) after the norm of its heads, by calling the block that norms and rotates heads without rotation."""
    rows: Any = x
    observed.note(norm.name, own.norm_rope(x, head_dim, norm, None, [0] * len(rows)))


def _twice(composed: Callable[..., Any], fused: Callable[..., Any]) -> Callable[..., Any]:
    """Return a block that runs the composed form for its taps, and returns the result of the fused form."""

    def block(self: Backend, *args: Any, **kwargs: Any) -> Any:
        composed(self, *args, **kwargs)
        return fused(*args, **kwargs)

    return block
