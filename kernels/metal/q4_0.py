"""Q4_0 in GPU memory: quants of four bits, and float16 scales. `weight = d * (q - 8)`."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .. import blocks
from . import layout
from .layout import BLOCK, Layout, StoredMatrix, blocks_of, packed


def _affine(ws: mx.array) -> tuple[mx.array, mx.array]:
    scales = ws.astype(mx.float32)
    return scales, -8 * scales


LAYOUT = Layout("Q4_0", layout.Q4_0, group=BLOCK, bits=4, entry=1, dtype=mx.float16, affine=_affine)


def split_q4_0(raw: NDArray[np.uint8], shape: tuple[int, int]) -> StoredMatrix:
    """Repack the Q4_0 blocks of a file, row after row, for GPU memory; no weight changes.

    Args:
        raw: N * K / 32 * 18 bytes, of any shape; may be a read-only view of a mapped file.
        shape: (N, K).

    Raises:
        ValueError: the bytes are not those of such a matrix.
    """
    found = blocks_of("split_q4_0", raw, shape, blocks.Q4_0, BLOCK)
    # The low halves of 16 bytes have 16 quants, and the high halves the next 16.
    quants = np.concatenate([found["qs"] & np.uint8(15), found["qs"] >> np.uint8(4)], axis=-1)
    scales = np.ascontiguousarray(found["d"])
    return StoredMatrix(LAYOUT, mx.array(packed(quants.reshape(shape), 4)), mx.array(scales))
