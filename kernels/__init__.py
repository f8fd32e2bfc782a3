"""Kernels for block-quantised weights: Metal text with its NumPy twins, compiled CPU kernels, and block layouts.

The package is usable without mlx_engine and importable without a GPU. Public names are imported when they are first
used, so that `import kernels` is fast. `kernels.launch` is a module, whose function `launch` runs any `Kernel`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = [
    "Experiment",
    "Kernel",
    "MetalExperiment",
    "Q8_0Matrix",
    "StoredMatrix",
    "Tuning",
    "affine_layout",
    "attention",
    "bench",
    "check",
    "counted",
    "dense",
    "dequantize",
    "dequantize_q8_0",
    "embed_rows",
    "executors",
    "head_norm_rope",
    "join_affine",
    "launch",
    "matvec",
    "norm_gate_up",
    "norm_project",
    "norm_qkv",
    "norm_rows",
    "project_add",
    "simd_per_row",
    "split_q4_0",
    "split_q4_k",
    "split_q6_k",
    "split_q8_0",
    "thread_per_output",
    "tiles",
    "use",
]

if TYPE_CHECKING:
    from kernels import launch
    from kernels.kernel import Kernel
    from kernels.lab.bench import bench
    from kernels.lab.check import check
    from kernels.lab.experiment import Experiment
    from kernels.lab.metal_experiment import MetalExperiment
    from kernels.launch import counted, executors, use
    from kernels.metal.affine import affine_layout, join_affine
    from kernels.metal.attention import attention
    from kernels.metal.dense import dense
    from kernels.metal.dequantize import dequantize, dequantize_q8_0
    from kernels.metal.embed_rows import embed_rows
    from kernels.metal.head_norm_rope import head_norm_rope
    from kernels.metal.layout import StoredMatrix
    from kernels.metal.matvec import matvec
    from kernels.metal.norm_gate_up import norm_gate_up
    from kernels.metal.norm_project import norm_project
    from kernels.metal.norm_qkv import norm_qkv
    from kernels.metal.norm_rows import norm_rows
    from kernels.metal.project_add import project_add
    from kernels.metal.q4_0 import split_q4_0
    from kernels.metal.q4_k import split_q4_k
    from kernels.metal.q6_k import split_q6_k
    from kernels.metal.q8_0 import Q8_0Matrix, split_q8_0
    from kernels.metal.rows import Tuning
    from kernels.metal.simd_per_row import simd_per_row
    from kernels.metal.thread_per_output import thread_per_output
    from kernels.metal.tiles import tiles

# Modules of the names that differ from their module's name in `kernels.metal`.
_HOMES = {
    "Experiment": "kernels.lab.experiment",
    "Kernel": "kernels.kernel",
    "MetalExperiment": "kernels.lab.metal_experiment",
    "Q8_0Matrix": "kernels.metal.q8_0",
    "StoredMatrix": "kernels.metal.layout",
    "Tuning": "kernels.metal.rows",
    "bench": "kernels.lab.bench",
    "check": "kernels.lab.check",
    "counted": "kernels.launch",
    "affine_layout": "kernels.metal.affine",
    "dequantize_q8_0": "kernels.metal.dequantize",
    "executors": "kernels.launch",
    "join_affine": "kernels.metal.affine",
    "split_q4_0": "kernels.metal.q4_0",
    "split_q4_k": "kernels.metal.q4_k",
    "split_q6_k": "kernels.metal.q6_k",
    "split_q8_0": "kernels.metal.q8_0",
    "use": "kernels.launch",
}


def __getattr__(name: str) -> Any:
    if name == "launch":
        return importlib.import_module("kernels.launch")
    if name not in __all__:
        raise AttributeError(f"module 'kernels' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES.get(name, f"kernels.metal.{name}")), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
