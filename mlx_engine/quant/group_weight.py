"""Weights in MLX's quantised types, whose quants, scales and biases a file stores in three tensors."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mlx_engine.quant import packing
from mlx_engine.quant.groups import GroupType
from mlx_engine.quant.weight import Weight, cut_shape, taken

# Groups that one thread joins at a time, and threads: page faults of the new memory are the larger part of the time.
_PIECE, _THREADS = 1 << 16, 4


@dataclass(frozen=True, eq=False)
class Parts:
    """The stored tensors of a weight (..., N, K): G groups, each with a scale, perhaps a bias, and packed quants.

    Attributes:
        quants: uint8 (G, bytes of a group's quants), in MLX's order.
        scales: uint8 (G, bytes of a scale).
        biases: uint8 (G, bytes of a bias), or None.
    """

    quants: NDArray[np.uint8]
    scales: NDArray[np.uint8]
    biases: NDArray[np.uint8] | None

    @property
    def in_order(self) -> tuple[NDArray[np.uint8], ...]:
        """The parts in the order of a block."""
        return (self.scales, self.quants) if self.biases is None else (self.scales, self.biases, self.quants)


class GroupWeight(Weight):
    """A weight of a `GroupType` that is stored in parts. Its blocks are made when `data` is first used.

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
        """Make these blocks alone."""
        cut = [part[first:last] for part in self.parts.in_order]
        return join(self.type, Parts(cut[-1], cut[0], cut[1] if self.type.has_biases else None))

    def part(self, i: int, n: int) -> GroupWeight:
        """Return part i of n equal parts along the first axis, without that axis. No bytes are read."""
        cut = [part[len(part) // n * i : len(part) // n * (i + 1)] for part in self.parts.in_order]
        parts = Parts(cut[-1], cut[0], cut[1] if self.type.has_biases else None)
        return GroupWeight(self.name, self.shape[1:], self.type, parts)

    def cut(self, axis: int, ranges: Sequence[tuple[int, int]]) -> GroupWeight:
        """Return rows or columns as `Weight.cut` does, in parts: no block is made."""
        shape = cut_shape(self, axis, ranges)
        cut = [taken(part, self.shape, self.type, axis, ranges) for part in self.parts.in_order]
        parts = Parts(cut[-1], cut[0], cut[1] if self.type.has_biases else None)
        return GroupWeight(self.name, shape, self.type, parts)

    def rows(self, ids: Sequence[int] | NDArray[np.integer]) -> NDArray[np.float32]:
        """Dequantise the rows `ids` of a matrix as `Weight.rows` does. Only their blocks are made."""
        if len(self.shape) != 2 or not len(ids) or min(ids) < 0 or max(ids) >= self.shape[0]:
            return super().rows(ids)
        n, per_row = len(ids), self.shape[1] // self.type.block_size
        picked = [
            part.reshape(self.shape[0], per_row, -1)[np.asarray(ids)].reshape(n * per_row, -1)
            for part in self.parts.in_order
        ]
        some = Parts(picked[-1], picked[0], picked[1] if self.type.has_biases else None)
        return GroupWeight(self.name, (n, self.shape[1]), self.type, some).dequantize()


def join(type_: GroupType, parts: Parts) -> NDArray[np.uint8]:
    """Return blocks as a vector of bytes: the parts of each group side by side, without any rounding.

    Quants of 4 bits are put in halves, which the CPU kernels unpack with fewer instructions.
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
    """Return the parts of a weight of this type: the stored ones if it has them, else copies."""
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
    """View columns of bytes as the widest items: NumPy copies an item at a time."""
    width = columns.shape[1]
    return columns.view(f"V{width}")
