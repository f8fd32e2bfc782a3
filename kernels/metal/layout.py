"""The layout of quantised matrices in GPU memory: an array of packed quants and an array of scales (`StoredMatrix`).

In a file, each block contains its scales and its quants, so quants are not aligned for loads of several uint32. As two
arrays, a matrix takes the same memory, and a SIMD-group reads consecutive aligned quants. Quants are unsigned and in
MLX's order, the first in the lowest bits of a uint32. So for most types, `mx.quantized_matmul` accepts these quants; it
is the fallback for a GPU that refuses our kernels.

Kernels read sixteen weights at a time, with a function from the header of the type, such as `q4_0.h.metal`. A new type
needs such a header, listed in `HEADERS` (kernels/kernel.py); a number, in this file and in `sixteen.h.metal`; a
`Layout`, in `formats.py`; and a function that repacks a file's bytes, also in `formats.py`. Kernels compute with
exactly the weights that the format defines, in float32; only the two prompt kernels (`prompt_product.py` and
`prompt_product_tensors.py`) may round weights to 16 bits. For types without an offset (`scale * q`), kernels multiply
the sum of sixteen products of quants and inputs by the scale, which needs fewer roundings. For types with an offset
(`scale * q + bias`), they compute each weight before they multiply it by an input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

# The number of columns K of every quantised matrix is a multiple of BLOCK.
BLOCK = 32
# The number of each type in the kernels' source. A `StoredMatrix` has a type from Q8_0 to AFFINE8 (`sixteen.h.metal`),
# and an `AffineMatrix` has MLX4 or MLX8 (`prompt.h.metal`).
Q8_0, Q4_0, Q4_K, Q6_K, AFFINE4, AFFINE8, MLX4, MLX8 = range(8)


@dataclass(frozen=True)
class Layout:
    """The layout of the quants `wq` and the scales `ws` of a `StoredMatrix`.

    Attributes:
        name: name of the type.
        kind: number of the type in the kernels' source.
        group: number of columns that share an entry of `ws`; K is a multiple of it.
        bits: bits per quant.
        entry: number of elements in an entry of `ws`.
        dtype: type of the elements of `ws`.
        affine: function of `ws` that returns the scales and the biases of `scale * quant + bias`, each float32
            (N, K / c), where c columns share a scale; None for a type that MLX's affine format cannot express.
        values: for a type without `affine`, function of `wq` and `ws` that returns the weights, float32 (N, K).
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
        """The type as one number, which is a template argument of kernels."""
        return 1000 * self.kind + self.group


