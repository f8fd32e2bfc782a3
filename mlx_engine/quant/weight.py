"""A stored weight: name, shape, type and a view of its bytes. Dequantised only on request."""

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
    read-only view of a mapped file.

    Raises:
        ValueError: the number of bytes does not match shape and type.
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
            ValueError: a row does not fill whole blocks.
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
        """Return all values as float32, of shape `shape`.

        Raises:
            UnsupportedTypeError: the type is known but cannot be read.
        """
        return quant.dequantize(self.data, self.type, where=f"tensor {self.name!r}").reshape(self.shape)

    def pieces(self, n: int) -> Iterator[NDArray[np.float32]]:
        """Yield all values in row-major order, as float32 vectors of at most `n` values, but at least a block.

        Only one piece at a time is dequantised.

        Raises:
            UnsupportedTypeError: the type is known but cannot be read.
        """
        step = max(1, n // self.type.block_size)
        for first in range(0, math.prod(self.shape) // self.type.block_size, step):
            yield quant.dequantize(self._blocks(first, first + step), self.type, where=f"tensor {self.name!r}")

    def _blocks(self, first: int, last: int) -> NDArray[np.uint8]:
        """Return the bytes of blocks [first, last)."""
        return self.data[first * self.type.block_bytes : last * self.type.block_bytes]

    def as_type(self, type_: GGMLType) -> Weight:
        """Return the weight converted to `type_`, piece by piece; return `self` if it has that type.

        Raises:
            UnsupportedTypeError: the stored type cannot be read, or `type_` cannot be written.
            ValueError: a row does not fill whole blocks.
        """
        if type_ == self.type:
            return self
        data = quant.requantize(self.data, self.type, type_, where=f"tensor {self.name!r}")
        return Weight(self.name, self.shape, type_, data)

    def rows(self, ids: Sequence[int] | NDArray[np.integer]) -> NDArray[np.float32]:
        """Dequantise the rows `ids` of a matrix, (len(ids), shape[1]). No other row is read.

        Raises:
            UnsupportedTypeError: the type is known but cannot be read.
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
