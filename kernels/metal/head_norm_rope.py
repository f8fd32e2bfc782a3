"""Apply RMSNorm and RoPE to the heads of queries and keys, and split values into heads, in one launch.

One launch replaces two norms, two rotations and three copies. Keys and values are returned as one array (2, G, T, E),
like the KV store (2, G, slots, E), so that one update writes both.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..kernel import Kernel
from ..launch import Size, launch
from . import arguments
from .layout import described
from .reference import EPSILON, FACTOR, Expected, Floats, normed, wide

KERNEL = Kernel.load("head_norm_rope", ["q", "k", "v", "q_weight", "k_weight", "eps", "cos_sin"], ["rotated", "kv"])
SIMDGROUPS = 4


def grid(tokens: int, n_heads: int, n_kv_heads: int) -> tuple[Size, Size]:
    """Return the grid and the threadgroup: SIMD-group i processes head i % (H + 2 G) of token i // (H + 2 G).

    Heads are counted in the order of queries, keys, values.
    """
    simdgroups = tokens * (n_heads + 2 * n_kv_heads)
    return (-(-simdgroups // SIMDGROUPS) * SIMDGROUPS * 32, 1, 1), (SIMDGROUPS * 32, 1, 1)


def rotation_table(frequencies: Sequence[float], n_positions: int, first: int = 0) -> NDArray[np.float32]:
    """Return the cos/sin table (n_positions, E / 2, 2) of the angles `position * frequency`, from position `first` on.

    The table is computed in float64 and rounded to float32.
    """
    positions = np.arange(first, first + n_positions, dtype=np.float64)
    angles = positions[:, None] * np.asarray(frequencies, dtype=np.float64)
    return np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)


def head_norm_rope(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    cos_sin: mx.array,
    head_dim: int,
    norm_weights: tuple[mx.array, mx.array] | None = None,
    eps: tuple[float, float] = (0.0, 0.0),
) -> tuple[mx.array, mx.array]:
    """Split q, k and v into heads. Apply RMSNorm (if `norm_weights` are given), then RoPE, to the heads of q and k.

    Args:
        q: (T, H * E) float16 or float32, any number T of tokens from 1 on.
        k: (T, G * E) of the same type.
        v: (T, G * E) of the same type.
        cos_sin: (T, E / 2, 2) float32, cosine and sine for each token and pair of elements (j, j + E / 2).
        head_dim: E, an even number of at least 8.
        norm_weights: two arrays (E,) of float32, for q and for k; None for no norms.
        eps: epsilon of the norms of q and of k.

    Returns:
        Queries (H, T, E), and keys followed by values (2, G, T, E), both float32. `reference` returns the error bounds.

    Raises:
        ValueError: an array has a wrong shape or type, or `head_dim` is not supported.
    """
    T, H, G = _heads(q, k, head_dim)
    arguments.array("head_norm_rope", "q", q, (T, H * head_dim), *arguments.ACTIVATIONS)
    arguments.array("head_norm_rope", "k", k, (T, G * head_dim), q.dtype)
    arguments.array("head_norm_rope", "v", v, (T, G * head_dim), q.dtype)
    arguments.array("head_norm_rope", "cos_sin", cos_sin, (T, head_dim // 2, 2), mx.float32)
    for norm_weight in norm_weights or ():
        arguments.array("head_norm_rope", "a norm weight", norm_weight, (head_dim,), mx.float32)
    threads, group = grid(T, H, G)
    rotated, kv = launch(
        KERNEL,
        # Without norms, the kernel does not read the norm weights, so any array, here `cos_sin`, may stand for them.
        [q, k, v, *(norm_weights or (cos_sin, cos_sin)), arguments.constants(*eps), cos_sin],
        template=(
            ("X", q.dtype),
            ("H", H),
            ("G", G),
            ("E", head_dim),
            ("PAIRS", -(-head_dim // 64)),
            ("NORM", norm_weights is not None),
            ("NSG", SIMDGROUPS),
        ),
        grid=threads,
        threadgroup=group,
        output_shapes=[(H, T, head_dim), (2, G, T, head_dim)],
        output_dtypes=[mx.float32, mx.float32],
    )
    return rotated, kv


def reference(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    cos_sin: mx.array,
    head_dim: int,
    norm_weights: tuple[mx.array, mx.array] | None = None,
    eps: tuple[float, float] = (0.0, 0.0),
) -> list[Expected]:
    """Return the expected results in float64, with the error bounds.

    A rotation computes `a * c - b * s` with two roundings: of the product `b * s`, and of the fused multiply-add. A
    norm adds the roundings of its factor 1 / sqrt(mean square + eps), and of the products with the factor and with the
    norm weight. All roundings are relative to `|a * c| + |b * s|`.
    """
    roundings = 2 if norm_weights is None else 2 + FACTOR + 2
    queries, keys = (_by_head(x, head_dim) for x in (q, k))
    if norm_weights is not None:
        queries, keys = (
            normed(mx.array(x.astype(np.float32)), norm_weight, e)
            for x, norm_weight, e in zip((queries, keys), norm_weights, eps, strict=True)
        )
    values = _by_head(v, head_dim)
    rotated_q, q_bound = _rotated(queries, wide(cos_sin), roundings)
    rotated_k, k_bound = _rotated(keys, wide(cos_sin), roundings)
    return [
        Expected(rotated_q, q_bound),
        Expected(np.stack([rotated_k, values]), np.stack([k_bound, np.zeros_like(values)])),
    ]


def _heads(q: mx.array, k: mx.array, head_dim: int) -> tuple[int, int, int]:
    """Return T, H and G. The caller checks the other shapes against them."""
    if head_dim % 2 or head_dim < 8 or q.ndim != 2 or k.ndim != 2 or not q.shape[0]:
        raise ValueError(
            f"head_norm_rope: expected an even head_dim from 8 on and rows (T, H * E), "
            f"found {head_dim} and {described(q)}, {described(k)}"
        )
    return q.shape[0], max(q.shape[1] // head_dim, 1), max(k.shape[1] // head_dim, 1)


def _by_head(x: mx.array, head_dim: int) -> Floats:
    """Return (heads, T, E) from (T, heads * E)."""
    return wide(x).reshape(x.shape[0], -1, head_dim).transpose(1, 0, 2)


def _rotated(x: Floats, cos_sin: Floats, roundings: int) -> Expected:
    a, b = np.split(x, 2, axis=-1)
    c, s = cos_sin[..., 0], cos_sin[..., 1]
    value = np.concatenate([a * c - b * s, b * c + a * s], axis=-1)
    size = np.concatenate([np.abs(a * c) + np.abs(b * s), np.abs(b * c) + np.abs(a * s)], axis=-1)
    return Expected(value, roundings * EPSILON * size)
