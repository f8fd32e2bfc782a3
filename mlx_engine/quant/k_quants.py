"""Dequantise the K-quants, Q2_K to Q6_K; quantise to Q4_K, Q5_K and Q6_K.

A block has 256 weights in groups of 16 or 32. A group has a small integer as its scale and, in some types, another as
its minimum; `d` and `dmin` are float16 factors of the block. In Q2_K, Q4_K and Q5_K,
`weight = (d * scale) * q - (dmin * minimum)`. In Q3_K and Q6_K, `weight = (d * scale) * (q - offset)`. Quantising
raises ValueError if a weight is NaN or infinite.

Source: `dequantize_row_q*_K`,
https://github.com/ggml-org/llama.cpp/blob/03f94f19a2c4c9d039fa1a84838fe3e2110cc28d/ggml/src/ggml-quants.c
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mlx_engine.kernels import blocks as layout
from mlx_engine.quant.packing import bit_fields, float_scales, scale_groups
from mlx_engine.quant.scale_search import affine, symmetric


def dequantize_q2_k(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantise (n, 84) bytes to (n, 256) weights: 16 groups of 16, 2-bit quants, 4-bit scales and minima.

    A byte of `scales` holds a group's scale in its low half and its minimum in the high one. Each 32 bytes of `qs` hold
    128 quants: the lowest two bits of each byte are the first 32 quants, the next two bits the next 32, and so on.
    """
    block = blocks.view(layout.Q2_K)[:, 0]
    quants = bit_fields(block["qs"].reshape(-1, 2, 32), 2).reshape(-1, 16, 16).astype(np.float32)
    parts = bit_fields(block["scales"], 4).astype(np.float32)
    return _affine(block, parts[:, 0], parts[:, 1], quants)


