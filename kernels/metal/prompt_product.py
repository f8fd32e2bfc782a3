"""Multiply many vectors (prompts) in float16 or bfloat16 with `simdgroup_matrix`, which every Apple GPU since M1 has.

A threadgroup expands each weight once for 64 vectors, into a tile in threadgroup memory, and sums in float32. The
result is rounded to the type of x. `prompt_product_tensors` is the same kernel with `matmul2d` of Metal 4.

If x is float16, tiles are float16, which the matrix units multiply without conversion; weights are rounded to float16.
If x is bfloat16, tiles are float32 and weights are not rounded, because GPUs before the M5 have no bfloat16 units.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ..kernel import Kernel
from ..launch import Size, launch
from .layout import AffineMatrix, StoredMatrix, described
from .reference import EPSILON, SEQUENTIAL, Expected, wide

INPUTS, OUTPUTS = ["x", "wq", "ws", "biases"], ["y"]
KERNEL = Kernel.load("prompt_product", INPUTS, OUTPUTS, headers=["prompt", "tile_simdgroups"])
TILE, THREADS = 64, 128
# The fewest vectors for which the engine uses the prompt kernels. With fewer, most of a tile of 64 would be empty.
FEWEST = 32
# Maps each type of x to the largest relative error of rounding to this type.
ROUNDING = {mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}

PromptMatrix = StoredMatrix | AffineMatrix


def prompt_product(x: mx.array, weight: PromptMatrix) -> mx.array:
    """Return `x @ weight.T`, (V, N), for V vectors x (V, K) of float16 or bfloat16. The result has the type of x.

    Raises:
        ValueError: x has a wrong shape or type.
    """
    return product("prompt_product", KERNEL, x, weight, mx.float16 if x.dtype == mx.float16 else mx.float32)


def product(name: str, kernel: Kernel, x: mx.array, weight: PromptMatrix, tile: mx.Dtype) -> mx.array:
    """Launch `kernel`, one of the two prompt kernels, with tiles of type `tile`. `name` is for error messages."""
    N, K = weight.shape
    if x.ndim != 2 or x.shape[1] != K or x.dtype not in ROUNDING or x.shape[0] < 1:
        raise ValueError(f"{name}: expected x (V, {K}) of float16 or bfloat16, found {described(x)}")
    wq, *scales = weight.inputs
    (y,) = launch(
        kernel,
        [x, wq, scales[0], scales[-1]],
        template=(("W", weight.code), ("T", x.dtype), ("TILE", tile)),
        grid=grid(N, len(x))[0],
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(len(x), N)],
        output_dtypes=[x.dtype],
    )
    return y


def grid(n_rows: int, vectors: int) -> tuple[Size, Size]:
    """Return the sizes of the grid and of a threadgroup; threadgroup (i, j) begins at row 64 i and vector 64 j."""
    return (-(-n_rows // TILE) * THREADS, -(-vectors // TILE), 1), (THREADS, 1, 1)


def reference(x: mx.array, weight: PromptMatrix) -> Expected:
    """Return the expected result in float64, with a bound for the errors of the sums and of rounding to x's type."""
    return rounded_product(x, weight, mx.float16 if x.dtype == mx.float16 else mx.float32)


def rounded_product(x: mx.array, weight: PromptMatrix, tile: mx.Dtype) -> Expected:
    """Round the weights to the type `tile`; return the product in float64, and the error bound."""
    with mx.stream(mx.cpu):
        vectors, weights = (wide(part.astype(mx.float32)) for part in (x, weight.dequantized().astype(tile)))
    y = vectors @ weights.T
    return Expected(y, SEQUENTIAL * EPSILON * (np.abs(vectors) @ np.abs(weights).T) + ROUNDING[x.dtype] * np.abs(y))
