"""Run Metal kernels on the CPU and report their mistakes.

`metal_kernel` has the interface of `mx.fast.metal_kernel`; `emulate` runs the `mx.fast.metal_kernel` calls of any
program in the emulator; `library` runs kernels of complete .metal files. `compiler.py` compiles a kernel with clang and
the headers in `include/`, which implement the Metal Shading Language. The C code in `runtime/` runs every GPU thread as
a fibre, a thread in user space. `memory.py` places every buffer between unmapped pages. A process runs one call at a
time; calls from other threads wait.

A kernel can be compiled in three *builds*, which differ in their checks. The argument `seed` of a call chooses the
order of threads. The results of a correct kernel are bit-identical for every seed, except the results of atomic sums
and of tensor products (`matmul2d`). README.md lists the mistakes that the emulator finds, and those that it cannot
find.

Textures are not supported. In the body of a `metal_kernel`, two more constructs are not supported: copying a structure
out of device memory, and calling a member function of an object outside the address space `thread`.
"""

from __future__ import annotations

from .compiler import unavailable
from .errors import (
    CompileError,
    CompilerMissingError,
    ConvergenceError,
    EmulatorError,
    Finding,
    HangError,
    LaunchError,
    LintError,
    MemoryFaultError,
    OrderError,
    RaceError,
    TensorError,
    UndefinedBehaviorError,
)
from .intercept import Call, Calls, emulate
from .kernel import MetalKernel, metal_kernel, prepare
from .metal_library import Library, Unwritten, WholeKernel, library

__all__ = [
    "Call",
    "Calls",
    "CompileError",
    "CompilerMissingError",
    "ConvergenceError",
    "EmulatorError",
    "Finding",
    "HangError",
    "LaunchError",
    "Library",
    "LintError",
    "MemoryFaultError",
    "MetalKernel",
    "OrderError",
    "RaceError",
    "TensorError",
    "UndefinedBehaviorError",
    "Unwritten",
    "WholeKernel",
    "emulate",
    "library",
    "metal_kernel",
    "prepare",
    "unavailable",
]
