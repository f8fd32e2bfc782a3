"""The NumPy definition of products in fixed point, to the last bit: int16 activations, and the order of summation.

Columns are cut into blocks of 32. A token has an int16 quant for each column, and a `token_scale` for each block. A
weight is `scale * quant + offset`. For each block, the products of the token's quants and the weights' quants are
summed as an exact integer, which is then rounded to float32: `sum`. A format with a scale for each 16 columns has two
sums per block.

The result y starts with 0, and the sums are added in the order of their columns. For each sum, if the format has
offsets, `y = fma(offset, total, y)` is computed first, where `total` is `token_scale` times the sum of the token's
quants in the columns of the sum. Then, in every format, `y = fma(sum, scale * token_scale, y)` is computed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..formats.blocks_numpy import Parts
from .order_numpy import fma

Floats = NDArray[np.float32]

# Number of columns of a block.
BLOCK = 32
# The largest quant, 127 * 256 + 127. Some kernels split a quant into two signed bytes, `256 * high + low`; for a larger
# quant, the high byte would have to be 128.
LIMIT = np.float32(32639)
# If the largest magnitude of a block of activations is below this, the block becomes zero, because LIMIT / magnitude
# could be infinite.
LEAST = np.float32(1e-34)


class Fixed(NamedTuple):
    """Rows in fixed point: quants (T, K), and scales (T, K / 32). A block with NaN or infinities has the scale NaN."""

    quants: NDArray[np.int16]
    scales: Floats


def quantize(x: Floats) -> Fixed:
    """Return the rows x (T, K) in fixed point."""
    blocks = np.ascontiguousarray(x, dtype=np.float32).reshape(len(x), -1, BLOCK)
    # The bits are compared as integers: NaN is then larger than infinity, and infinity larger than all numbers.
    bits = blocks.view(np.int32) & np.int32(0x7FFFFFFF)
    top = bits.max(axis=-1).view(np.float32)
    is_finite, is_zero = np.isfinite(top), top < LEAST
    safe = np.where(is_finite & ~is_zero, top, np.float32(1))
    quants = np.rint(np.where((is_finite & ~is_zero)[..., None], blocks, np.float32(0)) * (LIMIT / safe)[..., None])
    scales = np.where(is_finite, np.where(is_zero, np.float32(0), safe / LIMIT), np.float32(np.nan))
    return Fixed(quants.astype(np.int16).reshape(x.shape), scales)


def multiply(weights: Parts, n_rows: int, x: Fixed) -> Floats:
    """Return the products (T, N) of N weight rows, given as the `Parts` of their blocks, with tokens (T, K)."""
    # A scale for more than 32 columns is repeated for each block of 32.
    size = min(BLOCK, weights.quants.shape[-1])
    repeated = weights.quants.shape[-1] // size
    quants = weights.quants.reshape(n_rows, -1, size).astype(np.float64)
    factors = np.repeat(weights.scales.reshape(n_rows, -1), repeated, axis=1)
    offsets = None if weights.offsets is None else np.repeat(weights.offsets.reshape(n_rows, -1), repeated, axis=1)
    tokens = x.quants.reshape(len(x.quants), -1, size).astype(np.float64)
    scales = np.repeat(x.scales, BLOCK // size, axis=1)
    totals = tokens.sum(axis=-1).astype(np.float32) * scales
    y = np.zeros((len(tokens), n_rows), dtype=np.float32)
    for b in range(tokens.shape[1]):
        # Sums of integers below 2**53 are exact in float64.
        sums = (tokens[:, b] @ quants[:, b].T).astype(np.float32)
        if offsets is not None:
            y = fma(offsets[:, b], totals[:, b, None], y)
        y = fma(sums, factors[:, b] * scales[:, b, None], y)
    return y
