"""The end of a run when a rank dies or hangs: every rank sends signs of life to rank 0, and rank 0 to every rank.

MLX's calls wait in C++ and cannot be interrupted, so a thread ends the process. Signs of life travel on TCP connections
of their own, from each rank to rank 0: the rank that waits for a dead or stopped one is not the one to be named. Rank 0
tells the others who is gone and prints one line. If rank 0 itself is gone, rank 1 prints it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence

# Seconds between signs of life, and without one after which a rank is given up: all end within 10 s.
INTERVAL, LIMIT = 0.5, 8.0
# Seconds that rank 0 waits for the others when the run has ended.
PATIENCE = 5.0
FAILED = 1

End = Callable[[int, str | None], None]


def end_process(code: int, line: str | None) -> None:
    """Print a line, unless it is None, and end the process at once."""
    if line is not None:
        with contextlib.suppress(OSError):
            os.write(2, f"{line}\n".encode())
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    os._exit(code)


class Liveness:
    """The signs of life of one rank.

    Args:
        rank: this rank.
        hosts: the host of each rank, for messages.
        end: called once with an exit code and a line to print (or None) when the run has to end; by default it ends
            the process.
        interval: seconds between signs of life.
        limit: seconds without one after which a rank is given up.
    """

    def __init__(
        self, rank: int, hosts: Sequence[str], *, end: End = end_process, interval: float = INTERVAL,
        limit: float = LIMIT,
    ) -> None:  # fmt: skip
        self.rank, self._hosts, self._end, self._interval, self._limit = rank, hosts, end, interval, limit
        self._peers: dict[int, socket.socket] = {}
        self._left: set[int] = set()
        self._lock, self._is_ending = threading.Lock(), False
        self._listener: socket.socket | None = None
        self._is_closing, self._woken = False, threading.Event()

    def listen(self) -> int:
        """Listen for the other ranks, on rank 0. Return the port."""
        self._listener = socket.create_server(("", 0), backlog=len(self._hosts))
        return int(self._listener.getsockname()[1])

    def start(self, port: int) -> None:
        """Connect with the other ranks, and begin; `port` is that of rank 0. All ranks call it at the same time.

        Raises:
            OSError: a rank cannot be reached within the limit.
        """
        if self.rank:
            peer = socket.create_connection((self._hosts[0], port), timeout=self._limit)
            peer.sendall(f"{self.rank}\n".encode())
            self._peers[0] = peer
        elif self._listener is not None:
            self._listener.settimeout(self._limit)
            for _ in self._hosts[1:]:
                peer, _ = self._listener.accept()
                self._peers[int(_line(peer, self._limit))] = peer
            self._listener.close()
        for rank, peer in self._peers.items():
            peer.settimeout(self._limit)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._listen_to, args=(rank, peer), name=f"rank {rank}", daemon=True).start()
        threading.Thread(target=self._beat, name="signs of life", daemon=True).start()

    def close(self, code: int) -> None:
        """End the run, on rank 0: the other ranks end with this exit code. Wait until they have ended.

        If the code is 0, they end when they have run all passes; else at once.
        """
        self._is_closing = True
        self._tell_all(f"bye {code}\n")
        deadline = time.monotonic() + PATIENCE
        while len(self._left) < len(self._peers) and time.monotonic() < deadline:
            time.sleep(0.01)
        self._is_ending = True

    def wait(self) -> None:
        """Wait until this process is ended, because the connection to another rank was lost."""
        time.sleep(self._limit + 2 * self._interval)

    def wake(self) -> None:
        """Wake the other ranks, on rank 0."""
        self._tell_all("wake\n")

    def sleep(self) -> None:
        """Sleep until rank 0 wakes this rank. MLX's ring would use a core while it waits."""
        self._woken.wait()
        self._woken.clear()

    def leave(self) -> None:
        """End this rank's part, when the run has ended: its connection may close now."""
        self._is_ending = True

    def _beat(self) -> None:
        while not self._is_ending:
            self._tell_all(".\n")
            time.sleep(self._interval)

    def _tell_all(self, text: str) -> None:
        for rank, peer in self._peers.items():
            if rank not in self._left:
                with self._lock, contextlib.suppress(OSError):  # the thread that listens finds out
                    peer.sendall(text.encode())

    def _listen_to(self, rank: int, peer: socket.socket) -> None:
        """Read a rank's lines until it ends, or is given up."""
        is_told = False
        try:
            while True:
                word, _, rest = _line(peer, self._limit).partition(" ")
                if word == "bye":
                    is_told, code = True, int(rest)
                    if code:
                        return self._stop(code, None)
                    self._woken.set()
                elif word == "wake":
                    self._woken.set()
                elif word == "gone":
                    return self._stop(FAILED, None)
        except TimeoutError:
            found = f"has given no sign of life for {self._limit:.0f} s"
        except (OSError, EOFError):
            found = "has ended"
        self._left.add(rank)
        if is_told or self._is_closing or self._is_ending:
            return None
        return self._give_up(rank, found)

    def _give_up(self, rank: int, found: str) -> None:
        """End the run because of a rank that has died or hangs."""
        self._tell_all(f"gone {rank}\n")
        line = f"error: rank {rank} ({self._hosts[rank]}): expected to run until the end, found that it {found}; "
        line += "all ranks end, start them again"
        self._stop(FAILED, line if self.rank == 0 or (rank == 0 and self.rank == 1) else None)

    def _stop(self, code: int, line: str | None) -> None:
        with self._lock:
            if self._is_ending:
                return
            self._is_ending = True
        self._end(code, line)


def _line(peer: socket.socket, limit: float) -> str:
    """Return the next line of a peer.

    Raises:
        TimeoutError: it takes longer than the limit.
        EOFError: the connection was closed.
    """
    peer.settimeout(limit)
    found = bytearray()
    while not found.endswith(b"\n"):
        byte = peer.recv(1)
        if not byte:
            raise EOFError
        found += byte
    return found.decode().strip()
