"""The choice of one token after another: it keeps what a choice depends on, the history and the random draws."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from mlx_engine.backends.base import Backend
from mlx_engine.backends.parameters import Array
from mlx_engine.backends.sampling import Sampling


class Sampler:
    """Logits (1, V) in, the chosen id out."""

    def __init__(self, backend: Backend, sampling: Sampling, prompt: Sequence[int]) -> None:
        self._backend, self._sampling, self._recent = backend, sampling, list(prompt)
        self._random = random.Random(None if sampling.seed is None else int(sampling.seed))
        self._is_argmax = sampling.is_greedy and sampling.repetition_penalty == 1
        self._logits: Array | None = None

    def __call__(self, logits: Array) -> int:
        """Choose, wait until the id is on the host, and remember it."""
        if self._is_argmax:
            token = self._backend.argmax(logits)
        else:
            token = self._backend.sample(logits, self._sampling, self._recent, self._random.random())
        chosen = self._backend.token_id(token)
        self._recent.append(chosen)
        self._logits = logits
        return chosen

    def probability(self) -> float | None:
        """How likely the model held the last choice, before any option had a say; None before the first.

        Computed when asked, from the logits that were kept: a run that nobody watches does not pay for it.
        """
        if self._logits is None:
            return None
        row = self._backend.host(self._logits)[0].astype(np.float64)
        p = np.exp(row - row.max())
        return float(p[self._recent[-1]] / p.sum())
