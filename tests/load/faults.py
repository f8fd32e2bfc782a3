"""Faults of a server in a process of its own, and what its clients see of each."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil

from tests.load.planted import SEED, TOKEN
from tests.load.process import ROOT, SERVE, ServerProcess

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SECONDS = 90.0
MIB = 1 << 20
# The built-in model answers at least this long.
LONG = {"max_tokens": 450, "ignore_eos": True}


class WrongError(Exception):
    """A client has seen something else than expected."""


def expect(found: object, expected: object) -> None:
    if found != expected:
        raise WrongError(f"found {found!r}, expected {expected!r}")


def planted(fault: str) -> ServerProcess:
    return ServerProcess(
        "--slots", "4", "--kv-memory", "16MB", command=(sys.executable, "-m", "tests.load.planted", fault, "serve")
    )


def url(server: ServerProcess) -> str:
    return "http://{}:{}".format(*server.address)


def post(server: ServerProcess, path: str = COMPLETIONS, **body: Any) -> httpx.Response:
    given: dict[str, Any] = {"max_tokens": 30, "temperature": 0, "ignore_eos": True, "seed": 1, **body}
    if path == COMPLETIONS:
        given.setdefault("prompt", "Once upon a time")
    return httpx.post(url(server) + path, json=given, timeout=SECONDS)


def seen(reply: httpx.Response) -> str:
    """Return what a client sees: the status, and the code of the error that the reply or the stream ends with."""
    text = reply.text
    if "event-stream" in reply.headers["content-type"]:
        text = text.rstrip("\n").rsplit("data: ", 1)[1]
        if text == "[DONE]":
            return f"{reply.status_code}, complete stream"
    error = json.loads(text).get("error")
    return f"{reply.status_code}" if error is None else f"{reply.status_code} {error['code']}"


def connect(server: ServerProcess, data: bytes, buffer: int | None = None) -> socket.socket:
    found = socket.socket()
    found.settimeout(SECONDS)
    if buffer is not None:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    found.connect(server.address)
    found.sendall(data)
    return found


def request_bytes(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def until_closed(connection: socket.socket) -> tuple[str, float]:
    """Return the first line that a client gets, and the seconds until the server has closed the connection."""
    start, reply = time.monotonic(), b""
    while data := connection.recv(65536):
        reply += data
    return reply.split(b"\r\n")[0].decode(), time.monotonic() - start


# ---- faults of the engine ----


def one_request(fault: str, bad: dict[str, Any], path: str = COMPLETIONS) -> str:
    """A fault of one request: that request fails, streaming or not; one beside it does not notice."""
    with planted(fault) as server, ThreadPoolExecutor(3) as clients:
        good = clients.submit(post, server, max_tokens=300)
        found = [clients.submit(post, server, path, stream=stream, **bad) for stream in (False, True)]
        whole, stream = (seen(one.result()) for one in found)
        expect(seen(good.result()), "200")
        expect(whole, "500 internal_error")
        expect(seen(httpx.get(url(server) + "/health")), "200")
        expect(server.settled().is_idle, True)
        expect(server.end(), 0)
    return f"{whole}; streaming: {stream}; beside it: 200; /health 200"


def every_pass() -> str:
    with planted("every pass") as server:
        found = {seen(post(server)) for _ in range(5)}
        expect(found, {"500 internal_error"})
        expect(httpx.get(url(server) + "/health").status_code, 200)
        expect(server.settled().is_idle, True)
        expect(server.end(), 0)
    return "each request: 500 internal_error; /health 200"


def dead_thread(fault: str) -> str:
    """The engine thread ends while there are clients: they get errors, and the process ends with a failure."""
    healths: list[int] = []
    with planted(fault) as server, ThreadPoolExecutor(3) as clients:
        whole, stream, queued = (
            clients.submit(post, server, max_tokens=450, stream=stream) for stream in (False, True, False)
        )
        while server.popen.poll() is None:
            try:
                healths.append(httpx.get(url(server) + "/health", timeout=5).status_code)
            except httpx.TransportError:
                break
        code = server.popen.wait(30)
        expect([seen(one.result()) for one in (whole, stream, queued)], ["503 dead", "200 dead", "503 dead"])
        expect(code, 1)
        expect(set(healths) <= {200, 503}, True)
    return f"503 dead; streaming: an error event; /health {sorted(set(healths))}; exit code {code}"


# ---- clients ----


def slow_reader() -> str:
    """A client never reads a long stream; others get their answers meanwhile."""
    with ServerProcess("--slots", "24", "--kv-memory", "120MB") as server:
        # More than the buffers of the system take, some 4 MB.
        body = {"prompt": ["Once upon a time"] * 20, "stream": True, "logprobs": 20, **LONG}
        slow = connect(server, request_bytes(COMPLETIONS, body), buffer=4096)
        start = time.monotonic()
        with slow:
            process, port = psutil.Process(server.popen.pid), slow.getsockname()[1]
            expect(seen(post(server)), "200")
            others = time.monotonic() - start
            while any(one.raddr and one.raddr.port == port for one in process.net_connections("tcp")):
                expect(time.monotonic() - start < SECONDS, True)
                time.sleep(0.5)
            dropped = time.monotonic() - start
        expect(server.settled().is_idle, True)
        expect(server.end(), 0)
        expect(server.lines, [])
    return f"another client's answer after {others:.1f} s; its connection was closed after {dropped:.0f} s"


def half_a_head() -> str:
    with ServerProcess() as server, connect(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\n") as connection:
        found, seconds = until_closed(connection)
        expect(found.split()[1], "408")
    return f"{found} after {seconds:.0f} s"


def endless_body() -> str:
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    chunked = f"{head}Transfer-Encoding: chunked\r\n\r\n".encode()
    with ServerProcess() as server, connect(server, chunked) as connection:
        ended = threading.Event()

        def drip() -> None:
            while not ended.wait(0.5):
                connection.sendall(b"1\r\n \r\n")

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            start = time.monotonic()
            line = connection.recv(65536).split(b"\r\n")[0].decode()
        finally:
            ended.set()
            dripping.join()
        expect(line.split()[1], "408")
    return f"{line} after {time.monotonic() - start:.0f} s"


def large_bodies() -> str:
    """64 MB: refused without being kept, and the client can read why."""
    with ServerProcess() as server:
        post(server)
        before = server.vitals().rss
        data = b" " * 64_000_000
        for content in (data, iter([data])):
            headers = {"Content-Type": "application/json"}
            reply = httpx.post(url(server) + COMPLETIONS, content=content, headers=headers, timeout=SECONDS)
            expect(seen(reply), "413 request_too_large")
        grown = server.vitals().rss - before
        expect(grown < 8 * MIB, True)
    return f"413 request_too_large, announced or in chunks; resident memory {grown / MIB:+.1f} MiB"


def idle_connections() -> str:
    """Connections without a request are closed, and take nothing from others meanwhile."""
    with ServerProcess() as server:
        before = server.settled().fds
        start = time.monotonic()
        connections = [connect(server, b"") for _ in range(200)]
        expect(seen(post(server)), "200")
        while server.vitals().fds > before + 2 and time.monotonic() < start + SECONDS:
            time.sleep(1)
        seconds = time.monotonic() - start
        for connection in connections:
            connection.close()
        expect(seconds < SECONDS, True)
    return f"200 connections closed after {seconds:.0f} s"


# ---- signals ----


def under_load(*signals: signal.Signals, grace: str, expected: set[str]) -> str:
    """Signals while 8 answers run and others come."""
    with (
        ServerProcess("--slots", "8", "--kv-memory", "40MB", "--grace", grace) as server,
        ThreadPoolExecutor(16) as clients,
    ):
        for _ in range(2):
            post(server)
        running = [clients.submit(post, server, prompt=f"Once {i}", stream=i % 2 == 0, **LONG) for i in range(8)]
        while server.metrics()["num_requests_running"] < 8:
            time.sleep(0.01)
        start = time.monotonic()
        ending = clients.submit(server.end, *signals)
        time.sleep(0.02)
        late = []
        for _ in range(4):
            try:
                late.append(seen(post(server)))
            except httpx.TransportError as error:
                late.append(type(error).__name__)
        found = sorted({seen(one.result()) for one in running})
        code, seconds = ending.result(), time.monotonic() - start
        expect(set(found) <= expected, True)
        expect(set(late) <= {"503 closing", "ConnectError", "RemoteProtocolError", "ReadError"}, True)
        expect(code, 0)
        expect(server.lines, [])
    return f"running answers: {found}; new requests: {sorted(set(late))}; exit code 0 after {seconds:.1f} s"


def while_loading() -> str:
    codes = []
    for delay in (0.3, 0.6, 0.9, 1.1, 1.3, 1.6):
        with subprocess.Popen([*SERVE, "--port", "0"], cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
            time.sleep(delay)
            process.terminate()
            assert process.stderr is not None
            errors = [line for line in process.stderr if "rror" in line]
            codes.append(process.wait(30))
        expect(errors, [])
    # Before the event loop runs, the system ends the process.
    expect(set(codes) <= {0, -signal.SIGTERM}, True)
    return f"exit codes {codes}"


def start(*arguments: str) -> tuple[int, str]:
    found = subprocess.run([*SERVE, *arguments], cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    return found.returncode, found.stderr.strip().splitlines()[-1]


def port_in_use() -> str:
    with ServerProcess() as server:
        code, line = start("--port", str(server.address[1]))
        expect((code, "is in use by another program" in line), (1, True))
    return f"exit code {code}: {line}"


def missing_model() -> str:
    code, line = start("--port", "0", "-m", "/no/such/model.gguf")
    expect((code, line.startswith("error: ")), (1, True))
    return f"exit code {code}: {line}"


BAD = {"prompt": [TOKEN] * 3}
MESSAGES = [{"role": "user", "content": "planted"}]
ENDED, BROKEN = {"200", "200, complete stream"}, {"503 closing", "200 closing"}

FAULTS: dict[str, Callable[[], str]] = {
    "an exception in one request's sampling": lambda: one_request("sampling", {"seed": SEED}),
    "an exception in the passes of one sequence": lambda: one_request("one pass", BAD),
    "an exception in every pass": every_pass,
    "an exception in the template": lambda: one_request("template", {"messages": MESSAGES}, CHAT),
    "SystemExit in the engine thread": lambda: dead_thread("exit"),
    "MemoryError in the engine thread": lambda: dead_thread("memory"),
    "a client that never reads": slow_reader,
    "half-sent headers": half_a_head,
    "a body that never ends": endless_body,
    "bodies of 64 MB": large_bodies,
    "connections without a request": idle_connections,
    "TERM under load": lambda: under_load(signal.SIGTERM, grace="30", expected=ENDED),
    "INT under load": lambda: under_load(signal.SIGINT, grace="30", expected=ENDED),
    "TERM under load, too little time": lambda: under_load(signal.SIGTERM, grace="0.1", expected=ENDED | BROKEN),
    "TERM twice": lambda: under_load(signal.SIGTERM, signal.SIGTERM, grace="30", expected=BROKEN),
    "TERM, then INT": lambda: under_load(signal.SIGTERM, signal.SIGINT, grace="30", expected=BROKEN),
    "TERM while the model is loaded": while_loading,
    "a port in use": port_in_use,
    "a missing model": missing_model,
}


def faults() -> list[str]:
    """Run all faults, and return those whose clients saw something else than they should."""
    violations = []
    for name, fault in FAULTS.items():
        try:
            print(f"{name}: {fault()}", flush=True)
        except (WrongError, AssertionError, OSError, RuntimeError, httpx.HTTPError) as error:
            violations.append(f"{name}: {type(error).__name__}: {error}")
            print("VIOLATION", violations[-1], flush=True)
    return violations
