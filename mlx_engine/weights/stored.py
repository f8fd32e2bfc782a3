"""`TensorLayout` describes how a file stores a model's tensor; `take` converts from this form, `put` to this form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mlx_engine.errors import UnsupportedTypeError
from mlx_engine.quant.group_weight import GroupWeight
from mlx_engine.quant.types import F32, GGMLType
from mlx_engine.quant.weight import Weight


@dataclass(frozen=True)
class TensorLayout:
    """How a file stores a tensor of the model. The defaults mean that the stored tensor is the model's tensor.

    Attributes:
        name: the name in the file.
        rows: (first, of) if the file has the tensor as rows of a larger tensor with `of` rows; row `first` is the
            tensor's first row.
        step: the distance between consecutive rows of the tensor in the larger tensor of `rows`.
        transposed: whether the matrix is stored transposed, as in transformers' Conv1D layers.
        plus, times: the stored value is `(value - plus) * times`.
        row_times: pairs (number of rows, factor), one for each of the consecutive runs into which the rows are divided;
            the stored values of a run are also multiplied by its factor. Empty for no factors.
        heads: number of heads, if the rows of each head have another order in the file; None if the order is the same.
            If `rotated` is None, rows of the first and the second half of a head alternate in the file.
        rotated: number of rows of each head that rotary embedding rotates. The file has them before the head's other
            rows. In the model, each half of a head begins with half of the rotated rows, so that rotary pairs are
            (j, j + head_dim/2).
        interleaved: whether the two rows of a rotary pair have the indices (2j, 2j + 1) in the file; needs `rotated`.
        expert: (index, of) if the stored tensor has a leading axis of `of` experts, and the model's tensor is the
            expert with this index.
        is_log: whether the file stores log(-x) for the model's negative values x.
        order: for each row of the model's tensor, the index of the stored row. `take` then uses only the item `of` of
            `rows`, and ignores `step`.
        columns: (order, width) if the file has the columns in another order: group i of `width` columns in the model is
            group `order[i]` in the file.
        flipped: whether the model's matrix is the transpose of the matrix that the other fields describe. Unlike with
            `transposed`, types with blocks are allowed; their weights are expanded to float32.
        outer: the shape of the stored tensor, if it has the same elements as the model's but another number of axes.
    """

    name: str
    rows: tuple[int, int] | None = None
    transposed: bool = False
    plus: float = 0.0
    heads: int | None = None
    times: float = 1.0
    expert: tuple[int, int] | None = None
    rotated: int | None = None
    is_log: bool = False
    order: tuple[int, ...] | None = None
    columns: tuple[tuple[int, ...], int] | None = None
    outer: tuple[int, ...] | None = None
    step: int = 1
    interleaved: bool = False
    flipped: bool = False
    row_times: tuple[tuple[int, float], ...] = ()

    @property
    def is_shifted(self) -> bool:
        """Whether stored values differ from the model's values."""
        return self.plus != 0 or self.times != 1 or self.is_log or any(factor != 1 for _, factor in self.row_times)

    @property
    def place(self) -> tuple[int, int]:
        """The indices of the expert and of the first row; a sort key for tensors that a file stores as one tensor."""
        return (self.expert or (0, 0))[0], (self.rows or (0, 0))[0]

    @property
    def factors(self) -> NDArray[np.float32]:
        """The product of `times` and `row_times` for each row, (rows, 1); (1, 1) without `row_times`."""
        of_rows = [np.full((n, 1), factor) for n, factor in self.row_times] or [np.ones((1, 1))]
        return (np.concatenate(of_rows) * self.times).astype(np.float32)

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the stored tensor; `shape` is the shape of the model's tensor."""
        if self.outer is not None:
            return self.outer
        shape = shape[::-1] if self.flipped else shape
        whole = shape if self.rows is None else (self.rows[1], *shape[1:])
        whole = whole[::-1] if self.transposed else whole
        return whole if self.expert is None else (self.expert[1], *whole)

    def take(self, weight: Weight, shape: tuple[int, ...]) -> Weight:
        """Return the model's tensor of this shape from the stored tensor: a view of the stored bytes if possible.

        Raises:
            UnsupportedTypeError: the tensor is `transposed` and its type has blocks of several weights, or a block
                spans two groups of `columns`.
        """
        if self.flipped:
            # A block has consecutive weights of a row. Transposing puts them into different rows, so types with blocks
            # are expanded to float32.
            rows = replace(self, flipped=False).take(weight, shape[::-1])
            type_ = rows.type if rows.type.block_size == 1 else F32
            elements = rows.as_type(type_).data.view(f"u{type_.block_bytes}").reshape(shape[::-1])
            return Weight(weight.name, shape, type_, elements.T.reshape(-1).view(np.uint8))
        changes = self.transposed, self.is_shifted, self.heads, self.rows, self.expert, self.order, self.columns
        if not any(changes) and weight.shape == shape:
            return weight  # without using `weight.data`, which may read the bytes from the file
        if self.expert is not None and isinstance(weight, GroupWeight):
            # `GroupWeight.part` reads only this expert's bytes.
            return replace(self, expert=None).take(weight.part(*self.expert), shape)
        first, of = self.rows or (0, shape[0])
        data, last = weight.data, first + self.step * (shape[0] - 1) + 1
        if self.expert is not None:
            e, n = self.expert
            data = data[data.size // n * e : data.size // n * (e + 1)]
        if self.transposed and weight.type.block_size > 1:
            raise UnsupportedTypeError(
                where=f"tensor {self.name!r}",
                expected="a type without blocks, because the file stores this matrix transposed",
                found=weight.type.name,
                hint="quantise the original folder with the `quantize` command",
            )
        if self.transposed:
            # Transpose whole values: transposing single bytes takes ten times as long.
            values = data.view(f"u{weight.type.block_bytes}").reshape(shape[1], of)
            data = values[:, first : last : self.step].T.reshape(-1).view(np.uint8)
        elif self.order is not None:
            data = data.reshape(of, -1)[list(self.order)].reshape(-1)
        elif self.rows is not None:
            data = data.reshape(of, -1)[first : last : self.step].reshape(-1)
        if self.columns is not None:
            data = self._grouped(weight.type, data, shape)[:, list(self.columns[0])].reshape(-1)
        if self.heads is not None:
            head_dim = shape[0] // self.heads
            data = data.reshape(self.heads, head_dim, -1)[:, self._order(head_dim)].reshape(-1)
        taken = Weight(weight.name, shape, weight.type, data)
        if not self.is_shifted:
            return taken
        values = taken.dequantize()
        values = (values.reshape(shape[0], -1) / self.factors + np.float32(self.plus)).reshape(values.shape)
        if self.is_log:
            values = -np.exp(values)
        return Weight.pack(weight.name, values, F32)

    def put(self, parts: Sequence[Weight], orders: Sequence[tuple[int, ...] | None] = ()) -> Weight:
        """Join `parts`, which are tensors of the model, into the stored tensor: the inverse of `take`.

        Pass each part through `in_file_order` first. `orders` has the field `order` of each part's layout; by default,
        `self.order` is used.
        Raise ValueError if the parts have different types.
        """
        if len({part.type for part in parts}) > 1:
            raise ValueError(f"{self.name}: expected parts of one type, found {[part.type.name for part in parts]}")
        type_, width = parts[0].type, parts[0].shape[1:]
        if self.is_shifted:
            type_, plus = F32, np.float32(self.plus)
            values = [np.log(-part.dequantize()) if self.is_log else part.dequantize() for part in parts]
            shifted = [((v.reshape(len(v), -1) - plus) * self.factors).reshape(v.shape) for v in values]
            parts = [Weight.pack(p.name, v, F32) for p, v in zip(parts, shifted, strict=True)]
        data = np.concatenate([part.data for part in parts])
        order = [row for rows in orders or (self.order,) for row in rows or ()]
        if order:
            placed = np.empty_like(data.reshape(len(order), -1))
            placed[order] = data.reshape(len(order), -1)
            data = placed.reshape(-1)
        shape = (sum(part.shape[0] for part in parts), *width)
        if self.transposed:
            data = data.view(f"u{type_.block_bytes}").reshape(shape).T.reshape(-1).view(np.uint8)
            shape = shape[::-1]
        if self.expert is not None:
            shape = (len(parts), *parts[0].shape)
        if self.outer is not None:
            shape = self.outer
        return Weight(self.name, shape, type_, data)

    def in_file_order(self, part: Weight) -> Weight:
        """Return a tensor of the model in the file's order, as `heads`, `columns` and `flipped` describe the order.

        Raises:
            UnsupportedTypeError: a block of the type spans two groups of columns.
        """
        if self.flipped:
            return TensorLayout(self.name, flipped=True).take(part, part.shape[::-1])
        data = part.data
        if self.columns is not None:
            groups = self._grouped(part.type, data, part.shape)
            placed = np.empty_like(groups)
            placed[:, list(self.columns[0])] = groups
            data = placed.reshape(-1)
        if self.heads is not None:
            head_dim = part.shape[0] // self.heads
            order = np.argsort(self._order(head_dim))
            data = data.reshape(self.heads, head_dim, -1)[:, order].reshape(-1)
        return part if data is part.data else Weight(part.name, part.shape, part.type, data)

    def _order(self, head_dim: int) -> NDArray[np.intp]:
        """Return, for each row of a head in the model, its index among the rows of the head in the file."""
        rows = np.arange(head_dim)
        if self.rotated is None:
            return rows.reshape(-1, 2).T.reshape(-1)
        turned, rest = rows[: self.rotated], rows[self.rotated :].reshape(2, -1)
        turned = turned.reshape(-1, 2).T if self.interleaved else turned.reshape(2, -1)
        return np.concatenate((turned, rest), axis=1).reshape(-1)

    def _grouped(self, type_: GGMLType, data: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """Return the bytes of a matrix as (rows, groups of columns, bytes).

        Raise UnsupportedTypeError if a block spans two groups.
        """
        order, width = self.columns or ((0,), shape[1])
        if width % type_.block_size:
            raise UnsupportedTypeError(
                where=f"tensor {self.name!r}",
                expected=f"a type whose blocks do not cross groups of {width} columns, which the file reorders",
                found=f"{type_.name}, in blocks of {type_.block_size}",
                hint="choose a type with smaller blocks",
            )
        return data.reshape(shape[0], len(order), -1)
