"""The layout of quantised matrices in GPU memory: packed quants and scales in two aligned arrays, for every type.

In a file, blocks contain scales and quants, so quants are not aligned for loads of several words. Split in two arrays,
a matrix takes the same memory, and a SIMD-group reads consecutive quants. Quants are unsigned and in MLX's order, the
first in the lowest bits of a uint32. So for most types `mx.quantized_matmul` accepts this array, with scales and biases
in float32. It is the fallback for a GPU that refuses a kernel.

Kernels read sixteen weights at a time, with the header of each type (`q4_0.h.metal`). A new type needs such a header,
and in `formats.py` a `Layout` and a function that repacks a file's bytes. Weights are the float32 values that the
format defines. For types without an offset, the sum of sixteen products of quants is scaled, which rounds less; with an
offset, each weight is computed before it is multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

# Every K is a multiple of this.
BLOCK = 32
# The numbers of the types in `sixteen.h.metal`, and of MLX's own arrays in `prompt.h.metal`.
Q8_0, Q4_0, Q4_K, Q6_K, AFFINE4, AFFINE8, MLX4, MLX8 = range(8)


@dataclass(frozen=True)
class Layout:
    """The layout of a stored type.

    Attributes:
        name: name of the type.
        kind: number of the type in the kernels' text.
        group: columns per entry of `ws`; every K is a multiple of this.
        bits: bits of a quant.
        entry: elements of an entry of `ws`.
        dtype: type of these elements.
        affine: function that returns, from `ws`, the scales and biases of `scale * quant + bias`, each float32
            (N, K / c) for c columns; None for a type that MLX's format cannot express.
        values: function that returns, from `wq` and `ws`, the weights, float32 (N, K), of a type without `affine`.
    """

    name: str
    kind: int
    group: int
    bits: int
    entry: int
    dtype: mx.Dtype
    affine: Callable[[mx.array], tuple[mx.array, mx.array]] | None = None
    values: Callable[[mx.array, mx.array], mx.array] | None = None

    @property
    def code(self) -> int:
        """The template argument of kernels."""
        return 1000 * self.kind + self.group


@dataclass(frozen=True, eq=False)
class StoredMatrix:
    """An (N, K) matrix in the layout of its type.

    Attributes:
        layout: the layout of the arrays.
        wq: uint32 (N, K * bits / 32), packed quants.
        ws: (N, K / group * entry), scales, and minima or biases.

    Raises:
        ValueError: the two arrays do not belong together.
    """

    layout: Layout
    wq: mx.array
    ws: mx.array

    def __post_init__(self) -> None:
        of, arrays = self.layout, (self.wq, self.ws)
        if self.wq.dtype != mx.uint32 or self.ws.dtype != of.dtype or any(array.ndim != 2 for array in arrays):
            raise ValueError(
                f"{of.name} matrix: expected uint32 quants (N, K * {of.bits} / 32) and {_word(of.dtype)} scales "
                f"(N, K / {of.group} * {of.entry}), found {_described(self.wq)} and {_described(self.ws)}"
            )
        n, k = self.shape
        if k % of.group or self.ws.shape != (n, k // of.group * of.entry) or min(n, k) < 1:
            raise ValueError(
                f"{of.name} matrix: expected N >= 1, K a multiple of {of.group}, and {of.entry} scales for {of.group} "
                f"quants, found {n} x {k} quants and scales {tuple(self.ws.shape)}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.wq.shape[0], 32 * self.wq.shape[1] // self.layout.bits

    @property
    def nbytes(self) -> int:
        """The bytes of the matrix, which are as many as in a file. A product reads all of them."""
        return self.wq.nbytes + self.ws.nbytes

    @property
    def inputs(self) -> list[mx.array]:
        """Both arrays, for a kernel."""
        return [in_device_memory(self.wq), in_device_memory(self.ws)]

    @property
    def code(self) -> int:
        """The template argument of kernels."""
        return self.layout.code

    def scales_and_biases(self, ws: mx.array | None = None) -> tuple[mx.array, mx.array]:
        """Return scales and biases in MLX's format, of all rows, or of the rows whose scales are `ws`.

        Raises:
            ValueError: MLX's format cannot express the type.
        """
        if self.layout.affine is None:
            raise ValueError(f"{self.layout.name} matrix: expected a type with scales and biases for MLX")
        return self.layout.affine(self.ws if ws is None else ws)

    def dequantized(self, ids: mx.array | None = None) -> mx.array:
        """Return the weights (N, K), or the rows `ids`, in float32, in MLX operations."""
        of = self.layout
        wq, ws = (self.wq, self.ws) if ids is None else (self.wq[ids], self.ws[ids])
        if of.values is not None:
            return of.values(wq, ws)
        scales, biases = self.scales_and_biases(ws)
        return mx.dequantize(wq, scales, biases, group_size=self.shape[1] // scales.shape[1], bits=of.bits)


@dataclass(frozen=True, eq=False)
class AffineMatrix:
    """An (N, K) matrix in the arrays of `mx.quantized_matmul`: `weight = scale * quant + bias`.

    Attributes:
        wq: uint32 (N, K * bits / 32), the first quant in the lowest bits.
        scales: (N, K / group), float16, bfloat16 or float32.
        biases: (N, K / group), the type of `scales`.
        group: 32, 64 or 128.
        bits: 4 or 8.

    Raises:
        ValueError: the arrays do not belong together.
    """

    wq: mx.array
    scales: mx.array
    biases: mx.array
    group: int
    bits: int

    def __post_init__(self) -> None:
        n, k = self.shape
        expected = n, k // self.group
        if (
            self.bits not in (4, 8) or self.group not in (32, 64, 128) or k % self.group or min(n, k) < 1
            or self.scales.shape != expected or self.biases.shape != expected
            or self.wq.dtype != mx.uint32 or self.scales.dtype != self.biases.dtype
        ):  # fmt: skip
            raise ValueError(
                f"affine matrix: expected 4 or 8 bits, groups of 32, 64 or 128, uint32 quants (N, K * bits / 32), and "
                f"scales and biases (N, K / group) of one type, found {self.bits} bits, groups of {self.group}, "
                f"{_described(self.wq)}, {_described(self.scales)} and {_described(self.biases)}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.wq.shape[0], 32 * self.wq.shape[1] // self.bits

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads."""
        return self.wq.nbytes + self.scales.nbytes + self.biases.nbytes

    @property
    def inputs(self) -> list[mx.array]:
        """The three arrays, for a kernel."""
        return [in_device_memory(part) for part in (self.wq, self.scales, self.biases)]

    @property
    def code(self) -> int:
        """The template argument of kernels."""
        return 1000 * (MLX4 if self.bits == 4 else MLX8) + self.group

    def dequantized(self) -> mx.array:
        """Return the weights (N, K) in float32, in MLX operations."""
        scales, biases = (part.astype(mx.float32) for part in (self.scales, self.biases))
        return mx.dequantize(self.wq, scales, biases, group_size=self.group, bits=self.bits)


