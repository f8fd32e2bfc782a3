"""Run Metal kernels on the CPU and report their mistakes.

`metal_kernel` has the interface of `mx.fast.metal_kernel`; `emulate` replaces `mx.fast.metal_kernel` in other programs;
`library` runs kernels of complete .metal files. clang compiles a kernel (`compiler`) with headers that implement the
Metal Shading Language (`include/`). Every GPU thread is a fibre, a small thread that the runtime switches itself
(`runtime/`). Every buffer has unmapped pages around it (`memory`). A process runs one call at a time; calls from other
threads wait.

A kernel can be compiled in three builds with different checks; a correct kernel passes in each of them. The `seed`
chooses the order of threads; a correct kernel has the same bits for every seed, except in atomic sums and in products
of tensors (`matmul2d`). README.md lists the mistakes that the emulator finds, and those that it cannot find.

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
