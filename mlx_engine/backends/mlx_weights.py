"""Q8_0 as MLX multiplies it: the stored numbers reinterpreted, none of them rounded.

MLX's affine format says `weight = scale * code + bias` with unsigned codes. A signed byte q with its sign bit flipped
is `q + 128`, so `scale = d` and `bias = -128 d` say `d * q`. Both are float32: in float16 the bias of a scale above
511.75 would overflow, and scales of another type than the vectors' would be cast again for every product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import numpy as np

from kernels.metal.layout import split_q8_0
from mlx_engine.quant.weight import Weight

GROUP, BITS = 32, 8


class BlockMatrix(Protocol):
    """An (N, K) matrix in blocks, as an MLX backend holds it; any other weight is an `mx.array`."""

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads."""

    def multiply(self, x: mx.array) -> mx.array:
        """`x @ matrix.T`, (T, N) from float32 (T, K)."""

    def rows(self, ids: mx.array) -> mx.array:
        """float32 (T, K): the rows `ids`, these alone expanded."""


@dataclass(frozen=True, eq=False)
class AffineMatrix:
    """An (N, K) matrix in MLX's affine format, 8 bits and groups of 32: 40 bytes for every 32 weights.

    Attributes:
        wq: uint32 (N, K / 4), four codes each, the first in the lowest byte.
        scales: float32 (N, K / 32).
        biases: float32 (N, K / 32).
    """

    wq: mx.array
    scales: mx.array
    biases: mx.array

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.wq.shape[0], 4 * self.wq.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads."""
        return int(self.wq.nbytes + self.scales.nbytes + self.biases.nbytes)

    def multiply(self, x: mx.array) -> mx.array:
        """`mx.quantized_matmul`."""
        return mx.quantized_matmul(x, self.wq, self.scales, self.biases, group_size=GROUP, bits=BITS)

    def rows(self, ids: mx.array) -> mx.array:
        """`mx.dequantize`."""
        return mx.dequantize(self.wq[ids], self.scales[ids], self.biases[ids], group_size=GROUP, bits=BITS)


def reinterpret(weight: Weight) -> AffineMatrix | None:
    """A Q8_0 matrix in MLX's format; None where a scale is infinite or NaN, for which `-128 d` says something else."""
    split = split_q8_0(weight.data, (weight.shape[0], weight.shape[1]))
    scales = np.asarray(split.ws).astype(np.float32)
    if not np.isfinite(scales).all():
        return None
    return AffineMatrix(split.wq, mx.array(scales), mx.array(np.float32(-128) * scales))
