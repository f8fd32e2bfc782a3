"""Q6_K in GPU memory: quants of six bits, and for 256 weights a float16 and 16 scales of a byte.

`weight = (d * scale) * (q - 32)`; 16 weights share a scale. Their quants take three words of uint32: two with the low
four bits, one with the high two. MLX's affine format has no groups of 16, so the fallback multiplies floats.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .. import blocks
from . import layout
from .layout import Layout, StoredMatrix, blocks_of, packed

SUPERBLOCK, HALVES = 256, 9


def _values(wq: mx.array, ws: mx.array) -> mx.array:
    n = len(wq)
    words = wq.reshape(n, -1, 3)
    low = (words[..., :2, None] >> (4 * mx.arange(8, dtype=mx.uint32))) & 15
    high = (words[..., 2:] >> (2 * mx.arange(16, dtype=mx.uint32))) & 3
    quants = (low.reshape(high.shape) | high << 4).astype(mx.float32) - 32
    entries = ws.reshape(n, -1, HALVES)
    bytes_ = mx.contiguous(entries[..., 1:]).view(mx.int8)
    scales = entries[..., :1].astype(mx.float32) * bytes_.astype(mx.float32)
    return (scales.reshape(n, -1, 1) * quants).reshape(n, -1)


LAYOUT = Layout("Q6_K", layout.Q6_K, group=SUPERBLOCK, bits=6, entry=HALVES, dtype=mx.float16, values=_values)


def split_q6_k(raw: NDArray[np.uint8], shape: tuple[int, int]) -> StoredMatrix:
    """Repack the Q6_K blocks of a file, row after row, for GPU memory; no weight changes.

    Args:
        raw: N * K / 256 * 210 bytes, of any shape; may be a read-only view of a mapped file.
        shape: (N, K).

    Raises:
        ValueError: the bytes are not those of such a matrix.
    """
    found = blocks_of("split_q6_k", raw, shape, blocks.Q6_K, SUPERBLOCK)
    # Each half of a block: 64 bytes have the low bits of 128 quants, the first 64 in their low halves; 32 bytes have
    # the high bits, the first 32 in their lowest bits.
    ql, qh = found["ql"].reshape(*found.shape, 2, 1, 64), found["qh"].reshape(*found.shape, 2, 1, 32)
    low = np.concatenate([ql & np.uint8(15), ql >> np.uint8(4)], axis=-2)
    high = np.concatenate([qh >> np.uint8(shift) & np.uint8(3) for shift in (0, 2, 4, 6)], axis=-2)
    words = [packed(part.reshape(shape[0], -1, 16), bits) for part, bits in ((low, 4), (high, 2))]
    scales = np.concatenate([found["d"][..., None], found["scales"].view(np.float16)], axis=-1)
    quants = np.concatenate(words, axis=-1).reshape(shape[0], -1)
    return StoredMatrix(LAYOUT, mx.array(quants), mx.array(scales.reshape(shape[0], -1)))
