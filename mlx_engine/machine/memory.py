"""Measure free memory and usable cores, and control which pages of memory-mapped files are in memory.

Free memory and cores are those of the machine, but at most the limits of this process's control groups (its container).
Weights that the backend reads directly from the mapped file are read into memory before the first pass. If a weight is
converted instead, the pages of the stored weight are released afterwards.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mlx_engine.observe import log

# Maps the cgroup version to the file with the memory limit, the file with the bytes in use, and the entries of
# `memory.stat` with the bytes that are in use but can be freed by the system.
_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
    2: ("memory.max", "memory.current", ("inactive_file", "active_file")),
}


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes that this process can allocate: the free memory, within the limits of its control groups.

    Memory that is `Promised` does not count as free. `root` is the root of the file system, which tests replace.
    """
    import psutil  # imported here, because it takes 10 ms

    promised = sum(each.nbytes for each in list(_PROMISED))
    return max(0, min([int(psutil.virtual_memory().available), *_left(root)]) - promised)


class Promised:
    """Allocated memory of this process, of which `nbytes` bytes are not filled yet; the system counts these as free."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        _PROMISED.add(self)


_PROMISED = weakref.WeakSet[Promised]()


def give_back_freed() -> None:
    """Give freed memory, which glibc keeps for later allocations, back to the operating system."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _left(root: Path) -> Iterator[int]:
    """Yield the bytes that may still be allocated in each control group with a memory limit."""
    for group in groups_of(root, "memory"):
        limit, used, freed = _FILES[group.version]
        try:
            left = int((group.folder / limit).read_text()) - int((group.folder / used).read_text())
        except (OSError, ValueError):  # also "max": no limit
            continue
        with contextlib.suppress(OSError, ValueError):
            rows = [line.split() for line in (group.folder / "memory.stat").read_text().splitlines()]
            left += sum(int(row[1]) for row in rows if len(row) == 2 and row[0] in freed)
        yield left


class Group(NamedTuple):
    """A control group of this process: its cgroup version, 1 or 2, and its folder."""

    version: int
    folder: Path


def groups_of(root: Path, controller: str) -> Iterator[Group]:
    """Yield the control groups that may limit this process's use of `controller`, which is "cpu" or "memory"."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    groups = root / "sys/fs/cgroup"
    for line in lines:
        _, *rest = line.split(":", 2)
        if len(rest) != 2:
            continue
        controllers, inside = rest[0], rest[1].strip("/")
        if not controllers:  # version 2: every folder up to the root may set a limit
            parts = Path(inside).parts
            for n in range(len(parts), -1, -1):
                yield Group(2, groups.joinpath(*parts[:n]))
        elif controller in controllers.split(","):
            yield Group(1, groups / controller / inside)
            yield Group(1, groups / controller)


def usable_cores(root: Path = Path("/")) -> int:
    """Return the number of cores that this process may use by its affinity and its control groups' CPU quotas."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *(int(quota) for quota in _quotas(root))]))


def bounded_threads(threads: int | None) -> int | None:
    """Return `threads`, but at most the number of usable cores, with a warning if the number was reduced.

    More threads than cores wait for each other: on 2 cores, 8 threads are 8 times slower than 2 threads.
    """
    if threads is None or threads <= (cores := usable_cores()):
        return threads
    name = "core" if cores == 1 else "cores"
    log.warn(f"threads: expected at most {cores}, the {name} that this process may use, found {threads}; using {cores}")
    return cores


def _quotas(root: Path) -> Iterator[float]:
    """Yield the CPU quota, in cores, of each control group of this process that sets one."""
    for group in groups_of(root, "cpu"):
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if group.version == 1 else ("cpu.max",)
        try:
            text = " ".join((group.folder / name).read_text() for name in names)
            quota, period = map(int, text.split()[:2])
        except (OSError, ValueError):  # also "max": no limit
            continue
        if quota > 0 and period > 0:  # in version 1, -1 means no limit
            yield quota / period


