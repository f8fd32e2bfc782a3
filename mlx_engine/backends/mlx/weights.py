"""Quantised matrices for MLX's own products: MLX's types, and GGUF's Q8_0, Q4_0 and Q4_K repacked in MLX's format.

In MLX's affine format, `weight = scale * quant + bias`, with unsigned quants. Q8_0 has `weight = d * q` with signed
bytes q. Flipping the sign bit of q gives the unsigned byte `q + 128`. So `scale = d` and `bias = -128 d` give the same
weights.

With float32 activations, scales and biases are float32: in float16, the bias of a scale above 511.75 would overflow,
and MLX would convert float16 scales and biases to float32 for every product. With float16 or bfloat16 activations,
scales and biases are rounded to the type of the activations, as in mlx-lm.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_engine.backends.mlx.device import kind
from mlx_engine.kernels.metal.formats import split_q4_0, split_q4_k, split_q8_0
from mlx_engine.kernels.metal.layout import unwritten
from mlx_engine.quant.floats import dequantize_bf16, dequantize_f16
from mlx_engine.quant.group_weight import split
from mlx_engine.quant.groups import GroupType
from mlx_engine.quant.weight import Weight

GROUP, BITS = 32, 8
# Maps types to the functions that split their blocks. Matrices of these types are repacked only for float16 and
# bfloat16 activations; Q8_0 is repacked for all activations (`reinterpret`).
AFFINE = {"Q4_0": split_q4_0, "Q4_K": split_q4_k}


class BlockMatrix(Protocol):
    """A quantised (N, K) matrix of an MLX backend; all other weights are `mx.array`s."""

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads."""

    def multiply(self, x: mx.array) -> mx.array:
        """Return `x @ matrix.T`, (T, N) from (T, K), of the type of x."""

    def rows(self, ids: mx.array) -> mx.array:
        """Return the rows `ids`, dequantised to float32 (T, K)."""


@dataclass(frozen=True, eq=False)
class GroupMatrix:
    """An (N, K) matrix in one of MLX's quantised formats.

    Attributes:
        wq: uint32 (N, K * bits / 32), the first quant in the lowest bits.
        scales: (N, K / group) of the type of activations; uint8 in the modes without biases.
        biases: (N, K / group) of the type of activations, or None.
        group: number of weights per scale.
        bits: number of bits per quant.
        mode: the name of the format, for `mx.quantized_matmul`.
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
        given, scales, biases = summed_in_float32(x, self.scales, self.biases)
        y = mx.quantized_matmul(given, self.wq, scales, biases, group_size=self.group, bits=self.bits, mode=self.mode)
        return y.astype(x.dtype)

    def rows(self, ids: mx.array) -> mx.array:
        scales, biases = widened(self.scales[ids]), None if self.biases is None else widened(self.biases[ids])
        return mx.dequantize(
            self.wq[ids], scales, biases, group_size=self.group, bits=self.bits, mode=self.mode, dtype=mx.float32
        )


def widened(x: mx.array) -> mx.array:
    """Return floats as float32, and uint8 scales (of the modes without biases) unchanged."""
    return x if x.dtype == mx.uint8 else x.astype(mx.float32)


def summed_in_float32(
    x: mx.array, scales: mx.array, biases: mx.array | None = None
) -> tuple[mx.array, mx.array, mx.array | None]:
    """Return the arguments of a product with a matrix; on the CPU, convert them to float32.

    MLX's GPU kernels always sum in float32. MLX's CPU kernels sum in the type of x: in bfloat16, the error is 2e-2.
    For a float matrix, the argument `scales` is the matrix itself, and `biases` is None.
    """
    if x.dtype == mx.float32 or kind() != "cpu":
        return x, scales, biases
    return widened(x), widened(scales), None if biases is None else widened(biases)


def reinterpret(weight: Weight, dtype: mx.Dtype = mx.float32) -> GroupMatrix | None:
    """Return a Q8_0 matrix in MLX's format, with scales and biases rounded to `dtype`.

    Return None if a scale or bias is not finite: products would differ from those of the Q8_0 weights.
    """
    split = split_q8_0(weight.data, (weight.shape[0], weight.shape[1]))
    scales, biases = (unwritten(split.ws.shape, np.float32) for _ in range(2))
    values = np.asarray(scales)
    values[...] = np.asarray(split.ws)
    if not np.isfinite(values).all():
        return None
    np.multiply(np.float32(-128), values, out=np.asarray(biases))
    return _rounded(GroupMatrix(split.wq, scales, biases), dtype)


def affine_matrix(weight: Weight, dtype: mx.Dtype) -> GroupMatrix | None:
    """Repack a matrix in MLX's affine format, with scales and biases rounded to `dtype`.

    Return None if `AFFINE` does not have the type of the matrix, or if a rounded scale or bias is not finite.
    """
    split = AFFINE.get(weight.type.name)
    if split is None:
        return None
    matrix = split(weight.data, (weight.shape[0], weight.shape[1]))
    scales, biases = matrix.scales_and_biases()
    return _rounded(GroupMatrix(matrix.wq, scales, biases, GROUP, matrix.layout.bits), dtype)


def _rounded(matrix: GroupMatrix, dtype: mx.Dtype) -> GroupMatrix | None:
    """Return a matrix with its float32 scales and biases rounded to `dtype`; None if one of them is then not finite."""
    if dtype == mx.float32:
        return matrix
    scales, biases = (part.astype(dtype) for part in (matrix.scales, cast(mx.array, matrix.biases)))
    if not bool((mx.isfinite(scales).all() & mx.isfinite(biases).all()).item()):
        return None
    return replace(matrix, scales=scales, biases=biases)


def group_matrix(weight: Weight, type_: GroupType, dtype: mx.Dtype = mx.float32) -> GroupMatrix:
    """Return a matrix of one of MLX's types. Scales and biases have type `dtype`; without biases, scales are uint8."""
    parts, n = split(weight, type_), weight.shape[0]
    wq = mx.array(np.ascontiguousarray(parts.quants).reshape(n, -1).view(np.uint32))
    scales = mx.array(_scales(parts.scales, type_).reshape(n, -1), dtype=dtype if type_.has_biases else mx.uint8)
    biases = None if parts.biases is None else mx.array(_scales(parts.biases, type_).reshape(n, -1), dtype=dtype)
    return GroupMatrix(wq, scales, biases, type_.block_size, type_.bits, type_.mode)


def _scales(stored: NDArray[np.uint8], type_: GroupType) -> NDArray[np.float32] | NDArray[np.uint8]:
    stored = np.ascontiguousarray(stored)
    if type_.scale == "F32":
        return stored.view("<f4")
    return {"F16": dequantize_f16, "BF16": dequantize_bf16}[type_.scale](stored) if type_.has_biases else stored
