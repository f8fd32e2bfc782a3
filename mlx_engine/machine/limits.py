"""The cores and the memory that this process may use: those of the machine, within the limits of its container."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mlx_engine.observe import log

# The names of the limit, of the bytes in use, and of the bytes in use that the system can free at any time.
_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
    2: ("memory.max", "memory.current", ("inactive_file", "active_file")),
}


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes that this process can take now: the free memory, within the limits of its control groups."""
    import psutil  # imported here: it takes 10 ms

    return max(0, min([int(psutil.virtual_memory().available), *_left(root)]))


def give_back_freed() -> None:
    """Return memory to the system that glibc keeps after it was freed."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _left(root: Path) -> Iterator[int]:
    """Yield the bytes that are left in each control group with a limit."""
    for group in groups_of(root, "memory"):
        left = _left_in(group)
        if left is not None:
            yield left


def _left_in(group: Group) -> int | None:
    limit, used, freed = _FILES[group.version]
    try:
        left = int((group.folder / limit).read_text()) - int((group.folder / used).read_text())
    except (OSError, ValueError):  # also "max": no limit
        return None
    try:
        rows = [line.split() for line in (group.folder / "memory.stat").read_text().splitlines()]
        return left + sum(int(row[1]) for row in rows if len(row) == 2 and row[0] in freed)
    except (OSError, ValueError):
        return left


class Group(NamedTuple):
    """A folder with limits of this process, and the cgroup version, 1 or 2."""

    version: int
    folder: Path


def groups_of(root: Path, controller: str) -> Iterator[Group]:
    """Yield each control group that may limit this process by a controller, such as "cpu" or "memory"."""
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
        if not controllers:  # version 2: one tree, and every folder up to its root may set a limit
            parts = Path(inside).parts
            for n in range(len(parts), -1, -1):
                yield Group(2, groups.joinpath(*parts[:n]))
        elif controller in controllers.split(","):
            yield Group(1, groups / controller / inside)
            yield Group(1, groups / controller)


def usable_cores(root: Path = Path("/")) -> int:
    """Return the number of cores by affinity, or fewer if a control group has a lower CPU quota; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *(int(quota) for quota in _quotas(root))]))


def bounded_threads(threads: int | None) -> int | None:
    """Return `threads`, but at most the number of usable cores; warn if there are fewer.

    More threads than cores wait for each other: 8 threads on 2 cores are 8 times slower than 2.
    """
    if threads is None or threads <= (cores := usable_cores()):
        return threads
    name = "core" if cores == 1 else "cores"
    log.warn(f"threads: expected at most {cores}, the {name} that this process may use, found {threads}; using {cores}")
    return cores


def _quotas(root: Path) -> Iterator[float]:
    """Yield the CPU quota, in cores, of each control group of this process that sets one."""
    for group in groups_of(root, "cpu"):
        yield from (_version_1 if group.version == 1 else _version_2)(group.folder)


def _version_2(folder: Path) -> Iterator[float]:
    try:
        quota, period = (folder / "cpu.max").read_text().split()[:2]
        yield int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # also "max": no limit
        return


def _version_1(folder: Path) -> Iterator[float]:
    try:
        quota, period = (int((folder / name).read_text()) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
    except (OSError, ValueError):
        return
    if quota > 0 and period > 0:
        yield quota / period
