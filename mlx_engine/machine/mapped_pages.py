"""Memory pages of mapped files: read the pages of weights ahead of the first pass, and release all others.

A page fault on a mapped file also maps neighbouring pages from the page cache, up to 2 MiB on Linux. A rank that reads
half of the rows of a matrix would have two thirds to three quarters of the matrix resident.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterable

import numpy as np

# The bytes of a file within which Linux maps pages around the one that is read.
AROUND = 2 << 20


def release(read: np.ndarray, prepared: object) -> None:
    """Release the pages of the mapped file that `read` is a view of, unless `prepared` is a view of them, too.

    A converted weight is not read again. Its pages would count as this process's memory until the end of loading: for
    a bfloat16 file as much as half of the weights in float32.
    """
    file = _file_of(read)
    if file is not None and not is_view(prepared, read):
        _give_back(file, *_range(file, read))


def is_view(prepared: object, read: np.ndarray) -> bool:
    """Return whether what a backend has prepared still reads the memory of the weight `read`."""
    held = prepared if isinstance(prepared, np.ndarray) else getattr(prepared, "data", None)
    return isinstance(held, np.ndarray) and np.may_share_memory(held, read)


def map_small_pages(view: np.ndarray) -> None:
    """Let the system map the file of a view in small pages.

    It maps large ones (2 MiB) as a whole, and drops them as a whole, so that parts of matrices between parts that are
    not needed would be mapped again, with their neighbours, when a pass reads them.
    """
    file = _file_of(view)
    if file is not None and hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without large pages
            file.madvise(mmap.MADV_NOHUGEPAGE)


def read_ahead(views: Iterable[np.ndarray]) -> None:
    """Read every page of these arrays, and release all other pages of the mapped files that they are views of."""
    ends: dict[mmap.mmap, int] = {}
    for view in sorted(views, key=lambda array: array.ctypes.data):
        view[:: mmap.PAGESIZE].max(initial=0)
        file = _file_of(view)
        if file is not None:
            start, stop = _range(file, view)
            end = ends.get(file, 0)
            _give_back(file, end, start)
            ends[file] = max(end, stop)
    for file, end in ends.items():
        _give_back(file, end, len(file))


def release_rows(matrix: np.ndarray, rows: Iterable[int], row_bytes: int) -> None:
    """Release the pages around some rows of a matrix in a mapped file."""
    file = _file_of(matrix)
    if file is None:
        return
    first, last = _range(file, matrix)
    ends = {first + row * row_bytes + at for row in rows for at in (0, row_bytes - 1)}
    for window in {at // AROUND * AROUND for at in ends}:
        _give_back(file, max(window, first), min(window + AROUND, last))


def _give_back(file: mmap.mmap, start: int, stop: int) -> None:
    """Give back the pages of [start, stop). Whole pages only: the others hold bytes of the neighbours."""
    start, stop = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
    if start < stop and hasattr(file, "madvise"):
        with contextlib.suppress(OSError):  # pages that are locked in memory
            file.madvise(mmap.MADV_DONTNEED, start, stop - start)


def _range(file: mmap.mmap, view: np.ndarray) -> tuple[int, int]:
    """Return the first byte of a view in its file, and the one after its last."""
    first = view.ctypes.data - np.frombuffer(file, np.uint8, 1).ctypes.data
    return first, first + view.nbytes


def _file_of(array: np.ndarray) -> mmap.mmap | None:
    """Return the mapped file that an array is a contiguous view of."""
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    return base if isinstance(base, mmap.mmap) and array.flags.c_contiguous else None
