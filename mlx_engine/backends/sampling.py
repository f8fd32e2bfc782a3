"""Sampling of the next token in NumPy: the definition of sampling, which other implementations must agree with.

After the user's logits processors (`loop/sampler.py`), the functions in this file apply logit bias, repetition penalty,
frequency penalty, presence penalty, the mask of a constraint, temperature, top-k, top-p and min-p, in this order, and
draw one token. The mask comes after bias and penalties, so that these cannot allow a token that the mask forbids. The
order of top-k, top-p and min-p is that of Hugging Face transformers; vLLM applies min-p before top-k. The caller passes
the random number u in [0, 1) for the draw, so that the same seed gives the same text on every backend.

Ranks (processes that share a model) send logits to each other: slices of the vocabulary with tensor parallelism, whole
rows in a pipeline. If a pass needs only the k largest logits of each row (`Batch.best`), ranks send only these logits
and their columns (`packed`); a pipeline only if they take fewer bytes than the row (`packs`). The receiver sets all
other columns to a smaller value (`unpacked`), so the k largest logits of the row are correct. Equal logits are
ranked by column, lowest first, as in `largest`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from mlx_engine.backends.parameters import Token
from mlx_engine.options import Sampling

# The smallest and the largest positive normal float32 number. Repetition penalties are clipped to this range.
SMALLEST, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)

# A table (256, 8) for `masked`. For each value of a byte, it has 8 numbers, from the lowest bit on: plus infinity for a
# bit that is 1, and minus infinity for a bit that is 0.
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
LIMITS = np.where(_BITS == 1, np.float32(np.inf), np.float32(-np.inf))

# The number of groups into which `largest` divides the values, to find a lower bound of the n largest.
COLUMNS = 1024


@dataclass(frozen=True, eq=False)
class Draw:
    """The inputs for choosing one token from a row of logits.

    Attributes:
        recent: all earlier tokens, for the penalties: the prompt, then the generated tokens.
        u: a random number in [0, 1), which selects one of the tokens that the options keep.
        n_prompt: number of tokens of the prompt, which the frequency and presence penalties do not count.
        mask: (V,) True for each token that the constraint allows; at least one is True. None without a constraint.
    """

    sampling: Sampling
    recent: Sequence[Token]
    u: float
    n_prompt: int = 0
    mask: NDArray[np.bool_] | None = None


def adjust(logits: np.ndarray, draw: Draw) -> np.ndarray:
    """Return (V,) logits after bias, penalties and mask, or `logits` itself if none applies. `logits` is not changed.

    The tokens in `draw.recent` must be ints.
    """
    sampling, recent = draw.sampling, cast(Sequence[int], draw.recent)
    logits = add_bias(logits, sampling.logit_bias)
    logits = penalize(logits, recent, sampling.repetition_penalty)
    if sampling.has_penalties:
        generated = recent[draw.n_prompt :]
        logits = penalize_generated(logits, generated, sampling.frequency_penalty, sampling.presence_penalty)
    return logits if draw.mask is None else masked(logits, draw.mask)


def masked(logits: np.ndarray, mask: NDArray[np.bool_]) -> np.ndarray:
    """Return (V,) logits, with minus infinity for each token that the mask (V,) does not allow."""
    # This takes a third of the time of np.where: 40 us for 152,000 tokens.
    limits = LIMITS.take(np.packbits(mask, bitorder="little"), axis=0).reshape(-1)[: len(mask)]
    return np.asarray(np.minimum(logits, limits))


def add_bias(logits: np.ndarray, bias: Sequence[tuple[int, float]]) -> np.ndarray:
    """Return (V,) logits after adding each bias to the logit of its id; `bias` has pairs (id, number)."""
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
    # An infinite logit would make probabilities NaN.
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
    # Subtract the maximum before dividing: with a tiny temperature, p is then 0 for smaller logits, not NaN.
    with np.errstate(over="ignore", under="ignore"):
        p = np.exp((logits.astype(np.float64) - logits.max()) / sampling.temperature)
    order = largest(p, len(p) if sampling.top_k is None else sampling.top_k)
    likely = p[order]
    likely /= likely.sum()
    if sampling.top_p < 1:
        # The token with which the sum reaches top_p is kept, too. So compare, for each token, the sum before the token.
        reached = np.cumsum(likely) - likely
        likely = likely[: max(1, int(np.count_nonzero(reached < sampling.top_p)))]
    n_kept = max(1, int(np.count_nonzero(likely >= sampling.min_p * likely[0])))
    kept = np.zeros_like(p)
    kept[order[:n_kept]] = p[order[:n_kept]]
    return np.asarray(kept / kept.sum())


def largest(values: np.ndarray, n: int) -> np.ndarray:
    """Return the indices of the n >= 1 largest of (V,) values, largest first, equal values in order of index."""
    if n >= len(values):
        return np.argsort(-values, kind="stable")
    # Sorting a whole vocabulary takes milliseconds. So sort only the values that are at least `least`, the n-th largest
    # of the groups' maxima (of all values, if there are fewer maxima than n). At least n values are that large, so the
    # n largest values are among them.
    maxima = _maxima(values)
    maxima = maxima if n <= len(maxima) else values
    least = np.partition(maxima, len(maxima) - n)[len(maxima) - n]
    candidates = np.flatnonzero(values >= least)
    return candidates[np.argsort(-values[candidates], kind="stable")][:n]


def _maxima(values: np.ndarray) -> np.ndarray:
    """Return the largest value of each of `COLUMNS` groups, and the last V % COLUMNS values, which are in no group."""
    whole = len(values) // COLUMNS * COLUMNS
    if not whole:
        return values
    return np.concatenate((values[:whole].reshape(-1, COLUMNS).max(axis=0), values[whole:]))


def draw(p: np.ndarray, u: float) -> int:
    """Return the first id at which the cumulative sum of `p` exceeds u times the total."""
    total = np.cumsum(p)
    found = int(np.searchsorted(total, u * total[-1], side="right"))
    # If u times the total is rounded to the total, no sum exceeds it: choose the last token that is not filtered out.
    return min(found, int(np.flatnonzero(p)[-1]))


def packs(k: int | None, n: int) -> bool:
    """Return whether k logits and their columns take fewer bytes than all n logits; False if k is None."""
    return k is not None and 2 * k < n


def packed(logits: NDArray[np.float32], k: int) -> NDArray[np.float32]:
    """Return (R, 2, k) for a rank's logits, R rows of N columns: the k largest of each row, then their columns.

    Columns are float32, which is exact below 2**24. If N is less than k, the remaining items are minus infinity. If a
    row has a value that is not finite, the first logit of its result is NaN.
    """
    found = np.full((len(logits), 2, k), -np.inf, dtype=np.float32)
    for row, out in zip(logits, found, strict=True):
        if not np.isfinite(row).all():
            out[0, 0] = np.nan
            continue
        columns = largest(row, min(k, len(row)))
        out[0, : len(columns)], out[1, : len(columns)] = row[columns], columns
    return found


def unpacked(gathered: NDArray[np.float32], n: int) -> NDArray[np.float32]:
    """Return (R, n) logits from the packed logits (size, R, 2, k) of all ranks, where `size` is the number of ranks.

    Each rank has ceil(n / size) columns of the vocabulary, in rank order; the last ranks may have fewer.
    """
    size, n_rows = gathered.shape[:2]
    made = np.empty((n_rows, n), dtype=np.float32)
    for r, row in enumerate(made):
        if np.isnan(gathered[:, r]).any():
            row[:] = np.nan
            continue
        values, columns = gathered[:, r, 0], gathered[:, r, 1]
        is_sent = np.isfinite(values)
        least = float(values[is_sent].min())
        row[:] = max(least - 1 - abs(least), -LARGEST)
        for rank in range(size):
            own_columns = columns[rank, is_sent[rank]].astype(np.int64)
            row[rank * -(-n // size) + own_columns] = values[rank, is_sent[rank]]
    return made
