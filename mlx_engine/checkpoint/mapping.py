"""Views of memory-mapped files, and a guard that is called before the first one."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

# Called once with the path of the file, before the first view of weights. Access to a part that another process has
# cut off ends this process (SIGBUS): a program may say so in its own way.
before_first_view: Callable[[Path], None] | None = None


def view(path: Path, mapped: mmap.mmap | bytes, dtype: DTypeLike, count: int, offset: int) -> NDArray[Any]:
    """Return `count` values from byte `offset` on, as a read-only view of a mapped file."""
    global before_first_view
    if before_first_view is not None:
        guard, before_first_view = before_first_view, None
        guard(path)
    return np.frombuffer(mapped, dtype, count, offset)
