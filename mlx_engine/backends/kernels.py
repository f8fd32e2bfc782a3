"""Load the compiled CPU kernels once per process, from the disk cache if they have been compiled before."""

from __future__ import annotations

import logging
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

from mlx_engine.observe.log import LOGGER

if TYPE_CHECKING:
    from kernels.cpu.library import Library


@cache
def load_kernels() -> Library | None:
    """Return the kernels; None, with one warning, if they cannot be compiled or loaded here."""
    try:
        from kernels.cpu import library
    except (ImportError, OSError) as error:
        _say(error)
        return None
    lacking = library.lacking()
    if lacking is not None:
        _say(lacking)
        return None
    try:
        return _load(library)
    except Exception as error:  # any compiler or loader error: NumPy runs instead
        _say(f"{type(error).__name__}: {error}")
        return None


def _load(library: ModuleType) -> Library:
    file = library.code_file()
    if not file.exists():
        LOGGER.log(logging.WARNING, "compiling the CPU kernels, once; they are kept in %s", file.parent)
    loaded: Library = library.load()
    if not file.exists():
        LOGGER.log(logging.WARNING, "the compiled CPU kernels could not be kept in %s: the next process compiles again",
                   file.parent)  # fmt: skip
    return loaded


def _say(reason: object) -> None:
    LOGGER.log(logging.WARNING, "no compiled kernels, NumPy runs instead: %s", reason)
