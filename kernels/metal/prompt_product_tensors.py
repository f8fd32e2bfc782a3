"""Prompts in float16 or bfloat16: the same tiles in the neural accelerators of an M5, by `matmul2d` of Metal 4.

GPUs of before compile `matmul2d`, too, and run it on their ALUs; there `prompt_product` is used. Tiles have the type of
x, so each weight is rounded to it. Metal defines neither which thread has which sum nor the order of additions.
"""

from __future__ import annotations

import platform
import re

import mlx.core as mx

from ..kernel import Kernel
from .prompt_product import INPUTS, OUTPUTS, PromptMatrix, product, rounded_product
from .reference import Expected

KERNEL = Kernel.load(
    "prompt_product_tensors", INPUTS, OUTPUTS, headers=["prompt", "tile_tensors"], body="prompt_product"
)
# What MLX asks for its own kernels of this kind: the version of macOS, and the generation of the GPU, which is the
# number before the last letter of its architecture, such as applegpu_g17s; "p" are the GPUs of phones.
MACOS = (26, 2)
GENERATION, GENERATION_OF_PHONES = 17, 18


def prompt_product_tensors(x: mx.array, weight: PromptMatrix) -> mx.array:
    """Compute `x @ weight.T` for many vectors, by `matmul2d`.

    Args:
        x: (V, K) float16 or bfloat16, any V.
        weight: (N, K), of any stored type, or in MLX's affine arrays.

    Returns:
        (V, N) of x's type: the sums in float32, rounded once. Each weight is rounded to x's type.

    Raises:
        ValueError: x does not fit.
    """
    return product("prompt_product_tensors", KERNEL, x, weight, x.dtype)


def reference(x: mx.array, weight: PromptMatrix) -> Expected:
    """Return the same in float64, with the error bound of the sums and of the rounding to x's type."""
    return rounded_product(x, weight, x.dtype)


def has_accelerators(macos: str | None = None, architecture: str | None = None) -> bool:
    """Return whether MLX would use the accelerators of this machine's GPU; both arguments are for tests.

    Args:
        macos: the version of macOS, "26.2", or "" on another system.
        architecture: the GPU's name for its architecture, such as "applegpu_g17s".
    """
    version = platform.mac_ver()[0] if macos is None else macos
    if not version:
        return False
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    named = str(mx.device_info().get("architecture", "")) if architecture is None else architecture
    generation = re.search(r"(\d{1,2})([a-z])$", named)
    if generation is None or numbers < MACOS:
        return False
    return int(generation[1]) >= (GENERATION_OF_PHONES if generation[2] == "p" else GENERATION)
