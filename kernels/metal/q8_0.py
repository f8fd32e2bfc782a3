"""Q8_0 in GPU memory: bytes with their sign bit flipped, and float16 scales.

Flipped (`q ^ 0x80`), quants are unsigned: 0 to 255 for -128 to 127. The same two arrays are then also the weights and
scales of MLX's affine format with the bias `-128 * d`, because `d * (q + 128) - 128 * d = d * q` exactly. A kernel
flips four sign bits with one operation.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .. import blocks
from . import layout
from .layout import BLOCK, Layout, StoredMatrix, blocks_of, unwritten

# The largest scale d for which 128 d is a float16.
LARGEST_AFFINE_SCALE = 511.75


def _affine(ws: mx.array) -> tuple[mx.array, mx.array]:
    """In float32; in float16 a bias could overflow."""
    scales = ws.astype(mx.float32)
    return scales, -128 * scales


LAYOUT = Layout("Q8_0", layout.Q8_0, group=BLOCK, bits=8, entry=1, dtype=mx.float16, affine=_affine)


class Q8_0Matrix(StoredMatrix):  # noqa: N801 - the format's name
    """An (N, K) matrix: `weight[n, k] = ws[n, k // 32] * quant`, four quants in each uint32 of `wq`.

    Attributes:
        wq: uint32 (N, K / 4); byte k % 4, counted from the lowest, is `quant[n, k] ^ 0x80`.
        ws: float16 (N, K / 32).

    Raises:
        ValueError: the two arrays do not belong together.
    """

    def __init__(self, wq: mx.array, ws: mx.array) -> None:
        super().__init__(LAYOUT, wq, ws)

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
    found = blocks_of("split_q8_0", raw, shape, blocks.Q8_0, BLOCK)
    quants = found["qs"].view(np.uint8)
    wq = unwritten((shape[0], shape[1] // 4), np.uint32)
    np.bitwise_xor(quants, np.uint8(0x80), out=np.asarray(wq).view(np.uint8).reshape(quants.shape))
    # MLX would keep the memory between the elements of a view: a second copy of all quants.
    scales = np.ascontiguousarray(found["d"])
    return Q8_0Matrix(wq, mx.array(scales))


def joined(matrix: Q8_0Matrix) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """Return the quants (N, K) and scales (N, K / 32) of a matrix in NumPy, for the twins of kernels."""
    codes = np.array(matrix.wq).view(np.uint8) ^ np.uint8(0x80)
    return codes.view(np.int8), np.array(matrix.ws)
