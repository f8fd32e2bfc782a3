"""The `metal` backend's own data types: split Q8_0 matrices, and new keys and values in one array.

A matrix is split once, when it is loaded, and never dequantised. The fallback, MLX's own product, reads the same
quants; scales in MLX's format are made for each product and dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from kernels.metal.layout import Q8_0Matrix, split_q8_0
from mlx_engine.backends.mlx_weights import BITS, GROUP, GroupMatrix
from mlx_engine.quant.weight import Weight

if TYPE_CHECKING:
    from mlx_engine.backends.metal_kernels import Kernels


@dataclass(frozen=True, eq=False)
class SplitMatrix:
    """An (N, K) Q8_0 matrix, and the kernels that multiply with it.

    Attributes:
        matrix: quants and scales; a tied head and the embedding table share them.
        kernels: the kernels; if one is refused, MLX operations replace it.
        shape: (N, K).
    """

    matrix: Q8_0Matrix
    kernels: Kernels = field(repr=False)
    shape: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", self.matrix.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads."""
        return self.matrix.nbytes

    def multiply(self, x: mx.array) -> mx.array:
        """Return `x @ matrix.T`, (T, N) from float32 (T, K)."""
        y = self.kernels.multiply(x, self)
        return affine_multiply(x, self.matrix) if y is None else y

    def rows(self, ids: mx.array) -> mx.array:
        """Return the rows `ids`, dequantised to float32 (T, K)."""
        rows = self.kernels.rows(self, ids)
        return affine_rows(self.matrix, ids) if rows is None else rows


def split(weight: Weight, kernels: Kernels) -> SplitMatrix | None:
    """Return a split Q8_0 matrix; None if a scale is infinite or NaN, where the order of products would matter."""
    matrix = split_q8_0(weight.data, (weight.shape[0], weight.shape[1]))
    return SplitMatrix(matrix, kernels) if np.isfinite(np.asarray(matrix.ws)).all() else None


def affine(weight: SplitMatrix | mx.array) -> GroupMatrix | mx.array:
    """Return a matrix in MLX's affine format, without changing its values; a float matrix as it is."""
    return GroupMatrix(weight.matrix.wq, *_affine(weight.matrix.ws)) if isinstance(weight, SplitMatrix) else weight


def affine_multiply(x: mx.array, matrix: Q8_0Matrix) -> mx.array:
    """Return the product of `matvec`, by `mx.quantized_matmul`."""
    return mx.quantized_matmul(x, matrix.wq, *_affine(matrix.ws), group_size=GROUP, bits=BITS)


def affine_rows(matrix: Q8_0Matrix, ids: mx.array) -> mx.array:
    """Return the rows of `embed_rows`, by `mx.dequantize`."""
    return mx.dequantize(matrix.wq[ids], *_affine(matrix.ws[ids]), group_size=GROUP, bits=BITS)


def _affine(ws: mx.array) -> tuple[mx.array, mx.array]:
    """Return scales and biases in float32; in float16 a bias could overflow."""
    scales = ws.astype(mx.float32)
    return scales, -128 * scales


@dataclass(frozen=True, eq=False)
class Half:
    """The keys or the values of an array (2, G, T, E) that holds both; to models an array (T, G, E).

    Models pass keys and values as two arrays. With this type `kv_write` can still write both in one update.
    """

    both: mx.array
    index: int

    def __len__(self) -> int:
        return int(self.both.shape[2])

    @property
    def shape(self) -> tuple[int, int, int]:
        """(T, G, E)."""
        _, G, T, E = self.both.shape
        return T, G, E

    @property
    def nbytes(self) -> int:
        """Bytes of this half."""
        return int(self.both.nbytes) // 2

    def array(self) -> mx.array:
        """Return a view (T, G, E)."""
        return self.both[self.index : self.index + 1].squeeze(0).transpose(1, 0, 2)


def joined(k: object, v: object) -> mx.array | None:
    """Return the array (2, G, T, E) of which k and v are the halves; None if there is no such array."""
    if isinstance(k, Half) and isinstance(v, Half) and k.both is v.both and (k.index, v.index) == (0, 1):
        return k.both
    return None
