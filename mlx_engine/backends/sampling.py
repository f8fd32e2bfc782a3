"""Sampling of the next token: the options, their limits, and the definition that every backend implements.

The order is that of Hugging Face transformers: repetition penalty, temperature, top-k, top-p, min-p, then one draw.
The caller passes the random number u in [0, 1) for the draw, so that one seed gives the same text on every backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlx_engine.backends.parameters import Token
from mlx_engine.errors import is_number, is_whole, require

# Below this temperature only logits that differ in their last float32 digit could both be chosen: sampling is greedy.
COLDEST = 1e-7


@dataclass(frozen=True)
class Sampling:
    """Sampling options; the defaults choose the most likely token.

    Attributes:
        temperature: divisor of the logits; below 1e-7 the choice is greedy.
        top_k: keep the k most likely tokens; of equally likely tokens, the lower ids. None keeps all.
        top_p: keep the most likely tokens until their probability reaches p; 1 keeps all.
        min_p: keep tokens at least min_p times as likely as the most likely one; 0 keeps all.
        repetition_penalty: divisor of positive logits of earlier tokens, and factor of negative ones; 1 is off.
        seed: seed of the random numbers; None takes a new one for each run.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        """Check the options before any model is loaded.

        Raises:
            OptionError: a value outside its range; NaN and infinity are outside all of them.
        """
        t, k, p, m, r = self.temperature, self.top_k, self.top_p, self.min_p, self.repetition_penalty
        self._require("temperature", is_number(t) and t >= 0, "a finite number >= 0 (0 is greedy)")
        self._require("top_k", k is None or (is_whole(k) and k >= 1), "a whole number >= 1, or none at all")
        self._require("top_p", is_number(p) and 0 < p <= 1, "a number in (0, 1]")
        self._require("min_p", is_number(m) and 0 <= m <= 1, "a number in [0, 1]")
        self._require("repetition_penalty", is_number(r) and r > 0, "a finite number > 0")
        seed = self.seed
        self._require("seed", seed is None or (is_whole(seed) and seed >= 0), "a whole number >= 0, or none at all")

    def _require(self, option: str, holds: bool, expected: str) -> None:
        require(holds, option=option, expected=expected, found=getattr(self, option))

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, after the penalty."""
        return self.temperature < COLDEST

    @property
    def is_argmax(self) -> bool:
        """Whether the choice is the largest logit: greedy, without a repetition penalty."""
        return self.is_greedy and self.repetition_penalty == 1


@dataclass(frozen=True, eq=False)
class Draw:
    """The inputs for choosing one token from a row of logits.

    Attributes:
        sampling: the sampling options.
        recent: all tokens before it, for the repetition penalty.
        u: random number in [0, 1) that selects among the tokens that the options keep.
    """

    sampling: Sampling
    recent: Sequence[Token]
    u: float


def penalize(logits: np.ndarray, recent: Sequence[int], penalty: float) -> np.ndarray:
    """Return (V,) logits with the repetition penalty of Keskar et al. (CTRL, 2019) on the ids in `recent`."""
    if penalty == 1 or not recent:
        return logits
    logits = logits.copy()
    ids = np.unique(np.asarray(recent, dtype=np.int64))
    hit = logits[ids]
    logits[ids] = np.where(hit > 0, hit / penalty, hit * penalty)
    return logits


def probabilities(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Return (V,) float64 probabilities, 0 for tokens that are filtered out. The temperature must be > 0."""
    # Subtract the maximum before dividing: a tiny temperature then gives 0 for the other tokens, not NaN.
    with np.errstate(over="ignore", under="ignore"):
        p = np.exp((logits.astype(np.float64) - logits.max()) / sampling.temperature)
    order = _likeliest_first(p, sampling.top_k)
    likely = p[order]
    likely /= likely.sum()
    if sampling.top_p < 1:
        # The token whose probability makes the sum reach top_p is kept, so compare the sum before each token.
        reached = np.cumsum(likely) - likely
        likely = likely[: max(1, int(np.count_nonzero(reached < sampling.top_p)))]
    n_kept = max(1, int(np.count_nonzero(likely >= sampling.min_p * likely[0])))
    kept = np.zeros_like(p)
    kept[order[:n_kept]] = p[order[:n_kept]]
    return np.asarray(kept / kept.sum())


def _likeliest_first(p: np.ndarray, top_k: int | None) -> np.ndarray:
    """Return the ids of the top_k most likely tokens, or of all; of equally likely tokens, the lower id first."""
    if top_k is None or top_k >= len(p):
        return np.argsort(-p, kind="stable")
    # Sorting the vocabulary takes milliseconds; partitioning and sorting the candidates, with ties, takes less.
    least = np.partition(p, len(p) - top_k)[len(p) - top_k]
    candidates = np.flatnonzero(p >= least)
    return candidates[np.argsort(-p[candidates], kind="stable")][:top_k]


def draw(p: np.ndarray, u: float) -> int:
    """Return the first id at which the cumulative sum of `p` exceeds u times the total."""
    total = np.cumsum(p)
    found = int(np.searchsorted(total, u * total[-1], side="right"))
    # For u close to 1, rounding may leave no token above u; then the last possible token is chosen.
    return min(found, int(np.flatnonzero(p)[-1]))
