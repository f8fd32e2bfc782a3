"""Kernels of mlx-mast3r, compared with its own operations and with NumPy."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from tests.collection.case import Checkout, Results, case, normal

MAST3R = "Aedelon/mlx-mast3r"


@case(MAST3R)
def upsample_in_fours(checkout: Checkout) -> Results:
    bilinear, x = checkout.module("mlx_mast3r.kernels.bilinear"), normal()(2, 5, 7, 8)
    return bilinear.bilinear_upsample_2x_fused(x), bilinear._bilinear_upsample_2x_reference(x)


@case(MAST3R)
def upsample_one_by_one(checkout: Checkout) -> Results:
    bilinear, x = checkout.module("mlx_mast3r.kernels.bilinear"), normal()(1, 4, 3, 5)
    return bilinear.bilinear_upsample_2x_fused(x), bilinear._bilinear_upsample_2x_reference(x)


def sampled(checkout: Checkout, channels: int) -> Results:
    """Sample between four pixels; those outside are 0."""
    height, width = 5, 6
    x = normal()(2, height, width, channels)
    grid = np.random.default_rng(1).uniform(-1.2, 1.2, (2, 4, 9, 2)).astype(np.float32)
    values = np.pad(np.array(x), ((0, 0), (1, 1), (1, 1), (0, 0)))
    at = (grid + 1) * (np.array([width, height], np.float32) - 1) / 2
    low = np.floor(at).astype(int)
    expected = np.zeros((2, 4, 9, channels))
    for dx in (0, 1):
        for dy in (0, 1):
            corner = low + np.array([dx, dy])
            weight = np.prod(1 - np.abs(at - corner), axis=-1, keepdims=True)
            column, row = (np.clip(corner[..., i] + 1, 0, n + 1) for i, n in ((0, width), (1, height)))
            expected += weight * values[np.arange(2)[:, None, None], row, column]
    return checkout.module("mlx_mast3r.kernels.grid_sample").grid_sample(x, mx.array(grid)), expected


@case(MAST3R)
def grid_sample_in_fours(checkout: Checkout) -> Results:
    return sampled(checkout, 8)


@case(MAST3R)
def grid_sample_one_by_one(checkout: Checkout) -> Results:
    return sampled(checkout, 3)


def turned(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Rotate the first half of every head by the row and the second half by the column."""
    half, every = x.shape[-1] // 2, []
    for i in (0, 1):
        part, c, s = x[..., i * half : (i + 1) * half], cos[positions[:, i]], sin[positions[:, i]]
        first, second = np.split(part, 2, axis=-1)
        every.append(part * c + np.concatenate([-second, first], axis=-1) * s)
    return np.concatenate(every, axis=-1)


def rotary(checkout: Checkout) -> tuple[object, list[mx.array]]:
    array, rng, tokens, d = normal(), np.random.default_rng(1), 6, 16
    positions = mx.array(rng.integers(0, 9, (tokens, 2)).astype(np.int32))
    given = [array(2, 3, tokens, d), array(2, 3, tokens, d), array(9, d // 2), array(9, d // 2), positions]
    return checkout.module("mlx_mast3r.kernels.rope2d"), given


@case(MAST3R)
def rope_of_queries_and_keys(checkout: Checkout) -> Results:
    rope, given = rotary(checkout)
    q, k, *tables = map(np.array, given)
    return rope.apply_rope_2d_fused(*given), (turned(q, *tables), turned(k, *tables))  # type: ignore[attr-defined]


@case(MAST3R)
def rope_one_by_one(checkout: Checkout) -> Results:
    rope, (q, k, *tables) = rotary(checkout)
    kernel = rope._get_rope2d_kernel(vectorized=False)  # type: ignore[attr-defined]
    found = kernel(
        inputs=[q, k, *tables], template=[("T", mx.float32)], grid=(q.size, 1, 1), threadgroup=(256, 1, 1),
        output_shapes=[q.shape, k.shape], output_dtypes=[mx.float32] * 2,
    )  # fmt: skip
    tables = list(map(np.array, tables))
    return found, (turned(np.array(q), *tables), turned(np.array(k), *tables))


@case(MAST3R)
def rope_single(checkout: Checkout) -> Results:
    rope, (q, _, *tables) = rotary(checkout)
    found = rope.apply_rope_2d_single(q, *tables)  # type: ignore[attr-defined]
    return found, turned(np.array(q), *map(np.array, tables))
