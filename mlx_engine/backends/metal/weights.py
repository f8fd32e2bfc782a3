"""The data types of the `metal` backend: quantised matrices, and new keys and values in one array.

A matrix is split into quants and scales once, when it is loaded, and our kernels read these arrays. If the GPU refuses
a kernel, MLX multiplies instead, with the same quants, and the scales are converted to MLX's format in each product.
MLX's format cannot express Q6_K, so for MLX, a Q6_K matrix is dequantised in each product.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_engine.backends.mlx.weights import GroupMatrix
from mlx_engine.kernels.metal.formats import (
    GROUPS,
    KINDS,
    affine_layout,
    join_affine,
    split_q4_0,
    split_q4_k,
    split_q6_k,
    split_q8_0,
)
from mlx_engine.kernels.metal.layout import StoredMatrix
from mlx_engine.quant import group_weight
from mlx_engine.quant.groups import GroupType
from mlx_engine.quant.weight import Weight

if TYPE_CHECKING:
    from mlx_engine.backends.metal.kernels import Kernels

SPLIT: dict[str, Callable[[NDArray[np.uint8], tuple[int, int]], StoredMatrix]] = {
    "Q8_0": split_q8_0,
    "Q4_0": split_q4_0,
    "Q4_K": split_q4_k,
    "Q6_K": split_q6_k,
}


@dataclass(frozen=True, eq=False)
class SplitMatrix:
    """A `BlockMatrix` (N, K) in its stored type, split into quants and scales, and the kernels that multiply it.

    Attributes:
        matrix: the quants and scales. If the head is tied to the embedding table, both share this object.
    """

    matrix: StoredMatrix
    kernels: Kernels = field(repr=False)
    shape: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", self.matrix.shape)

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes

    @property
    def instance(self) -> Hashable:
        """The key of a kernel's instantiation: the shape and the stored type."""
        return self.shape, self.matrix.layout

    def multiply(self, x: mx.array) -> mx.array:
        y = self.kernels.multiply(x, self)
        return fallback_multiply(x, self.matrix) if y is None else y

    def rows(self, ids: mx.array) -> mx.array:
        rows = self.kernels.rows(self, ids)
        return self.matrix.dequantized(ids) if rows is None else rows


def split(weight: Weight, kernels: Kernels) -> SplitMatrix | None:
    """Return a matrix in its stored type, split into quants and scales; None if there is no kernel for the type.

    Also return None if a scale is infinite or NaN: products would then depend on whether a kernel multiplies by the
    scale before or after it adds.
    """
    matrix = _repacked(weight)
    return SplitMatrix(matrix, kernels) if matrix is not None and _is_finite(matrix) else None


def _repacked(weight: Weight) -> StoredMatrix | None:
    if len(weight.shape) != 2:
        return None
    shape, type_ = (weight.shape[0], weight.shape[1]), weight.type
    if type_.name in SPLIT:
        return SPLIT[type_.name](weight.data, shape)
    if not isinstance(type_, GroupType) or type_.bits not in KINDS or type_.block_size not in GROUPS:
        return None
    parts = group_weight.split(weight, type_)
    if parts.biases is None:
        return None
    layout = affine_layout(type_.bits, type_.block_size, type_.scale)
    return join_affine(layout, shape, parts.quants, parts.scales, parts.biases)


def _is_finite(matrix: StoredMatrix) -> bool:
    of = matrix.layout
    # `affine` returns the scales and biases in `ws` as floats. It is None for Q6_K: there, the first float16 element of
    # each entry of `ws` is the scale d, and each other element is not a float, but the bytes of two int8 scales.
    parts = [matrix.ws[:, :: of.entry]] if of.affine is None else of.affine(matrix.ws)
    return all(bool(mx.isfinite(part).all().item()) for part in parts)


def affine(weight: SplitMatrix | mx.array) -> GroupMatrix | mx.array:
    """Return a matrix in MLX's affine format if the format can express its type exactly, else as floats."""
    return _affine(weight.matrix) if isinstance(weight, SplitMatrix) else weight


def _affine(matrix: StoredMatrix) -> GroupMatrix | mx.array:
    if matrix.layout.affine is None:
        return matrix.dequantized()
    scales, biases = matrix.scales_and_biases()
    return GroupMatrix(matrix.wq, scales, biases, matrix.shape[1] // scales.shape[1], matrix.layout.bits)


def fallback_multiply(x: mx.array, matrix: StoredMatrix) -> mx.array:
    """Return `x @ matrix.T` by MLX operations."""
    weight = _affine(matrix)
    return x @ weight.T if isinstance(weight, mx.array) else weight.multiply(x)


@dataclass(frozen=True, eq=False)
class Half:
    """The keys or the values (T, G, E) of new tokens: a half of an array (2, G, T, E) that has keys and values.

    Models pass keys and values as two arrays. If these are the `Half`s of one array, `kv_write` writes both at once.
    """

    both: mx.array
    index: int

    def __len__(self) -> int:
        return int(self.both.shape[2])

    @property
    def shape(self) -> tuple[int, int, int]:
        _, G, T, E = self.both.shape
        return T, G, E

    @property
    def nbytes(self) -> int:
        return int(self.both.nbytes) // 2

    def array(self) -> mx.array:
        """Return a view of this half."""
        return self.both[self.index : self.index + 1].squeeze(0).transpose(1, 0, 2)


def joined(k: object, v: object) -> mx.array | None:
    """Return the array (2, G, T, E) whose halves are k and v; None if they are not halves of one array."""
    if isinstance(k, Half) and isinstance(v, Half) and k.both is v.both and (k.index, v.index) == (0, 1):
        return k.both
    return None