@dataclass(frozen=True, eq=False)
class StoredMatrix:
    """An (N, K) matrix in the layout of its type.

    Attributes:
        layout: the layout of `wq` and `ws`.
        wq: uint32 (N, K * bits / 32), packed quants.
        ws: (N, K / group * entry), scales; in types with an offset, also minima or biases.

    Raises:
        ValueError: the shapes or types of the two arrays do not match the layout.
    """

    layout: Layout
    wq: mx.array
    ws: mx.array

    def __post_init__(self) -> None:
        of, arrays = self.layout, (self.wq, self.ws)
        if self.wq.dtype != mx.uint32 or self.ws.dtype != of.dtype or any(array.ndim != 2 for array in arrays):
            raise ValueError(
                f"{of.name} matrix: expected uint32 quants (N, K * {of.bits} / 32) and {word(of.dtype)} scales "
                f"(N, K / {of.group} * {of.entry}), found {described(self.wq)} and {described(self.ws)}"
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
        """Size in bytes, the same as in a file."""
        return self.wq.nbytes + self.ws.nbytes

    @property
    def inputs(self) -> list[mx.array]:
        """The arguments of a kernel: `wq` and `ws`."""
        return [in_device_memory(self.wq), in_device_memory(self.ws)]

    @property
    def code(self) -> int:
        """The type as one number, which is a template argument of kernels."""
        return self.layout.code

    def scales_and_biases(self, ws: mx.array | None = None) -> tuple[mx.array, mx.array]:
        """Return scales and biases in MLX's affine format: of all rows, or of the rows whose scales are `ws`.

        Raises:
            ValueError: MLX's format cannot express the type.
        """
        if self.layout.affine is None:
            raise ValueError(f"{self.layout.name} matrix: expected a type with scales and biases for MLX")
        return self.layout.affine(self.ws if ws is None else ws)

    def dequantized(self, ids: mx.array | None = None) -> mx.array:
        """Compute the weights of all rows, or of the rows `ids`, float32 (rows, K), with MLX's operations."""
        of = self.layout
        wq, ws = (self.wq, self.ws) if ids is None else (self.wq[ids], self.ws[ids])
        if of.values is not None:
            return of.values(wq, ws)
        scales, biases = self.scales_and_biases(ws)
        return mx.dequantize(wq, scales, biases, group_size=self.shape[1] // scales.shape[1], bits=of.bits)


@dataclass(frozen=True, eq=False)
class AffineMatrix:
    """An (N, K) matrix in the arrays of `mx.quantized_matmul`, for prompt kernels: `weight = scale * quant + bias`.

    Attributes:
        wq: uint32 (N, K * bits / 32), the first quant in the lowest bits.
        scales: (N, K / group), float16, bfloat16 or float32.
        biases: (N, K / group), the type of `scales`.
        group: 32, 64 or 128.
        bits: 4 or 8.

    Raises:
        ValueError: the shapes or types of the arrays do not match.
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
                f"{described(self.wq)}, {described(self.scales)} and {described(self.biases)}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.wq.shape[0], 32 * self.wq.shape[1] // self.bits

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.wq.nbytes + self.scales.nbytes + self.biases.nbytes

    @property
    def inputs(self) -> list[mx.array]:
        """The arguments of a kernel: quants, scales and biases."""
        return [in_device_memory(part) for part in (self.wq, self.scales, self.biases)]

    @property
    def code(self) -> int:
        """The type as one number, which is a template argument of kernels."""
        return 1000 * (MLX4 if self.bits == 4 else MLX8) + self.group

    def dequantized(self) -> mx.array:
        """Compute the weights (N, K) in float32 with MLX's operations."""
        scales, biases = (part.astype(mx.float32) for part in (self.scales, self.biases))
        return mx.dequantize(self.wq, scales, biases, group_size=self.group, bits=self.bits)


def expanded(matrix: StoredMatrix) -> NDArray[np.float64]:
    """Return the exact weights (N, K) in float64, for the references of kernels."""
    with mx.stream(mx.cpu):
        return np.array(matrix.dequantized()).astype(np.float64)


def unwritten(shape: Sequence[int], dtype: type[np.generic]) -> mx.array:
    """Return an uninitialised array whose memory NumPy may write through `np.asarray`.

    `mx.array(values)` copies NumPy's values, so a large matrix would be in memory twice while it is loaded. To avoid
    this, MLX copies an array of `np.empty`, whose pages take no memory because they are never written, and the caller
    writes into MLX's copy. `mx.zeros` would also do, but it is an MLX operation, and a forked process cannot run one.
    """
    return mx.array(np.empty(shape, dtype))


def blocks_of(
    where: str, raw: NDArray[np.uint8], shape: tuple[int, int], dtype: np.dtype[np.void], block: int
) -> NDArray[np.void]:
    """Return the bytes `raw` of an (N, K) matrix as an array (N, K / block) of `dtype`, one element per block.

    A block has `block` weights. `where` is the name of the calling function, for the error message.

    Raises:
        ValueError: `raw` has another type or number of bytes, or K is not a multiple of the block size.
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
    """Pack quants (..., n) of 2 or 4 bits into uint32 (..., n * bits / 32), the first in the lowest bits."""
    # Quants that will share a byte are in adjacent bytes. View these bytes as one integer, and shift the quants into
    # its lowest byte.
    words = np.ascontiguousarray(quants).view(f"<u{8 // bits}")
    made = words.copy()
    for i in range(1, 8 // bits):
        made |= words >> (8 - bits) * i
    return made.astype(np.uint8).view(np.uint32)


def in_device_memory(array: mx.array) -> mx.array:
    """Return the array, padded to eight elements if it has fewer.

    MLX passes arrays of fewer than eight elements in the address space `constant`, but the kernels' functions expect
    pointers to `device` memory. Only tests have such small matrices.
    """
    return array if array.size >= 8 else mx.pad(array.reshape(-1), (0, 8 - array.size))


def word(dtype: mx.Dtype) -> str:
    """Return the name of a type without the prefix `mlx.core.`."""
    return str(dtype).rpartition(".")[2]


def described(found: mx.array) -> str:
    """Return the shape and the type of an array for an error message."""
    return f"{tuple(found.shape)} of {word(found.dtype)}"
