"""Parse descriptions of a kernel's arrays, such as "float16 V K"; compute shapes, and generate random values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from math import lcm, prod
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .. import blocks
from ..cpu.formats import blocks_numpy
from ..metal.cases import stored
from ..metal.formats import (
    DTYPES,
    GROUPS,
    KINDS,
    LAYOUT_Q4_0,
    LAYOUT_Q4_K,
    LAYOUT_Q6_K,
    LAYOUT_Q8_0,
    affine_layout,
    split_q4_0,
    split_q4_k,
    split_q6_k,
    split_q8_0,
)
from ..metal.layout import BLOCK, StoredMatrix, expanded, in_device_memory

Sizes = Mapping[str, int]

FLOATS = ("float32", "float16", "bfloat16")
INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
# The name of the type parameter in a kernel's text. By default, a check runs the kernel with T as float32 and float16.
CHOSEN = "T"
# Matrices of these quantised types are two arrays in a kernel: packed quants, and scales. Maps each type to its layout.
SPLIT = {
    layout.name.lower(): layout
    for layout in (
        LAYOUT_Q8_0, LAYOUT_Q4_0, LAYOUT_Q4_K, LAYOUT_Q6_K,
        *(affine_layout(*of) for of in product(KINDS, GROUPS, DTYPES)),
    )
}  # fmt: skip
# Matrices of these quantised types are one array in a kernel: the blocks of a file. Maps each type to (dtype of a
# block, weights per block).
AS_BLOCKS: dict[str, tuple[np.dtype[np.void], int]] = {
    **{name: (getattr(blocks, name.upper()), 32) for name in ("q4_1", "q5_0", "q5_1", "iq4_nl", "mxfp4")},
    **{name: (getattr(blocks, name.upper()), 256) for name in ("q2_k", "q3_k", "q5_k", "iq4_xs")},
}
STORED = (*SPLIT, *AS_BLOCKS)
TYPES = (*FLOATS, *INTEGERS, "bool", CHOSEN, *STORED)

# Matches names of types in other libraries and in Metal, such as "half". `parse` refuses them as names of axes.
_MEANT = re.compile(
    r"(?:b|bf)?float(?:\d+(?:_t)?)?|half|double|u?(?:int|char|short|long)(?:\d+(?:_t)?)?|bool_|byte|size_t|"
    r"complex\d*|(?:f|fp|bf|u|i)\d+|[fi]?q\d_\w+"
)
_INSTEAD = {"float": "float32", "half": "float16", "bfloat": "bfloat16", "int": "int32", "uint": "uint32"}

_AXIS = re.compile(r"(\d+|[A-Za-z]\w*)((?:[*/]\d+)*)")


@dataclass(frozen=True)
class Axis:
    """The parsed length of an axis: a number or a name, then factors and divisors, such as "32", "N*2" or "K/32"."""

    text: str
    base: str
    factors: tuple[tuple[str, int], ...]  # ("*" or "/", number)

    @property
    def name(self) -> str | None:
        """The name of the axis, or None if it is only a number."""
        return None if self.base.isdigit() else self.base

    @property
    def multiple(self) -> int:
        """The product of the divisors, such as 32 for "K/32": K must be a multiple of 32."""
        return prod(factor for operator, factor in self.factors if operator == "/")

    def size(self, sizes: Sizes) -> int:
        """Return the length of the axis; raise ValueError if `sizes` lacks the name or a division is inexact."""
        if self.name is not None and self.name not in sizes:
            raise ValueError(f"axis {self.text}: expected a size for {self.name}, found sizes for {', '.join(sizes)}")
        size = sizes[self.base] if self.name is not None else int(self.base)
        for operator, factor in self.factors:
            if operator == "/" and size % factor:
                raise ValueError(f"axis {self.text}: expected a multiple of {factor}, found {size}")
            size = size // factor if operator == "/" else size * factor
        return size


@dataclass(frozen=True)
class Array:
    """An array's name, type and axes."""

    name: str
    type: str
    axes: tuple[Axis, ...]

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        """Return the array's shape for these sizes of the axes."""
        return tuple(axis.size(sizes) for axis in self.axes)

    @property
    def parts(self) -> tuple[str, ...]:
        """The array's names in the kernel; a matrix `w` of a type in `SPLIT` has quants `wq` and scales `ws`."""
        return (f"{self.name}q", f"{self.name}s") if self.type in SPLIT else (self.name,)

    @property
    def block(self) -> int:
        """Columns per block of a quantised type; 1 for other types."""
        return SPLIT[self.type].group if self.type in SPLIT else AS_BLOCKS.get(self.type, (None, 1))[1]

    @property
    def multiples(self) -> dict[str, int]:
        """Maps the name of each axis to a number by which its size must be divisible."""
        found = {axis.name: axis.multiple for axis in self.axes if axis.name is not None}
        last = self.axes[-1].name if self.axes else None
        if last is not None:
            found[last] = lcm(found[last], self.block)
        return found


