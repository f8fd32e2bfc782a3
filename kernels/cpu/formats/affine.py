"""MLX's affine formats on the CPU: groups of 32, 64 or 128 weights as float32, made for each combination that is used.

A block is a group: its scale and its bias, of float16, bfloat16 or float32, and quants of 2 to 8 bits, in the order of
`kernels/blocks.py`. A weight is `scale * q + bias`, with product and sum each rounded; for scales of 16 bits the
product is exact. The NumPy twin is in `blocks_numpy.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..build.jit import jit
from ..build.library import affine_format
from ..build.vectors import add, fma, mul
from .affine_quants import floats_of_words, multiply_add_table, pair_of, scale_and_bias
from .format import ONE_PANEL, TWO_PANELS
from .rows import dequantize_pieces, four_rows_of_groups
from .sums import WIDE

SCALE_BYTES = {"f16": 2, "bf16": 2, "f32": 4}
# Weights that gemv unpacks together. More share the work on their scale, but those of four rows must fit in registers.
_PIECE = 64 if WIDE else 32


class Kernels(NamedTuple):
    """What the module of another format has, see `formats.py`."""

    BLOCK: int
    BLOCK_BYTES: int
    MOST: int
    four_rows: Any
    dequantize: Any


def kernels(name: str) -> Kernels:
    """Return the kernels of a format, such as "affine4_g64_bf16".

    Raises:
        ValueError: no format has this name.
    """
    found = affine_format(name)
    if found is None:
        raise ValueError(f"expected the name of an affine format, found {name!r}")
    bits, group, scale = found
    block_bytes, piece = 2 * SCALE_BYTES[scale] + group * bits // 8, min(_PIECE, group)
    four_rows = four_rows_of_groups(group, block_bytes, piece, weights_of(bits, scale, piece))
    dequantize = dequantize_pieces(group, block_bytes, weights_of(bits, scale, 32))
    return Kernels(group, block_bytes, TWO_PANELS if bits == 8 else ONE_PANEL, four_rows, dequantize)


def weights_of(bits: int, scale: str, piece: int) -> Any:
    """Make the function that returns 32 or 64 weights of a block in two or four vectors."""
    # `multiply_add_table` reads 4 bits of a word and ignores the others.
    quants = pair_of(bits, clean=bits != 4 or scale == "f32")
    combine, scale_of, n_scales = _combine(bits, scale), scale_and_bias(scale), 2 * SCALE_BYTES[scale]

    @jit
    def two(blocks: Any, at: int, p: int) -> Any:
        """Return weights 32 p to 32 p + 31 of the block at byte `at`."""
        (scale, bias), (low, high) = scale_of(blocks, at), quants(blocks, at + n_scales + 4 * bits * p)
        return combine(low, scale, bias), combine(high, scale, bias)

    @jit
    def four(blocks: Any, at: int, p: int) -> Any:
        """Return weights 64 p to 64 p + 63 of the block at byte `at`."""
        return (*two(blocks, at, 2 * p), *two(blocks, at, 2 * p + 1))

    return two if piece == 32 else four


def _combine(bits: int, scale: str) -> Any:
    """Make the function that returns `scale * q + bias` for 16 quants."""

    @jit
    def fused(quants: Any, scale: Any, bias: Any) -> Any:
        return fma(scale, floats_of_words(quants), bias)

    @jit
    def rounded_twice(quants: Any, scale: Any, bias: Any) -> Any:
        return add(mul(scale, floats_of_words(quants)), bias)

    if scale == "f32":
        return rounded_twice
    return multiply_add_table if bits <= 4 else fused
