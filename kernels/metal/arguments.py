"""What a kernel was given, checked before it is launched: a GPU reads wrong memory without a word."""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from kernels.metal.rows import MOST_VECTORS

ACTIVATIONS = (mx.float16, mx.float32)


def vectors(kernel: str, x: mx.array, n_columns: int, most: int | None = MOST_VECTORS) -> int:
    """How many vectors of `n_columns` x has.

    That they lie where 16-byte loads may read cannot be seen from here. Arrays that MLX has made do, and so do whole
    rows of them; of a view from the middle of a row take a copy.

    Raises:
        ValueError: it is something else, or has more than `most` of them.
    """
    if x.ndim != 2 or x.shape[1] != n_columns or x.dtype not in ACTIVATIONS or x.shape[0] < 1:
        raise ValueError(f"{kernel}: expected x (V, {n_columns}) of float16 or float32, found {described(x)}")
    if most is not None and x.shape[0] > most:
        raise ValueError(f"{kernel}: expected at most {most} vectors, found {x.shape[0]}; `tiles` takes any number")
    return x.shape[0]


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


@lru_cache(maxsize=64)
def constants(*values: float) -> mx.array:
    """Numbers for a kernel that are no template arguments, as a float32 array; the same array each time."""
    return mx.array(values, dtype=mx.float32)
