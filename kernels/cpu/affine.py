"""MLX's affine formats on the CPU: groups of 32, 64 or 128 weights as float32, made for each combination that is used.

A block is a group: its scale and its bias, of float16, bfloat16 or float32, and quants of 2 to 8 bits, the first in the
lowest bits. A weight is `scale * q + bias`, with product and sum each rounded; for scales of 16 bits the product is
exact. The NumPy twin is in `blocks_numpy.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from kernels.cpu.affine_quants import float_splat, floats_of_words, quants_of
from kernels.cpu.formats import ONE_PANEL, TWO_PANELS
from kernels.cpu.jit import jit
from kernels.cpu.library import affine_format
from kernels.cpu.quants import scale_4_bits
from kernels.cpu.rows import dequantize_pieces, four_rows_of_groups
from kernels.cpu.vectors import add, fma, mul, sub, zeros

SCALE_BYTES = {"f16": 2, "bf16": 2, "f32": 4}
# Weights whose quants are unpacked together, in two vectors.
PIECE = 32


class Kernels(NamedTuple):
    """What the module of another format has, see `formats.py`."""

    BLOCK: int
    BLOCK_BYTES: int
    MOST: int
    four_rows: Any
    dequantize: Any


def kernels(name: str) -> Kernels:
    """Return the kernels of a format, such as "affine4_g64_bf16"."""
    bits, group, scale = affine_format(name)
    block_bytes = 2 * SCALE_BYTES[scale] + group * bits // 8
    weights = weights_of(bits, scale)
    four_rows = four_rows_of_groups(group, block_bytes, PIECE, weights)
    most = TWO_PANELS if bits == 8 else ONE_PANEL
    return Kernels(group, block_bytes, most, four_rows, dequantize_pieces(group, block_bytes, weights))


def weights_of(bits: int, scale: str) -> Any:
    """Make the function that returns 32 weights of a block in two vectors."""
    quants, splat, size = quants_of(bits), float_splat(scale), SCALE_BYTES[scale]
    combine = _combine(bits, scale)

    @jit
    def weights(blocks: Any, at: int, p: int) -> Any:
        """Return weights 32 p to 32 p + 31 of the block at byte `at`."""
        scale, bias, first = splat(blocks, at), splat(blocks, at + size), at + 2 * size + 4 * bits * p
        low, high = quants(blocks, first), quants(blocks, first + 2 * bits)
        return combine(low, scale, bias), combine(high, scale, bias)

    return weights


def _combine(bits: int, scale: str) -> Callable[..., Any]:
    """Make the function that returns `scale * q + bias` for 16 quants."""

    @jit
    def by_table(quants: Any, scale: Any, bias: Any) -> Any:
        return scale_4_bits(quants, scale, sub(zeros(), bias))

    @jit
    def fused(quants: Any, scale: Any, bias: Any) -> Any:
        return fma(scale, floats_of_words(quants), bias)

    @jit
    def rounded_twice(quants: Any, scale: Any, bias: Any) -> Any:
        return add(mul(scale, floats_of_words(quants)), bias)

    if scale == "f32":
        return rounded_twice  # type: ignore[no-any-return]
    return by_table if bits <= 4 else fused  # type: ignore[no-any-return]
