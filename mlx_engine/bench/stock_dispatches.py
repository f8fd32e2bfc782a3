"""How many GPU dispatches MLX takes for each operation of a backend on MLX, for one token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlx_engine.backends.batch import KVView
from mlx_engine.backends.metal.weights import SplitMatrix, joined
from mlx_engine.backends.mlx.weights import GroupMatrix
from mlx_engine.backends.parameters import Linear, Scores
from mlx_engine.kernels.metal.attention import WIDEST_HEAD
from mlx_engine.kernels.metal.dense import NARROWEST
from mlx_engine.kernels.metal.layout import BLOCK

# From this number of keys on, MLX splits attention into two dispatches on large GPUs; later on other GPUs.
TWO_PASSES = 1024
# Head sizes of MLX's attention kernel for a single query. Other sizes: scale, matmul, softmax, matmul.
FUSED_HEADS, UNFUSED = (64, 96, 128, 256), 4
# MLX splits the sum of a longer row into two dispatches.
LONGEST_SUM = 4096
# With a soft cap: scale, matmul, tanh, multiply, softmax, matmul.
CAPPED = 6


def _attention(backend: Any, q: Any, kv: KVView, counts: Any, scores: Scores) -> int:
    if _launches(backend, "attention") and q.shape[-1] % 8 == 0 and q.shape[-1] <= WIDEST_HEAD:
        return 0
    if scores.softcap is not None:
        return CAPPED if scores.sinks is None else CAPPED + 1
    if q.shape[-1] not in FUSED_HEADS:
        return UNFUSED
    return 1 if kv.spans[0].length - kv.first_visible(kv.spans[0], 1) < TWO_PASSES else 2


def _linear(backend: Any, x: Any, linear: Linear) -> int:
    return _product(backend, linear.weight) + (linear.bias is not None)


def _rms_norm(backend: Any, x: Any, weight: Any, eps: float) -> int:
    return 0 if _launches(backend, "norm_rows") and x.ndim == 2 and x.shape[1] % BLOCK == 0 else 1


def _launches(backend: Any, kernel: str) -> bool:
    """Return whether the backend has this kernel; its launches are counted when they happen."""
    kernels = getattr(backend, "kernels", None)
    return kernels is not None and kernel not in kernels.refused


def _product(backend: Any, weight: Any) -> int:
    """Count a matrix product that MLX computes. Without our kernel, scales and biases are computed first."""
    if not isinstance(weight, SplitMatrix):
        return 0 if _launches(backend, "dense") and weight.shape[1] >= NARROWEST else 1
    return 3 if "matvec" in weight.kernels.refused else 0


def _embed(backend: Any, table: Any, ids: Any) -> int:
    """Count the gather of a float row, or of quants, scales and biases and their dequantisation."""
    if isinstance(table, SplitMatrix):
        return 5 if "embed_rows" in table.kernels.refused else 0
    return 4 if isinstance(table, GroupMatrix) else 1


# Dispatches of each `MlxBackend` operation for one token. Views have none: `heads`, `merge`, `take`.
STOCK: dict[str, Callable[..., int]] = {
    "embed": _embed,
    "linear": _linear,
    "rms_norm": _rms_norm,
    "layer_norm": lambda *_: 1,
    "rope": lambda *_: 3,
    "attention": _attention,
    "silu": lambda *_: 2,
    "gelu": lambda *_: 9,
    "add": lambda *_: 1,
    "multiply": lambda *_: 1,
    "soft_cap": lambda *_: 3,
    "argmax": lambda *_: 1,
    "row_sums": lambda _, logits: 1 if logits.shape[-1] <= LONGEST_SUM else 2,
    # The store has no other reference, so MLX writes it in place.
    "kv_write": lambda backend, store, slots, k, v: 1 if joined(k, v) is not None else 2,
}
