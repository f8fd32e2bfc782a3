"""Run Metal kernels on the CPU and report their mistakes.

`metal_kernel` has the interface of `mx.fast.metal_kernel`; `emulate` replaces that function for other programs;
`library` runs whole .metal kernels, in one address space. clang compiles a kernel (`compiler`) with headers that
implement the Metal Shading Language (`include/`); every GPU thread is a fibre (`runtime/`), and every buffer has
unmapped pages around it (`memory`). One call runs at a time in a process; calls from other threads wait.

The emulator finds reads and writes out of bounds, data races, divergent barriers and SIMD-group operations, undefined
behaviour, missing address spaces, and reads of unwritten memory, which is filled with NaN. A correct kernel passes in
each of three builds, with the same bits for every `seed`. A seed chooses the order of threads.

The emulator does not show the speed of a kernel, the precision of a GPU's own functions, or which constructs Apple's
compiler refuses. Textures are not supported. In the body of a `metal_kernel`, copies of structures out of device
memory and member functions of objects outside the address space `thread` are not supported either.
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
