"""Links that lose messages while both of their ranks live, found by what the ranks report with their signs of life.

MLX's ring waits for a message without end. A rank that computes for long sends nothing either, so the time of a wait
alone says nothing: the rank before must have sent the message.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import NamedTuple

# Bytes per second that the slowest link carries. A long message may take its time.
SLOWEST = 1e6


class Report(NamedTuple):
    """What a rank has exchanged with its neighbours.

    Attributes:
        sent: messages that it has sent to the next rank.
        awaited: the number of the message that it waits for, from the rank before; 0 if it waits for none.
        nbytes: bytes of this message.
    """

    sent: int = 0
    awaited: int = 0
    nbytes: int = 0


class Stalls:
    """The reports of all ranks, on rank 0.

    Args:
        size: the number of ranks.
        interval: seconds between two reports of a rank.
        limit: seconds that a short message may take.
    """

    def __init__(self, size: int, interval: float, limit: float) -> None:
        self._size, self._interval, self._limit = size, interval, limit
        self._sent, self._waits = Counter[int](), dict[int, tuple[int, int]]()
        self._lock = threading.Lock()

    def is_stalled(self, rank: int, report: Report) -> bool:
        """Return whether a message to this rank takes longer than the limit, by its latest report.

        Reports are counted, and not seconds: a rank that is stopped reports nothing.
        """
        with self._lock:
            self._sent[rank] = report.sent
            if not report.awaited or self._sent[(rank - 1) % self._size] < report.awaited:
                self._waits.pop(rank, None)
                return False
            awaited, n = self._waits.get(rank, (0, 0))
            n = n + 1 if awaited == report.awaited else 1
            self._waits[rank] = report.awaited, n
        return (n - 1) * self._interval > self._limit + report.nbytes / SLOWEST
