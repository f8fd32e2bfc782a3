"""Heads of queries and keys normed and rotated, and values, all in one launch.

Faster than two norms, two rotations and three copies. Queries come out as attention takes them. Keys and values come
out as one array that is shaped like a part of their store (2, K, slots, E), so that one update writes both.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from kernels.kernel import Kernel
from kernels.launch import Size, launch
from kernels.metal import arguments
from kernels.metal.twins import EPSILON, FACTOR, Expected, Floats, normed, wide

KERNEL = Kernel.load("head_norm_rope", ["q", "k", "v", "q_gain", "k_gain", "eps", "turns"], ["rotated", "kv"])
SIMDGROUPS = 4


def grid(tokens: int, n_heads: int, n_kv_heads: int) -> tuple[Size, Size]:
    """Threads, and threads of a group: SIMD-group i has head i % (H + 2 K) of token i // (H + 2 K)."""
    simdgroups = tokens * (n_heads + 2 * n_kv_heads)
    return (-(-simdgroups // SIMDGROUPS) * SIMDGROUPS * 32, 1, 1), (SIMDGROUPS * 32, 1, 1)


def rotation_table(frequencies: Sequence[float], n_positions: int, first: int = 0) -> NDArray[np.float32]:
    """(n_positions, E / 2, 2): cosine and sine of `position * frequency`, taken in float64, from position `first` on.

    Rows of an array made of it are the `turns` of tokens that follow each other.
    """
    positions = np.arange(first, first + n_positions, dtype=np.float64)
    angles = positions[:, None] * np.asarray(frequencies, dtype=np.float64)
    return np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)


def head_norm_rope(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    turns: mx.array,
    head_dim: int,
    gains: tuple[mx.array, mx.array] | None = None,
    eps: tuple[float, float] = (0.0, 0.0),
) -> tuple[mx.array, mx.array]:
    """Split rows into heads, norm (with `gains`) those of q and k, turn their pairs (j, j + E / 2).

    Args:
        q: (T, H * E) float16 or float32, any T.
        k: (T, K * E) of the same type.
        v: (T, K * E) of the same type.
        turns: (T, E / 2, 2) float32, cosine and sine for each token and pair.
        head_dim: E, an even number from 8 on.
        gains: (E,) float32 for q and for k; None for no norms.
        eps: what is added to the mean squares of q and of k.

    Returns:
        Queries (H, T, E), and keys followed by values (2, K, T, E), both float32. `a[None]` and `kv[:1]` are what
        attention takes, without a copy. The bound is in `twin`.

    Raises:
        ValueError: an array does not fit.
    """
    T, H, K = _heads(q, k, head_dim)
    arguments.array("head_norm_rope", "q", q, (T, H * head_dim), *arguments.ACTIVATIONS)
    arguments.array("head_norm_rope", "k", k, (T, K * head_dim), q.dtype)
    arguments.array("head_norm_rope", "v", v, (T, K * head_dim), q.dtype)
    arguments.array("head_norm_rope", "turns", turns, (T, head_dim // 2, 2), mx.float32)
    for gain in gains or ():
        arguments.array("head_norm_rope", "a gain", gain, (head_dim,), mx.float32)
    threads, group = grid(T, H, K)
    rotated, kv = launch(
        KERNEL,
        # Without norms nobody reads a gain.
        [q, k, v, *(gains or (turns, turns)), arguments.constants(*eps), turns],
        template=(
            ("X", q.dtype),
            ("H", H),
            ("G", K),
            ("E", head_dim),
            ("PAIRS", -(-head_dim // 64)),
            ("NORM", gains is not None),
            ("NSG", SIMDGROUPS),
        ),
        grid=threads,
        threadgroup=group,
        output_shapes=[(H, T, head_dim), (2, K, T, head_dim)],
        output_dtypes=[mx.float32, mx.float32],
    )
    return rotated, kv


def twin(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    turns: mx.array,
    head_dim: int,
    gains: tuple[mx.array, mx.array] | None = None,
    eps: tuple[float, float] = (0.0, 0.0),
) -> list[Expected]:
    """The same in float64.

    A rotation adds two products: one is rounded with its sum, one before it. A norm brings its factor's roundings and
    two products. Both are counted on the terms without signs.
    """
    roundings = 2 if gains is None else 2 + FACTOR + 2
    queries, keys = (_by_head(x, head_dim) for x in (q, k))
    if gains is not None:
        queries, keys = (
            normed(mx.array(x.astype(np.float32)), gain, e)
            for x, gain, e in zip((queries, keys), gains, eps, strict=True)
        )
    values = _by_head(v, head_dim)
    rotated, rotated_bound = _turned(queries, wide(turns), roundings)
    turned, turned_bound = _turned(keys, wide(turns), roundings)
    return [
        Expected(rotated, rotated_bound),
        Expected(np.stack([turned, values]), np.stack([turned_bound, np.zeros_like(values)])),
    ]


def _heads(q: mx.array, k: mx.array, head_dim: int) -> tuple[int, int, int]:
    """T, H and K; whoever asks checks the shapes that follow from them."""
    if head_dim % 2 or head_dim < 8 or q.ndim != 2 or k.ndim != 2 or not q.shape[0]:
        raise ValueError(
            f"head_norm_rope: expected an even head_dim from 8 on and rows (T, H * E), "
            f"found {head_dim} and {arguments.described(q)}, {arguments.described(k)}"
        )
    return q.shape[0], max(q.shape[1] // head_dim, 1), max(k.shape[1] // head_dim, 1)


def _by_head(x: mx.array, head_dim: int) -> Floats:
    """(heads, T, E) from (T, heads * E)."""
    return wide(x).reshape(x.shape[0], -1, head_dim).transpose(1, 0, 2)


def _turned(x: Floats, turns: Floats, roundings: int) -> Expected:
    a, b = np.split(x, 2, axis=-1)
    c, s = turns[..., 0], turns[..., 1]
    value = np.concatenate([a * c - b * s, b * c + a * s], axis=-1)
    size = np.concatenate([np.abs(a * c) + np.abs(b * s), np.abs(b * c) + np.abs(a * s)], axis=-1)
    return Expected(value, roundings * EPSILON * size)
