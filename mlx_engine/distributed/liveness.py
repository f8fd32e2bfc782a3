"""The end of a run when a rank dies or hangs: every rank sends signs of life to rank 0, and rank 0 to every rank.

MLX's calls wait in C++ and cannot be interrupted, so a thread ends the process. Signs of life travel on TCP connections
of their own, from each rank to rank 0: the rank that waits for a dead or stopped one is not the one to be named. Rank 0
tells the others who is gone and prints one line. If rank 0 itself is gone, rank 1 prints it.

The ranks join on these connections, before MLX connects them: MLX waits for a rank that is missing without end, and
keeps the GIL meanwhile. While MLX connects them, a process of its own watches each rank (`watcher.py`).
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from mlx_engine.distributed.stalls import Report, Stalls
from mlx_engine.distributed.watcher import line_about, names
from mlx_engine.errors import DistributedError

# Seconds between signs of life, and without one after which a rank is given up: all end within 10 s.
INTERVAL, LIMIT = 0.5, 8.0
# Seconds after the last rank that joined, or after this one, in which another must join; and between two attempts. A
# rank beside processes that use all cores takes 20 s and more until it has imported what it needs.
JOINING, RETRY = 60.0, 0.05
# Seconds that rank 0 waits for the others when the run has ended.
PATIENCE = 5.0
# Seconds that a rank with an error lives on: most errors are those of all ranks, and rank 0 reports them.
COURTESY = 1.0
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
        joining: seconds after the last rank that joined, in which another must join.

    Attributes:
        report: returns what this rank has exchanged with the others.
    """

    report: Callable[[], Report] = staticmethod(Report)

    def __init__(
        self, rank: int, hosts: Sequence[str], *, end: End = end_process, interval: float = INTERVAL,
        limit: float = LIMIT, joining: float = JOINING,
    ) -> None:  # fmt: skip
        self.rank, self._hosts, self._end, self._interval, self._limit = rank, hosts, end, interval, limit
        self._joining, self._stalls = joining, Stalls(len(hosts), interval, limit)
        self._peers: dict[int, socket.socket] = {}
        self._left: set[int] = set()
        self._lock, self._is_ending = threading.Lock(), False
        self._is_closing, self._woken, self._joined = False, threading.Event(), threading.Event()
        self._paused, self._resumed = threading.Semaphore(0), threading.Event()

    def join(self, port: int) -> None:
        """Wait until all ranks have called this, connected with rank 0 at this port of its host. The port is then free.

        A rank that does not come in time ends the run, and one line names it.

        Raises:
            DistributedError: rank 0 cannot listen there; or the run has ended, and `end` has returned.
        """
        threading.Thread(target=self._beat, name="signs of life", daemon=True).start()
        missing = [0] * (not self._connect(port)) if self.rank else self._admit(port)
        if missing:
            self._give_up(missing, f"expected to join within {self._joining:g} s of the others, found missing")
        if self.rank == 0:
            self._tell_all("go\n")
        if self.rank:
            self._wait_for(self._joined.wait)
        self._check_goes_on()

    @contextmanager
    def paused(self) -> Iterator[Mapping[int, socket.socket]]:
        """Yield the connections to the other ranks, which only the caller reads in the context. Every rank calls this.

        Signs of life are sent in the context, and their lack is no error. After an exception in the context the
        connections stay unread: the run ends, and its cause has been printed.

        Raises:
            DistributedError: the run has ended, and `end` has returned.
        """
        self._tell_all("pause\n")
        for _ in self._peers:
            self._wait_for(lambda seconds: self._paused.acquire(timeout=seconds))
        self._check_goes_on()
        yield self._peers
        self._resumed.set()

    def _wait_for(self, happens: Callable[[float], bool]) -> None:
        """Wait until something happens, or the run ends."""
        while not (happens(self._interval) or self._is_ending):
            pass

    def _check_goes_on(self) -> None:
        if self._is_ending:
            raise DistributedError(f"rank {self.rank}", "ranks that join", "that the run has ended", "see rank 0")

    def _admit(self, port: int) -> list[int]:
        """Wait for the other ranks, on rank 0; return those that have not come in time."""
        missing, host = set(range(1, len(self._hosts))), self._hosts[0]
        try:
            listening = socket.create_server((host, port), backlog=len(self._hosts))
        except OSError as error:
            hint = "choose another with --starting-port of mlx.launch"
            raise DistributedError("rank 0", f"a free port {port} at {host}", str(error), hint) from error
        with listening as listener:
            deadline = time.monotonic() + self._joining
            while missing and not self._is_ending and time.monotonic() < deadline:
                listener.settimeout(max(RETRY, deadline - time.monotonic()))
                try:
                    peer, _ = listener.accept()
                except TimeoutError:
                    continue
                rank = _rank(peer, self._limit)
                if rank not in missing:  # not one of the ranks
                    peer.close()
                    continue
                missing.remove(rank)
                self._listen(rank, peer)
                deadline = time.monotonic() + self._joining
        return sorted(missing)

    def _connect(self, port: int) -> bool:
        """Connect with rank 0; return whether it has been there in time."""
        deadline = time.monotonic() + self._joining
        while (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(OSError):
                peer = socket.create_connection((self._hosts[0], port), timeout=left)
                if peer.getsockname() == peer.getpeername():  # on one machine a socket may meet itself
                    peer.close()
                    continue
                peer.sendall(f"{self.rank}\n".encode())
                self._listen(0, peer)
                return True
            time.sleep(RETRY)
        return False

    def _listen(self, rank: int, peer: socket.socket) -> None:
        """Listen to a rank from now on, and send it signs of life."""
        peer.settimeout(self._limit)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._peers[rank] = peer
        threading.Thread(target=self._listen_to, args=(rank, peer), name=f"rank {rank}", daemon=True).start()

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

    def leave(self, code: int, error: str = "") -> None:
        """End this rank's part, on other ranks than 0.

        After an error let rank 0 end first if it has the same one; if not, have it print this one and end all ranks.
        """
        if code:
            time.sleep(COURTESY)
            self._tell_all(f"failed {' '.join(error.split())}\n")
            time.sleep(COURTESY)
        self._is_ending = True

    def _beat(self) -> None:
        while not self._is_ending:
            report = self.report()
            self._tell_all(f". {' '.join(map(str, report))}\n")
            if self.rank == 0:
                self._note(0, report)
            time.sleep(self._interval)

    def _note(self, rank: int, report: Report) -> None:
        """Note a rank's report, on rank 0; end the run if a message to this rank was lost."""
        if not self._stalls.is_stalled(rank, report):
            return
        if report.awaited_gather:
            waiting = self._stalls.waiting(report.awaited_gather)
            # A rank whose gather has ended may not have sent all blocks: it lacks memory, or its link is lost.
            others = [of for of in range(len(self._hosts)) if of not in waiting]
            found = f"found one that all ranks have begun and that does not end on {names(self._hosts, waiting)}"
            self._give_up(others or waiting, f"expected each gather to end, {found}")
        else:
            before = (rank - 1) % len(self._hosts)
            found = f"expected each message to arrive, found that one to rank {rank} ({self._hosts[rank]}) does not"
            self._give_up([before], found)

    def _tell_all(self, text: str) -> None:
        for rank, peer in list(self._peers.items()):  # others may join meanwhile
            if rank not in self._left:
                with self._lock, contextlib.suppress(OSError):  # the thread that listens finds out
                    peer.sendall(text.encode())

    def _listen_to(self, rank: int, peer: socket.socket) -> None:
        """Read a rank's lines until it ends, or is given up."""
        is_told = False
        try:
            while True:
                word, _, rest = _line(peer, self._limit).partition(" ")
                if word == "." and self.rank == 0:
                    self._note(rank, Report(*map(int, rest.split())))
                elif word == "bye":
                    is_told, code = True, int(rest)
                    if code:
                        return self._stop(code, None)
                    self._woken.set()
                elif word == "wake":
                    self._woken.set()
                elif word == "go":
                    self._joined.set()
                elif word == "pause":
                    self._paused.release()
                    self._resumed.wait()
                elif word == "failed":
                    return self._give_up([rank], rest)
                elif word == "gone":
                    return self._stop(FAILED, None)
        except TimeoutError:
            found = f"has given no sign of life for {self._limit:g} s"
        except (OSError, EOFError):
            found = "has ended"
        self._left.add(rank)
        if is_told or self._is_closing or self._is_ending:
            return None
        return self._give_up([rank], f"expected to run until the end, found that it {found}")

    def _give_up(self, ranks: Sequence[int], found: str) -> None:
        """End the run because of ranks that have died, hang or are missing."""
        self._tell_all(f"gone {ranks}\n")
        line = line_about(self._hosts, ranks, found)
        self._stop(FAILED, line if self.rank == 0 or (0 in ranks and self.rank == 1) else None)

    def _stop(self, code: int, line: str | None) -> None:
        with self._lock:
            if self._is_ending:
                return
            self._is_ending = True
        self._end(code, line)


def _rank(peer: socket.socket, limit: float) -> int | None:
    """Return the rank that a peer gives as its own; None if it gives none."""
    try:
        return int(_line(peer, limit))
    except (OSError, EOFError, ValueError):
        return None


def _line(peer: socket.socket, limit: float) -> str:
    """Return the next line of a peer.

    Raises:
        TimeoutError: the whole line takes longer than the limit.
        EOFError: the connection was closed.
    """
    found, deadline = bytearray(), time.monotonic() + limit
    arrival = select.poll()  # the timeout of the socket is also that of the thread that sends
    arrival.register(peer, select.POLLIN)
    while not found.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not arrival.poll(left * 1e3):
            raise TimeoutError
        byte = peer.recv(1)
        if not byte:
            raise EOFError
        found += byte
    return found.decode().strip()
