"""Sampling of the next token: the options, their limits, and the definition that every backend implements.

The order is that of Hugging Face transformers and vLLM: logit bias, repetition penalty, frequency penalty, presence
penalty, temperature, top-k, top-p, min-p (vLLM: min-p before top-k), then one draw. So a bias shifts a logit before any
option scales it. The caller passes the random number u in [0, 1) for the draw, so that one seed gives the same text on
every backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from mlx_engine.backends.parameters import Token
from mlx_engine.errors import OptionError, is_number, is_whole, require

# Below this temperature only logits that differ in their last float32 digit could both be chosen: sampling is greedy.
COLDEST = 1e-7

# The bounds of the OpenAI API. A bias of -100 in effect bans a token, a bias of 100 in effect forces it.
MOST_PENALTY, MOST_BIAS = 2, 100

# The normal positive float32 numbers, as Python's: logits and their penalties are float32.
SMALLEST, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)

# Groups of values in which `largest` looks for candidates.
COLUMNS = 1024


@dataclass(frozen=True)
class Sampling:
    """Sampling options; the defaults choose the most likely token.

    Attributes:
        temperature: divisor of the logits; below 1e-7 the choice is greedy.
        top_k: keep the k most likely tokens; of equally likely tokens, the lower ids. None keeps all.
        top_p: keep the most likely tokens until their probability reaches p; 1 keeps all, 0 the most likely one.
        min_p: keep tokens at least min_p times as likely as the most likely one; 0 keeps all.
        repetition_penalty: divisor of positive logits of earlier tokens, and factor of negative ones; 1 is off.
        presence_penalty: subtracted from the logit of every token that has been generated; -2 to 2, 0 is off.
        frequency_penalty: subtracted from a token's logit once for each time it has been generated; -2 to 2, 0 is off.
        logit_bias: pairs (token id, number from -100 to 100) that are added to the logits; a mapping is accepted too,
            and stored as pairs by id.
        seed: seed of the random numbers; None takes a new one for each run.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        """Check the options before any model is loaded.

        Raises:
            OptionError: a value outside its range; NaN and infinity are outside all of them.
        """
        t, k, p, m, r = self.temperature, self.top_k, self.top_p, self.min_p, self.repetition_penalty
        self._require("temperature", is_number(t) and t >= 0, "a finite number >= 0 (0 is greedy)")
        self._require("top_k", k is None or (is_whole(k) and k >= 1), "a whole number >= 1, or none at all")
        self._require("top_p", is_number(p) and 0 <= p <= 1, "a number in [0, 1]")
        self._require("min_p", is_number(m) and 0 <= m <= 1, "a number in [0, 1]")
        self._require("repetition_penalty", is_number(r) and r > 0, "a finite number > 0")
        for option in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, option)
            self._require(option, is_number(value) and abs(value) <= MOST_PENALTY, "a number from -2 to 2")
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        seed = self.seed
        self._require("seed", seed is None or (is_whole(seed) and seed >= 0), "a whole number >= 0, or none at all")

    def _require(self, option: str, holds: bool, expected: str) -> None:
        require(holds, option=option, expected=expected, found=getattr(self, option))

    def check_vocabulary(self, n_tokens: int) -> None:
        """Check that a vocabulary of `n_tokens` has the ids of the logit bias.

        Raises:
            OptionError: an id is too large.
        """
        for token_id, _ in self.logit_bias:
            expected = f"token ids from 0 to {n_tokens - 1}"
            require(token_id < n_tokens, option="logit_bias", expected=expected, found=token_id)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, after bias and penalties."""
        return self.temperature < COLDEST

    @property
    def has_penalties(self) -> bool:
        """Whether the logits change with the tokens that have been generated, beyond the repetition penalty."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def is_argmax(self) -> bool:
        """Whether the choice is the largest logit: greedy, without a bias and penalties."""
        return self.is_greedy and self.repetition_penalty == 1 and not self.has_penalties and not self.logit_bias


def _checked_bias(given: object) -> tuple[tuple[int, float], ...]:
    """Return a mapping or pairs as pairs, sorted by id.

    Raises:
        OptionError: there is something else, an id is there twice, or a value is outside its range.
    """
    pairs = tuple(given.items()) if isinstance(given, Mapping) else given
    expected = "a mapping of token ids to numbers, or pairs of both"
    if not isinstance(pairs, list | tuple) or any(not isinstance(p, list | tuple) or len(p) != 2 for p in pairs):
        raise OptionError(option="logit_bias", expected=expected, found=given)
    checked: dict[int, float] = {}
    for token_id, bias in pairs:
        sound = is_whole(token_id) and token_id >= 0
        require(sound, option="logit_bias", expected="token ids >= 0", found=token_id)
        expected = f"a number from -{MOST_BIAS} to {MOST_BIAS} for token {token_id}"
        require(is_number(bias) and abs(bias) <= MOST_BIAS, option="logit_bias", expected=expected, found=bias)
        require(token_id not in checked, option="logit_bias", expected="each token id once", found=token_id)
        checked[int(token_id)] = float(bias)
    return tuple(sorted(checked.items()))


