"""Give back the memory pages of a mapped file that are not needed any more."""

from __future__ import annotations

import mmap

import numpy as np


def release(read: np.ndarray, prepared: object) -> None:
    """Give back the pages of the mapped file that `read` is a view of, unless `prepared` is a view of them, too.

    A converted weight is not read again. Its pages would count as this process's memory until the end of loading: for
    a bfloat16 file as much as half of the weights in float32.
    """
    file = _file_of(read)
    if file is None or not hasattr(file, "madvise") or is_view(prepared, read):
        return
    first = read.ctypes.data - np.frombuffer(file, np.uint8, 1).ctypes.data
    # Whole pages only: the others hold bytes of the neighbours.
    start, stop = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, (first + read.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if start < stop:
        file.madvise(mmap.MADV_DONTNEED, start, stop - start)


def is_view(prepared: object, read: np.ndarray) -> bool:
    """Return whether what a backend has prepared still reads the memory of the weight `read`."""
    held = prepared if isinstance(prepared, np.ndarray) else getattr(prepared, "data", None)
    return isinstance(held, np.ndarray) and np.may_share_memory(held, read)


def _file_of(array: np.ndarray) -> mmap.mmap | None:
    """Return the mapped file that an array is a contiguous view of."""
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    return base if isinstance(base, mmap.mmap) and array.flags.c_contiguous else None
