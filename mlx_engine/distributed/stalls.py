"""Links that lose messages while both of their ranks live, found by what the ranks report with their signs of life.

MLX's ring waits for a message without end. A rank that computes for long sends nothing either, so the time of a wait
alone says nothing: the message must have been sent. In a pipeline the previous rank sends it. In a gather every rank
sends its block when it begins.
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
        awaited: the number of the message that it waits for, from the previous rank; 0 if it waits for none.
        gathers: gathers that it has begun.
        awaited_gather: the number of the gather whose end it waits for; 0 if it waits for none.
        nbytes: bytes of the awaited message or gather.
    """

    sent: int = 0
    awaited: int = 0
    gathers: int = 0
    awaited_gather: int = 0
    nbytes: int = 0


class Wait(NamedTuple):
    """A wait for data that has been sent.

    Attributes:
        awaited: the numbers of the message and of the gather; one of them is 0.
        counts: how many reports each rank had given when the wait was first reported.
    """

    awaited: tuple[int, int]
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

        Reports are counted, not seconds, and the smallest count of all ranks matters: a stopped rank sends none.
        """
        with self._lock:
            self._reports[rank] = report
            self._counts[rank] += 1
            if not self._has_been_sent(rank, report):
                self._waits.pop(rank, None)
                return False
            awaited = report.awaited, report.awaited_gather
            if rank not in self._waits or self._waits[rank].awaited != awaited:
                self._waits[rank] = Wait(awaited, self._counts.copy())
            n = min(self._counts[each] - self._waits[rank].counts[each] for each in range(self._size))
        return n * self._interval > self._limit + report.nbytes / SLOWEST

    def _has_been_sent(self, rank: int, report: Report) -> bool:
        """Return whether what a rank waits for has been sent; False if it waits for nothing."""
        if report.awaited:
            return self._reports[(rank - 1) % self._size].sent >= report.awaited
        number = report.awaited_gather
        return number > 0 and all(self._reports[each].gathers >= number for each in range(self._size))

    def waiting(self, number: int) -> list[int]:
        """Return the ranks that wait for the end of a gather."""
        with self._lock:
            return [rank for rank in range(self._size) if self._reports[rank].awaited_gather == number]
