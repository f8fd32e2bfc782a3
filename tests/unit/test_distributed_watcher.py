"""Which rank the watching processes name while MLX connects the ranks: three watchers in threads, and their ranks."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time

import pytest

from mlx_engine.distributed.watcher import CONNECTED, READY, Watcher
from tests.patience import PATIENCE, wait_for
from tests.ranks import ROOT

HOSTS = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
RANKS = range(len(HOSTS))
LIMIT, GRACE = 0.7, 0.5


class AnsweringWatcher(Watcher):
    """A watcher whose rank answers unless it is stopped. Tests say when the time of a wait is over."""

    n_waits = 0

    def __init__(self, connecting: Connecting, rank: int, links: dict[int, int]) -> None:
        super().__init__(rank, HOSTS, links, 0, LIMIT, GRACE)
        self._connecting = connecting

    def _ask(self) -> None:
        if self._rank not in (self._connecting.stopped, *self._connecting.dead):
            self._connecting.say(self._rank, "Current thread 0x1 (most recent call first):")

    def _listen(self, seconds: float) -> None:
        self.n_waits += 1
        while not self._is_decided() and self._connecting.n_over < self.n_waits:
            super()._listen(0.01)


class Connecting:
    """Ranks that connect, each a socket to its watcher. `links` are the connections of ranks 1 and 2 with rank 0."""

    def __init__(self) -> None:
        self.ranks, watchers = zip(*(socket.socketpair() for _ in RANKS), strict=True)
        self.links, hub = zip(*(socket.socketpair() for _ in RANKS[1:]), strict=True)
        self.watchers, self.hub, self.stopped, self.have_connected = watchers, hub, -1, False
        self.lines: dict[int, str | None] = {}
        self.made: dict[int, AnsweringWatcher] = {}
        self.n_over, self.dead = 0, set[int]()
        for each in (*self.ranks, *self.links):
            each.settimeout(PATIENCE)
        self.threads = [threading.Thread(target=self.watch, args=(rank,)) for rank in RANKS]
        for thread in self.threads:
            thread.start()

    def watch(self, rank: int) -> None:
        """Run the watcher of a rank. The rank ends after it, unless it is stopped or has connected."""
        own = self.hub if rank == 0 else self.links[rank - 1 : rank]
        links = {rank: self.watchers[rank].fileno()}
        links |= {of: link.fileno() for of, link in zip(RANKS[1:] if rank == 0 else [0], own, strict=True)}
        self.made[rank] = AnsweringWatcher(self, rank, links)
        self.lines[rank] = self.made[rank].run()
        if rank != self.stopped and not self.have_connected:
            for link in own:
                link.shutdown(socket.SHUT_WR)

    def say(self, rank: int, line: str) -> None:
        """Have a rank say a line to its watcher."""
        self.ranks[rank].sendall(f"{line}\n".encode())

    def meet(self, word: str, *late: int) -> None:
        """Have the ranks say a word and wait until all have said it; those that are late say nothing."""
        self.have_connected = word == CONNECTED and not late
        for rank in set(RANKS) - set(late):
            self.say(rank, word)
        for rank in RANKS if not late else []:
            assert self.ranks[rank].recv(64).decode() == f"all {word}\n"

    def ask(self, n: int) -> None:
        """Let the time of the watchers' wait n pass, after which they ask; return when they have heard all answers."""
        wait_for(lambda: [made.n_waits for made in self.made.values()] == [n] * len(RANKS))
        self.n_over = n
        answering = set(RANKS) - {self.stopped}
        for made in self.made.values():
            wait_for(lambda made=made: made._alive == answering & set(made._links))

    def pass_limit(self, n: int) -> None:
        """Let the time of the wait n pass, and that for the answers."""
        self.ask(n)
        self.n_over = n + 1

    def die(self, rank: int) -> None:
        """Let a rank die: its watcher ends after it, and with both their connections."""
        self.dead.add(rank)
        self.ranks[rank].shutdown(socket.SHUT_RDWR)

    def end(self) -> dict[int, str | None]:
        """Return the lines that the watchers print."""
        wait_for(lambda: not any(thread.is_alive() for thread in self.threads))
        return self.lines

    def close(self) -> None:
        """Close all connections."""
        for rank in RANKS:
            self.die(rank)
        self.n_over = 9
        self.end()
        for each in (*self.ranks, *self.watchers, *self.links, *self.hub):
            each.close()


@pytest.fixture
def connecting():
    made = Connecting()
    yield made
    made.close()


def printed(named: str, found: str, by: int = 0) -> dict[int, str | None]:
    """Return what the watchers print if one of them names a rank."""
    line = f"error: {named}: {found}; all ranks end, start them again"
    return {rank: line if rank == by else None for rank in RANKS}


def test_ranks_that_connect_are_not_named_and_read_what_follows(connecting: Connecting):
    connecting.meet(READY)
    connecting.links[1].sendall(b". 0 0 0 0 0\n")  # a sign of life
    connecting.hub[0].sendall(b". 0 0 0 0 0\n")
    connecting.meet(CONNECTED)
    connecting.hub[0].sendall(b"wake\n")
    assert connecting.end() == {0: None, 1: None, 2: None}
    assert connecting.links[0].recv(64) == b"wake\n"


