"""Kernels for block-quantised weights: Metal kernels with NumPy references, compiled CPU kernels, and block layouts.

The package does not import mlx_engine, and can be imported without a GPU. In a wheel its name is `mlx_engine.kernels`.
In a checkout, it can be imported as `kernels` or as `mlx_engine.kernels`, and both names give the same modules. Public
names are imported when they are first used, so that `import kernels` is fast. `kernels.launch` is a module; its
function `launch` runs a Metal kernel (a `Kernel`).
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
    "prompt_product",
    "prompt_product_tensors",
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
    from . import launch
    from .kernel import Kernel
    from .lab.bench import bench
    from .lab.check import check
    from .lab.experiment import Experiment
    from .lab.metal_experiment import MetalExperiment
    from .launch import counted, executors, use
    from .metal.attention import attention
    from .metal.dense import dense
    from .metal.dequantize import dequantize, dequantize_q8_0
    from .metal.embed_rows import embed_rows
    from .metal.formats import Q8_0Matrix, affine_layout, join_affine, split_q4_0, split_q4_k, split_q6_k, split_q8_0
    from .metal.head_norm_rope import head_norm_rope
    from .metal.layout import StoredMatrix
    from .metal.matvec import matvec
    from .metal.norm_gate_up import norm_gate_up
    from .metal.norm_project import norm_project
    from .metal.norm_qkv import norm_qkv
    from .metal.norm_rows import norm_rows
    from .metal.project_add import project_add
    from .metal.prompt_product import prompt_product
    from .metal.prompt_product_tensors import prompt_product_tensors
    from .metal.rows import Tuning
    from .metal.simd_per_row import simd_per_row
    from .metal.thread_per_output import thread_per_output
    from .metal.tiles import tiles

# Maps public names to the modules that define them. If a public name is missing here, the module `metal.NAME` defines
# it: `metal.matvec` defines `matvec`. The name `launch` is an exception: it is a module.
_HOMES = {
    "Kernel": "kernel",
    **dict.fromkeys(("counted", "executors", "use"), "launch"),
    "Experiment": "lab.experiment",
    "MetalExperiment": "lab.metal_experiment",
    "bench": "lab.bench",
    "check": "lab.check",
    **dict.fromkeys(("Q8_0Matrix", "affine_layout", "join_affine"), "metal.formats"),
    **dict.fromkeys(("split_q4_0", "split_q4_k", "split_q6_k", "split_q8_0"), "metal.formats"),
    "StoredMatrix": "metal.layout",
    "Tuning": "metal.rows",
    "dequantize_q8_0": "metal.dequantize",
}


def __getattr__(name: str) -> Any:
    if name == "launch":
        return importlib.import_module(".launch", __name__)
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("." + _HOMES.get(name, f"metal.{name}"), __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
