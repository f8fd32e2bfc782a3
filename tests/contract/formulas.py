"""The primitives once more, straight from their formulas in float64 NumPy: a second opinion on `scalar` itself."""

from __future__ import annotations

import math

import numpy as np

from mlx_engine.backends.parameters import Rope


def linear(x: np.ndarray, w: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.einsum("tk,nk->tn", x, w) + b


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return weight * x * (np.mean(x**2, axis=-1, keepdims=True) + eps) ** -0.5


def layer_norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, eps: float) -> np.ndarray:
    return weight * (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps) + bias


def rope(x: np.ndarray, rope: Rope, offset: int) -> np.ndarray:
    """A pair of halves is a complex number, and a rotation is a multiplication."""
    half = x.shape[-1] // 2
    z = x[..., :half] + 1j * x[..., half:]
    angles = (offset + np.arange(len(x)))[:, None, None] * np.array(rope.frequencies)
    turned = z * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, window: int | None, softcap: float, sinks: np.ndarray
) -> np.ndarray:
    """q (T, H, E), k and v (S, K, E), heads repeated and everything masked, which is slow and plain."""
    T, H, _ = q.shape
    S, K, _ = k.shape
    k, v = np.repeat(k, H // K, axis=1), np.repeat(v, H // K, axis=1)
    scores = np.einsum("the,she->hts", q, k) * scale
    scores = softcap * np.tanh(scores / softcap)
    for t in range(T):
        for s in range(S):
            position = S - T + t
            if s > position or (window is not None and s <= position - window):
                scores[:, t, s] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    sink = np.exp(sinks[:, None, None] - scores.max(-1, keepdims=True))
    return np.einsum("hts,she->the", weights / (weights.sum(-1, keepdims=True) + sink), v)


def soft_cap(x: np.ndarray, cap: float) -> np.ndarray:
    return cap * (1 - 2 / (np.exp(2 * x / cap) + 1))


def silu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(x / 2))


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu_erf(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * np.vectorize(math.erfc)(-x / math.sqrt(2))


def relu2(x: np.ndarray) -> np.ndarray:
    return np.where(x > 0, x * x, 0)


def clamped_swiglu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    g, u = np.where(gate > 7, 7, gate), np.sign(up) * np.minimum(np.abs(up), 7)
    return g * (1 + np.tanh(0.851 * g)) / 2 * (1 + u)
