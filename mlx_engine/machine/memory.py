"""The memory that this process may take: the free memory of the machine, within the limit of its container."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path

from mlx_engine.machine.control_groups import Group, groups_of

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
