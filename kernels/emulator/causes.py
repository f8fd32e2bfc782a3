"""Which of two errors of a kernel is the cause of the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .errors import EmulatorError, HangError, RaceError, UndefinedBehaviorError


def root_cause(error: EmulatorError, build: str, repeat: Callable[[str], Any]) -> EmulatorError:
    """Return the index beyond a private array that has led to an error, or the error itself.

    Only the build "undefined" checks such indices. Elsewhere a write beyond a private array damages other variables,
    and the error is about what these then do.

    Args:
        error: what a run has raised.
        build: the build of this run.
        repeat: runs the same in another build.
    """
    if build == "undefined" or not error.findings or isinstance(error, HangError | RaceError):
        return error
    try:
        repeat("undefined")
    except UndefinedBehaviorError as cause:
        return cause if "index beyond" in str(cause) else error
    except EmulatorError:
        pass
    return error
