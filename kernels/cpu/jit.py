"""Numba, prepared: where compiled code is kept, and why there may be none.

Kernels are decorated with `jit` from here, never with Numba's own, so that the cache folder is chosen before the first
of them exists: Numba refuses to cache into a folder that it cannot write.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numba
from llvmlite import binding
from numba.core import config

# Half-precision scales are widened by an instruction that x86 has since 2012; without it LLVM would call a library
# function that the process need not have.
_NEEDED_ON_X86 = ("f16c", "fma", "avx2")


def lacking() -> str | None:
    """What this processor lacks for the kernels, or None."""
    target = config.CPU_NAME or binding.get_host_cpu_name()
    if not binding.get_process_triple().startswith(("x86_64", "i686")) or config.CPU_NAME:
        return None
    features = binding.get_host_cpu_features()
    missing = [name for name in _NEEDED_ON_X86 if not features.get(name)]
    return f"the processor ({target}) lacks {', '.join(missing)}" if missing else None


def cache_folder() -> Path:
    """The first of these that is ours to write: NUMBA_CACHE_DIR, the user's cache folder, a temporary one."""
    given = os.environ.get("NUMBA_CACHE_DIR")
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 - Path's raises
    candidates = [Path(given)] if given else []
    if not cache.startswith("~"):  # nobody knows where home is
        candidates.append(Path(cache) / "mlx_engine" / "numba")
    # The same folder each time, so that what is compiled there is found again.
    candidates.append(Path(tempfile.gettempdir()) / f"mlx_engine-numba-{_user()}")
    ours = next((folder for folder in candidates if _is_ours(folder)), None)
    if ours is None:
        ours = Path(tempfile.mkdtemp(prefix="mlx_engine-numba-"))
        atexit.register(shutil.rmtree, ours, ignore_errors=True)
    return ours


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0


def _is_ours(folder: Path) -> bool:
    """Whether it can be written, and nobody else has made it: compiled code is run as it lies there."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return not hasattr(os, "getuid") or folder.stat().st_uid == os.getuid()
    except OSError:
        return False


def _digest() -> str:
    """Of the kernels' source: Numba looks at the file of a function, but not at those of the functions it calls."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


FOLDER = cache_folder() / _digest()
config.CACHE_DIR = str(FOLDER)


def jit(function: Callable[..., Any]) -> Any:
    """Compile on first call, without the interpreter's lock and without bounds checks; kept on disk."""
    return numba.njit(nogil=True, boundscheck=False, cache=True)(function)


# What a task is to whoever calls it: the words of a job, and which chunk of it to do.
TASK = numba.types.void(numba.types.CPointer(numba.types.int64), numba.types.int64)


class Task:
    """A kernel as plain machine code with an address, which compiled code can call without knowing what it is."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    @cached_property
    def address(self) -> int:
        """Compile it, or load it from disk; kept on disk."""
        return int(numba.cfunc(TASK, cache=True, boundscheck=False)(self.function).address)


task = Task


def is_compiled() -> bool:
    """Whether kernels of this very source have been compiled before, so that using them costs little."""
    return any(FOLDER.rglob("*.nbi"))
