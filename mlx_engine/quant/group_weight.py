"""Weights in MLX's quantised types (`groups.py`), and exact conversions between types of MLX and of GGUF.

A file of MLX stores such a weight as separate tensors: its quants, scales and, in the mode "affine", biases. The
conversions are:

- Q8_0, Q4_0 and Q4_1 become groups of 32 in MLX's mode "affine", whose quants are unsigned. In Q8_0 and Q4_0, a weight
  is d * q with the scale d and a signed quant q. In MLX, the quant is q + z with an offset z (`OFFSETS`), and the bias
  is -z * d: `d * q = d * (q + z) - z * d`. Scales and biases are float32, in which both products are exact.
- For MXFP4, only the order of the quants in a block changes (`packing.py`). GGUF's order is "in halves"; the order of
  MLX and of Hugging Face's folders of gpt-oss is "in pairs". The quant that means -0 in MLX means 0 in GGUF.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mlx_engine.kernels.cached import cached_property
from mlx_engine.quant import packing
from mlx_engine.quant.groups import GroupType, affine, fixed
from mlx_engine.quant.types import BY_NAME
from mlx_engine.quant.weight import Weight, cut_shape, taken

# The number of groups that a thread of `join` copies at a time, and the number of threads. Most of the time is taken by
# page faults of new memory, which threads handle in parallel.
_PIECE, _THREADS = 1 << 16, 4


@dataclass(frozen=True, eq=False)
class Parts:
    """The stored tensors of a weight (..., N, K) with n groups, as bytes.

    Attributes:
        quants: uint8 (n, bytes of a group's quants), in MLX's order.
        scales: uint8 (n, bytes of a scale).
        biases: uint8 (n, bytes of a bias); None in modes without biases.
    """

    quants: NDArray[np.uint8]
    scales: NDArray[np.uint8]
    biases: NDArray[np.uint8] | None

    @classmethod
    def of(cls, in_order: Sequence[NDArray[np.uint8]]) -> Parts:
        """Return parts from arrays in the order of the fields of a block: scales, biases if any, quants."""
        scales, *biases, quants = in_order
        return cls(quants, scales, biases[0] if biases else None)

    @property
    def in_order(self) -> tuple[NDArray[np.uint8], ...]:
        """The parts in the order of the fields of a block."""
        return (self.scales, self.quants) if self.biases is None else (self.scales, self.biases, self.quants)


class GroupWeight(Weight):
    """A weight of a `GroupType`, stored in parts. The parts are joined into blocks when `data` is first used.

    Raises:
        ValueError: the parts do not match shape and type.
    """

    type: GroupType
    parts: Parts

    def __init__(self, name: str, shape: tuple[int, ...], type_: GroupType, parts: Parts) -> None:
        n_groups = type_.bytes_for(int(np.prod(shape))) // type_.block_bytes
        widths = [part.shape[1] for part in parts.in_order if part.shape[0] == n_groups and part.ndim == 2]
        n_scales = 2 if type_.has_biases else 1
        expected = [type_.scale_bytes] * n_scales + [type_.block_bytes - n_scales * type_.scale_bytes]
        if widths != expected:
            raise ValueError(f"{name}: expected parts of {n_groups:,} groups of {expected} bytes, found {widths}")
        for field, value in (("name", name), ("shape", shape), ("type", type_), ("parts", parts)):
            object.__setattr__(self, field, value)

    @cached_property
    def data(self) -> NDArray[np.uint8]:
        """The blocks, as a vector of bytes in new memory."""
        return join(self.type, self.parts)

    def _blocks(self, first: int, last: int) -> NDArray[np.uint8]:
        return join(self.type, Parts.of([part[first:last] for part in self.parts.in_order]))

    def part(self, i: int, n: int) -> GroupWeight:
        """Return item i of the first axis (of length n), such as one of n experts. No bytes are read."""
        cut = [part[len(part) // n * i : len(part) // n * (i + 1)] for part in self.parts.in_order]
        return GroupWeight(self.name, self.shape[1:], self.type, Parts.of(cut))

    def cut(self, axis: int, ranges: Sequence[tuple[int, int]]) -> GroupWeight:
        """Return rows or columns as `Weight.cut` does, without making blocks."""
        shape = cut_shape(self, axis, ranges)
        cut = [taken(part, self.shape, self.type, axis, ranges) for part in self.parts.in_order]
        return GroupWeight(self.name, shape, self.type, Parts.of(cut))

    def rows(self, ids: Sequence[int] | NDArray[np.integer]) -> NDArray[np.float32]:
        """Dequantise rows as `Weight.rows` does. Only the blocks of these rows are joined."""
        if len(self.shape) != 2 or not len(ids) or min(ids) < 0 or max(ids) >= self.shape[0]:
            return super().rows(ids)
        n, per_row = len(ids), self.shape[1] // self.type.block_size
        picked = [
            part.reshape(self.shape[0], per_row, -1)[np.asarray(ids)].reshape(n * per_row, -1)
            for part in self.parts.in_order
        ]
        return GroupWeight(self.name, (n, self.shape[1]), self.type, Parts.of(picked)).dequantize()


def join(type_: GroupType, parts: Parts) -> NDArray[np.uint8]:
    """Return the blocks of a weight as a vector of bytes. A block has the scale, bias and quants of one group.

    In the mode "affine", 4-bit quants are reordered from pairs to halves (`packing.py`), because CPU kernels unpack
    halves with fewer instructions. No value is rounded.
    """
    n = len(parts.quants)
    blocks = np.empty((n, type_.block_bytes), dtype=np.uint8)

    def copy(first: int) -> None:
        at, last = 0, first + _PIECE
        for part in parts.in_order:
            to = blocks[first:last, at : at + part.shape[1]]
            if part is parts.quants and type_.in_halves:
                packing.in_halves(part[first:last], to)
            else:
                _words(to)[...] = _words(part[first:last])
            at += part.shape[1]

    if n <= _PIECE:
        copy(0)
    else:
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(copy, range(0, n, _PIECE)))
    return blocks.reshape(-1)


def split(weight: Weight, type_: GroupType) -> Parts:
    """Return the parts of a weight of the type `type_`. If the weight is stored in blocks, the parts are copies."""
    if isinstance(weight, GroupWeight):
        return weight.parts
    blocks, n = weight.data.reshape(-1, type_.block_bytes), type_.scale_bytes
    scales, others = blocks[:, :n], blocks[:, n:]
    if not type_.has_biases:
        return Parts(np.ascontiguousarray(others), np.ascontiguousarray(scales), None)
    quants = others[:, n:].copy()
    if type_.in_halves:
        packing.in_pairs(others[:, n:], quants)
    return Parts(quants, np.ascontiguousarray(scales), np.ascontiguousarray(others[:, :n]))


def _words(columns: NDArray[np.uint8]) -> NDArray[np.generic]:
    """View each row of (n, width) bytes as one item, so that NumPy copies whole rows, not single bytes."""
    return columns.view(f"V{columns.shape[1]}")


# Maps the name of a type of GGUF to the type of MLX into which `in_groups` converts it.
EXACT: Mapping[str, GroupType] = {
    "Q8_0": affine(8, 32, "F32"),
    "Q4_0": affine(4, 32, "F32"),
    "Q4_1": affine(4, 32, "F32"),
}
# Maps the name of each type with signed quants to the offset z (see the docstring of this module).
OFFSETS = {"Q8_0": 128, "Q4_0": 8}

GGUF, MLX = BY_NAME["MXFP4"], fixed("mxfp4")
# The only scale byte of MXFP4 that MLX and GGUF read differently: it is infinity in MLX, and 2 ** 128 in GGUF.
_UNLIKE = 255
# The number of groups that are converted at a time, so that temporary arrays take only a few megabytes.
_PART = 1 << 17


def in_groups(weight: Weight) -> Weight:
    """Convert a weight of a type in `EXACT` to MLX's type.

    A weight of another type, or with a scale or minimum that is not finite, is returned unchanged.
    """
    if weight.type.name not in EXACT:
        return weight
    type_, stored = EXACT[weight.type.name], BY_NAME[weight.type.name]
    blocks = weight.data.reshape(-1, stored.block_bytes)
    n_floats = 2 if weight.type.name == "Q4_1" else 1
    floats = np.ascontiguousarray(blocks[:, : 2 * n_floats]).view(np.float16).astype(np.float32)
    if not np.isfinite(floats).all():
        return weight
    scales = np.ascontiguousarray(floats[:, :1])
    biases = np.ascontiguousarray(floats[:, 1:]) if n_floats == 2 else scales * np.float32(-OFFSETS[weight.type.name])
    quants = np.empty((len(blocks), type_.block_size * type_.bits // 8), dtype=np.uint8)
    for first in range(0, len(blocks), _PART):
        some = slice(first, first + _PART)
        quants[some] = _in_order(blocks[some, 2 * n_floats :], type_.bits)
    return GroupWeight(weight.name, weight.shape, type_, Parts(quants, scales.view(np.uint8), biases.view(np.uint8)))


def _in_order(packed: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Convert the quants of GGUF blocks to unsigned quants in MLX's order.

    Q8_0 stores signed bytes; the XOR adds 128. Q4_0 and Q4_1 store 4-bit numbers that are unsigned already (in Q4_0,
    the signed quant plus 8), in the order "in halves".
    """
    if bits == 8:
        return packed ^ np.uint8(0x80)
    quants = np.empty_like(packed)
    packing.in_pairs(packed, quants)
    return quants


def in_gguf_order(weight: Weight) -> Weight:
    """Convert a weight in MLX's form of MXFP4 to GGUF's form.

    A weight of another type, or with an infinite scale, is returned unchanged.
    """
    if weight.type != MLX:
        return weight
    parts = split(weight, MLX)
    if (parts.scales == _UNLIKE).any():
        return weight
    blocks = np.empty((len(parts.quants), GGUF.block_bytes), dtype=np.uint8)
    blocks[:, :1] = parts.scales
    for first in range(0, len(blocks), _PART):
        some = slice(first, first + _PART)
        packing.in_halves(parts.quants[some], blocks[some, 1:])
    return Weight(weight.name, weight.shape, GGUF, blocks.reshape(-1))


def in_mlx_order(weight: Weight) -> Weight:
    """Convert a weight in GGUF's form of MXFP4 to MLX's form.

    A weight of another type, or with the scale 2 ** 128, which MLX does not have, is returned unchanged.
    """
    if weight.type != GGUF:
        return weight
    blocks = weight.data.reshape(-1, GGUF.block_bytes)
    if (blocks[:, 0] == _UNLIKE).any():
        return weight
    quants = np.empty((len(blocks), GGUF.block_bytes - 1), dtype=np.uint8)
    for first in range(0, len(blocks), _PART):
        some = slice(first, first + _PART)
        packing.in_pairs(blocks[some, 1:], quants[some])
    scales = np.ascontiguousarray(blocks[:, :1])
    return GroupWeight(weight.name, weight.shape, MLX, Parts(quants, scales, None))
