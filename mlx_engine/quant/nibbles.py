"""Two orders of 4-bit quants: pairs, as MLX packs them, and halves, as GGUF's types with 4 bits have them.

32 quants take 16 bytes. In pairs, byte j has quants 2j and 2j + 1, the first in its low bits. In halves, byte j has
quants j and j + 16. Conversion moves bits and changes no quant.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mlx_engine.quant.packing import bit_fields

_LOW, _HIGH = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(0xF0F0F0F0F0F0F0F0)
_FOUR = np.uint64(4)


def in_halves(pairs: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
    """Write quants (n, 16 m), stored in pairs, in halves to `out`, of the same shape."""
    first, second = _words_of(pairs)
    # Quants 2j and 2j + 1 of each 16 are those of bytes 2j and 2j + 1.
    even, odd = first & _LOW | (second & _LOW) << _FOUR, first >> _FOUR & _LOW | second & _HIGH
    out[:, ::2], out[:, 1::2] = _bytes_of(even), _bytes_of(odd)


def in_pairs(halves: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
    """Write quants (n, 16 m), stored in halves, in pairs to `out`, of the same shape."""
    even, odd = (np.ascontiguousarray(halves[:, i::2]).view(np.uint64) for i in (0, 1))
    words = out.view(np.uint64)
    words[:, ::2], words[:, 1::2] = even & _LOW | (odd & _LOW) << _FOUR, even >> _FOUR & _LOW | odd & _HIGH


def unpack_halves(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return quants (n, 32 m), each from 0 to 15, of (n, 16 m) bytes in halves."""
    return bit_fields(packed.reshape(len(packed), -1, 16), 4).reshape(len(packed), -1)


def _words_of(packed: NDArray[np.uint8]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return the first and the last 8 of each 16 bytes as words (n, m)."""
    words = np.ascontiguousarray(packed).view(np.uint64)
    return words[:, ::2], words[:, 1::2]


def _bytes_of(words: NDArray[np.uint64]) -> NDArray[np.uint8]:
    return words.view(np.uint8)
