"""The number of CPU cores that this process may use, by CPU affinity and by its container's quota."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from mlx_engine.machine.control_groups import groups_of
from mlx_engine.observe import log


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
