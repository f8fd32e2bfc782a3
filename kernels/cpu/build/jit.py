"""Decorators for kernels: `jit` compiles for this process, `task` and `entry` also export a function to the library.

Kernels use `jit` from here, not Numba's, so that the cache folder is chosen before the first kernel is defined: Numba
refuses to cache into a folder that it cannot write. `exports.py` compiles the exported functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from numba import types
from numba.core import config

from ...cached import cached_property
from .library import ENTRIES, features, folder

config.CACHE_DIR = str(folder())
# Without this, Numba would add features of this machine's processor to those of a named processor, for example AVX-512,
# and AMX where the system does not permit it.
config.CPU_FEATURES = features()

# Division by zero follows IEEE 754: kernels must not raise, because their callers in compiled code cannot catch.
_OPTIONS = {"nogil": True, "boundscheck": False, "error_model": "numpy", "cache": True}

# The type of a task. Its arguments are the words of a job, the number of a chunk, and the address of scratch memory.
TASK = types.void(types.CPointer(types.int64), types.int64, types.int64)
_TYPES = {"i": types.int64, "f": types.float64}

# Exported functions and their types, by name.
EXPORTS: dict[str, tuple[Callable[..., Any], Any]] = {}


def for_export() -> None:
    """Compile all further kernels only for calls from compiled code, without Python wrappers and without caching.

    Call this before the first kernel is imported.
    """
    _OPTIONS.update(cache=False, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def jit(function: Callable[..., Any]) -> Any:
    """Compile a function on its first call, to run without bounds checks and the GIL; cache its code."""
    return numba.njit(**_OPTIONS)(function)


def inlined(function: Callable[..., Any]) -> Any:
    """Compile a function as `jit` does, inlined into each caller. LLVM would not inline a large function."""
    return numba.njit(**_OPTIONS, forceinline=True)(function)


class Task:
    """A kernel that compiled code calls by its address."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    @cached_property
    def address(self) -> int:
        """The address of the task, compiled in this process. `Library.address` of exported tasks needs no compiler."""
        options = {name: _OPTIONS[name] for name in ("boundscheck", "error_model", "cache")}
        return int(numba.cfunc(TASK, **options)(self.function).address)


def task(function: Callable[..., Any]) -> Task:
    """Export a kernel of type `TASK`."""
    EXPORTS[function.__name__] = (function, TASK)
    return Task(function)


def export(name: str, function: Callable[..., Any]) -> str:
    """Export a function, whose arguments are integers and addresses, under a name; return the name."""
    EXPORTS[name] = (function, types.void(*[types.int64] * function.__code__.co_argcount))
    return name


def entry(function: Callable[..., Any]) -> Any:
    """Export a function that Python calls; `library.ENTRIES` has the types of its arguments."""
    EXPORTS[function.__name__] = (function, types.void(*(_TYPES[letter] for letter in ENTRIES[function.__name__])))
    return jit(function)
