"""Runs the text of Metal kernels on the CPU, and says where it is wrong.

`metal_kernel` is the twin of `mx.fast.metal_kernel`. A kernel becomes machine code through clang (`compiler`), for
which `include/` is the Metal Shading Language; every GPU thread is a fibre (`runtime/`), and every buffer lies between
unmapped pages (`memory`). One call runs at a time in a process; calls from other threads wait.

It finds reads and writes out of bounds, races, threads that do not come to a barrier or SIMD-group operation together,
undefined behaviour, missing address spaces, and memory that nobody has written: that is full of NaN. A right kernel
passes in each of three builds, and gives the same bits for every `seed`, that is, every order of threads.

It cannot tell how fast a kernel is, how exact a GPU's own functions are, or whether Apple's compiler takes every
construct. Not there: textures, packed vectors of three, copies of structures out of device memory, member functions
called on objects in other spaces than `thread`.
"""

from __future__ import annotations

from kernels.emulator.compiler import unavailable
from kernels.emulator.errors import (
    CompileError,
    CompilerMissingError,
    ConvergenceError,
    EmulatorError,
    LaunchError,
    LintError,
    MemoryFaultError,
    RaceError,
    UndefinedBehaviorError,
)
from kernels.emulator.kernel import MetalKernel, metal_kernel, prepare

__all__ = [
    "CompileError",
    "CompilerMissingError",
    "ConvergenceError",
    "EmulatorError",
    "LaunchError",
    "LintError",
    "MemoryFaultError",
    "MetalKernel",
    "RaceError",
    "UndefinedBehaviorError",
    "metal_kernel",
    "prepare",
    "unavailable",
]
