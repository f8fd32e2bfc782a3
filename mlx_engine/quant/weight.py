"""A weight as it is stored in a file: name, shape, type and a view of its bytes, which are dequantised on request."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mlx_engine import quant
from mlx_engine.quant.types import GGMLType


@dataclass(frozen=True, eq=False)
class Weight:
    """A tensor in its stored type.

    `shape` is row-major, as in NumPy: (outputs, inputs) for a linear layer. `data` is a vector of bytes, usually a
    read-only view of a mapped file. Methods that dequantise raise UnsupportedTypeError if the type cannot be read.

    Raises:
        ValueError: rows do not fill whole blocks, or the number of bytes does not match shape and type.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    data: NDArray[np.uint8]

    def __post_init__(self) -> None:
        row = self.shape[-1] if self.shape else 1
        if row % self.type.block_size:
            raise ValueError(
                f"{self.name}: rows of {row} weights do not fill {self.type} blocks of {self.type.block_size}"
            )
        expected = self.type.bytes_for(math.prod(self.shape))
        if self.data.dtype != np.uint8 or self.data.shape != (expected,):
            raise ValueError(
                f"{self.name}: shape {self.shape} as {self.type} takes {expected:,} bytes in one dimension, "
                f"not {self.data.dtype} {self.data.shape}"
            )

    @classmethod
    def pack(cls, name: str, values: ArrayLike, type_: GGMLType) -> Weight:
        """Create a weight of type `type_` from floats.

        Raises:
            UnsupportedTypeError: the type cannot be written.
            ValueError: a row does not fill whole blocks; or a value is NaN or infinite, and the type cannot store it.
        """
        floats = np.asarray(values, dtype=np.float32)
        row = floats.shape[-1] if floats.ndim else 1
        if row % type_.block_size:
            raise ValueError(f"{name}: rows of {row} weights do not fill {type_} blocks of {type_.block_size}")
        return cls(name, floats.shape, type_, quant.quantize(floats, type_, where=f"tensor {name!r}"))

    @property
    def nbytes(self) -> int:
        """The number of stored bytes."""
        return self.type.bytes_for(math.prod(self.shape))

    def dequantize(self) -> NDArray[np.float32]:
        """Return all values as float32, of shape `shape`."""
        return quant.dequantize(self.data, self.type, where=f"tensor {self.name!r}").reshape(self.shape)

    def pieces(self, n: int) -> Iterator[NDArray[np.float32]]:
        """Yield all values in row-major order, as float32 vectors of whole blocks: at most `n` values, or one block."""
        step = max(1, n // self.type.block_size)
        for first in range(0, math.prod(self.shape) // self.type.block_size, step):
            yield quant.dequantize(self._blocks(first, first + step), self.type, where=f"tensor {self.name!r}")

    def _blocks(self, first: int, last: int) -> NDArray[np.uint8]:
        """Return the bytes of blocks [first, last)."""
        return self.data[first * self.type.block_bytes : last * self.type.block_bytes]

    def as_type(self, type_: GGMLType, *, threads: int = 1) -> Weight:
        """Return the weight converted to `type_`, piece by piece; return `self` if it has that type.

        Raises:
            UnsupportedTypeError: the stored type cannot be read, or `type_` cannot be written.
            ValueError: a row does not fill whole blocks; or a value is NaN or infinite, and `type_` cannot store it.
        """
        if type_ == self.type:
            return self
        data = quant.requantize(self.data, self.type, type_, where=f"tensor {self.name!r}", threads=threads)
        return Weight(self.name, self.shape, type_, data)

    def cut(self, axis: int, ranges: Sequence[tuple[int, int]]) -> Weight:
        """Return ranges [first, last) of the rows (axis 0) or columns (axis 1) of a matrix, or of a vector's values.

        The ranges are joined in their order. For a vector, `axis` is 0. If `axis` is 0 and there is one range, the
        result is a view, else a copy.

        Raises:
            ValueError: the weight is neither a matrix nor a vector, or has no axis `axis`; or there is no range; or a
                range is empty, or begins or ends inside a block or outside the weight.
        """
        shape = cut_shape(self, axis, ranges)
        return Weight(self.name, shape, self.type, taken(self.data, self.shape, self.type, axis, ranges).reshape(-1))

    def rows(self, ids: Sequence[int] | NDArray[np.integer]) -> NDArray[np.float32]:
        """Dequantise the rows `ids` of a matrix, (len(ids), shape[1]). No other row is read.

        Raises:
            ValueError: the weight is not a matrix.
            IndexError: an id is negative or not below `shape[0]`.
        """
        if len(self.shape) != 2:
            raise ValueError(f"{self.name}: rows() needs a matrix, found shape {self.shape}")
        index = np.asarray(ids, dtype=np.int64)
        if index.size and (index.min() < 0 or index.max() >= self.shape[0]):
            raise IndexError(
                f"{self.name}: rows 0 to {self.shape[0] - 1} exist, asked for {index.min()} to {index.max()}"
            )
        stored = self.data.reshape(self.shape[0], self.type.bytes_for(self.shape[1]))[index]
        values = quant.dequantize(stored, self.type, where=f"tensor {self.name!r}")
        return values.reshape(len(index), self.shape[1])


def cut_shape(weight: Weight, axis: int, ranges: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Return the shape of `weight.cut(axis, ranges)`; raise ValueError as `Weight.cut` does."""
    shape, unit = weight.shape, weight.type.block_size if axis == len(weight.shape) - 1 else 1
    if len(shape) > 2 or not 0 <= axis < len(shape) or not ranges:
        raise ValueError(f"{weight.name}: expected rows or columns of a matrix, found axis {axis} of shape {shape}")
    for first, last in ranges:
        if not 0 <= first < last <= shape[axis] or first % unit or last % unit:
            raise ValueError(
                f"{weight.name}: expected a range within [0, {shape[axis]}), its ends multiples of {unit}, "
                f"found [{first}, {last})"
            )
    return (*shape[:axis], sum(last - first for first, last in ranges), *shape[axis + 1 :])


def taken(
    stored: NDArray[np.uint8], shape: tuple[int, ...], type_: GGMLType, axis: int, ranges: Sequence[tuple[int, int]]
) -> NDArray[np.uint8]:
    """Return the bytes (blocks, bytes per block) of `Weight.cut(axis, ranges)` for a weight of this shape and type.

    `stored` has the blocks of the weight, or the same part of every block, such as its scale.
    """
    n_rows, n_blocks = math.prod(shape[:-1]), shape[-1] // type_.block_size
    blocks = stored.reshape(n_rows, n_blocks, -1)
    if axis == len(shape) - 1:
        unit = type_.block_size
        some = [blocks[:, first // unit : last // unit] for first, last in ranges]
    else:
        some = [blocks[first:last] for first, last in ranges]
    joined = some[0] if len(some) == 1 else np.concatenate(some, axis=int(axis == len(shape) - 1))
    return joined.reshape(-1, blocks.shape[2])
