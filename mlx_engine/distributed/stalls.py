"""Links that lose messages while both of their ranks live, found by what the ranks report with their signs of life.

MLX's ring waits for a message without end. A rank that computes for long sends nothing either, so the time of a wait
alone says nothing: the message must have been sent. In a pipeline the rank before sends it; in a gather every rank
does, as soon as it begins the gather.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from typing import NamedTuple

# Bytes per second that the slowest link carries. A long message may take its time.
SLOWEST = 1e6


class Report(NamedTuple):
    """What a rank has exchanged with the others.

    Attributes:
        sent: messages that it has sent to the next rank.
        awaited: the number of the message that it waits for, from the rank before; 0 if it waits for none.
        begun: gathers that it has begun.
        gathered: the number of the gather whose end it waits for; 0 if it waits for none.
        nbytes: bytes of what it waits for.
    """

    sent: int = 0
    awaited: int = 0
    begun: int = 0
    gathered: int = 0
    nbytes: int = 0


class Wait(NamedTuple):
    """A rank's wait for what has been sent.

    Attributes:
        of: the numbers of the message and of the gather, one of which is 0.
        counts: how many reports each rank had given when the wait was first reported.
    """

    of: tuple[int, int]
    counts: Counter[int]


class Stalls:
    """The reports of all ranks, on rank 0.

    Args:
        size: the number of ranks.
        interval: seconds between two reports of a rank.
        limit: seconds that a short message may take.
    """

    def __init__(self, size: int, interval: float, limit: float) -> None:
        self._size, self._interval, self._limit = size, interval, limit
        self._reports, self._counts = defaultdict[int, Report](Report), Counter[int]()
        self._waits = dict[int, Wait]()
        self._lock = threading.Lock()

    def is_stalled(self, rank: int, report: Report) -> bool:
        """Return whether what this rank waits for takes longer than the limit, by its latest report.

        Reports are counted, and not seconds, and those of the rank that has reported least: one that is stopped reports
        nothing.
        """
        with self._lock:
            self._reports[rank] = report
            self._counts[rank] += 1
            if not self._has_been_sent(rank, report):
                self._waits.pop(rank, None)
                return False
            of = report.awaited, report.gathered
            if rank not in self._waits or self._waits[rank].of != of:
                self._waits[rank] = Wait(of, self._counts.copy())
            n = min(self._counts[each] - self._waits[rank].counts[each] for each in range(self._size))
        return n * self._interval > self._limit + report.nbytes / SLOWEST

    def _has_been_sent(self, rank: int, report: Report) -> bool:
        """Return whether what a rank waits for has been sent; False if it waits for nothing."""
        if report.awaited:
            return self._reports[(rank - 1) % self._size].sent >= report.awaited
        return report.gathered > 0 and all(self._reports[each].begun >= report.gathered for each in range(self._size))

    def gathering(self, number: int) -> list[int]:
        """Return the ranks that wait for the end of a gather."""
        with self._lock:
            return [rank for rank in range(self._size) if self._reports[rank].gathered == number]
