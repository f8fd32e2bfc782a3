"""Decorators for kernels: `jit` compiles for this process; `task` and `entry` also export a function to the library.

This module also sets Numba's cache folder to one that the user can write to, because Numba raises an error if the
folder is read-only. `exports.py` compiles the exported functions.
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
# Without this setting, Numba would compile for all features of this machine's processor: for AVX-512 even if
# NUMBA_CPU_NAME names a processor without it, and for AMX even if the system does not permit it.
config.CPU_FEATURES = features()

# With the error model "numpy", division by zero follows IEEE 754. By default, it would raise an exception, which
# compiled callers could not catch.
_OPTIONS = {"nogil": True, "boundscheck": False, "error_model": "numpy", "cache": True}

# The type of a task, a function that processes one chunk of a job (`jobs.py`). A task has three arguments: a pointer to
# the job's words (int64), the number of the chunk, and the address of scratch memory.
TASK = types.void(types.CPointer(types.int64), types.int64, types.int64)
_TYPES = {"i": types.int64, "f": types.float64}

# Maps the name of each exported function to the function and its type.
EXPORTS: dict[str, tuple[Callable[..., Any], Any]] = {}


def for_export() -> None:
    """Compile kernels without Python wrappers and without caching. Call this before the first kernel is imported."""
    _OPTIONS.update(cache=False, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def jit(function: Callable[..., Any]) -> Any:
    """Compile a function on its first call and cache its code. It runs without bounds checks and without the GIL."""
    return numba.njit(**_OPTIONS)(function)


def inlined(function: Callable[..., Any]) -> Any:
    """Compile a function as `jit` does, and inline it into each caller: LLVM alone inlines only small functions."""
    return numba.njit(**_OPTIONS, forceinline=True)(function)


class Task:
    """A kernel of type `TASK`, which compiled code calls by its address."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    @cached_property
    def address(self) -> int:
        """The address of code compiled in this process, for tests and benchmarks; the engine uses `Library.address`."""
        options = {name: _OPTIONS[name] for name in ("boundscheck", "error_model", "cache")}
        return int(numba.cfunc(TASK, **options)(self.function).address)


def task(function: Callable[..., Any]) -> Task:
    """Export a kernel of type `TASK`."""
    EXPORTS[function.__name__] = (function, TASK)
    return Task(function)


def export(name: str, function: Callable[..., Any]) -> str:
    """Export a function under a name, and return the name. All arguments of the function are integers or addresses."""
    EXPORTS[name] = (function, types.void(*[types.int64] * function.__code__.co_argcount))
    return name


def entry(function: Callable[..., Any]) -> Any:
    """Export a function that Python calls, with the argument types in `library.ENTRIES`; return `jit(function)`."""
    EXPORTS[function.__name__] = (function, types.void(*(_TYPES[letter] for letter in ENTRIES[function.__name__])))
    return jit(function)