def dequantize_q3_k(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantise (n, 110) bytes to (n, 256) weights: 16 groups of 16, 3-bit quants minus 4, 6-bit scales minus 32.

    Each 32 bytes of `qs` hold the low two bits of 128 quants, those of the first 32 in the lowest bits. Bit `j` of the
    32 bytes `hmask` is the third bit of quants `32 j` to `32 j + 31`. The first 8 bytes of `scales` hold the low four
    bits of 16 scales, and the last 4 bytes hold their high two bits.
    """
    block = blocks.view(layout.Q3_K)[:, 0]
    low = bit_fields(block["qs"].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
    third = bit_fields(block["hmask"], 1).reshape(-1, 16, 16)
    quants = ((low | third << np.uint8(2)).astype(np.int8) - np.int8(4)).astype(np.float32)

    low_scales = bit_fields(block["scales"][:, :8], 4).reshape(-1, 16)
    high_scales = bit_fields(block["scales"][:, 8:], 2).reshape(-1, 16)
    scales = ((low_scales | high_scales << np.uint8(4)).astype(np.int8) - np.int8(32)).astype(np.float32)
    return scale_groups(float_scales(block["d"], scales), quants)


def dequantize_q4_k(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantise (n, 144) bytes to (n, 256) weights: 8 groups of 32, 4-bit quants, 6-bit scales and minima.

    Each 32 bytes of `qs` hold two groups, the first in the low halves of the bytes.
    """
    block = blocks.view(layout.Q4_K)[:, 0]
    quants = bit_fields(block["qs"].reshape(-1, 4, 32), 4).reshape(-1, 8, 32).astype(np.float32)
    scales, minima = scales_and_minima(block["scales"])
    return _affine(block, scales, minima, quants)


def quantize_q4_k(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Quantise (n, 256) weights to (n, 144) bytes."""
    blocks, _ = _quantized(values, 15, layout.Q4_K)
    return blocks.view(np.uint8).reshape(len(values), -1)


def dequantize_q5_k(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantise (n, 176) bytes to (n, 256) weights: 8 groups of 32, 5-bit quants, 6-bit scales and minima.

    The low four bits are stored as in Q4_K; bit `g` of the 32 bytes `qh` is the fifth bit of the weights of group `g`.
    """
    block = blocks.view(layout.Q5_K)[:, 0]
    low = bit_fields(block["qs"].reshape(-1, 4, 32), 4).reshape(-1, 8, 32)
    quants = (low | bit_fields(block["qh"], 1) << np.uint8(4)).astype(np.float32)
    scales, minima = scales_and_minima(block["scales"])
    return _affine(block, scales, minima, quants)


def quantize_q5_k(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Quantise (n, 256) weights to (n, 176) bytes."""
    blocks, quants = _quantized(values, 31, layout.Q5_K)
    fifth = np.ascontiguousarray((quants >> np.uint8(4)).transpose(0, 2, 1))
    blocks["qh"] = np.packbits(fifth, axis=2, bitorder="little")[:, :, 0]
    return blocks.view(np.uint8).reshape(len(values), -1)


def _quantized(
    values: NDArray[np.float32], n_max: int, dtype: np.dtype[np.void]
) -> tuple[NDArray[np.void], NDArray[np.uint8]]:
    """Return blocks of Q4_K, or of Q5_K with `qh` not yet set, and the quants (n, 8, 32), from 0 to `n_max`."""
    found, blocks = affine(values, n_max), np.empty(len(values), dtype)
    blocks["d"], blocks["dmin"], blocks["scales"] = found.d, found.dmin, pack_scales(found.scales, found.minima)
    low = (found.quants & np.uint8(15)).reshape(-1, 4, 2, 32)
    blocks["qs"] = (low[:, :, 0] | low[:, :, 1] << np.uint8(4)).reshape(-1, 128)
    return blocks, found.quants


def dequantize_q6_k(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantise (n, 210) bytes to (n, 256) weights: 16 groups of 16, 6-bit quants minus 32, signed 8-bit scales.

    For each half of the block (128 weights), 64 bytes of `ql` hold the low four bits of the quants, those of the
    first 64 in the low halves of the bytes. 32 bytes of `qh` hold the high two bits, those of the first 32 in the
    lowest bits.
    """
    block = blocks.view(layout.Q6_K)[:, 0]
    low = bit_fields(block["ql"].reshape(-1, 2, 64), 4).reshape(-1, 16, 16)
    high = bit_fields(block["qh"].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
    quants = ((low | high << np.uint8(4)).astype(np.int8) - np.int8(32)).astype(np.float32)
    return scale_groups(float_scales(block["d"], block["scales"].astype(np.float32)), quants)


def quantize_q6_k(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Quantise (n, 256) weights to (n, 210) bytes."""
    found, blocks = symmetric(values), np.empty(len(values), layout.Q6_K)
    blocks["d"], blocks["scales"] = found.d, found.scales
    quants = (found.quants + np.int8(32)).view(np.uint8)
    low = (quants & np.uint8(15)).reshape(-1, 2, 2, 64)
    blocks["ql"] = (low[:, :, 0] | low[:, :, 1] << np.uint8(4)).reshape(-1, 128)
    high = (quants >> np.uint8(4)).reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    blocks["qh"] = np.bitwise_or.reduce(high << shifts, axis=2).reshape(-1, 64)
    return blocks.view(np.uint8).reshape(len(values), -1)


def _affine(
    block: NDArray[np.void], scales: NDArray[np.float32], minima: NDArray[np.float32], quants: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Return `(d * scale) * q - (dmin * minimum)`, (n, 256).

    `scales` and `minima` are (n, groups), and `quants` (n, groups, weights of a group).
    """
    scales, minima = float_scales(block["d"], scales), float_scales(block["dmin"], minima)
    with np.errstate(invalid="ignore"):  # d and dmin may be infinite or NaN; infinity times 0 is invalid
        return (scales[..., None] * quants - minima[..., None]).reshape(-1, 256)


def scales_and_minima(packed: NDArray[np.uint8]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Unpack the (n, 12) bytes of Q4_K and Q5_K into (n, 8) scales and (n, 8) minima, from 0 to 63.

    Below, a byte is written as eight letters, the highest bit first. `A` to `H` are bits of the scales 0 to 7, `a` to
    `h` bits of the minima 0 to 7. Bytes 0 to 3 are `EEAAAAAA` to `HHDDDDDD`, bytes 4 to 7 are `eeaaaaaa` to `hhdddddd`,
    and bytes 8 to 11 are `eeeeEEEE` to `hhhhHHHH`. So the last four scales and minima are divided: their low four bits
    are in bytes 8 to 11, and their high two bits are the top two bits of bytes 0 to 7.
    """
    first, second, last = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = [first & np.uint8(0x3F), last & np.uint8(0x0F) | first >> np.uint8(6) << np.uint8(4)]
    minima = [second & np.uint8(0x3F), last >> np.uint8(4) | second >> np.uint8(6) << np.uint8(4)]
    return np.concatenate(scales, axis=1).astype(np.float32), np.concatenate(minima, axis=1).astype(np.float32)


def pack_scales(scales: NDArray[np.uint8], minima: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pack (n, 8) scales and (n, 8) minima, from 0 to 63, into (n, 12) bytes."""
    parts = [part[:, :4] | (part[:, 4:] >> np.uint8(4)) << np.uint8(6) for part in (scales, minima)]
    last = (scales[:, 4:] & np.uint8(0x0F)) | (minima[:, 4:] & np.uint8(0x0F)) << np.uint8(4)
    return np.concatenate([*parts, last], axis=1)
