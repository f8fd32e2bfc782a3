"""Random matrices of every stored type, for the test cases of kernels."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .. import blocks
from .formats import (
    DTYPES,
    GROUPS,
    KINDS,
    Q8_0Matrix,
    affine_layout,
    join_affine,
    split_q4_0,
    split_q4_k,
    split_q6_k,
    split_q8_0,
)
from .layout import AffineMatrix, StoredMatrix

_BLOCKS: dict[str, tuple[int, Callable[[NDArray[np.uint8], tuple[int, int]], StoredMatrix]]] = {
    "Q4_0": (32, split_q4_0),
    "Q4_K": (256, split_q4_k),
    "Q6_K": (256, split_q6_k),
}
# (bits, group, type of scales): for 4 and for 8 bits, every group size and every type of scales once.
AFFINE = ((4, 64, "F16"), (4, 32, "BF16"), (8, 64, "BF16"), (4, 128, "F32"), (8, 32, "F32"), (8, 128, "F16"))
TYPES = (*_BLOCKS, *(affine_layout(*of).name for of in AFFINE))


def matrix(rng: np.random.Generator, n_rows: int, n_columns: int) -> Q8_0Matrix:
    """Return random quants, including -128, with scales of both signs over three decades, some subnormal and some 0."""
    made = np.empty(n_rows * n_columns // 32, blocks.Q8_0)
    made["qs"] = rng.integers(-128, 128, made["qs"].shape)
    made["d"] = _scales(rng, len(made))
    return split_q8_0(made.view(np.uint8), (n_rows, n_columns))


def stored(rng: np.random.Generator, n_rows: int, n_columns: int, type_: str) -> StoredMatrix:
    """Return a matrix of Q8_0, Q4_0, Q4_K, Q6_K or an affine type, with random quants and scales."""
    shape = n_rows, n_columns
    if type_ == "Q8_0":
        return matrix(rng, n_rows, n_columns)
    if type_ in _BLOCKS:
        size, split = _BLOCKS[type_]
        kind = getattr(blocks, type_)
        made = rng.integers(0, 256, n_rows * n_columns // size * kind.itemsize, dtype=np.uint8).view(kind)
        for name in set(kind.names) & {"d", "dmin"}:
            made[name] = _scales(rng, len(made))
        return split(made.view(np.uint8), shape)
    bits, group, scale = next(of for of in product(KINDS, GROUPS, DTYPES) if affine_layout(*of).name == type_)
    quants = rng.integers(0, 256, n_rows * n_columns * bits // 8, dtype=np.uint8)
    n = n_rows * n_columns // group
    parts = [_bytes(_scales(rng, n).astype(np.float32), scale) for _ in range(2)]
    return join_affine(affine_layout(bits, group, scale), shape, quants, *parts)


def affine(rng: np.random.Generator, n_rows: int, n_columns: int, of: tuple[int, int], dtype: mx.Dtype) -> AffineMatrix:
    """Return a matrix in MLX's arrays; `of` is (bits, columns of a group), `dtype` the type of scales and biases."""
    bits, group = of
    wq = rng.integers(0, 2**32, (n_rows, n_columns * bits // 32), dtype=np.uint32)
    parts = (_scales(rng, n_rows * n_columns // group).reshape(n_rows, -1).astype(np.float32) for _ in range(2))
    scales, biases = (mx.array(part).astype(dtype) for part in parts)
    return AffineMatrix(mx.array(wq), scales, biases, group, bits)


def _scales(rng: np.random.Generator, n: int) -> NDArray[np.float64]:
    scales = rng.standard_normal(n) * 10.0 ** rng.integers(-4, -1, n)
    scales[rng.random(n) < 0.02] = 0
    return scales


def _bytes(values: NDArray[np.float32], scale: str) -> NDArray[np.uint8]:
    if scale == "BF16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return values.astype({"F16": np.float16, "F32": np.float32}[scale]).view(np.uint8)
