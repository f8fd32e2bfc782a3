"""Numba, prepared: what is compiled for this process alone, and what is exported as machine code for all.

Kernels are decorated with `jit` from here, never with Numba's own, so that the cache folder is chosen before the first
of them exists: Numba refuses to cache into a folder that it cannot write. `task` and `entry` also export the function
under its name; `exports.py` compiles what has been exported.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numba
from numba import types
from numba.core import config

from kernels.cpu.library import ENTRIES, folder

config.CACHE_DIR = str(folder())
# Numba would add this processor's features to those of one that is named, and compile AVX-512 for one without.
if config.CPU_NAME and config.CPU_FEATURES is None:
    config.CPU_FEATURES = ""

# A division by zero gives what the processor gives: nothing here can raise, for nobody could catch it.
_OPTIONS = {"nogil": True, "boundscheck": False, "error_model": "numpy", "cache": True}

# What a task is to whoever calls it: the words of a job, which chunk of it to do, and the address of scratch memory.
TASK = types.void(types.CPointer(types.int64), types.int64, types.int64)
_TYPES = {"i": types.int64, "f": types.float64}

# Functions by name, and their types.
EXPORTS: dict[str, tuple[Callable[..., Any], Any]] = {}


def for_export() -> None:
    """From now on what is decorated is compiled for other compiled code alone: Python cannot call it, nor is it kept.

    To be called before the first kernel is imported.
    """
    _OPTIONS.update(cache=False, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def jit(function: Callable[..., Any]) -> Any:
    """Compile on first call, without the interpreter's lock and without bounds checks; kept on disk."""
    return numba.njit(**_OPTIONS)(function)


class Task:
    """A kernel that compiled code calls by its address, without knowing what it is."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    @cached_property
    def address(self) -> int:
        """Where its machine code lies in this process; for exported ones `Library.address` is the same for less."""
        options = {name: _OPTIONS[name] for name in ("boundscheck", "error_model", "cache")}
        return int(numba.cfunc(TASK, **options)(self.function).address)


def task(function: Callable[..., Any]) -> Task:
    """Export a kernel of type `TASK`."""
    EXPORTS[function.__name__] = (function, TASK)
    return Task(function)


def entry(function: Callable[..., Any]) -> Any:
    """Export what Python calls; `ENTRIES` has its arguments."""
    EXPORTS[function.__name__] = (function, types.void(*(_TYPES[letter] for letter in ENTRIES[function.__name__])))
    return jit(function)
