"""Compute log-probabilities of tokens from the model's logits, before any sampling option; compute their digest.

Equal logits give bit-identical log-probabilities on every processor. For this, the sum of exponentials is computed in
float64 in one fixed order (`kernels/cpu/products/sum_exp.py`). The logarithm is computed by `natural_log` in this
module, because the C libraries of two systems may round `log` differently.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mlx_engine.backends.base import Backend
from mlx_engine.backends.sampling import largest

_LN2, _SQRT_HALF = 0.6931471805599453, 0.7071067811865476
# The number of terms in the series of `natural_log`; the first omitted term is less than 2**-53 times the sum.
_TERMS = 12


@dataclass(frozen=True)
class TokenLogprobs:
    """The log-probability of a token, and of the most likely tokens at its position.

    Attributes:
        logprob: the natural logarithm of the token's probability, a float32 value.
        top: the most likely tokens as pairs (token id, log-probability), most likely first. Equally likely tokens
            are in ascending order of ids.
        rank: 1 plus the number of tokens that are more likely; None if the rank was not asked for.
        allowed: the sum of the probabilities of the tokens that the constraint allowed; None without a constraint.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None
    allowed: float | None = None


def token_logprobs(
    backend: Backend,
    logits: np.ndarray,
    token_id: int,
    n_top: int = 0,
    mask: NDArray[np.bool_] | None = None,
    *,
    ranked: bool = False,
) -> TokenLogprobs:
    """Return the log-probability of `token_id` and the `n_top` most likely tokens, from logits (V,) on the host.

    With `ranked`, also return the rank of the token. With the mask (V,) of a constraint, also return the sum of the
    probabilities of the allowed tokens.
    """
    top = float(logits.max())
    log_sum = natural_log(backend.sum_exp(logits, top))

    def logprob(i: int) -> float:
        return float(np.float32(float(logits[i]) - top - log_sum))

    alternatives = largest(logits, n_top).tolist() if n_top else []
    rank = 1 + int(np.count_nonzero(logits > logits[token_id])) if ranked else None
    allowed = None if mask is None else _allowed(backend, logits, mask, top, log_sum)
    return TokenLogprobs(token_id, logprob(token_id), tuple((i, logprob(i)) for i in alternatives), rank, allowed)


def _allowed(backend: Backend, logits: np.ndarray, mask: NDArray[np.bool_], top: float, log_sum: float) -> float:
    """Return the sum of the probabilities of the tokens that a mask (V,) allows.

    `top` is the largest logit, `log_sum` the logarithm of the sum of exp(logits - top). If the mask allows most tokens,
    compute 1 minus the sum for the other tokens, which are fewer: the absolute error is then at most 1e-12. Otherwise,
    the only errors are rounding errors of float64.
    """
    is_most = 2 * int(np.count_nonzero(mask)) > len(mask)
    some = logits[np.flatnonzero(~mask if is_most else mask)]
    if not len(some):
        return float(is_most)
    largest_some = float(some.max())
    p = math.exp(largest_some - top + natural_log(backend.sum_exp(some, largest_some)) - log_sum)
    return min(1.0, max(0.0, 1 - p if is_most else p))


def natural_log(x: float) -> float:
    """Return the natural logarithm of x > 0.

    Only additions, multiplications and divisions are used, because IEEE 754 fixes how they are rounded. Write x as
    m * 2**e with sqrt(1/2) <= m < sqrt(2). Then log(x) = e log(2) + log(m), and
    log(m) = 2 (s + s**3 / 3 + s**5 / 5 + ...) with s = (m - 1) / (m + 1).
    """
    m, e = math.frexp(x)
    if m < _SQRT_HALF:
        m, e = 2 * m, e - 1
    s = (m - 1) / (m + 1)
    series = 0.0
    for k in range(_TERMS - 1, -1, -1):
        series = series * (s * s) + 1 / (2 * k + 1)
    return e * _LN2 + 2 * s * series


def digest(token_ids: Sequence[int], logprobs: Sequence[float]) -> str:
    """Return the SHA-256, in hex, of token ids and their log-probabilities.

    The hashed bytes are all ids as little-endian int32, then all log-probabilities as little-endian float32.

    Raises:
        ValueError: the numbers of ids and of log-probabilities differ.
    """
    if len(token_ids) != len(logprobs):
        raise ValueError(f"expected a log-probability for each of {len(token_ids)} tokens, found {len(logprobs)}")
    return hashlib.sha256(np.array(token_ids, "<i4").tobytes() + np.array(logprobs, "<f4").tobytes()).hexdigest()
