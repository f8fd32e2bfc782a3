"""What the emulator raises. Each message says where, what was found, what was expected, and what to do.

EmulatorError
+-- LaunchError (ValueError)    the call does not fit the kernel: counts, shapes, dtypes, grid
+-- CompilerMissingError        no clang on this machine
+-- CompileError                the text is no kernel
|   +-- LintError               clang would take it, Metal or MLX would not
+-- MemoryFaultError            touched memory outside a buffer, or wrote to an input
+-- ConvergenceError            threads that must meet do not: SIMD-group operations and barriers
+-- UndefinedBehaviorError      signed overflow, shifts, alignment, divisions, casts
+-- RaceError                   two threads at one place, one of them writing, and nothing that orders them
"""

from __future__ import annotations


class EmulatorError(Exception):
    """The root of everything that a kernel or its call can cause."""


class LaunchError(EmulatorError, ValueError):
    """A call that does not fit the kernel."""


class CompilerMissingError(EmulatorError):
    """There is no compiler that the emulator could use."""


class CompileError(EmulatorError):
    """Clang refuses the kernel."""


class LintError(CompileError):
    """A rule of Metal or MLX that clang does not know."""


class MemoryFaultError(EmulatorError):
    """A thread touched what is not there, or wrote to what is only read."""


class ConvergenceError(EmulatorError):
    """Threads do not come to a SIMD-group operation or a barrier together."""


class UndefinedBehaviorError(EmulatorError):
    """The language gives no meaning to what a thread did."""


class RaceError(EmulatorError):
    """The result depends on which of two threads comes first."""