# On a page fault, Linux also maps the neighbouring pages of the file that are in the page cache, within an aligned
# window of AROUND bytes. If a rank (a process that shares a model) read half of the rows of a matrix and released no
# pages, two thirds to three quarters of the matrix would count as its memory.
AROUND = 2 << 20


def release(read: np.ndarray, prepared: object) -> None:
    """Release the pages of a stored weight, `read`, unless the backend's weight, `prepared`, is a view of them.

    A stored weight that was converted is not read again, but its pages would count as this process's memory until the
    end of loading. For example, the pages of bfloat16 weights would add half of the memory of the float32 weights.
    """
    file = _file_of(read)
    if file is not None and not is_view(prepared, read):
        _give_back(file, *_range(file, read))


def is_view(prepared: object, read: np.ndarray) -> bool:
    """Return whether a backend's weight, `prepared`, is a view of the memory of the stored weight `read`."""
    held = prepared if isinstance(prepared, np.ndarray) else getattr(prepared, "data", None)
    return isinstance(held, np.ndarray) and np.may_share_memory(held, read)


class MappedRange(NamedTuple):
    """Bytes of a mapped file, from the offset `first` on; `stat` is the file's status when it was mapped."""

    path: Path
    stat: os.stat_result
    first: int
    nbytes: int

    @property
    def span(self) -> int:
        """The size in bytes of all memory pages that overlap the range."""
        return -(-(self.first % mmap.PAGESIZE + self.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE

    def is_of(self, stat: os.stat_result) -> bool:
        """Return whether `stat` is the status of the mapped file, unchanged since the file was mapped."""
        names = ("st_dev", "st_ino", "st_size", "st_mtime_ns")
        return all(getattr(stat, name) == getattr(self.stat, name) for name in names)


def mapped_range(array: np.ndarray) -> MappedRange | None:
    """Return the range of a mapped file that has the elements of an array.

    Return None if the array is no contiguous view of a mapped file, or if the file's path is unknown.
    """
    file: Any = _file_of(array)
    if file is None or not hasattr(file, "path"):
        return None
    return MappedRange(file.path, file.stat, _range(file, array)[0], array.nbytes)


def map_small_pages(view: np.ndarray) -> None:
    """Ask the system to map the file of a view in small pages.

    Large pages (2 MiB) are mapped and released as a whole. If only some parts of a matrix are needed, releasing the
    other parts would also release needed parts in the same large pages, and the next pass would map these again.
    """
    file = _file_of(view)
    if file is not None and hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without large pages
            file.madvise(mmap.MADV_NOHUGEPAGE)


def read_ahead(views: Iterable[np.ndarray]) -> None:
    """Read every page of these views of mapped files, and release all other pages of these files."""
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
    """Release the pages of these rows of a mapped matrix, and the pages around them that the system also mapped."""
    file = _file_of(matrix)
    if file is None:
        return
    first, last = _range(file, matrix)
    ends = {first + row * row_bytes + at for row in rows for at in (0, row_bytes - 1)}
    for window in {at // AROUND * AROUND for at in ends}:
        _give_back(file, max(window, first), min(window + AROUND, last))


def _give_back(file: mmap.mmap, start: int, stop: int) -> None:
    """Release the pages of a file that lie wholly in the bytes [start, stop).

    The pages at both ends are kept, because they may also have bytes of other tensors.
    """
    start, stop = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
    if start < stop and hasattr(file, "madvise"):
        with contextlib.suppress(OSError):  # pages that are locked in memory
            file.madvise(mmap.MADV_DONTNEED, start, stop - start)


def _range(file: mmap.mmap, view: np.ndarray) -> tuple[int, int]:
    """Return the offsets in a file of a view's first byte, and of the byte after its last byte."""
    first = view.ctypes.data - np.frombuffer(file, np.uint8, 1).ctypes.data
    return first, first + view.nbytes


def _file_of(array: np.ndarray) -> mmap.mmap | None:
    """Return the mapped file that has the elements of an array; None if the array is no contiguous view of one."""
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    return base if isinstance(base, mmap.mmap) and array.flags.c_contiguous else None
