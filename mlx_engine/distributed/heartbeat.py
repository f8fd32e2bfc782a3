"""End all ranks of a run if one of them fails. A rank is one of the processes that run a model together.

If a rank dies, stops or loses its link, all ranks end within 10 s, and one line names the failed rank. If a large
message is lost, the time that the message takes at 1 MB/s is added to the 10 s. Every half second, each rank sends a
message (a beat) to rank 0 on a TCP connection, and rank 0 sends a beat to each rank. A rank without a beat for 8 s
counts as dead. The living ranks may be waiting in a C++ call of MLX, which cannot be interrupted, so on each of them a
thread of the heartbeat ends the process. Rank 0 prints the line and ends the other ranks; if rank 0 is dead, rank 1
prints the line.

All ranks first connect to rank 0 (`join`). Only then do they connect to each other through MLX (`connected`), which
would wait for a missing rank without a limit. MLX holds the GIL while it connects, so no Python thread can apply a
deadline. A timer in C ends the process instead, but cannot name the missing rank.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from mlx_engine.errors import DistributedError

# Seconds between two beats of a rank. A rank counts as dead after LIMIT seconds without a beat.
INTERVAL, LIMIT = 0.5, 8.0
# Rank 0 waits JOINING seconds for a rank to join, and waits again after each rank that has joined. This limit is long,
# because imports take 20 s and more if other processes use all cores. A rank tries to connect every RETRY seconds.
JOINING, RETRY = 60.0, 0.05
# Seconds that rank 0 waits for the other ranks to end when the run has ended.
PATIENCE = 5.0
# Seconds that a rank with an error waits before it reports the error. Most errors occur on several ranks, and another
# rank reports them first: rank 0, or the rank that caused the error.
COURTESY = 1.0
# Seconds that the last rank waits before it connects, so that rank 0 is already listening. After a refused connection,
# MLX would wait for 1 s.
HEAD_START = 0.1
# The assumed lowest speed of a link, in bytes per second. It determines how long a large message may take.
SLOWEST = 1e6
# The first message of a rank. It has a fixed length, so that reading it reads no byte of the next message.
HELLO = "rank {:<8}\n"
FAILED = 1
START_AGAIN = "all ranks end, start them again"
NOT_CONNECTED = f"the ranks did not connect: one has ended or stopped, or cannot be reached; {START_AGAIN}"

R = TypeVar("R")


class Report(NamedTuple):
    """Counts of the messages and gathers of a rank. In a gather, each rank receives one array from every rank."""

    sent: int = 0  # messages to the next rank
    awaited: int = 0  # number of the message from the previous rank that this rank now waits for; 0 for none
    gathers: int = 0  # gathers that have begun
    awaited_gather: int = 0  # number of the gather whose end this rank now waits for; 0 for none
    nbytes: int = 0  # bytes of the awaited message or gather


class Beat(NamedTuple):
    """A message from a rank to rank 0, or from rank 0 to a rank, sent as a line of JSON."""

    met: int = 0  # number of barriers that the rank (in rank 0's beats: that every rank) has reached
    woken: int = 0  # how often rank 0 has woken the other ranks
    code: int | None = None  # the exit code with which all ranks end
    error: str = ""  # an error of the rank, which rank 0 prints
    report: Sequence[int] = Report()


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
        hosts: the host of each rank. Ranks connect to the host of rank 0; the other hosts are only printed in errors.

    Attributes:
        report: returns this rank's counts of messages and gathers.
        end: called once, when the run has to end, with an exit code and the line to print, or None for no line. By
            default, `end` ends the process; tests replace it by a function that returns.
        interval, limit, joining: `INTERVAL`, `LIMIT` and `JOINING`.
    """

    report: Callable[[], Report] = staticmethod(Report)
    end: Callable[[int, str | None], None] = staticmethod(end_process)
    interval, limit, joining = INTERVAL, LIMIT, JOINING

    def __init__(self, rank: int, hosts: Sequence[str]) -> None:
        self.rank, self._hosts = rank, hosts
        self._peers: dict[int, socket.socket] = {}
        self._beat, self._heard = Beat(), defaultdict[int, Beat](Beat)
        # For each rank, the number of its beats since the last change of any rank's report.
        self._unchanged = Counter[int]()
        self._n_woken, self._is_connecting = 0, False
        self._is_closing, self._is_ending, self._has_ended = False, False, False
        self._sending, self._news = threading.Lock(), threading.Condition()
        self._notice: subprocess.Popen[bytes] | None = None

    # ---- the beginning ----

    def join(self, port: int) -> None:
        """Connect to rank 0, which listens at `port`, and wait until all ranks have joined. Then close the port.

        If a rank does not join in time, the run ends and one line names the rank.

        Raises:
            DistributedError: rank 0 cannot listen at the port; or the run has ended, and `end` has returned (in tests).
        """
        threading.Thread(target=self._send_beats, name="heartbeat", daemon=True).start()
        missing = [0] * (not self._connect(port)) if self.rank else self._admit(port)
        if missing:
            self._give_up(f"{self._names(missing)} did not join within {self.joining:g} s of the others", missing)
        self._meet()

    def connected(self, ring: Callable[[], R]) -> R:
        """Connect this rank with its neighbours by `ring`; return the result of `ring` once all ranks have connected.

        If this takes longer than `limit` + 1 s, a timer in C ends the process. The timer does not need the GIL, which
        `ring` may hold. If a rank dies after rank 0 has connected, a line names the dead rank. If a rank dies earlier,
        the line only says that the ranks did not connect.

        Raises:
            DistributedError: `ring` cannot connect; or the run has ended, and `end` has returned (in tests).
        """
        self._is_connecting = True
        with Path(os.devnull).open("w") as nowhere:
            faulthandler.dump_traceback_later(self.limit + 1, exit=True, file=nowhere)
            try:
                if self.rank == 0:
                    # A shell that prints NOT_CONNECTED if this process ends, because its input then closes before it
                    # has read a line.
                    command = ["/bin/sh", "-c", 'read line || echo "error: $1" >&2', "sh", NOT_CONNECTED]
                    with self._sending:
                        if not self._is_ending:  # while the run ends, another thread prints the reason
                            self._notice = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
                if self.rank == len(self._hosts) - 1:
                    time.sleep(HEAD_START)
                made = ring()
                self._drop_notice()
                self._meet()
            except BaseException as error:  # also at SIGTERM, which mlx.launch sends to all ranks if one has died
                time.sleep(COURTESY)  # if the ring failed because another rank died, that rank gets named first
                if isinstance(error, DistributedError):
                    self._stop(FAILED, f"error: {self._names([self.rank])}: {error}; {START_AGAIN}")
                raise
            finally:
                faulthandler.cancel_dump_traceback_later()
                self._drop_notice()
        self._is_connecting = False
        return made

    def _drop_notice(self) -> None:
        """End the shell that `connected` has started, so that it prints nothing."""
        with self._sending:
            if self._notice is not None:
                self._notice.communicate(b"\n")
            self._notice = None

    def _admit(self, port: int) -> list[int]:
        """On rank 0, wait until the other ranks have joined. Return the ranks that have not joined in time."""
        missing, host = set(range(1, len(self._hosts))), self._hosts[0]
        try:
            listening = socket.create_server((host, port), backlog=len(self._hosts))
        except OSError as error:
            hint = "choose another port with --starting-port of mlx.launch"
            message = f"cannot listen at {host}:{port}: {error}"
            raise DistributedError(message, where="rank 0", found=str(error), hint=hint) from error
        with listening as listener:
            deadline = time.monotonic() + self.joining
            while missing and not self._is_ending and time.monotonic() < deadline:
                listener.settimeout(max(RETRY, deadline - time.monotonic()))
                with contextlib.suppress(TimeoutError):
                    rank = self._greet(listener.accept()[0], missing)
                    deadline = time.monotonic() + self.joining if rank else deadline
        return sorted(missing)

    def _greet(self, peer: socket.socket, missing: set[int]) -> bool:
        """Read the greeting of a new connection. If a missing rank sent it, listen to this rank and return True."""
        peer.settimeout(self.limit)
        try:
            hello = peer.recv(len(HELLO.format(0))).decode()
            missing.remove(rank := int(hello[4:]))
        except (OSError, ValueError, KeyError):  # another program
            peer.close()
            return False
        self._listen(rank, peer)
        return True

    def _connect(self, port: int) -> bool:
        """Connect to rank 0; return whether this succeeded in time."""
        deadline = time.monotonic() + self.joining
        while (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(OSError):
                peer = socket.create_connection((self._hosts[0], port), timeout=left)
                if peer.getsockname() != peer.getpeername():
                    peer.sendall(HELLO.format(self.rank).encode())
                    self._listen(0, peer)
                    return True
                peer.close()  # it has connected to itself, which TCP allows on one machine
            time.sleep(RETRY)
        return False

    def _listen(self, rank: int, peer: socket.socket) -> None:
        """Start a thread that reads a rank's beats, and send beats to the rank from now on."""
        peer.settimeout(self.limit)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._peers[rank] = peer
        threading.Thread(target=self._listen_to, args=(rank, peer), name=f"rank {rank}", daemon=True).start()

    def _meet(self) -> None:
        """Wait at a barrier until all ranks have called this method.

        Raises:
            DistributedError: the run has ended, and `end` has returned (in tests).
        """
        n = self._beat.met + 1
        if self.rank:
            self._say(met=n)
        self._wait_for(lambda: all(self._heard[rank].met >= n for rank in self._peers))
        if self._has_ended:
            raise DistributedError("the run has ended", where=f"rank {self.rank}", hint="see rank 0")
        if self.rank == 0:
            self._say(met=n)

    # ---- the end ----

    def close(self, code: int) -> None:
        """End the other ranks with this exit code, and wait until they have ended, for at most PATIENCE seconds.

        Only rank 0 calls this. If the code is 0, the other ranks first run all passes that rank 0 has begun. With any
        other code, they end at once.
        """
        self._is_closing = True
        self._say(code=code)
        self._wait_for(lambda: not self._peers, PATIENCE)
        self._is_ending = True

    def leave(self, code: int, error: str = "") -> None:
        """End this rank's part of the run; not called on rank 0.

        After an error, first wait, because rank 0 usually ends the run with the same error. If rank 0 does not,
        send it the error; rank 0 then prints the error and ends all ranks.
        """
        if code:
            time.sleep(COURTESY)
            self._say(error=" ".join(error.split()))
            time.sleep(COURTESY)
        self._is_ending = True

    def wait(self) -> None:
        """Wait after a lost connection, so that another thread can print the cause and end this process."""
        time.sleep(self.limit + 2 * self.interval)

    def _give_up(self, found: str, gone: Sequence[int] = ()) -> None:
        """End the run with the error `found`. Rank 0 prints it; if rank 0 is dead (in `gone`), rank 1 does."""
        prints = self.rank == 0 or (0 in gone and self.rank == 1)
        self._stop(FAILED, f"error: {found}; {START_AGAIN}" if prints else None)

    def _stop(self, code: int, line: str | None) -> None:
        """End all ranks; do nothing if this rank is already ending."""
        with self._news:
            if self._is_ending:
                return
            self._is_ending = True
        self._say(code=code)
        self._drop_notice()
        self.end(code, line)
        with self._news:  # only after `end`, so that no waiting thread raises an error before `end` prints
            self._has_ended = True
            self._news.notify_all()

    def _names(self, ranks: Sequence[int]) -> str:
        return ", ".join(f"rank {rank} ({self._hosts[rank]})" for rank in ranks)

    # ---- idle ranks ----

    def wake(self) -> None:
        """On rank 0, wake the other ranks from `sleep`."""
        self._say(woken=self._beat.woken + 1)

    def sleep(self) -> None:
        """Wait until rank 0 wakes this rank. A receive of MLX would use a whole core while it waits."""
        self._wait_for(lambda: self._is_closing or self._heard[0].woken > self._n_woken)
        self._n_woken = self._heard[0].woken

    # ---- beats ----

    def _wait_for(self, holds: Callable[[], bool], seconds: float | None = None) -> None:
        """Wait until beats of other ranks make a condition true, or the run ends."""
        with self._news:
            self._news.wait_for(lambda: self._has_ended or holds(), seconds)

    def _say(self, **changes: Any) -> None:
        """Send a beat with these changes: from rank 0 to all other ranks, from another rank to rank 0."""
        with self._sending:
            self._beat = self._beat._replace(report=self.report(), **changes)
            for peer in list(self._peers.values()):  # a copy, because other ranks may join meanwhile
                with contextlib.suppress(OSError):  # the listening thread detects the loss
                    peer.sendall(json.dumps(self._beat).encode() + b"\n")

    def _send_beats(self) -> None:
        while not self._is_ending:
            self._say()
            if self.rank == 0:
                self._hear(0, self._beat)
                self._find_lost_messages()
            time.sleep(self.interval)

    def _listen_to(self, rank: int, peer: socket.socket) -> None:
        """Read a rank's beats until the rank ends or counts as dead."""
        found = "exited"
        try:
            with peer, peer.makefile("rb") as lines:
                for line in lines:
                    self._hear(rank, Beat(*json.loads(line)))
        except TimeoutError:
            found = f"gave no sign of life for {self.limit:g} s"
            if self._is_connecting:  # the rank may be alive: its MLX holds the GIL while it waits for another rank
                found += " while the ranks connected: it or a rank that it waits for has stopped, or cannot be reached"
        except (OSError, ValueError, TypeError):
            pass
        if not self._is_closing:
            self._give_up(f"{self._names([rank])} {found}", [rank])
        with self._news:
            del self._peers[rank]
            self._news.notify_all()

    def _hear(self, rank: int, beat: Beat) -> None:
        """Record a beat. End the run if the beat has an error, or an exit code other than 0."""
        with self._news:
            if beat.report != self._heard[rank].report:
                self._unchanged.clear()
            self._unchanged[rank] += 1
            self._heard[rank] = beat
            is_end = beat.code is not None and not self._is_closing
            self._is_closing |= is_end
            self._news.notify_all()
        if beat.error:
            self._give_up(f"{self._names([rank])}: {beat.error}")
        elif is_end and beat.code:
            self._stop(beat.code, None)  # the sending rank has printed the reason

    def _find_lost_messages(self) -> None:
        """On rank 0, end the run if a link loses messages although both of its ranks are alive.

        A message to a rank counts as lost if the previous rank has sent it and it does not arrive in time. A gather
        counts as lost if all ranks have begun it and it does not end in time. A long wait alone is no loss, because the
        sender may still compute. Time is counted in beats: for each rank, the beats since the last change of any report
        are counted, and the smallest of these numbers is multiplied by the interval. So while a rank has stopped and
        sends no beats, no message counts as lost.
        """
        ranks = range(len(self._hosts))
        reports = [Report(*self._heard[rank].report) for rank in ranks]
        seconds = self.interval * min(self._unchanged[rank] for rank in ranks)
        for rank, report in enumerate(reports):
            if seconds <= self.limit + report.nbytes / SLOWEST:
                continue
            if report.awaited and reports[rank - 1].sent >= report.awaited:
                found = f"a message that was sent does not arrive at {self._names([rank])}"
                self._give_up(f"{self._names([(rank - 1) % len(ranks)])}: {found}")
            elif report.awaited_gather and all(each.gathers >= report.awaited_gather for each in reports):
                waiting = [each for each in ranks if reports[each].awaited_gather == report.awaited_gather]
                # If the gather has ended on some ranks, name these ranks: a rank that lacks memory, or whose link is
                # lost, can end the gather without having sent all blocks to the next rank.
                named = [each for each in ranks if each not in waiting] or waiting
                found = f"a gather that all ranks have begun does not end on {self._names(waiting)}"
                self._give_up(f"{self._names(named)}: {found}")
