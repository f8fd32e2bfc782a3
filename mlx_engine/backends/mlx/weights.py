"""Quantised matrices for MLX's own products: MLX's types, and Q8_0 repacked without changing its values.

In MLX's affine format `weight = scale * quant + bias`, with unsigned quants. A signed byte q with its sign bit flipped
is `q + 128`, so `scale = d` and `bias = -128 d` give `d * q`. Scales and biases are float32: in float16 the bias of a
scale above 511.75 would overflow, and MLX would cast scales of a type other than the activations' for every product,
which moves 20 bytes per group where float32 scales and biases have 8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_engine.kernels.metal.formats import split_q8_0
from mlx_engine.kernels.metal.layout import unwritten
from mlx_engine.quant.floats import BF16, F16
from mlx_engine.quant.group_weight import split
from mlx_engine.quant.groups import GroupType
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
class GroupMatrix:
    """An (N, K) matrix in one of MLX's quantised formats.

    Attributes:
        wq: uint32 (N, K * bits / 32), the first quant in the lowest bits.
        scales: float32 (N, K / group); uint8 in the modes without biases.
        biases: float32 (N, K / group), or None.
        group, bits, mode: the arguments of `mx.quantized_matmul`.
    """

    wq: mx.array
    scales: mx.array
    biases: mx.array | None
    group: int = GROUP
    bits: int = BITS
    mode: str = "affine"

    @property
    def shape(self) -> tuple[int, int]:
        return self.wq.shape[0], self.group * self.scales.shape[1]

    @property
    def nbytes(self) -> int:
        return int(self.wq.nbytes + self.scales.nbytes + (0 if self.biases is None else self.biases.nbytes))

    def multiply(self, x: mx.array) -> mx.array:
        return mx.quantized_matmul(
            x, self.wq, self.scales, self.biases, group_size=self.group, bits=self.bits, mode=self.mode
        )

    def rows(self, ids: mx.array) -> mx.array:
        biases = None if self.biases is None else self.biases[ids]
        return mx.dequantize(
            self.wq[ids], self.scales[ids], biases, group_size=self.group, bits=self.bits, mode=self.mode,
            dtype=mx.float32,
        )  # fmt: skip


def reinterpret(weight: Weight) -> GroupMatrix | None:
    """Return a Q8_0 matrix in MLX's format; None if a scale is infinite or NaN, where repacking is not exact."""
    split = split_q8_0(weight.data, (weight.shape[0], weight.shape[1]))
    scales, biases = (unwritten(split.ws.shape, np.float32) for _ in range(2))
    values = np.asarray(scales)
    values[...] = np.asarray(split.ws)
    if not np.isfinite(values).all():
        return None
    np.multiply(np.float32(-128), values, out=np.asarray(biases))
    return GroupMatrix(split.wq, scales, biases)


def group_matrix(weight: Weight, type_: GroupType) -> GroupMatrix:
    """Return a matrix of one of MLX's types, with scales and biases widened to float32."""
    parts, n = split(weight, type_), weight.shape[0]
    wq = mx.array(np.ascontiguousarray(parts.quants).reshape(n, -1).view(np.uint32))
    scales = mx.array(_scales(parts.scales, type_).reshape(n, -1))
    biases = None if parts.biases is None else mx.array(_scales(parts.biases, type_).reshape(n, -1))
    return GroupMatrix(wq, scales, biases, type_.block_size, type_.bits, type_.mode)


def _scales(stored: NDArray[np.uint8], type_: GroupType) -> NDArray[np.float32] | NDArray[np.uint8]:
    stored = np.ascontiguousarray(stored)
    if type_.scale == "F32":
        return stored.view("<f4")
    return {"F16": F16.dequantize, "BF16": BF16.dequantize}[type_.scale](stored) if type_.has_biases else stored