def expanded(matrix: StoredMatrix) -> NDArray[np.float64]:
    """Return the weights (N, K), exactly, in float64, for the references of kernels."""
    with mx.stream(mx.cpu):
        return np.array(matrix.dequantized()).astype(np.float64)


def unwritten(shape: Sequence[int], dtype: type[np.generic]) -> mx.array:
    """Return an uninitialised array whose memory NumPy may write through `np.asarray`.

    MLX copies NumPy's values, which doubles the memory of a large matrix while it is loaded. So MLX copies `np.empty`,
    whose pages take no memory until they are written. No MLX operation runs, because a forked process cannot run one.
    """
    return mx.array(np.empty(shape, dtype))


def blocks_of(
    where: str, raw: NDArray[np.uint8], shape: tuple[int, int], dtype: np.dtype[np.void], block: int
) -> NDArray[np.void]:
    """Return a file's blocks of `block` weights as a structured array (N, K / block).

    Raises:
        ValueError: the bytes are not those of such a matrix.
    """
    n, k = shape
    n_bytes = n * k // block * dtype.itemsize
    if raw.dtype != np.uint8 or raw.size != n_bytes or k % block or n < 1 or k < 1:
        raise ValueError(
            f"{where}: expected {n_bytes:,} bytes for {n} rows of {k} weights, a multiple of {block}, "
            f"found {raw.size:,} of type {raw.dtype}"
        )
    return np.ascontiguousarray(raw).reshape(-1).view(dtype).reshape(n, k // block)


def packed(quants: NDArray[np.uint8], bits: int) -> NDArray[np.uint32]:
    """Return quants (..., n) of 2 or 4 bits, n * bits a multiple of 32, in words (..., n * bits / 32)."""
    # View the quants that share a byte as one word, and combine them in its lowest byte by shifts.
    words = np.ascontiguousarray(quants).view(f"<u{8 // bits}")
    made = words.copy()
    for i in range(1, 8 // bits):
        made |= words >> (8 - bits) * i
    return made.astype(np.uint8).view(np.uint32)


def in_device_memory(array: mx.array) -> mx.array:
    """Return the array, padded to eight elements if it has fewer.

    MLX passes smaller arrays in the address space `constant`, which functions with pointers to `device` memory do not
    accept. Matrices of models are never so small.
    """
    return array if array.size >= 8 else mx.pad(array.reshape(-1), (0, 8 - array.size))


def _word(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]


def _described(array: mx.array) -> str:
    return f"{_word(array.dtype)} {tuple(array.shape)}"
