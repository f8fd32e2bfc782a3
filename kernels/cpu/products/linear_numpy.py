"""The NumPy twin of compiled linear layers: a block, step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .norms_numpy import Floats


def project(
    x: Floats,
    weight: Floats | None,
    eps: float,
    matrices: Sequence[Floats],
    biases: Sequence[Floats | None],
    residual: Floats | None,
    activation: Callable[[Floats], Floats] | None,
) -> Floats:
    """Compute (T, N) from (T, K): RMS norm, products, biases, activation, residual.

    Args:
        x: the input.
        weight: (K,), the weight of the norm; None is no norm.
        eps: epsilon of the norm.
        matrices: (N, K) each; their products are concatenated.
        biases: (N,) or None, one for each matrix.
        residual: added to the result, or None.
        activation: applied to the product, or with two matrices to the gate, the first one; None is no activation.
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