def test_a_watcher_leaves_what_follows_the_last_line(connecting: Connecting):
    link, other = socket.socketpair()
    own, rank = socket.socketpair()
    with link, other, own, rank:
        link.settimeout(PATIENCE)
        other.sendall(b"all connected\nwake\n")
        assert Watcher(1, HOSTS, {1: own.fileno(), 0: link.fileno()}, 0, PATIENCE).run() is None
        assert (link.recv(64), rank.recv(64)) == (b"wake\n", b"all connected\n")


def test_a_watcher_listens_until_its_limit():
    (link, other), (own, rank) = socket.socketpair(), socket.socketpair()
    with link, other, own, rank:
        start = time.monotonic()
        assert Watcher(1, HOSTS, {1: own.fileno(), 0: link.fileno()}, 0, 0.1, 0.05).run() is None
        assert time.monotonic() - start >= 0.1


@pytest.mark.parametrize("victim", RANKS)
@pytest.mark.parametrize("met", [[], [READY]], ids=["before", "while"])
def test_a_rank_that_dies_is_named(connecting: Connecting, victim: int, met: list[str]):
    for word in met:
        connecting.meet(word)
    connecting.die(victim)
    named, found = f"rank {victim} ({HOSTS[victim]})", "expected to run until the end, found that it has ended"
    assert connecting.end() == printed(named, found, by=int(victim == 0))


@pytest.mark.parametrize("victim", RANKS)
@pytest.mark.parametrize("has_connected", [False, True])
def test_a_rank_that_stops_is_named_after_the_limit(connecting: Connecting, victim: int, has_connected: bool):
    connecting.stopped = victim
    connecting.meet(READY)
    connecting.meet(CONNECTED, (victim + 1) % 3 if has_connected else victim)
    connecting.pass_limit(2)
    found = f"expected to run until the end, found that it has given no sign of life for {LIMIT} s"
    assert connecting.end() == printed(f"rank {victim} ({HOSTS[victim]})", found, by=int(victim == 0))


@pytest.mark.parametrize("victim", RANKS)
@pytest.mark.parametrize("dies", [False, True], ids=["stops", "dies"])
def test_ranks_that_are_ready_late_are_asked_again(connecting: Connecting, victim: int, dies: bool):
    connecting.ask(1)
    connecting.meet(READY)
    if dies:
        connecting.die(victim)
        found = "expected to run until the end, found that it has ended"
    else:
        connecting.stopped = victim
        connecting.meet(CONNECTED, victim)
        connecting.pass_limit(3)
        found = f"expected to run until the end, found that it has given no sign of life for {LIMIT} s"
    assert connecting.end() == printed(f"rank {victim} ({HOSTS[victim]})", found, by=int(victim == 0))


@pytest.mark.parametrize("victim", RANKS)
def test_the_error_of_a_rank_is_printed_by_rank_0(connecting: Connecting, victim: int):
    connecting.meet(READY)
    connecting.say(victim, "failed ring: expected a port, found none")
    named = f"rank {victim} ({HOSTS[victim]})"
    assert connecting.end() == printed(named, "ring: expected a port, found none")


def test_ranks_that_live_and_have_not_connected_are_named(connecting: Connecting):
    connecting.meet(READY)
    connecting.meet(CONNECTED, 1, 2)
    wait_for(lambda: connecting.made[0]._said[CONNECTED])
    connecting.pass_limit(2)
    found = f"expected to connect within {LIMIT} s, found a neighbour that cannot be reached"
    assert connecting.end() == printed("rank 1 (127.0.0.2), rank 2 (127.0.0.3)", found)


def test_ranks_may_connect_after_they_were_asked(connecting: Connecting):
    connecting.meet(READY)
    for rank in RANKS:
        connecting.say(rank, "Current thread 0x1 (most recent call first):\n  File")
    connecting.meet(CONNECTED)
    assert connecting.end() == {0: None, 1: None, 2: None}


def test_a_rank_asks_its_own_process_alone(monkeypatch):
    asked: list[int] = []
    monkeypatch.setattr("os.kill", lambda process, number: asked.append(process))
    monkeypatch.setattr("os.getppid", lambda: 7)
    for process in (6, 7):
        Watcher(0, HOSTS, {}, process, LIMIT)._ask()
    assert asked == [7]


def test_the_links_of_a_watching_process_are_not_its_stdin_or_stdout():
    # A process without stdin, whose sockets get its number.
    code = (
        "import os, socket, subprocess; os.close(0); one, two = socket.socketpair(); assert one.fileno() == 0\n"
        "from mlx_engine.distributed import connecting\n"
        "subprocess.Popen = lambda command, pass_fds, **options: print(sorted(pass_fds))\n"
        "connecting._watching({}, {0: one, 1: two})"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert min(json.loads(run.stdout)) > 2
