"""What a kernel was given, checked before it is launched: a GPU reads wrong memory without a word."""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from kernels.metal.rows import MOST_VECTORS

ACTIVATIONS = (mx.float16, mx.float32)


def vectors(kernel: str, x: mx.array, n_columns: int) -> int:
    """How many vectors of `n_columns` x has.

    That they lie where 16-byte loads may read cannot be seen from here. Arrays that MLX has made do, and so do whole
    rows of them; of a view from the middle of a row take a copy.

    Raises:
        ValueError: it is something else.
    """
    if x.ndim != 2 or x.shape[1] != n_columns or x.dtype not in ACTIVATIONS or x.shape[0] < 1:
        raise ValueError(f"{kernel}: expected x (V, {n_columns}) of float16 or float32, found {described(x)}")
    return x.shape[0]


def normed_vectors(kernel: str, x: mx.array, gain: mx.array, n_columns: int, factors: mx.array | None) -> int:
    """How many vectors x has, for a kernel that norms them, or is given them as `norm_rows` makes them.

    Raises:
        ValueError: x, the gain or the factors do not fit, or there are many vectors and no factors.
    """
    n = vectors(kernel, x, n_columns)
    array(kernel, "gain", gain, (n_columns,), *ACTIVATIONS)
    if factors is not None:
        array(kernel, "factors", factors, (n,), mx.float32)
        array(kernel, "x", x, (n, n_columns), mx.float32)
    elif n > MOST_VECTORS:
        raise ValueError(f"{kernel}: expected at most {MOST_VECTORS} vectors, or factors of `norm_rows`, found {n}")
    return n


def array(kernel: str, name: str, found: mx.array, shape: tuple[int, ...], *dtypes: mx.Dtype) -> mx.array:
    """The same array, when it has that shape and one of these types.

    Raises:
        ValueError: it has not.
    """
    if found.shape != shape or found.dtype not in dtypes:
        wanted = " or ".join(str(dtype).rpartition(".")[2] for dtype in dtypes)
        raise ValueError(f"{kernel}: expected {name} {shape} of {wanted}, found {described(found)}")
    return found


def same(kernel: str, name: str, found: int, expected: int) -> None:
    """Two numbers that must be one.

    Raises:
        ValueError: they are not.
    """
    if found != expected:
        raise ValueError(f"{kernel}: expected {name} {expected}, found {found}")


def described(found: mx.array) -> str:
    """Shape and type, for a message."""
    return f"{tuple(found.shape)} of {str(found.dtype).rpartition('.')[2]}"


def factors(given: mx.array | None) -> mx.array:
    """The factors that a kernel was given, or an array that stands in their place and that nobody reads."""
    return constants(1.0) if given is None else given


@lru_cache(maxsize=64)
def constants(*values: float) -> mx.array:
    """Numbers for a kernel that are no template arguments, as a float32 array; the same array each time."""
    return mx.array(values, dtype=mx.float32)
