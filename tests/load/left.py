"""Clients that ask for a lot of work and leave: `/health` answers at once, others get their answers, memory stays.

The hostile clients are a process of their own, which sends prepared bytes:
`python -m tests.load.left HOST PORT N SECONDS`.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import psutil

from tests.load.planted import NO_LENGTH_CHECK
from tests.load.process import ROOT, SERVE, ServerProcess

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# Seconds after which a hostile client leaves.
STAY = 0.5
# Seconds between two requests of /health.
POLL = 0.02
# Seconds in which /health must answer, 99 times of 100.
P99 = 0.05
# Memory that may stay: what the allocator holds depends on which requests met.
RSS_TOLERANCE = 64 << 20
N_HONEST = 4
# Seconds of hostile clients before memory is compared: arenas of the allocator grow until they have met every mix.
WARM_UP = 10.0
# Seconds after which all connections must be closed, and the descriptors of the template's process.
SETTLE, CHILD_FDS = 60.0, 5


def message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def bodies() -> list[tuple[str, bytes]]:
    """Return the paths and bodies of hostile requests."""
    found: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {"messages": [message("hello there")] * 50_000}),
        (CHAT, {"messages": [message("x")] * 100_000}),
        (COMPLETIONS, {"prompt": ["a"] * 1_000_000}),
        (COMPLETIONS, {"prompt": " " * 4_000_000}),
        (CHAT, {"messages": [message(" " * 4_000_000)]}),
        ("/tokenize", {"content": " " * 4_000_000}),
        ("/detokenize", {"tokens": [12] * 1_390_000}),
    ]
    return [(path, json.dumps(body, separators=(",", ":")).encode()) for path, body in found]


def request(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return f"{head}\r\nConnection: close\r\n\r\n".encode() + body


# ---- the process of the hostile clients ----


async def hostile(host: str, port: int, n_clients: int, seconds: float) -> None:
    """Send requests from n clients, each of which leaves half a second after it has sent everything."""
    loop, end, statuses = asyncio.get_running_loop(), time.monotonic() + seconds, Counter[str]()
    prepared = [request(path, body) for path, body in bodies()]

    async def client(number: int) -> None:
        while time.monotonic() < end:
            with socket.socket() as connection:
                connection.setblocking(False)
                try:
                    await loop.sock_connect(connection, (host, port))
                    await loop.sock_sendall(connection, prepared[number % len(prepared)])
                    reply = await asyncio.wait_for(loop.sock_recv(connection, 4096), STAY)
                    statuses[reply[9:12].decode() or "closed"] += 1
                    await asyncio.sleep(STAY)
                except (asyncio.TimeoutError, OSError) as error:
                    statuses["left" if isinstance(error, asyncio.TimeoutError) else type(error).__name__] += 1
            number += 1

    clients = [asyncio.ensure_future(client(number)) for number in range(n_clients)]
    await asyncio.wait(clients, timeout=seconds)
    for one in clients:
        one.cancel()
    print(json.dumps(statuses))


# ---- this process ----


def ask(address: tuple[str, int], data: bytes) -> tuple[int, bytes]:
    """Return the status and the body of the reply to a request whose connection is closed."""
    with closing(socket.create_connection(address, timeout=120)) as connection:
        connection.sendall(data)
        reply = b""
        while piece := connection.recv(1 << 16):
            reply += piece
    head, _, body = reply.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


def honest_body(number: int) -> bytes:
    body = {"messages": [message(f"Tell me a story, number {number}.")], "max_tokens": 40, "seed": number}
    return request(CHAT, json.dumps(body).encode())


class Honest(threading.Thread):
    """A client that asks one question again and again, and waits when it is told to.

    Attributes:
        expected: the digest of the answer alone.
        digests: the digests of all answers.
        refused: how often it was told to wait.
    """

    def __init__(self, address: tuple[str, int], number: int, ended: threading.Event) -> None:
        super().__init__()
        self._address, self._data, self._ended = address, honest_body(number), ended
        self.expected, self.digests, self.refused = self._digest(), list[str](), 0

    def _digest(self) -> str:
        status, body = ask(self._address, self._data)
        digest: str = json.loads(body)["mlx_engine"]["digest"] if status == 200 else ""
        return digest

    def run(self) -> None:
        while not self._ended.is_set():
            digest = self._digest()
            if digest:
                self.digests.append(digest)
            else:
                self.refused += 1
                self._ended.wait(1)


class Health(threading.Thread):
    """Asks for /health all the time, and notes how long each reply takes."""

    def __init__(self, address: tuple[str, int], ended: threading.Event) -> None:
        super().__init__()
        self._address, self._ended, self.seconds = address, ended, list[float]()

    def run(self) -> None:
        data = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
        while not self._ended.wait(POLL):
            start = time.perf_counter()
            status, _ = ask(self._address, data)
            self.seconds.append(time.perf_counter() - start if status == 200 else float("inf"))

    def at(self, share: float) -> float:
        return sorted(self.seconds)[min(int(share * len(self.seconds)), len(self.seconds) - 1)]


class Memory(threading.Thread):
    """Notes the most resident memory of a process and its children."""

    def __init__(self, pid: int, ended: threading.Event) -> None:
        super().__init__()
        self._process, self._ended, self.most = psutil.Process(pid), ended, 0

    def now(self) -> int:
        total: int = self._process.memory_info().rss
        for child in self._process.children(recursive=True):
            try:
                total += child.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        return total

    def run(self) -> None:
        while not self._ended.wait(0.05):
            self.most = max(self.most, self.now())


@dataclass(frozen=True)
class Seen:
    """What was seen of a server; `memory` is in bytes: before, at most and after."""

    health: Health
    honest: list[Honest]
    memory: tuple[int, int, int]
    is_idle: bool
    lines: list[str]
    code: int


def left(n_clients: int, seconds: float, arguments: list[str], *, checks_length: bool = True) -> list[str]:
    """Run hostile clients beside honest ones, and return what was not as it must be.

    Without `checks_length` the server encodes texts that it would refuse by their length, as with a very long context.
    """
    command = SERVE if checks_length else (sys.executable, "-m", "tests.load.planted", NO_LENGTH_CHECK, "serve")
    with ServerProcess(*arguments, command=command) as server:
        seen = watched(server, n_clients, seconds)
    n_wrong = sum(digest != one.expected for one in seen.honest for digest in one.digests)
    n_answers = sum(len(one.digests) for one in seen.honest)
    before, most, after = (n / 2**20 for n in seen.memory)
    p50, p99, slowest = (seen.health.at(share) for share in (0.5, 0.99, 1.0))
    print(f"/health: p50 {1e3 * p50:.1f} ms, p99 {1e3 * p99:.1f} ms, max {1e3 * slowest:.1f} ms")
    n_refused = sum(one.refused for one in seen.honest)
    print(f"honest clients: {n_answers} answers, {n_wrong} differ; refused {n_refused} times")
    print(f"resident: before {before:.0f} MiB, most {most:.0f} MiB, after {after:.0f} MiB")
    checks = {
        f"{n_wrong} answers differ from those alone": n_wrong == 0,
        "no honest client got an answer": n_answers > 0,
        f"/health: the 99th percentile is above {1e3 * P99:.0f} ms": p99 <= P99,
        f"memory grew by {after - before:.0f} MiB": after - before <= RSS_TOLERANCE / 2**20,
        "requests are left": seen.is_idle,
        f"exit code {seen.code}": seen.code == 0,
        f"log: {seen.lines[:3]}": not seen.lines,
    }
    return [what for what, holds in checks.items() if not holds]


def watched(server: ServerProcess, n_clients: int, seconds: float) -> Seen:
    """Run the clients, after a short round of hostile ones that starts the server's threads and processes."""
    ended = threading.Event()
    honest = [Honest(server.address, number, ended) for number in range(N_HONEST)]
    health, memory = Health(server.address, ended), Memory(server.popen.pid, ended)
    n_fds = server.vitals().fds
    run_hostile(server, n_clients, WARM_UP)
    wait_until_closed(server, n_fds)
    before = memory.now()
    threads = [*honest, health, memory]
    for thread in threads:
        thread.start()
    print(f"load average before: {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    statuses = run_hostile(server, n_clients, seconds)
    print(f"load average after: {os.getloadavg()[0]:.1f}; hostile requests: {statuses}")
    ended.set()
    for thread in threads:
        thread.join()
    is_idle = wait_until_closed(server, n_fds)
    found = (before, memory.most, memory.now())
    return Seen(health, honest, found, is_idle, list(server.lines), server.end())


def wait_until_closed(server: ServerProcess, n_fds: int) -> bool:
    """Wait until the server has read what clients sent before they left; return whether it is idle."""
    end = time.monotonic() + SETTLE
    while (vitals := server.settled()).fds > n_fds + CHILD_FDS and time.monotonic() < end:
        time.sleep(0.2)
    print(f"{vitals.fds} descriptors, {n_fds} at the start")
    return vitals.is_idle


def run_hostile(server: ServerProcess, n_clients: int, seconds: float) -> str:
    command = (sys.executable, "-m", "tests.load.left", *map(str, (*server.address, n_clients, seconds)))
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    asyncio.run(hostile(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])))
