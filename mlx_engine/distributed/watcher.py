"""A process that watches its rank while MLX connects the ranks, and names a rank that dies or stops meanwhile.

MLX keeps the GIL while it connects, so no Python thread of a rank can detect this. Every rank starts this file as a
script when all have joined (`connecting.py`). The script imports a part of the standard library alone, so it starts in
some milliseconds. It reads and writes lines on links: one to its rank, and the connections for signs of life to the
others, which nobody else reads meanwhile.

A rank says "ready" and "connected"; the watcher of rank 0 answers "all ready" and "all connected" when every rank has
said it. A link that ends belongs to a rank that is dead. One second before the limit of each of the two waits, the
watcher sends its rank a signal: Python's `faulthandler` answers in C, without the GIL. A rank that is stopped does not.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import sys
import time
from collections.abc import Mapping, Sequence

READY, CONNECTED, FAILED, ALIVE, GONE = "ready", "connected", "failed", "alive", "gone"
# Asks a rank whether it lives: any line that is not one of the above is an answer. Windows has no SIGUSR1, and no
# ranks.
QUESTION = getattr(signal, "SIGUSR1", signal.SIGTERM)
# Seconds for the answer, before the limit.
GRACE = 1.0


def names(hosts: Sequence[str], ranks: Sequence[int]) -> str:
    """Return the ranks and their hosts, for messages."""
    return ", ".join(f"rank {rank} ({hosts[rank]})" for rank in ranks)


def line_about(hosts: Sequence[str], ranks: Sequence[int], found: str) -> str:
    """Return the line that names the ranks because of which a run ends."""
    return f"error: {names(hosts, ranks)}: {found}; all ranks end, start them again"


class Watcher:
    """What the watching process of one rank hears from the ranks.

    Args:
        rank: this rank.
        hosts: the host of each rank, for messages.
        links: a file descriptor for each rank that this one hears: itself and rank 0; rank 0 hears all.
        process: the process of this rank.
        limit: seconds in which the ranks must say each word.
        grace: seconds before the limit at which the watcher signals its rank.
    """

    def __init__(
        self, rank: int, hosts: Sequence[str], links: Mapping[int, int], process: int, limit: float,
        grace: float = GRACE,
    ) -> None:  # fmt: skip
        self._rank, self._hosts, self._links, self._process = rank, hosts, links, process
        self._limit, self._grace = limit, grace
        self._parts = {of: bytearray() for of in links}
        self._said: dict[str, set[int]] = {READY: set(), CONNECTED: set()}
        self._alive, self._dead, self._errors = set[int](), set[int](), dict[int, str]()
        self._is_over = self._have_met = False
        self._selector = selectors.DefaultSelector()

    def run(self) -> str | None:
        """Watch until all ranks have connected, or one is found dead or stopped; return the line that names it.

        Return None if there is no such rank, or if another rank prints the line.
        """
        with self._selector:
            for of, link in self._links.items():
                self._selector.register(link, selectors.EVENT_READ, of)
            self._watch()
            if self._have_met and not self._is_over:  # all are ready, and connect now
                self._watch()
        if self._is_over:
            return None
        ranks, found = self._at_fault()
        if self._rank == 0 and ranks:
            self._tell_others(GONE)
        return line_about(self._hosts, ranks, found) if ranks and self._rank < 2 else None

    def _watch(self) -> None:
        """Listen until all ranks have said a word, or a rank is at fault, or the limit has passed."""
        self._have_met = False
        self._alive.clear()
        self._listen(self._limit - self._grace)
        if not self._is_decided():
            self._ask()
            self._listen(self._grace)

    def _is_decided(self) -> bool:
        return bool(self._is_over or self._have_met or self._dead or self._errors)

    def _listen(self, seconds: float) -> None:
        """Read lines for some seconds, or until it is decided how the wait ends."""
        deadline = time.monotonic() + seconds
        while not self._is_decided() and (left := deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                if not self._is_decided():
                    self._read(key.data)

    def _read(self, rank: int) -> None:
        """Read one byte of a link: what follows the last line is for the rank itself."""
        try:
            byte = os.read(self._links[rank], 1)
        except BlockingIOError:
            return
        except OSError:
            byte = b""
        if not byte:
            self._selector.unregister(self._links[rank])
            self._hear_end(rank)
        elif byte != b"\n":
            self._parts[rank] += byte
        else:
            line = self._parts[rank].decode(errors="replace")
            self._parts[rank].clear()
            self._hear(rank, line)

    def _hear(self, rank: int, line: str) -> None:
        """Note a line of a rank. The line of a rank that is not this one comes from its watcher."""
        word, _, rest = line.partition(" ")
        if rank == self._rank:
            if word not in (READY, CONNECTED, FAILED):
                word = line = ALIVE
            self._tell_others(line)
        if word == ALIVE:
            self._alive.add(rank)
        elif word == GONE:
            self._is_over = True
        elif word == "all":
            self._conclude(rest)
        elif word == FAILED and self._rank == 0:
            self._errors[rank] = rest
        elif word in self._said and self._rank == 0:
            self._said[word].add(rank)
            if len(self._said[word]) == len(self._hosts):
                self._conclude(word)
                self._tell_others(f"all {word}")

    def _hear_end(self, rank: int) -> None:
        """Note that the link to a rank has ended."""
        if rank in self._alive:  # after its answer it has waited until the limit: its end is not the cause
            return
        if rank == self._rank:
            self._is_over = True  # the other ranks hear the end of this process
        else:
            self._dead.add(rank)

    def _conclude(self, word: str) -> None:
        """Tell this rank that all ranks have said a word."""
        self._tell(self._rank, f"all {word}")
        self._have_met, self._is_over = True, word == CONNECTED

    def _ask(self) -> None:
        """Ask this rank's process whether it lives."""
        if os.getppid() == self._process:  # otherwise it is dead, and its link ends
            os.kill(self._process, QUESTION)

    def _at_fault(self) -> tuple[list[int], str]:
        """Return the ranks because of which the run ends, and what was found; no ranks if other ranks find them."""
        if self._errors:
            return list(self._errors), next(iter(self._errors.values()))
        if self._dead:
            return sorted(self._dead), "expected to run until the end, found that it has ended"
        if self._rank not in self._alive:
            return [], ""
        if silent := sorted(set(self._links) - self._alive):
            found = f"expected to run until the end, found that it has given no sign of life for {self._limit:g} s"
            return silent, found
        waiting = sorted(set(range(len(self._hosts))) - self._said[CONNECTED]) if self._rank == 0 else []
        return waiting, f"expected to connect within {self._limit:g} s, found a neighbour that cannot be reached"

    def _tell(self, rank: int, line: str) -> None:
        with contextlib.suppress(OSError):  # a rank that is gone is found when its link is read
            os.write(self._links[rank], f"{line}\n".encode())

    def _tell_others(self, line: str) -> None:
        for rank in self._links:
            if rank != self._rank:
                self._tell(rank, line)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    line = Watcher(**{**given, "links": {int(rank): link for rank, link in given["links"].items()}}).run()
    if line is not None:
        os.write(2, f"{line}\n".encode())
    os._exit(0)
