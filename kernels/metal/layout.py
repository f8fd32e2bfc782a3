"""How a Q8_0 matrix lies in GPU memory: codes and scales apart, each aligned.

In a file, blocks of 34 bytes follow each other; they lie at odd addresses, which no 16-byte load can read. Split, a
matrix takes the same memory, and a SIMD-group reads 512 codes of a row in one go.

Codes are stored with their sign bit flipped (`q ^ 0x80`), which makes them unsigned: 0 to 255 for -128 to 127. The
same two arrays are then the weights and scales of an affine matrix of MLX with the bias `-128 * d`, because
`d * (q + 128) - 128 * d = d * q`: exact, and `mx.quantized_matmul` can be given what the kernels are given. A kernel
flips four signs at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from kernels.blocks import Q8_0

# Weights of a block, which share a scale.
BLOCK = 32
# The largest scale whose 128-fold is a float16.
LARGEST_AFFINE_SCALE = 511.75


@dataclass(frozen=True, eq=False)
class Q8_0Matrix:  # noqa: N801 - the format's name
    """An (N, K) matrix: `weight[n, k] = ws[n, k // 32] * code`, four codes in each number of `wq`.

    Attributes:
        wq: uint32 (N, K / 4); byte k % 4 of a number, counted from the lowest, is `code[n, k] ^ 0x80`.
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
        """Bytes in memory, 34 for 32 weights: what a product with the whole matrix reads."""
        return self.wq.nbytes + self.ws.nbytes

    def biases(self) -> mx.array:
        """`-128 * ws`, float16 (N, K / 32): what `mx.quantized_matmul` needs beside `wq` and `ws`.

        Raises:
            ValueError: a scale is so large that its bias is no float16.
        """
        largest = float(np.abs(np.array(self.ws)).max())
        if not largest <= LARGEST_AFFINE_SCALE:
            raise ValueError(f"biases: expected scales up to {LARGEST_AFFINE_SCALE}, found {largest}")
        return self.ws * mx.array(-128, dtype=mx.float16)


def split_q8_0(raw: NDArray[np.uint8], shape: tuple[int, int]) -> Q8_0Matrix:
    """Q8_0 blocks as they lie in a file, row after row, as a matrix in GPU memory; no weight changes.

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
    # Of a view MLX would keep all that lies between its elements: every code once more.
    scales = np.ascontiguousarray(blocks["d"])
    return Q8_0Matrix(mx.array(codes.reshape(n, k).view(np.uint32)), mx.array(scales))


def joined(matrix: Q8_0Matrix) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """The codes (N, K) and scales (N, K / 32) of a matrix, in NumPy: what the twins of the kernels read."""
    codes = np.array(matrix.wq).view(np.uint8) ^ np.uint8(0x80)
    return codes.view(np.int8), np.array(matrix.ws)


def expanded(matrix: Q8_0Matrix) -> NDArray[np.float64]:
    """The weights (N, K), which float64 holds exactly."""
    codes, scales = joined(matrix)
    return codes.astype(np.float64) * np.repeat(scales.astype(np.float64), BLOCK, axis=1)


def in_device_memory(array: mx.array) -> mx.array:
    """The same numbers, at least eight.

    MLX hands smaller arrays to a kernel in another address space, where functions that take pointers into device
    memory cannot follow. Matrices of models are never that small; this costs them nothing.
    """
    return array if array.size >= 8 else mx.pad(array.reshape(-1), (0, 8 - array.size))


def _described(array: mx.array) -> str:
    return f"{array.dtype} {tuple(array.shape)}"
