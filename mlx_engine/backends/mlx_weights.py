"""Q8_0 in MLX's affine format: the weights are repacked without changing their values.

In MLX's affine format `weight = scale * quant + bias`, with unsigned quants. A signed byte q with its sign bit flipped
is `q + 128`, so `scale = d` and `bias = -128 d` give `d * q`. Scales and biases are float32: in float16 the bias of a
scale above 511.75 would overflow, and MLX would cast scales of a type other than the activations' for every product.
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
    """A quantised (N, K) matrix of an MLX backend; all other weights are `mx.array`s."""

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads."""

    def multiply(self, x: mx.array) -> mx.array:
        """Return `x @ matrix.T`, (T, N) from float32 (T, K)."""

    def rows(self, ids: mx.array) -> mx.array:
        """Return the rows `ids`, dequantised to float32 (T, K)."""


@dataclass(frozen=True, eq=False)
class AffineMatrix:
    """An (N, K) matrix in MLX's affine format, 8 bits and groups of 32: 40 bytes for every 32 weights.

    Attributes:
        wq: uint32 (N, K / 4), four 8-bit quants each, the first in the lowest byte.
        scales: float32 (N, K / 32).
        biases: float32 (N, K / 32).
    """

    wq: mx.array
    scales: mx.array
    biases: mx.array

    @property
    def shape(self) -> tuple[int, int]:
        return self.wq.shape[0], 4 * self.wq.shape[1]

    @property
    def nbytes(self) -> int:
        return int(self.wq.nbytes + self.scales.nbytes + self.biases.nbytes)

    def multiply(self, x: mx.array) -> mx.array:
        return mx.quantized_matmul(x, self.wq, self.scales, self.biases, group_size=GROUP, bits=BITS)

    def rows(self, ids: mx.array) -> mx.array:
        return mx.dequantize(self.wq[ids], self.scales[ids], self.biases[ids], group_size=GROUP, bits=BITS)


def reinterpret(weight: Weight) -> AffineMatrix | None:
    """Return a Q8_0 matrix in MLX's format; None if a scale is infinite or NaN, where repacking is not exact."""
    split = split_q8_0(weight.data, (weight.shape[0], weight.shape[1]))
    scales = np.asarray(split.ws).astype(np.float32)
    if not np.isfinite(scales).all():
        return None
    return AffineMatrix(split.wq, mx.array(scales), mx.array(np.float32(-128) * scales))
