"""Estimate the duration of passes that did not fit the budget."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

# With fewer passes than this, time is taken to be proportional to the number of tokens.
ENOUGH = 8


def rest(passes: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """Estimate the seconds of the missing passes from the measured ones and the lengths of all.

    With a KV cache every pass has length 1 and takes the same time. Without one, time is a constant (reading the
    weights) plus a part proportional to the length: a line is fitted to the later half of the passes, since short
    lengths use other kernels. With only a few passes, time is taken to be proportional to the length.
    """
    n = len(passes)
    missing = lengths[n:]
    if n < ENOUGH or len(set(lengths[n // 2 : n])) < 2:
        per_length = sum(passes) / sum(lengths[:n])
        return [per_length * length for length in missing]
    slope, start = statistics.linear_regression(lengths[n // 2 : n], passes[n // 2 :])
    if slope < 0:
        slope, start = 0.0, statistics.fmean(passes[n // 2 :])
    return [start + slope * length for length in missing]
