"""How fast answers end, measured over the last of them: when a full queue will have room again."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

# The number of ends that are remembered.
ENDS = 64


class Rates:
    """Measures how many answers end per second."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=ENDS)

    def add_end(self, n: int = 1) -> None:
        """Note that n answers end now."""
        self._ends.extend([self._clock()] * n)

    def seconds_for(self, n: int) -> int:
        """Return the expected whole seconds until n more answers have ended, at least 1.

        The rate is the number of remembered ends divided by the time since the first of them. It is unknown before the
        second; then 1 is returned.
        """
        if len(self._ends) < 2:
            return 1
        seconds = max(self._clock() - self._ends[0], 1e-9)
        return max(1, math.ceil(n * seconds / len(self._ends)))
