"""Exceptions of the emulator. Each message has the place, what was found, what was expected, and what to do.

EmulatorError
+-- LaunchError (ValueError)    the call does not fit the kernel: counts, shapes, dtypes, grid
+-- CompilerMissingError        no clang on this machine
+-- CompileError                clang refuses the text
|   +-- LintError               clang accepts the text, Metal or MLX does not
+-- MemoryFaultError            touched memory outside a buffer, or wrote to an input
+-- ConvergenceError            divergent SIMD-group operations and barriers
+-- UndefinedBehaviorError      signed overflow, shifts, alignment, divisions, casts
+-- RaceError                   two unordered accesses to the same bytes, at least one a write
+-- HangError                   a threadgroup that does not end
+-- OrderError                  results that depend on the order of threads
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from .findings import Finding


class EmulatorError(Exception):
    """The base class of all errors of a kernel or its call.

    Attributes:
        findings: all mistakes of the run, the first one first; none if the kernel did not run.
    """

    findings: tuple[Finding, ...] = ()


class LaunchError(EmulatorError, ValueError):
    """A call that does not fit the kernel."""


class CompilerMissingError(EmulatorError):
    """There is no usable compiler."""


class CompileError(EmulatorError):
    """Clang refuses the kernel."""


class LintError(CompileError):
    """The text breaks a rule of Metal or MLX that clang does not check."""


class MemoryFaultError(EmulatorError):
    """A thread accessed memory out of bounds, or wrote to an input.

    Attributes:
        seen: "at once", by a fault; "afterwards", of a write beside an array that hit no unmapped page; "exactly", in
            the build "races", which checks every access.
    """

    seen: Literal["at once", "afterwards", "exactly"] = "at once"


class ConvergenceError(EmulatorError):
    """Not all threads reach a SIMD-group operation or a barrier together."""


class UndefinedBehaviorError(EmulatorError):
    """A thread executed undefined behaviour."""


class TensorError(EmulatorError):
    """A tensor, or an operation on tensors, is used in a way that the specification leaves undefined."""


class RaceError(EmulatorError):
    """Two threads use the same memory, and nothing orders them."""


class HangError(EmulatorError):
    """A threadgroup does not end."""


class OrderError(EmulatorError):
    """Two orders of threads give different results."""


# ---- causes ----


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
