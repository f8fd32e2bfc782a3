"""Check a kernel's arguments before a launch, because a GPU reads out of bounds without an error."""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from .layout import Q8_0, StoredMatrix, described, word
from .rows import MOST_VECTORS

ACTIVATIONS = (mx.float16, mx.float32)


def vectors(kernel: str, x: mx.array, n_columns: int, *also: mx.Dtype) -> int:
    """Return V, the number of vectors; raise ValueError unless x is (V, n_columns) of one of the accepted types.

    The accepted types are `ACTIVATIONS` and `also`. Kernels load up to 16 bytes of x at once, but MLX does not report
    an array's address, so alignment is not checked. Arrays that MLX allocated, and views of whole rows, are aligned;
    the caller must copy a view that begins inside a row.
    """
    if x.ndim != 2 or x.shape[1] != n_columns or x.dtype not in (*ACTIVATIONS, *also) or x.shape[0] < 1:
        first, *rest = map(word, (*also, *ACTIVATIONS))
        types = ", ".join([first, *rest[:-1]]) + f" or {rest[-1]}"
        raise ValueError(f"{kernel}: expected x (V, {n_columns}) of {types}, found {described(x)}")
    return x.shape[0]


def normed_vectors(kernel: str, x: mx.array, norm_weight: mx.array, n_columns: int, factors: mx.array | None) -> int:
    """Return the number of vectors of x, after checking the arguments of a kernel that fuses an RMSNorm and a product.

    If `factors` is None, the kernel computes the RMSNorm of x, for at most `MOST_VECTORS` vectors. Otherwise, x and
    `factors` are the outputs of `norm_rows`. Raise ValueError if an array has a wrong shape or type, or x has too many
    vectors.
    """
    n = vectors(kernel, x, n_columns)
    array(kernel, "norm_weight", norm_weight, (n_columns,), *ACTIVATIONS)
    if factors is not None:
        array(kernel, "factors", factors, (n,), mx.float32)
        array(kernel, "x", x, (n, n_columns), mx.float32)
    elif n > MOST_VECTORS:
        raise ValueError(f"{kernel}: expected at most {MOST_VECTORS} vectors, or factors of `norm_rows`, found {n}")
    return n


def array(kernel: str, name: str, found: mx.array, shape: tuple[int, ...], *dtypes: mx.Dtype) -> mx.array:
    """Return the array `found`; raise ValueError if its shape is not `shape`, or its type is not in `dtypes`."""
    if found.shape != shape or found.dtype not in dtypes:
        wanted = " or ".join(map(word, dtypes))
        raise ValueError(f"{kernel}: expected {name} {shape} of {wanted}, found {described(found)}")
    return found


def q8_0(kernel: str, weight: StoredMatrix) -> None:
    """Raise ValueError if a matrix is not Q8_0, for the kernels that support no other type."""
    if weight.layout.kind != Q8_0:
        raise ValueError(f"{kernel}: expected a Q8_0 matrix, found {weight.layout.name}")


def same(kernel: str, name: str, found: int, expected: int) -> None:
    """Raise ValueError if the number `found` differs from `expected`; `name` is its unit, such as "columns of k"."""
    if found != expected:
        raise ValueError(f"{kernel}: expected {expected} {name}, found {found}")


def factors(given: mx.array | None) -> mx.array:
    """Return `given`; if it is None, return a placeholder that the kernel does not read."""
    return constants(1.0) if given is None else given


@lru_cache(maxsize=64)
def constants(*values: float) -> mx.array:
    """Return a float32 array of numbers that a kernel reads at run time, such as an epsilon."""
    return mx.array(values, dtype=mx.float32)