@dataclass(frozen=True, eq=False)
class Draw:
    """The inputs for choosing one token from a row of logits.

    Attributes:
        sampling: the sampling options.
        recent: all tokens before it, for the penalties: those of the prompt, then the generated ones.
        u: random number in [0, 1) that selects among the tokens that the options keep.
        n_prompt: number of tokens of the prompt, which the frequency and presence penalties do not count.
    """

    sampling: Sampling
    recent: Sequence[Token]
    u: float
    n_prompt: int = 0


def adjust(logits: np.ndarray, draw: Draw) -> np.ndarray:
    """Return (V,) logits after the bias and all penalties; `logits` itself, unchanged, if none applies.

    The ids in `draw` must be ints.
    """
    sampling, recent = draw.sampling, cast(Sequence[int], draw.recent)
    logits = add_bias(logits, sampling.logit_bias)
    logits = penalize(logits, recent, sampling.repetition_penalty)
    if sampling.has_penalties:
        generated = recent[draw.n_prompt :]
        logits = penalize_generated(logits, generated, sampling.frequency_penalty, sampling.presence_penalty)
    return logits


def add_bias(logits: np.ndarray, bias: Sequence[tuple[int, float]]) -> np.ndarray:
    """Return (V,) logits with a number added to the logits of some ids."""
    if not bias:
        return logits
    ids, values = zip(*bias, strict=True)
    logits = logits.copy()
    logits[list(ids)] += np.array(values, dtype=logits.dtype)
    return logits


def penalize(logits: np.ndarray, recent: Sequence[int], penalty: float) -> np.ndarray:
    """Return (V,) logits with the repetition penalty of Keskar et al. (CTRL, 2019) on the ids in `recent`."""
    if penalty == 1 or not recent:
        return logits
    logits = logits.copy()
    ids = np.unique(np.asarray(recent, dtype=np.int64))
    hit, penalty = logits[ids], min(max(penalty, SMALLEST), LARGEST)
    with np.errstate(over="ignore"):
        penalized = np.where(hit > 0, hit / penalty, hit * penalty)
    # Two infinite logits would make all probabilities NaN.
    logits[ids] = np.clip(penalized, -LARGEST, LARGEST)
    return logits


def penalize_generated(logits: np.ndarray, generated: Sequence[int], frequency: float, presence: float) -> np.ndarray:
    """Return (V,) logits with the frequency and presence penalties of the OpenAI API on the generated ids."""
    if not generated:
        return logits
    ids, counts = np.unique(np.asarray(generated, dtype=np.int64), return_counts=True)
    logits = logits.copy()
    # Two float32 subtractions, in vLLM's order.
    logits[ids] -= logits.dtype.type(frequency) * counts.astype(logits.dtype)
    logits[ids] -= logits.dtype.type(presence)
    return logits


def probabilities(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Return (V,) float64 probabilities, 0 for tokens that are filtered out. The temperature must be > 0."""
    # Subtract the maximum before dividing: a tiny temperature then gives 0 for the other tokens, not NaN.
    with np.errstate(over="ignore", under="ignore"):
        p = np.exp((logits.astype(np.float64) - logits.max()) / sampling.temperature)
    order = largest(p, len(p) if sampling.top_k is None else sampling.top_k)
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


def largest(values: np.ndarray, n: int) -> np.ndarray:
    """Return the indices of the n >= 1 largest of (V,) values, or of all, largest first; of equal ones the lowest."""
    if n >= len(values):
        return np.argsort(-values, kind="stable")
    # Sorting a vocabulary takes milliseconds. n values or more are at least `least`; only these are sorted.
    maxima = _maxima(values)
    maxima = maxima if n <= len(maxima) else values
    least = np.partition(maxima, len(maxima) - n)[len(maxima) - n]
    candidates = np.flatnonzero(values >= least)
    return candidates[np.argsort(-values[candidates], kind="stable")][:n]


def _maxima(values: np.ndarray) -> np.ndarray:
    """Return the largest value of each of COLUMNS groups, and the values that fill no group: a fast first selection."""
    whole = len(values) // COLUMNS * COLUMNS
    if not whole:
        return values
    return np.concatenate((values[:whole].reshape(-1, COLUMNS).max(axis=0), values[whole:]))


def draw(p: np.ndarray, u: float) -> int:
    """Return the first id at which the cumulative sum of `p` exceeds u times the total."""
    total = np.cumsum(p)
    found = int(np.searchsorted(total, u * total[-1], side="right"))
    # For u close to 1, rounding may leave no token above u; then the last possible token is chosen.
    return min(found, int(np.flatnonzero(p)[-1]))
