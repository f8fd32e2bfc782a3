"""NumPy memory for compiled kernels: addresses, aligned arrays, contiguous rows."""

from __future__ import annotations

import ctypes
import math

import numpy as np

from mlx_engine.kernels.cpu.build import layout


def address(array: np.ndarray) -> int:
    """Return the address of an array. Four times as fast as `array.ctypes.data` if the array is writable."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]
    except (TypeError, ValueError, BufferError):  # read-only, empty, or not contiguous
        return int(array.ctypes.data)


def aligned(*shape: int) -> np.ndarray:
    """Return an uninitialised array that is aligned to a cache line, so that products read whole lines."""
    n = math.prod(shape)
    memory = np.empty(n + layout.LANES, dtype=np.float32)
    first = -address(memory) % (4 * layout.LANES) // 4
    return memory[first : first + n].reshape(shape)


def strided_rows(x: np.ndarray) -> np.ndarray:
    """Return x with contiguous elements in each row; rows may have a stride, as columns of a larger array have."""
    return x if x.strides[1] == x.itemsize and x.strides[0] >= 0 else np.ascontiguousarray(x)


def contiguous(x: np.ndarray) -> np.ndarray:
    """Return x, or a C-contiguous copy if its elements are not contiguous."""
    return x if x.flags.c_contiguous else np.ascontiguousarray(x)
