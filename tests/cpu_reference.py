"""NumPy references of compiled kernels, in the dtype of their arguments: norms, activations, linear layers, attention.

`kernels/cpu/products/order_numpy.py` has the references that are bit-identical to the kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]


def rms_norm(x: Floats, at: int, n: int, weight: Floats, eps: float, out: Floats, to: int) -> None:
    """`out[to ...] = weight * x[at ...] / sqrt(mean(x**2) + eps)` over `n` elements; out may be x."""
    row = x[at : at + n]
    out[to : to + n] = weight * (row / np.sqrt(np.mean(np.square(row)) + eps))


def layer_norm(x: Floats, at: int, n: int, weight: Floats, bias: Floats, eps: float, out: Floats, to: int) -> None:
    """`out[to ...] = weight * (x[at ...] - mean) / sqrt(variance + eps) + bias` over `n` elements; out may be x."""
    centered = x[at : at + n] - np.mean(x[at : at + n])
    out[to : to + n] = weight * (centered / np.sqrt(np.mean(np.square(centered)) + eps)) + bias


def rotate(x: Floats, at: int, half: int, cos: Floats, sin: Floats, row: int, out: Floats, to: int) -> None:
    """Rotate pairs (j, j + half) by the angles of `cos[row ...]` and `sin[row ...]`; out may be x."""
    a, b = x[at : at + 2 * half].reshape(2, half).copy()
    c, s = cos[row : row + half], sin[row : row + half]
    out[to : to + half] = a * c - b * s
    out[to + half : to + 2 * half] = b * c + a * s


def silu(x: Floats) -> Floats:
    """`x / (1 + exp(-x))`. Where the exponential overflows, x / infinity is 0, the correct result."""
    with np.errstate(over="ignore"):
        return np.asarray(x / (1 + np.exp(-x)))


def gelu(x: Floats) -> Floats:
    """`0.5 x (1 + tanh(u))` with `u = sqrt(2/pi) (x + 0.044715 x**3)`, written as `x / (1 + exp(-2 u))`."""
    with np.errstate(over="ignore"):
        u = float(np.sqrt(2 / np.pi)) * (x + 0.044715 * x**3)
        return np.asarray(x / (1 + np.exp(-2 * u)))


def gelu_erf(x: Floats) -> Floats:
    """`0.5 x erfc(-x / sqrt(2))`."""
    return np.asarray(x * (0.5 * np.vectorize(math.erfc, otypes=[np.float64])(-x / math.sqrt(2))).astype(x.dtype))


def relu2(x: Floats) -> Floats:
    """`max(x, 0)**2`."""
    return np.square(np.maximum(x, 0))


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
        activation: applied to the product; of two products to the first, the gate. None is no activation.
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


def norm_rope(x: Floats, weight: Floats, eps: float, cos: Floats, sin: Floats, offset: int, out: Floats) -> None:
    """Norm and rotate T rows of heads into (T, H, E); an empty weight is no norm.

    Row t is rotated by row `offset + t` of the cos/sin tables.
    """
    n_tokens, n_heads, width = out.shape
    for t in range(n_tokens):
        for h in range(n_heads):
            head = x[t, h * width : (h + 1) * width].copy()
            if weight.size:
                rms_norm(head, 0, width, weight, eps, head, 0)
            rotate(head, 0, width // 2, cos[offset + t].reshape(-1), sin[offset + t].reshape(-1), 0, out[t, h], 0)


def attend(
    q: Floats, kv: Floats, window: int, scale: float, out: Floats, softcap: float = 0.0, sinks: Floats | None = None
) -> None:
    """Compute (T, H, E) attention of the last T tokens over keys and values (2, G, S, E) of S tokens.

    A query attends to the keys up to its own token; if `window` is not 0, only to the last `window` of these keys.
    A soft cap other than 0 is applied to the scores. `sinks` (H,) has one more score per head for the softmax.
    """
    (n_tokens, n_heads, _), n_keys = q.shape, kv.shape[2]
    group = n_heads // kv.shape[1]
    key, own = np.arange(n_keys), np.arange(n_keys - n_tokens, n_keys)[:, None]
    hidden = key > own
    if window:
        hidden |= key <= own - window if window > 0 else key < own - own % -window
    for h in range(n_heads):
        keys, values = kv[:, h // group]
        scores = scale * (q[:, h] @ keys.T)
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        scores[hidden] = -np.inf
        sink = -np.inf if sinks is None else sinks[h]
        most = np.maximum(scores.max(axis=1, keepdims=True), sink)
        weights = np.exp(scores - most)
        out[:, h] = weights @ values / (weights.sum(axis=1, keepdims=True) + np.exp(sink - most))
