"""Multiply many vectors (prompts) in float16 or bfloat16 with `matmul2d` of Metal 4: the neural accelerators of an M5.

GPUs before the M5 run `matmul2d` on their ALUs, so the engine uses `prompt_product` there. Weights are rounded to
the type of the vectors x. Metal does not define the order of sums in `matmul2d`, so results may differ between GPUs.
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
# MLX uses its own `matmul2d` kernels if macOS has at least this version, and the GPU at least this generation. The
# generation is the number in the name of the architecture, such as 17 in applegpu_g17s; the last letter is "p" for GPUs
# of phones.
MACOS = (26, 2)
GENERATION, GENERATION_OF_PHONES = 17, 18


def prompt_product_tensors(x: mx.array, weight: PromptMatrix) -> mx.array:
    """Compute `x @ weight.T`, (V, N) of x's type, for x (V, K) of float16 or bfloat16, with any number V of vectors.

    Sums are float32, and are rounded once, to x's type.

    Raises:
        ValueError: x has a wrong shape or type.
    """
    return product("prompt_product_tensors", KERNEL, x, weight, x.dtype)


def reference(x: mx.array, weight: PromptMatrix) -> Expected:
    """Return the expected result in float64, with the error bound of the sums and of rounding to x's type."""
    return rounded_product(x, weight, x.dtype)


def has_accelerators(macos: str | None = None, architecture: str | None = None) -> bool:
    """Return whether MLX would use the neural accelerators of this machine's GPU.

    Only tests pass arguments: the version of macOS, such as "26.2", or "" on another system; and MLX's name for the
    GPU's architecture, such as "applegpu_g17s".
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
