"""TQ1_0 and TQ2_0: 256 weights of -1, 0 and 1 share one float16 scale. `weight = d * (q - 1)`.

TQ2_0 stores 2 bits per weight: each 32 bytes have 128 weights, the first 32 in the lowest bits. TQ1_0 stores 5 weights
in a byte: the byte is `ceil(n * 256 / 243)` for a number n of five digits in base 3, highest digit first. The next
digit is the integer part of three times the byte over 256, and what is left of the product is the next byte. The first
32 bytes have 160 weights, digit by digit, the next 16 bytes 80, and the last 4 bytes 16, of which the fifth digit is
unused.

Source: `dequantize_row_tq1_0` and `dequantize_row_tq2_0`,
https://github.com/ggml-org/llama.cpp/blob/03f94f19a2c4c9d039fa1a84838fe3e2110cc28d/ggml/src/ggml-quants.c
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mlx_engine.kernels import blocks as layout
from mlx_engine.quant.packing import bit_fields


def dequantize_1(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantise (n, 54) bytes of TQ1_0 to (n, 256) weights."""
    block = blocks.view(layout.TQ1_0)[:, 0]
    parts = [_digits(block["qs"][:, :32], 5), _digits(block["qs"][:, 32:], 5), _digits(block["qh"], 4)]
    return _scaled(block["d"], np.concatenate(parts, axis=1))


def dequantize_2(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantise (n, 66) bytes of TQ2_0 to (n, 256) weights."""
    block = blocks.view(layout.TQ2_0)[:, 0]
    return _scaled(block["d"], bit_fields(block["qs"].reshape(-1, 2, 32), 2).reshape(-1, 256))


def _digits(packed: NDArray[np.uint8], n: int) -> NDArray[np.uint8]:
    """Return the first n digits of (m, k) bytes, (m, n k): digit j of all bytes precedes digit j + 1."""
    rests = packed[:, None] * np.array([3**j for j in range(n)], dtype=np.uint8)[:, None]  # modulo 256
    return (rests.astype(np.uint16) * np.uint16(3) >> np.uint16(8)).astype(np.uint8).reshape(len(packed), -1)


def _scaled(scale: NDArray[np.float16], quants: NDArray[np.uint8]) -> NDArray[np.float32]:
    with np.errstate(invalid="ignore"):  # any bytes are weights: a scale may be infinite or NaN, and a quant 0
        return scale.astype(np.float32)[:, None] * (quants.astype(np.float32) - np.float32(1))
