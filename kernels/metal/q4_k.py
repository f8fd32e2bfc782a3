"""Q4_K in GPU memory: quants of four bits, and the 16 bytes of scales that a file has for 256 weights.

`weight = (d * scale) * q - dmin * minimum`; 32 weights share a scale and a minimum of six bits each.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .. import blocks
from . import layout
from .layout import Layout, StoredMatrix, blocks_of, packed

SUPERBLOCK, WORDS = 256, 4


def _affine(ws: mx.array) -> tuple[mx.array, mx.array]:
    """Return the scales and biases of 32 weights, exact in float32."""
    words = ws.reshape(len(ws), -1, WORDS)
    factors = mx.contiguous(words[..., :1]).view(mx.float16).astype(mx.float32)
    packed_scales = mx.contiguous(words[..., 1:]).view(mx.uint8)
    first, second, last = (packed_scales[..., i : i + 4] for i in (0, 4, 8))
    scales = mx.concatenate([first & 63, last & 15 | first >> 6 << 4], axis=-1)
    minima = mx.concatenate([second & 63, last >> 4 | second >> 6 << 4], axis=-1)
    return tuple(  # type: ignore[return-value]
        (factors[..., i : i + 1] * sign * part.astype(mx.float32)).reshape(len(ws), -1)
        for i, sign, part in ((0, 1, scales), (1, -1, minima))
    )


LAYOUT = Layout("Q4_K", layout.Q4_K, group=SUPERBLOCK, bits=4, entry=WORDS, dtype=mx.uint32, affine=_affine)


def split_q4_k(raw: NDArray[np.uint8], shape: tuple[int, int]) -> StoredMatrix:
    """Repack the Q4_K blocks of a file, row after row, for GPU memory; no weight changes.

    Args:
        raw: N * K / 256 * 144 bytes, of any shape; may be a read-only view of a mapped file.
        shape: (N, K).

    Raises:
        ValueError: the bytes are not those of such a matrix.
    """
    found = blocks_of("split_q4_k", raw, shape, blocks.Q4_K, SUPERBLOCK)
    # The low halves of 32 bytes have 32 quants, and the high halves the next 32.
    qs = found["qs"].reshape(*found.shape, 4, 1, 32)
    quants = np.concatenate([qs & np.uint8(15), qs >> np.uint8(4)], axis=-2)
    heads = np.ascontiguousarray(found).view(np.uint8).reshape(*found.shape, -1)[..., : 4 * WORDS]
    scales = np.ascontiguousarray(heads).view(np.uint32).reshape(shape[0], -1)
    return StoredMatrix(LAYOUT, mx.array(packed(quants.reshape(shape), 4)), mx.array(scales))
