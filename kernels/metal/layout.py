"""The layout of a Q8_0 matrix in GPU memory: quants and scales in separate, aligned arrays.

In a file, blocks of 34 bytes are contiguous and therefore not aligned for 16-byte loads. Split, a matrix takes the same
memory, and a SIMD-group reads 512 quants of a row at once.

Quants are stored with their sign bit flipped (`q ^ 0x80`), which makes them unsigned: 0 to 255 for -128 to 127. The
same two arrays are then also the weights and scales of MLX's affine format with the bias `-128 * d`, because `d * (q +
128) - 128 * d = d * q` exactly: `mx.quantized_matmul` takes the same arrays. A kernel flips four sign bits with one
operation.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from kernels.blocks import Q8_0

# Weights of a block, which share a scale.
BLOCK = 32
# The largest scale d for which 128 d is a float16.
LARGEST_AFFINE_SCALE = 511.75


@dataclass(frozen=True, eq=False)
class Q8_0Matrix:  # noqa: N801 - the format's name
    """An (N, K) matrix: `weight[n, k] = ws[n, k // 32] * quant`, four quants in each uint32 of `wq`.

    Attributes:
        wq: uint32 (N, K / 4); byte k % 4, counted from the lowest, is `quant[n, k] ^ 0x80`.
        ws: float16 (N, K / 32).

    Raises:
        ValueError: the two arrays do not belong together.
    """

    wq: mx.array
    ws: mx.array

    def __post_init__(self) -> None:
        if self.wq.dtype != mx.uint32 or self.ws.dtype != mx.float16 or self.wq.ndim != 2 or self.ws.ndim != 2:
            raise ValueError(
                f"Q8_0 matrix: expected uint32 codes (N, K / 4) and float16 scales (N, K / 32), "
                f"found {_described(self.wq)} and {_described(self.ws)}"
            )
        n, k = self.shape
        if self.ws.shape != (n, k // BLOCK) or k % BLOCK or n < 1 or k < 1:
            raise ValueError(
                f"Q8_0 matrix: expected N >= 1, K a multiple of {BLOCK}, and one scale per {BLOCK} codes, "
                f"found {n} x {k} codes and scales {tuple(self.ws.shape)}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.wq.shape[0], 4 * self.wq.shape[1]

    @property
    def nbytes(self) -> int:
        """The bytes of the matrix, 34 for 32 weights, all of which a product reads."""
        return self.wq.nbytes + self.ws.nbytes

    def biases(self) -> mx.array:
        """Return `-128 * ws`, float16 (N, K / 32), which `mx.quantized_matmul` needs besides `wq` and `ws`.

        Raises:
            ValueError: a scale is so large that its bias is no float16.
        """
        largest = float(np.abs(np.array(self.ws)).max())
        if not largest <= LARGEST_AFFINE_SCALE:
            raise ValueError(f"biases: expected scales up to {LARGEST_AFFINE_SCALE}, found {largest}")
        return self.ws * mx.array(-128, dtype=mx.float16)


def split_q8_0(raw: NDArray[np.uint8], shape: tuple[int, int]) -> Q8_0Matrix:
    """Repack the Q8_0 blocks of a file, row after row, for GPU memory; no weight changes.

    Args:
        raw: N * K / 32 * 34 bytes, of any shape; may be a read-only view of a mapped file.
        shape: (N, K).

    Raises:
        ValueError: the bytes are not those of such a matrix.
    """
    n, k = shape
    n_bytes = n * k // BLOCK * Q8_0.itemsize
    if raw.dtype != np.uint8 or raw.size != n_bytes or k % BLOCK or n < 1 or k < 1:
        raise ValueError(
            f"split_q8_0: expected {n_bytes:,} bytes for {n} rows of {k} weights, a multiple of {BLOCK}, "
            f"found {raw.size:,} of type {raw.dtype}"
        )
    blocks = np.ascontiguousarray(raw).reshape(-1).view(Q8_0).reshape(n, k // BLOCK)
    codes = blocks["qs"].view(np.uint8) ^ np.uint8(0x80)
    # MLX would keep the memory between the elements of a view: a second copy of all quants.
    scales = np.ascontiguousarray(blocks["d"])
    return Q8_0Matrix(mx.array(codes.reshape(n, k).view(np.uint32)), mx.array(scales))


def joined(matrix: Q8_0Matrix) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """Return the quants (N, K) and scales (N, K / 32) of a matrix in NumPy, for the twins of kernels."""
    codes = np.array(matrix.wq).view(np.uint8) ^ np.uint8(0x80)
    return codes.view(np.int8), np.array(matrix.ws)


def expanded(matrix: Q8_0Matrix) -> NDArray[np.float64]:
    """Return the weights (N, K) in float64, exactly."""
    codes, scales = joined(matrix)
    return codes.astype(np.float64) * np.repeat(scales.astype(np.float64), BLOCK, axis=1)


def in_device_memory(array: mx.array) -> mx.array:
    """Return the array, padded to eight elements if it has fewer.

    MLX passes smaller arrays in the address space `constant`, which functions with pointers to `device` memory do not
    accept. Matrices of models are never so small.
    """
    return array if array.size >= 8 else mx.pad(array.reshape(-1), (0, 8 - array.size))


def _described(array: mx.array) -> str:
    return f"{array.dtype} {tuple(array.shape)}"
