"""How long the passes that did not fit their budget would have taken."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

# With fewer passes than this nothing is known but what a token of the sequence takes.
ENOUGH = 8


def rest(passes: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """Seconds of the passes that are missing, given those that were made and the lengths of all.

    With a cache every pass has length 1, and passes are alike. Without one a pass has a part that every length takes,
    which is reading the weights, and one for each token: a line through the later half of what was measured, for
    the first few lengths go other ways. Of a handful of passes, the time is taken to be proportional to the length.
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
