"""How a file stores a tensor of the model: under which name and in which form. Convert in both directions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mlx_engine.quant.types import F32, GGMLType
from mlx_engine.quant.weight import Weight


@dataclass(frozen=True)
class Stored:
    """How a file stores a tensor: its name there, and how its values differ from the model's.

    Attributes:
        name: the name in the file.
        rows: (first, of) if the tensor is a part of a larger tensor of `of` rows and begins at row `first`.
        transposed: whether the matrix is stored transposed, as in Conv1D layers.
        plus: added to every stored value to get the model's value.
        times: factor by which every value, minus `plus`, is multiplied in the file.
        is_log: whether the file has logarithms of the model's values, which are negative, without their sign.
        order: the stored rows that are the model's rows, in the model's order; `rows` then only gives their number.
        columns: (order, width) if the model's columns are stored in another order: groups of `width` columns each.
        outer: the shape of the stored tensor, if it has the same elements in another number of axes.
        heads: number of heads, if the file interleaves the rows of each head's two halves.
    """

    name: str
    rows: tuple[int, int] | None = None
    transposed: bool = False
    plus: float = 0.0
    heads: int | None = None
    times: float = 1.0
    is_log: bool = False
    order: tuple[int, ...] | None = None
    columns: tuple[tuple[int, ...], int] | None = None
    outer: tuple[int, ...] | None = None

    @property
    def is_shifted(self) -> bool:
        """Whether stored values differ from the model's values."""
        return self.plus != 0 or self.times != 1 or self.is_log

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the stored tensor, given the shape of the model's tensor."""
        if self.outer is not None:
            return self.outer
        whole = shape if self.rows is None else (self.rows[1], *shape[1:])
        return whole[::-1] if self.transposed else whole

    def take(self, weight: Weight, shape: tuple[int, ...]) -> Weight:
        """Return the model's tensor from the stored tensor: a view of its bytes if possible."""
        first, of = self.rows or (0, shape[0])
        data, last = weight.data, first + shape[0]
        if self.transposed:
            # Transpose elements of whole values: byte by byte it takes ten times as long.
            values = data.view(f"u{weight.type.block_bytes}").reshape(shape[1], of)
            data = values[:, first:last].T.reshape(-1).view(np.uint8)
        elif self.order is not None:
            data = data.reshape(of, -1)[list(self.order)].reshape(-1)
        elif self.rows is not None:
            data = data[data.size * first // of : data.size * last // of]
        if self.columns is not None:
            data = self._grouped(weight.type, data, shape)[:, list(self.columns[0])].reshape(-1)
        if self.heads is not None:
            data = data.reshape(self.heads, shape[0] // self.heads // 2, 2, -1).transpose(0, 2, 1, 3).reshape(-1)
        taken = Weight(weight.name, shape, weight.type, data)
        if not self.is_shifted:
            return taken
        values = taken.dequantize() / np.float32(self.times) + np.float32(self.plus)
        if self.is_log:
            values = -np.exp(values)
        return Weight.pack(weight.name, values, F32)

    def put(self, parts: Sequence[Weight], orders: Sequence[tuple[int, ...] | None] = ()) -> Weight:
        """Return the stored tensor from the model's tensors that are its rows, in order: the inverse of `take`.

        Args:
            parts: the model's tensors.
            orders: the `order` of each part; by default this one's.

        Raises:
            ValueError: the parts are of several types.
        """
        if len({part.type for part in parts}) > 1:
            raise ValueError(f"{self.name}: expected parts of one type, found {[part.type.name for part in parts]}")
        type_, width = parts[0].type, parts[0].shape[1:]
        if self.is_shifted:
            type_, plus, times = F32, np.float32(self.plus), np.float32(self.times)
            values = [np.log(-part.dequantize()) if self.is_log else part.dequantize() for part in parts]
            parts = [Weight.pack(p.name, (v - plus) * times, F32) for p, v in zip(parts, values, strict=True)]
        data = np.concatenate([self._dealt(part) for part in parts])
        order = [row for rows in orders or (self.order,) for row in rows or ()]
        if order:
            placed = np.empty_like(data.reshape(len(order), -1))
            placed[order] = data.reshape(len(order), -1)
            data = placed.reshape(-1)
        shape = (sum(part.shape[0] for part in parts), *width)
        if self.transposed:
            data = data.view(f"u{type_.block_bytes}").reshape(shape).T.reshape(-1).view(np.uint8)
            shape = shape[::-1]
        if self.outer is not None:
            shape = self.outer
        return Weight(self.name, shape, type_, data)

    def _dealt(self, part: Weight) -> NDArray[np.uint8]:
        """Return the bytes of a part, with the rows of each head's two halves interleaved if the file needs it."""
        if self.columns is not None:
            groups = self._grouped(part.type, part.data, part.shape)
            placed = np.empty_like(groups)
            placed[:, list(self.columns[0])] = groups
            return placed.reshape(-1)
        if self.heads is None:
            return part.data
        halves = part.data.reshape(self.heads, 2, part.shape[0] // self.heads // 2, -1)
        return halves.transpose(0, 2, 1, 3).reshape(-1)

    def _grouped(self, type_: GGMLType, data: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """Return the bytes of a matrix as (rows, groups of columns, bytes).

        Raises:
            ValueError: a block of the type lies in two groups.
        """
        order, width = self.columns or ((0,), shape[1])
        if width % type_.block_size:
            expected = f"columns in blocks of {type_.block_size} that do not cross groups of {width}"
            raise ValueError(f"{self.name}: expected {expected}, found {type_.name}")
        return data.reshape(shape[0], len(order), -1)
