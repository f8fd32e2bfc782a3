"""A TCP relay in user space with a given rate and latency, and ranks on this machine that are linked by relays.

    python -m benchmarks.relay --rate 1e9 --latency 0.001 LISTEN_PORT:TARGET_PORT ...

The relay simulates a network link, and needs no root. Each direction of a connection is a `Wire`: bytes are sent at
the rate, and arrive after the latency. One thread serves all wires, because several Python threads would wait for the
GIL.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
HOST = "127.0.0.1"
# With this niceness other programs get a small share of the cores during a measurement.
NICENESS = -10
Ranks = list["subprocess.Popen[str]"]


@contextmanager
def ranks(command: Sequence[str], n: int, link: tuple[float, float] | None = None) -> Iterator[Ranks]:
    """Run a Python command as each of n ranks, and end all of them when the context ends.

    MLX's ring connects to the next rank's address in its file of addresses. So each rank gets its own file, in which
    this address is that of the relay.

    Args:
        command: the arguments of Python.
        n: number of ranks.
        link: bits per second and seconds of latency; None for plain loopback.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ports = free_ports(n)
        towards = list(ports)  # the port at which rank r is reached by its neighbour
        if link is not None:
            towards = [stack.enter_context(relay(port, *link)) for port in ports]
        started: Ranks = []
        for rank in range(n):
            files = [towards[i] if i == (rank + 1) % n else ports[i] for i in range(n)]
            hosts = folder / f"{rank}.json"
            hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in files]))
            environment = {**os.environ, "MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank)}
            process = subprocess.Popen(
                [sys.executable, *command], cwd=ROOT, env=environment, text=True, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
            stack.callback(ended, process)
            started.append(process)
        yield started


def ended(process: subprocess.Popen[str]) -> None:
    """End a process if it runs, and close its pipes."""
    if process.poll() is None:
        process.kill()
    process.communicate()


@contextmanager
def relay(target: int, rate: float, latency: float) -> Iterator[int]:
    """Run a relay to a port of this machine in a process of its own; yield the port that it listens on."""
    command = ["-m", "benchmarks.relay", "--rate", str(rate), "--latency", str(latency), f"0:{target}"]
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        yield int(process.stdout.readline() if process.stdout else 0)
    finally:
        ended(process)


def free_ports(n: int) -> list[int]:
    """Return n ports of this machine that are free now."""
    with ExitStack() as stack:
        made = [stack.enter_context(socket.create_server((HOST, 0))) for _ in range(n)]
        return [each.getsockname()[1] for each in made]


def urgent() -> None:
    """Raise the priority of this process above other programs, if the system permits it."""
    tasks = Path("/proc/self/task")
    for task in tasks.iterdir() if tasks.is_dir() else ():
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, int(task.name), NICENESS)


BITS = 8
# Bytes that are read at once: at 10 Gbit/s they take 0.1 ms.
CHUNK = 128 << 10
# prctl's option for the timer slack of a thread, and its value in ns; the default is 50 us.
PR_SET_TIMERSLACK, SLACK_NS = 29, 1


@dataclass
class Wire:
    """One direction of a connection.

    Attributes:
        source: the socket whose bytes travel.
        sink: the socket that gets them.
        rate: bits per second.
        latency: seconds.
        queue: (time of arrival, bytes) in order.
        free: when the last byte will have left.
        n_queued: bytes in the queue.
        is_open: whether the source can have more bytes.
    """

    source: socket.socket
    sink: socket.socket
    rate: float
    latency: float
    queue: deque[tuple[float, memoryview]] = field(default_factory=deque)
    free: float = 0.0
    n_queued: int = 0
    is_open: bool = True

    @property
    def capacity(self) -> float:
        """The largest number of bytes in flight: rate times latency, plus some chunks."""
        return self.rate * self.latency / BITS + 4 * CHUNK

    def read(self) -> None:
        """Read the bytes that the source has, and set their time of arrival."""
        try:
            data = self.source.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.is_open = False
            return
        self.free = max(time.perf_counter(), self.free) + len(data) * BITS / self.rate
        self.queue.append((self.free + self.latency, memoryview(data)))
        self.n_queued += len(data)

    def write(self) -> bool:
        """Deliver the bytes that have arrived; return whether the sink could not accept all of them."""
        while self.queue and self.queue[0][0] <= time.perf_counter():
            due, data = self.queue[0]
            try:
                n = self.sink.send(data)
            except BlockingIOError:
                return True
            except OSError:
                self.queue.clear()
                self.n_queued = 0  # continue to read and drop the source's bytes, until the source closes
                return False
            self.n_queued -= n
            if n < len(data):
                self.queue[0] = due, data[n:]
                return True
            self.queue.popleft()
        if not self.is_open and not self.queue:
            self.close()
        return False

    def close(self) -> None:
        """Shut down the sink for writing, because no bytes follow."""
        try:
            self.sink.shutdown(socket.SHUT_WR)
        except OSError:
            return


class Relay:
    """Forwards connections from ports of this machine to other ports; each connection has two wires."""

    def __init__(self, routes: dict[int, int], rate: float, latency: float) -> None:
        """Listen on the ports that are the keys of `routes`; port 0 takes a free one.

        Args:
            routes: by listening port, the port to which its connections are forwarded.
            rate: bits per second of each direction of a connection.
            latency: seconds.
        """
        self.rate, self.latency = rate, latency
        self.listening = {socket.create_server((HOST, port)): target for port, target in routes.items()}
        self.wires: list[Wire] = []

    @property
    def ports(self) -> list[int]:
        """The ports, in the order of the routes."""
        return [listener.getsockname()[1] for listener in self.listening]

    def accept(self, listener: socket.socket) -> None:
        """Accept a connection, and connect to its target as soon as the target listens."""
        near, _ = listener.accept()
        far = connected((HOST, self.listening[listener]))
        for each in (near, far):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            each.setblocking(False)
        self.wires += [Wire(*ends, self.rate, self.latency) for ends in ((near, far), (far, near))]

    def step(self, longest: float = 1.0) -> None:
        """Wait for bytes or for the next arrival, at most `longest` seconds, and forward the bytes that are due."""
        full, before = [wire for wire in self.wires if wire.write()], sockets(self.wires)
        self.wires = [wire for wire in self.wires if wire.is_open or wire.queue]
        for each in before - sockets(self.wires):
            each.close()
        ready = [wire for wire in self.wires if wire.is_open and wire.n_queued < wire.capacity]
        dues = [wire.queue[0][0] for wire in self.wires if wire.queue and wire not in full]
        wait = max(0.0, min([longest, *(due - time.perf_counter() for due in dues)]))
        sources = {wire.source: wire for wire in ready}
        readable, _, _ = select.select([*self.listening, *sources], [wire.sink for wire in full], [], wait)
        for each in readable:
            if each in sources:
                sources[each].read()
            else:
                self.accept(each)

    def close(self) -> None:
        """Close all sockets."""
        for each in {*self.listening, *sockets(self.wires)}:
            each.close()


def sockets(wires: Iterable[Wire]) -> set[socket.socket]:
    """Return the sockets of wires."""
    return {end for wire in wires for end in (wire.source, wire.sink)}


def connected(address: tuple[str, int]) -> socket.socket:
    """Connect to an address; retry until a process listens there. Raise OSError if none listens after 30 seconds."""
    end = time.monotonic() + 30.0
    while True:
        try:
            return socket.create_connection(address)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def punctual() -> None:
    """Reduce the wake-up delay of this thread, if Linux allows it: by priority, and without timer slack."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, SLACK_NS, 0, 0, 0)
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a relay until it is ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, required=True, help="bits per second")
    parser.add_argument("--latency", type=float, required=True, help="seconds")
    parser.add_argument("routes", nargs="+", metavar="PORT:TARGET")
    given = parser.parse_args(arguments)
    punctual()
    routes = {int(port): int(target) for port, target in (route.split(":") for route in given.routes)}
    relay = Relay(routes, given.rate, given.latency)
    print(*relay.ports, flush=True)
    while True:
        relay.step()


if __name__ == "__main__":
    main()
