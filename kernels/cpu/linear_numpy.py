"""The NumPy twin of the compiled linear layers: what a block computes, one step after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kernels.cpu.norms_numpy import Floats


def project(
    x: Floats,
    weight: Floats | None,
    eps: float,
    matrices: Sequence[Floats],
    biases: Sequence[Floats | None],
    residual: Floats | None,
    activation: Callable[[Floats], Floats] | None,
) -> Floats:
    """(T, N) from (T, K): an RMS norm, products, and what follows them.

    Args:
        x: the input, normed first if there is a weight.
        weight: (K,) or None.
        eps: of the norm.
        matrices: (N, K) each; their products lie side by side.
        biases: (N,) or None, one for each matrix.
        residual: added to the result, or None.
        activation: of the product, or of the first of two that are a gate and what it gates; None is none.
    """
    if weight is not None:
        x = weight * (x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + eps))
    products: list[Floats] = [
        x @ matrix.T if bias is None else x @ matrix.T + bias for matrix, bias in zip(matrices, biases, strict=True)
    ]
    if activation is not None:
        products[0] = activation(products[0])
        if len(products) == 2:
            return products[0] * products[1]
    y = np.concatenate(products, axis=1)
    return y if residual is None else y + residual
