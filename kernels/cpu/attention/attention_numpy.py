"""The NumPy twin of compiled attention: one head at a time, with a mask and the full matrix of scores."""

from __future__ import annotations

import numpy as np

from ..products.norms_numpy import Floats


def attend(
    q: Floats, kv: Floats, window: int, scale: float, out: Floats, softcap: float = 0.0, sinks: Floats | None = None
) -> None:
    """Compute (T, H, E) attention of the last T tokens over keys and values (2, G, S, E) of S tokens.

    A query attends to the keys up to its own token; with a window other than 0, to the latest `window` of them.
    A soft cap other than 0 is applied to the scores. `sinks` (H,) has one more score for each head, without a value.
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
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        scores[hidden] = -np.inf
        sink = -np.inf if sinks is None else sinks[h]
        most = np.maximum(scores.max(axis=1, keepdims=True), sink)
        weights = np.exp(scores - most)
        out[:, h] = weights @ values / (weights.sum(axis=1, keepdims=True) + np.exp(sink - most))
