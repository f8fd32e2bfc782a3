"""How the next token is chosen: the options, their limits, and the definition that every backend follows.

The order is that of Hugging Face transformers: repetition penalty, temperature, top-k, top-p, min-p, then one draw.
The draw is a number u in [0, 1) that the caller brings, so one seed gives the same text on every backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlx_engine.backends.parameters import Token
from mlx_engine.errors import is_number, is_whole, require

# Below this temperature a float32 logit could at best win against its own last digit: it is greedy.
COLDEST = 1e-7


@dataclass(frozen=True)
class Sampling:
    """Options of the choice; the defaults choose the most likely token.

    Attributes:
        temperature: 0 is greedy, and so is less than 1e-7; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; of equal ones the lower ids. None keeps all.
        top_p: keep the most likely tokens until their probability reaches p; 1 keeps all.
        min_p: keep tokens at least min_p times as likely as the most likely one; 0 keeps all.
        repetition_penalty: positive logits of tokens seen before are divided by it, negative ones multiplied.
        seed: of the draws; None takes a fresh one for each run.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        """Refuse what makes no sense, before any model is loaded.

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
        """Whether neither tokens seen before nor a draw have a say: the largest logit is taken."""
        return self.is_greedy and self.repetition_penalty == 1


@dataclass(frozen=True, eq=False)
class Draw:
    """How one token is chosen from a row of logits.

    Attributes:
        sampling: the options.
        recent: the tokens before it, for the repetition penalty.
        u: in [0, 1), selects among the tokens that the options leave.
    """

    sampling: Sampling
    recent: Sequence[Token]
    u: float


def penalize(logits: np.ndarray, recent: Sequence[int], penalty: float) -> np.ndarray:
    """(V,) logits with the repetition penalty of Keskar et al. (CTRL, 2019) on the ids in `recent`."""
    if penalty == 1 or not recent:
        return logits
    logits = logits.copy()
    ids = np.unique(np.asarray(recent, dtype=np.int64))
    hit = logits[ids]
    logits[ids] = np.where(hit > 0, hit / penalty, hit * penalty)
    return logits


def probabilities(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """(V,) float64 probabilities that the draw selects from; what was filtered out has 0. Temperature must be > 0."""
    # The maximum is taken off before dividing: a tiny temperature then sends the others to 0, not to NaN.
    with np.errstate(over="ignore", under="ignore"):
        p = np.exp((logits.astype(np.float64) - logits.max()) / sampling.temperature)
    order = _likeliest_first(p, sampling.top_k)
    likely = p[order]
    likely /= likely.sum()
    if sampling.top_p < 1:
        # The token that reaches p stays: it is the first whose predecessors do not reach it.
        reached = np.cumsum(likely) - likely
        likely = likely[: max(1, int(np.count_nonzero(reached < sampling.top_p)))]
    n_kept = max(1, int(np.count_nonzero(likely >= sampling.min_p * likely[0])))
    kept = np.zeros_like(p)
    kept[order[:n_kept]] = p[order[:n_kept]]
    return np.asarray(kept / kept.sum())


def _likeliest_first(p: np.ndarray, top_k: int | None) -> np.ndarray:
    """The ids of the top_k likeliest tokens, or of all; of equal ones the lower id comes first."""
    if top_k is None or top_k >= len(p):
        return np.argsort(-p, kind="stable")
    # Sorting a vocabulary costs milliseconds; finding who may be among the first k, ties included, does not.
    least = np.partition(p, len(p) - top_k)[len(p) - top_k]
    candidates = np.flatnonzero(p >= least)
    return candidates[np.argsort(-p[candidates], kind="stable")][:top_k]


def draw(p: np.ndarray, u: float) -> int:
    """The first id at which the running sum of `p` exceeds u."""
    total = np.cumsum(p)
    found = int(np.searchsorted(total, u * total[-1], side="right"))
    # A draw within rounding of 1 can land past the end; the last possible token is the one it meant.
    return min(found, int(np.flatnonzero(p)[-1]))
