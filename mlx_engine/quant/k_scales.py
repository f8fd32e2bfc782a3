"""Pack and unpack the 12 bytes with 8 scales and 8 minima, 6 bits each, of a Q4_K or Q5_K block.

With scales `A` to `H` and minima `a` to `h`, bytes 0 to 3 are `EEAAAAAA` to `HHDDDDDD`, bytes 4 to 7 are
`eeaaaaaa` to `hhdddddd`, and bytes 8 to 11 are `eeeeEEEE` to `hhhhHHHH`, the highest bit first. The first
four scales and minima are stored whole; of the last four, the high two bits are stored above the first four.

Source: `get_scale_min_k4`,
https://github.com/ggml-org/llama.cpp/blob/03f94f19a2c4c9d039fa1a84838fe3e2110cc28d/ggml/src/ggml-quants.c
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def scales_and_minima(packed: NDArray[np.uint8]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Unpack (n, 12) bytes into (n, 8) scales and (n, 8) minima, from 0 to 63."""
    first, second, last = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = [first & np.uint8(0x3F), last & np.uint8(0x0F) | first >> np.uint8(6) << np.uint8(4)]
    minima = [second & np.uint8(0x3F), last >> np.uint8(4) | second >> np.uint8(6) << np.uint8(4)]
    return np.concatenate(scales, axis=1).astype(np.float32), np.concatenate(minima, axis=1).astype(np.float32)


def packed(scales: NDArray[np.uint8], minima: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pack (n, 8) scales and (n, 8) minima, from 0 to 63, into (n, 12) bytes."""
    parts = [part[:, :4] | (part[:, 4:] >> np.uint8(4)) << np.uint8(6) for part in (scales, minima)]
    last = (scales[:, 4:] & np.uint8(0x0F)) | (minima[:, 4:] & np.uint8(0x0F)) << np.uint8(4)
    return np.concatenate([*parts, last], axis=1)
