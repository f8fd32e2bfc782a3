"""FP8: weights of type F8_E4M3 with float scales: `weight[n, k] = float32(q[n, k]) * scale`, rounded once to float32.

A scale is for a block of rows and columns (`weight_scale_inv`, 128 x 128 as published; the name is of its use when the
weight was quantised, and the stored number is the factor), for a row, or for the matrix. Scales of the activations are
not used: activations stay float32.

Source: `weight_dequant`, github.com/deepseek-ai/DeepSeek-V3, inference/kernel.py; OCP 8-bit Floating Point
Specification (OFP8), revision 1.0, E4M3.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mlx_engine.checkpoint.quantized import Files, Layer, QuantConfig, check_shape, floats, named, part
from mlx_engine.quant.types import F32
from mlx_engine.quant.weight import Weight

_KNOWN = (
    "activation_scheme", "dequantize", "fmt", "ignored_layers", "modules_to_convert", "modules_to_not_convert",
    "quant_method", "scale_fmt", "weight_block_size",
)  # fmt: skip
_SCALES = ("weight_scale_inv", "weight_scale")
# Weights per piece: temporaries take a few megabytes.
_PIECE = 1 << 20
# A function from row numbers to the factors of these rows, which broadcast with their weights.
_Factor = Callable[[NDArray[np.int64]], NDArray[np.float32]]
# Scales of activations.
_UNUSED = ("input_scale", "activation_scale")


def _e4m3() -> NDArray[np.float32]:
    """Return the values of all bytes: sign, 4 exponent bits with bias 7, 3 mantissa bits; 127 and 255 are NaN."""
    codes = np.arange(128)
    exponents, mantissas = codes >> 3, codes & 7
    significands = np.where(exponents, 8 + mantissas, mantissas).astype(np.float32)
    positive = np.ldexp(significands, np.maximum(exponents, 1) - 10)
    positive[127] = np.nan
    return np.concatenate([positive, -positive]).astype(np.float32)


E4M3 = _e4m3()


def layers(config: QuantConfig, files: Files) -> dict[str, Layer]:
    """Return the quantised layers of a folder by the names of their weights.

    Raises:
        UnsupportedConfigError: the config asks for what is not implemented.
        FormatError: the tensors of a layer do not fit each other.
    """
    config.expect("fmt", "e4m3", "float8_e4m3fn", None)
    config.expect("scale_fmt", "float", "ue8m0", None)
    config.refuse_others(_KNOWN)
    size = config.values.get("weight_block_size")
    block = None if size is None else block_size(config, "weight_block_size", size)
    prefixes = [p for p in named(files, ".weight") if files[f"{p}.weight"].tensors[f"{p}.weight"].dtype == "F8_E4M3"]
    return {f"{prefix}.weight": layer(files, prefix, block) for prefix in prefixes}


def block_size(config: QuantConfig, key: str, value: object) -> tuple[int, int]:
    """Return the rows and columns of a block.

    Raises:
        UnsupportedConfigError: they are not two whole numbers >= 1.
    """
    if isinstance(value, list) and len(value) == 2 and all(type(n) is int and n >= 1 for n in value):
        return value[0], value[1]
    raise config.error(key, "two whole numbers >= 1", value)


def layer(files: Files, prefix: str, block: tuple[int, int] | None) -> Layer:
    """Return the layer of `prefix.weight`, (N, K), whose scales are for blocks, or without `block` for rows or for all.

    Raises:
        FormatError: the scales are missing, or do not fit the weight.
    """
    scale = next((f"{prefix}.{end}" for end in _SCALES if f"{prefix}.{end}" in files), f"{prefix}.{_SCALES[0]}")
    codes = part(files, f"{prefix}.weight", "F8_E4M3")
    check_shape(f"{prefix}.weight", codes.shape, (len(codes), *codes.shape[1:2]))
    n, k = codes.shape
    shapes = [(n, 1), (n,), (1, 1), (1,), ()] if block is None else [(-(-n // block[0]), -(-k // block[1]))]
    check_shape(scale, floats(files, scale).shape, *shapes)
    unused = tuple(f"{prefix}.{end}" for end in _UNUSED if f"{prefix}.{end}" in files)

    def read() -> Weight:
        scales = floats(files, scale)
        factor = _by_rows(scales) if block is None else _by_blocks(scales, block, k)
        out = np.empty((n, k), dtype=np.float32)
        step = max(1, _PIECE // max(k, 1))
        for first in range(0, n, step):
            rows = np.arange(first, min(first + step, n))
            with np.errstate(invalid="ignore", over="ignore"):  # any bytes are weights
                np.multiply(E4M3[codes[rows]], factor(rows), out=out[rows[0] : rows[-1] + 1])
        return Weight(f"{prefix}.weight", (n, k), F32, out.view(np.uint8).reshape(-1))

    return Layer((n, k), (f"{prefix}.weight", scale, *unused), read)


def _by_blocks(scales: NDArray[np.float32], block: tuple[int, int], k: int) -> _Factor:
    return lambda rows: np.repeat(scales[rows // block[0]], block[1], axis=1)[:, :k]


def _by_rows(scales: NDArray[np.float32]) -> _Factor:
    column = scales.reshape(-1, 1)
    return lambda rows: column[rows] if len(column) > 1 else column
