"""What `metal` keeps and hands on in the shape that its kernels have: Q8_0 matrices, and new keys and values.

A matrix is split once, when it is loaded, and never expanded. Its slow twin, MLX's own product, reads the same codes;
scales as MLX wants them are made for each product and dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from kernels.metal.layout import Q8_0Matrix, split_q8_0
from mlx_engine.backends.mlx_weights import BITS, GROUP
from mlx_engine.quant.weight import Weight

if TYPE_CHECKING:
    from mlx_engine.backends.metal_kernels import Kernels


@dataclass(frozen=True, eq=False)
class SplitMatrix:
    """An (N, K) Q8_0 matrix, and the kernels that multiply with it.

    Attributes:
        matrix: codes and scales; whoever shares the matrix shares these.
        kernels: asked first; MLX's operations do what they refuse.
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
        """`x @ matrix.T`, (T, N) from float32 (T, K)."""
        y = self.kernels.multiply(x, self)
        return affine_multiply(x, self.matrix) if y is None else y

    def rows(self, ids: mx.array) -> mx.array:
        """float32 (T, K): the rows `ids`, these alone expanded."""
        rows = self.kernels.rows(self, ids)
        return affine_rows(self.matrix, ids) if rows is None else rows


def split(weight: Weight, kernels: Kernels) -> SplitMatrix | None:
    """A Q8_0 matrix for the kernels; None where a scale is infinite or NaN, which the order of products would show."""
    matrix = split_q8_0(weight.data, (weight.shape[0], weight.shape[1]))
    return SplitMatrix(matrix, kernels) if np.isfinite(np.asarray(matrix.ws)).all() else None


def affine_multiply(x: mx.array, matrix: Q8_0Matrix) -> mx.array:
    """The twin of the kernel `matvec`: `mx.quantized_matmul`."""
    return mx.quantized_matmul(x, matrix.wq, *_affine(matrix.ws), group_size=GROUP, bits=BITS)


def affine_rows(matrix: Q8_0Matrix, ids: mx.array) -> mx.array:
    """The twin of the kernel `embed_rows`: `mx.dequantize`."""
    return mx.dequantize(matrix.wq[ids], *_affine(matrix.ws[ids]), group_size=GROUP, bits=BITS)


def _affine(ws: mx.array) -> tuple[mx.array, mx.array]:
    """Scales and biases in float32, where no bias of a float16 scale overflows."""
    scales = ws.astype(mx.float32)
    return scales, -128 * scales


@dataclass(frozen=True, eq=False)
class Half:
    """The keys, or the values, of an array (2, K, T, E) that holds both: what the seam calls (T, K, E).

    Keys and values travel apart through a model and its cache, and are written to their store by one update.
    """

    both: mx.array
    index: int

    def __len__(self) -> int:
        return int(self.both.shape[2])

    @property
    def shape(self) -> tuple[int, int, int]:
        """(T, K, E)."""
        _, K, T, E = self.both.shape
        return T, K, E

    @property
    def nbytes(self) -> int:
        """Of this half."""
        return int(self.both.nbytes) // 2

    def array(self) -> mx.array:
        """(T, K, E), a view."""
        return self.both[self.index : self.index + 1].squeeze(0).transpose(1, 0, 2)


def joined(k: object, v: object) -> mx.array | None:
    """The array (2, K, T, E) that k and v are the halves of; None if they are not."""
    if isinstance(k, Half) and isinstance(v, Half) and k.both is v.both and (k.index, v.index) == (0, 1):
        return k.both
    return None