def parse(name: str, text: str, kernel: str) -> Array:
    """Parse an array's description: a type (by default float32), then axes. Raise ValueError if it is invalid."""
    words = text.split()
    type_ = words.pop(0) if words and words[0] in TYPES else "float32"
    axes = []
    for word in words:
        match = _AXIS.fullmatch(word)
        if match is None or match[1] in TYPES or _MEANT.fullmatch(match[1].lower()):
            hint = f"write {_INSTEAD[word]}; " if word in _INSTEAD else ""
            raise ValueError(
                f"{kernel}: {name}: expected a type and axes such as 'float16 V K' or 'uint32 N K/4', "
                f"found {word!r} in {text!r}; {hint}types are {', '.join(TYPES)}"
            )
        factors = re.findall(r"([*/])(\d+)", match[2])
        axes.append(Axis(word, match[1], tuple((operator, int(factor)) for operator, factor in factors)))
    if type_ in STORED and len(axes) != 2:
        raise ValueError(f"{kernel}: {name}: expected two axes for a {type_} matrix, rows and columns, found {text!r}")
    return Array(name, type_, tuple(axes))


def dtype_of(type_: str, chosen: str) -> mx.Dtype:
    """Return the MLX dtype of a type. T stands for `chosen`."""
    dtype: mx.Dtype = getattr(mx, "bool_" if type_ == "bool" else chosen if type_ == CHOSEN else type_)
    return dtype


# A few distinct values, exact in every float type, for arrays with many equal elements.
_TIED = (-1.0, 0.25, 0.5, 2.0)


def random_values(array: Array, shape: tuple[int, ...], rng: np.random.Generator, *, tied: bool = False) -> Any:
    """Return random test values: normally distributed floats, small integers, bools, or a matrix with random quants.

    Floats have the mean 0.25, not 0: with the mean 0, the sum of several terms could be so close to 0 that a kernel
    that omits these terms would pass. With `tied`, floats instead have only a few distinct values.
    """
    if array.type == "q8_0":
        made = np.empty((shape[0], shape[1] // BLOCK), blocks.Q8_0)
        made["qs"] = rng.integers(-128, 128, (*made.shape, BLOCK))
        made["d"] = rng.uniform(0.5, 1.5, made.shape) / 128
        return split_q8_0(made.view(np.uint8), (shape[0], shape[1]))
    if array.type in SPLIT:
        return stored(rng, shape[0], shape[1], SPLIT[array.type].name)
    if array.type in AS_BLOCKS:
        return _random_blocks(array.type, shape, rng)
    if tied and array.type in (*FLOATS, CHOSEN):
        return rng.choice(_TIED, shape)
    if array.type == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if array.type in INTEGERS:
        return rng.integers(0, 100, shape)
    return rng.standard_normal(shape) + 0.25


def _random_blocks(type_: str, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.void]:
    kind, size = AS_BLOCKS[type_]
    made = rng.integers(0, 256, (shape[0], shape[1] // size * kind.itemsize), dtype=np.uint8).view(kind)
    for name in {"d", "dmin", "m"} & set(kind.names or ()):
        made[name] = rng.uniform(0.5, 1.5, made.shape) / 128
    if type_ == "mxfp4":
        made["e"] = rng.integers(120, 130, made.shape)
    return made


def on_device(array: Array, values: Any, chosen: str) -> tuple[list[mx.array], NDArray[Any]]:
    """Return the arrays for the kernel, and the same values for a reference, in float64, int64 or bool.

    For a quantised type, `values` is a StoredMatrix (only types in `SPLIT`) or the blocks of a file, as a structured
    array (rows, blocks per row) or as bytes (rows, bytes per row).
    """
    if array.type in SPLIT:
        matrix = values if isinstance(values, StoredMatrix) else _split(array.type, np.asarray(values))
        return matrix.inputs, expanded(matrix)
    if array.type in AS_BLOCKS:
        raw = np.ascontiguousarray(values).view(np.uint8).reshape(len(values), -1)
        weights = getattr(blocks_numpy, array.type)(raw.reshape(-1))
        return [in_device_memory(mx.array(raw))], weights.astype(np.float64).reshape(len(raw), -1)
    given = mx.array(np.asarray(values)).astype(dtype_of(array.type, chosen))
    return [given], in_numpy(given)


def _split(type_: str, values: NDArray[Any]) -> StoredMatrix:
    """Repack a file's blocks; raise ValueError for MLX's types, which no GGUF file has."""
    functions = {"q8_0": split_q8_0, "q4_0": split_q4_0, "q4_k": split_q4_k, "q6_k": split_q6_k}
    if type_ not in functions:
        raise ValueError(
            f"data: expected a kernels.StoredMatrix for a matrix of {type_}, found {type(values).__name__}"
        )
    raw, layout = np.ascontiguousarray(values).view(np.uint8), SPLIT[type_]
    n_bytes = getattr(blocks, layout.name).itemsize
    return functions[type_](raw, (len(values), raw.size // len(values) // n_bytes * layout.group))


def in_numpy(array: mx.array | NDArray[Any]) -> NDArray[Any]:
    """Return an array in NumPy, as float64, int64 or bool."""
    if isinstance(array, mx.array) and array.dtype == mx.bfloat16:
        array = array.astype(mx.float32)
    values = np.array(array)
    if values.dtype.kind == "f":
        return values.astype(np.float64)
    return values if values.dtype.kind == "b" else values.astype(np.int64)
