"""The control groups of this process: the folders where a container's limits are written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


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
