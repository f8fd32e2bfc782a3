"""The NumPy twin of the compiled attention: head by head, with a mask and all scores at once."""

from __future__ import annotations

import numpy as np

from kernels.cpu.norms_numpy import Floats


def attend(q: Floats, kv: Floats, start: int, stop: int, window: int, scale: float, out: Floats) -> None:
    """(T, H, E) attention of queries over slots [start, stop) of a store, of which the last T are the queries' own.

    A query sees the slots up to its own; with a window, other than 0, only so many of the last of them.
    """
    n_tokens, n_heads, _ = q.shape
    group = n_heads // kv.shape[1]
    slot, own = np.arange(start, stop), np.arange(stop - n_tokens, stop)[:, None]
    hidden = slot > own
    if window:
        hidden |= slot <= own - window
    for h in range(n_heads):
        keys, values = kv[:, h // group, start:stop]
        scores = scale * (q[:, h] @ keys.T)
        scores[hidden] = -np.inf
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[:, h] = weights @ values / weights.sum(axis=1, keepdims=True)
