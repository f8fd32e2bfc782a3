"""The NumPy twin of the compiled attention: head by head, with a mask and all scores at once."""

from __future__ import annotations

import numpy as np

from kernels.cpu.norms_numpy import Floats


def attend(q: Floats, kv: Floats, window: int, scale: float, out: Floats) -> None:
    """(T, H, E) attention of queries over keys and values (2, G, S, E), of which the last T are the queries' own.

    A query sees the keys up to its own; with a window, other than 0, only so many of the last of them.
    """
    (n_tokens, n_heads, _), n_keys = q.shape, kv.shape[2]
    group = n_heads // kv.shape[1]
    key, own = np.arange(n_keys), np.arange(n_keys - n_tokens, n_keys)[:, None]
    hidden = key > own
    if window:
        hidden |= key <= own - window
    for h in range(n_heads):
        keys, values = kv[:, h // group]
        scores = scale * (q[:, h] @ keys.T)
        scores[hidden] = -np.inf
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[:, h] = weights @ values / weights.sum(axis=1, keepdims=True)
