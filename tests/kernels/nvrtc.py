"""NVIDIA's run-time compiler, where it is installed: kernels compile as `mx.fast.cuda_kernel` would have them compiled.

It needs no GPU: `pip install nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cuda-cccl`.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import mlx.core as mx

from kernels.launch import Launch, header, translated

TYPES = {mx.float16: "__half", mx.float32: "float", mx.uint32: "uint32_t", mx.int32: "int32_t"}
# As much of MLX's header of this name as a kernel can see.
UTILS = b"""#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda/std/array>
namespace mlx::core::cu {
using Shape = cuda::std::array<int32_t, 10>;
using Strides = cuda::std::array<int64_t, 10>;
}
"""
UTILS_NAME = b"mlx/backend/cuda/device/utils.cuh"


def toolkit() -> Path | None:
    """The folder with `lib/libnvrtc.so.13` and `include`, from NVIDIA's Python packages; None if there is none."""
    for folder in sys.path:
        found = Path(folder) / "nvidia" / "cu13"
        if list(found.glob("lib/libnvrtc.so*")) and (found / "include" / "cuda_fp16.h").exists():
            return found
    return None


def source(launch: Launch) -> str:
    """What MLX hands to the compiler for a launch.

    Source: `build_kernel`,
    https://github.com/ml-explore/mlx/blob/846d176227a0ac13d2667e58d2bb68b322109ab0/mlx/backend/cuda/custom_kernel.cpp
    """
    kernel, body = launch.kernel, translated(launch.kernel.source)
    parameters = []
    for name, array in zip(kernel.input_names, launch.inputs, strict=True):
        parameters.append(f"const {TYPES[array.dtype]}* {name}")
        if f"{name}_shape" in body:
            parameters.append(f"const __grid_constant__ Shape {name}_shape")
        if f"{name}_strides" in body:
            parameters.append(f"const __grid_constant__ Strides {name}_strides")
    for name, dtype in zip(kernel.output_names, launch.output_dtypes, strict=True):
        parameters.append(f"{TYPES[dtype]}* {name}")
    constants = [_constant(name, value) for name, value in launch.template]
    return "\n".join([
        f'#include "{UTILS_NAME.decode()}"',
        "#include <cooperative_groups.h>",
        header() + translated(kernel.header),
        "namespace mlx::core::cu {",
        "namespace cg = cooperative_groups;",
        f"__global__ void custom_kernel_{kernel.name}({', '.join(parameters)}) {{",
        *constants,
        body,
        "}",
        "}",
    ])  # fmt: skip


def _constant(name: str, value: int | bool | mx.Dtype) -> str:
    if isinstance(value, mx.Dtype):
        return f"using {name} = {TYPES[value]};"
    return f"constexpr {'bool' if isinstance(value, bool) else 'int'} {name} = {int(value)};"


class Compiler:
    """`nvrtc` through ctypes; one call compiles one text for a Hopper GPU, or says why it does not."""

    def __init__(self, folder: Path) -> None:
        self.lib = ctypes.CDLL(str(min(folder.glob("lib/libnvrtc.so*"), key=lambda p: len(p.name))))
        includes = [folder / "include", folder / "include" / "cccl"]
        options = ["--device-as-default-execution-space", "--gpu-architecture=sm_90a"]
        self.options = [*options, *(f"--include-path={path}" for path in includes)]

    def ptx(self, text: str) -> str:
        """The machine code of a text, readable.

        Raises:
            ValueError: the text does not compile; with the compiler's log.
        """
        program = ctypes.c_void_p()
        headers, names = (ctypes.c_char_p * 1)(UTILS), (ctypes.c_char_p * 1)(UTILS_NAME)
        self._check(self.lib.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"k.cu", 1, headers, names))
        try:
            options = (ctypes.c_char_p * len(self.options))(*(option.encode() for option in self.options))
            if self.lib.nvrtcCompileProgram(program, len(self.options), options):
                raise ValueError(self._text(program, "ProgramLog"))
            return self._text(program, "PTX")
        finally:
            self._check(self.lib.nvrtcDestroyProgram(ctypes.byref(program)))

    def _text(self, program: ctypes.c_void_p, what: str) -> str:
        size = ctypes.c_size_t()
        self._check(getattr(self.lib, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        text = ctypes.create_string_buffer(size.value)
        self._check(getattr(self.lib, f"nvrtcGet{what}")(program, text))
        return text.value.decode()

    def _check(self, error: int) -> None:
        if error:
            self.lib.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise RuntimeError(self.lib.nvrtcGetErrorString(error).decode())
