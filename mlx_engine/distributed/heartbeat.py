"""The heartbeat of a run: all ranks end within 10 s when one dies, stops or loses its link, and one line names it.

Every rank sends a beat each half second on a TCP connection to rank 0, and rank 0 to every rank. A rank that sends none
for 8 s is given up, whatever it waits for. MLX's calls wait in C++ and cannot be interrupted, so a thread ends the
process. Rank 0 prints the line and ends the others; if rank 0 itself is gone, rank 1 prints it.

A beat carries counts of the messages that the rank has sent and awaits. They show a link that loses messages while both
of its ranks live.

The ranks join on these connections before MLX connects them, because MLX blocks indefinitely on a missing rank while
holding the GIL. No thread of Python runs meanwhile: a timer in C has the same deadline, and no rank can be named.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from mlx_engine.errors import DistributedError

# Seconds between beats, and without one after which a rank is given up: all end within 10 s.
INTERVAL, LIMIT = 0.5, 8.0
# Seconds after the last rank that joined, or after this one, in which another must join; and between two attempts. A
# rank takes 20 s and more for its imports if other processes use all cores.
JOINING, RETRY = 60.0, 0.05
# Seconds that rank 0 waits for the others when the run has ended.
PATIENCE = 5.0
# Seconds that a rank with an error lives on: most errors are those of all ranks, and rank 0 reports them.
COURTESY = 1.0
# Seconds that the last rank waits before it connects, so that rank 0 listens already: after a refused connection MLX
# waits for 1 s.
HEAD_START = 0.1
# Bytes per second that the slowest link carries. A long message may take its time.
SLOWEST = 1e6
FAILED = 1
START_AGAIN = "all ranks end, start them again"
NOT_CONNECTED = f"the ranks did not connect: one has ended or stopped, or cannot be reached; {START_AGAIN}"

End = Callable[[int, str | None], None]
R = TypeVar("R")


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


class Stalls:
    """Links that lose messages while both of their ranks live, found on rank 0 by what the ranks report.

    A rank that computes for long sends nothing either, so a wait counts only when the message has been sent: by the
    previous rank, or in a gather by all ranks.

    Args:
        size: the number of ranks.
        interval: seconds between two reports of a rank.
        limit: seconds that a short message may take.
    """

    def __init__(self, size: int, interval: float, limit: float) -> None:
        self._size, self._interval, self._limit, self._lock = size, interval, limit, threading.Lock()
        self._reports, self._counts = defaultdict[int, Report](Report), Counter[int]()
        # By rank: the message and the gather that it awaits, and how many reports each rank had given at its first.
        self._waits = dict[int, tuple[tuple[int, int], Counter[int]]]()

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
            if rank not in self._waits or self._waits[rank][0] != awaited:
                self._waits[rank] = awaited, self._counts.copy()
            n = min(self._counts[each] - self._waits[rank][1][each] for each in range(self._size))
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


def end_process(code: int, line: str | None) -> None:
    """Print a line, unless it is None, and end the process at once."""
    if line is not None:
        with contextlib.suppress(OSError):
            os.write(2, f"{line}\n".encode())
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    os._exit(code)


class Heartbeat:
    """The heartbeat of one rank.

    Args:
        rank: this rank.
        hosts: the host of each rank, for messages.
        end: called once with an exit code and a line to print (or None) when the run has to end; by default it ends
            the process.
        interval: seconds between beats.
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
        self._lock, self._is_ending, self._is_closing, self._is_connecting = threading.Lock(), False, False, False
        # Rank 0 counts the ranks that are at a meeting point; the others wait there until it says "go".
        self._arrived, self._woken = threading.Semaphore(0), threading.Event()
        self._notice: subprocess.Popen[bytes] | None = None

    # ---- the beginning ----

    def join(self, port: int) -> None:
        """Wait until all ranks have called this, connected with rank 0 at this port of its host. The port is then free.

        A rank that does not come in time ends the run, and one line names it.

        Raises:
            DistributedError: rank 0 cannot listen there; or the run has ended, and `end` has returned.
        """
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        missing = [0] * (not self._connect(port)) if self.rank else self._admit(port)
        if missing:
            self._give_up(f"{self._names(missing)} did not join within {self._joining:g} s of the others", missing)
        self._meet()

    def connected(self, ring: Callable[[], R]) -> R:
        """Return the ring that connects this rank with its neighbours, once all ranks have connected.

        If this takes longer than the limit, a timer in C ends the process without the GIL, which `ring` may keep. A
        rank that dies is named if the ring of rank 0 is done; otherwise a line says that the ranks did not connect.

        Raises:
            DistributedError: the run has ended, and `end` has returned.
        """
        self._is_connecting = True
        with Path(os.devnull).open("w") as nowhere:
            faulthandler.dump_traceback_later(self._limit + 1, exit=True, file=nowhere)
            try:
                if self.rank == 0:
                    self._notice = _notice_of_end(NOT_CONNECTED)
                if self.rank == len(self._hosts) - 1:
                    time.sleep(HEAD_START)
                made = ring()
                self._drop_notice()  # from now on a thread of this process names a rank
                self._meet()
            except DistributedError as error:
                time.sleep(COURTESY)  # if the ring failed because another rank has died, that rank is named first
                self._stop(FAILED, f"error: {self._names([self.rank])}: {error}; {START_AGAIN}", tells=True)
                raise
            finally:
                faulthandler.cancel_dump_traceback_later()
                self._drop_notice()
        self._is_connecting = False
        return made

    def _drop_notice(self) -> None:
        """Stop the process that prints NOT_CONNECTED when this one ends."""
        notice, self._notice = self._notice, None
        if notice is not None:
            notice.kill()
            notice.communicate()

    def _admit(self, port: int) -> list[int]:
        """Wait for the other ranks, on rank 0; return those that have not come in time."""
        missing, host = set(range(1, len(self._hosts))), self._hosts[0]
        try:
            listening = socket.create_server((host, port), backlog=len(self._hosts))
        except OSError as error:
            hint = "choose another port with --starting-port of mlx.launch"
            message = f"cannot listen at {host}:{port}: {error}"
            raise DistributedError(message, where="rank 0", found=str(error), hint=hint) from error
        with listening as listener:
            deadline = time.monotonic() + self._joining
            while missing and not self._is_ending and time.monotonic() < deadline:
                listener.settimeout(max(RETRY, deadline - time.monotonic()))
                try:
                    peer, _ = listener.accept()
                except TimeoutError:
                    continue
                try:
                    missing.remove(rank := int(_line(peer, self._limit)))
                except (OSError, EOFError, ValueError, KeyError):  # not one of the ranks
                    peer.close()
                    continue
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
        """Listen to a rank from now on, and send it beats."""
        peer.settimeout(self._limit)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._peers[rank] = peer
        threading.Thread(target=self._listen_to, args=(rank, peer), name=f"rank {rank}", daemon=True).start()

    def _meet(self) -> None:
        """Wait until all ranks have called this.

        Raises:
            DistributedError: the run has ended, and `end` has returned.
        """
        if self.rank:
            self._tell_all("here\n")
        for _ in self._peers:
            while not (self._arrived.acquire(timeout=self._interval) or self._is_ending):
                pass
        if self._is_ending:
            raise DistributedError("the run has ended", where=f"rank {self.rank}", hint="see rank 0")
        if self.rank == 0:
            self._tell_all("go\n")

    # ---- the end ----

    def close(self, code: int) -> None:
        """End the run, on rank 0: the other ranks end with this exit code. Wait until they have ended.

        If the code is 0, they end when they have run all passes; else at once.
        """
        self._is_closing = True
        self._tell_all(f"end {code}\n")
        deadline = time.monotonic() + PATIENCE
        while len(self._left) < len(self._peers) and time.monotonic() < deadline:
            time.sleep(0.01)
        self._is_ending = True

    def leave(self, code: int, error: str = "") -> None:
        """End this rank's part, on other ranks than 0.

        After an error let rank 0 end first if it has the same one; if not, have it print this one and end all ranks.
        """
        if code:
            time.sleep(COURTESY)
            self._tell_all(f"failed {' '.join(error.split())}\n")
            time.sleep(COURTESY)
        self._is_ending = True

    def wait(self) -> None:
        """Wait until this process is ended, because the connection to another rank was lost."""
        time.sleep(self._limit + 2 * self._interval)

    # ---- idle ranks ----

    def wake(self) -> None:
        """Wake the other ranks, on rank 0."""
        self._tell_all("wake\n")

    def sleep(self) -> None:
        """Sleep until rank 0 wakes this rank. MLX's ring would use a core while it waits."""
        self._woken.wait()
        self._woken.clear()

    # ---- beats ----

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
            named = [of for of in range(len(self._hosts)) if of not in waiting] or waiting
            found = f"a gather that all ranks have begun does not end on {self._names(waiting)}"
        else:
            named = [(rank - 1) % len(self._hosts)]
            found = f"a message that was sent does not arrive at {self._names([rank])}"
        self._give_up(f"{self._names(named)}: {found}")

    def _tell_all(self, text: str) -> None:
        for rank, peer in list(self._peers.items()):  # others may join meanwhile
            if rank not in self._left:
                with self._lock, contextlib.suppress(OSError):  # the thread that listens finds out
                    peer.sendall(text.encode())

    def _listen_to(self, rank: int, peer: socket.socket) -> None:
        """Read a rank's lines until it ends, or is given up."""
        try:
            while self._hear(rank, _line(peer, self._limit)):
                pass
            return
        except TimeoutError:
            found = f"gave no sign of life for {self._limit:g} s"
        except (OSError, EOFError):
            found = "exited"
        self._left.add(rank)
        if self._is_closing or self._is_ending:
            return
        if self._is_connecting and found != "exited":  # MLX may hold the rank's GIL, because of another rank
            found += " while the ranks connected: it or a rank that it waits for has stopped, or cannot be reached"
        self._give_up(f"{self._names([rank])} {found}", [rank])

    def _hear(self, rank: int, line: str) -> bool:
        """Do what a line of a rank asks for; return whether the run goes on."""
        word, _, rest = line.partition(" ")
        if word == "." and self.rank == 0:
            self._note(rank, Report(*map(int, rest.split())))
        elif word in ("here", "go"):
            self._arrived.release()
        elif word == "wake":
            self._woken.set()
        elif word == "failed":
            self._give_up(f"{self._names([rank])}: {rest}")
            return False
        elif word == "end":
            if self.rank == 0:
                self._tell_all(f"{line}\n")
            self._is_closing = True
            if int(rest):
                self._drop_notice()  # the rank that says this has printed why
                self._stop(int(rest), None)
                return False
            self._woken.set()
        return True

    def _give_up(self, found: str, gone: Sequence[int] = ()) -> None:
        """End the run because of what was found. Rank 0 prints it, or rank 1 if rank 0 is gone."""
        prints = self.rank == 0 or (0 in gone and self.rank == 1)
        self._stop(FAILED, f"error: {found}; {START_AGAIN}" if prints else None, tells=True)

    def _stop(self, code: int, line: str | None, *, tells: bool = False) -> None:
        """End this process, once; with `tells`, have the other ranks end, too."""
        with self._lock:
            if self._is_ending:
                return
            self._is_ending = True
        if tells:
            self._tell_all(f"end {FAILED}\n")
        if line is not None:
            self._drop_notice()
        self._end(code, line)

    def _names(self, ranks: Sequence[int]) -> str:
        return ", ".join(f"rank {rank} ({self._hosts[rank]})" for rank in ranks)


def _notice_of_end(line: str) -> subprocess.Popen[bytes]:
    """Start a shell that prints a line of error when this process has ended, whatever has ended it."""
    return subprocess.Popen(
        ["/bin/sh", "-c", 'read line; echo "error: $1" >&2', "sh", line],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the rank
    )


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
        left = max(0.0, deadline - time.monotonic())  # at 0 read what has arrived: this thread may have been late
        if not arrival.poll(left * 1e3):
            raise TimeoutError
        byte = peer.recv(1)
        if not byte:
            raise EOFError
        found += byte
    return found.decode().strip()
