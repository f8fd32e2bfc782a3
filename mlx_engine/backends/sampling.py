"""How the next token is chosen: the options, their limits, and the definition that every backend follows.

The order is that of Hugging Face transformers: repetition penalty, temperature, top-k, top-p, min-p, then one draw.
The draw is a number u in [0, 1) that the caller brings, so one seed gives the same text on every backend.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlx_engine.errors import OptionError


@dataclass(frozen=True)
class Sampling:
    """Options of the choice; the defaults choose the most likely token.

    Attributes:
        temperature: 0 is greedy; otherwise logits are divided by it.
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
        self._require("temperature", 0 <= self.temperature < math.inf, "a finite number >= 0 (0 is greedy)")
        self._require("top_k", self.top_k is None or self.top_k >= 1, "a whole number >= 1, or none at all")
        self._require("top_p", 0 < self.top_p <= 1, "a number in (0, 1]")
        self._require("min_p", 0 <= self.min_p <= 1, "a number in [0, 1]")
        self._require("repetition_penalty", 0 < self.repetition_penalty < math.inf, "a finite number > 0")
        self._require("seed", self.seed is None or self.seed >= 0, "a whole number >= 0")

    def _require(self, option: str, holds: bool, expected: str) -> None:
        if not holds:
            raise OptionError(option=option, expected=expected, found=getattr(self, option))

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, after the penalty."""
        return self.temperature == 0


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
    order = np.argsort(-p, kind="stable")
    keep = len(p) if sampling.top_k is None else min(sampling.top_k, len(p))
    likely = p[order[:keep]]
    likely /= likely.sum()
    if sampling.top_p < 1:
        # The token that reaches p stays: it is the first whose predecessors do not reach it.
        reached = np.cumsum(likely) - likely
        keep = max(1, int(np.count_nonzero(reached < sampling.top_p)))
    keep = max(1, int(np.count_nonzero(likely[:keep] >= sampling.min_p * likely[0])))
    p[order[keep:]] = 0
    return np.asarray(p / p.sum())


def draw(p: np.ndarray, u: float) -> int:
    """The first id at which the running sum of `p` exceeds u."""
    total = np.cumsum(p)
    found = int(np.searchsorted(total, u * total[-1], side="right"))
    # A draw within rounding of 1 can land past the end; the last possible token is the one it meant.
    return min(found, int(np.flatnonzero(p)[-1]))
