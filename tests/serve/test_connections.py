"""More connections than the process may have: the oldest idle ones are closed, and requests are served."""

from __future__ import annotations

import re
import resource
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any
from unittest.mock import MagicMock

import pytest

from mlx_engine.serve import server as module
from mlx_engine.serve.server import LOG_SECONDS, ConnectionLimit
from tests.load.process import ServerProcess
from tests.patience import PATIENCE
from tests.serve.served import HTTP, Served, chat_body, served, wait_for

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def connect(server: Served) -> socket.socket:
    return socket.create_connection(server.address, timeout=PATIENCE)


def is_served(connection: socket.socket) -> bool:
    found = b""
    try:
        connection.sendall(HEALTH)
        while not found.endswith(b"}") and (piece := connection.recv(65536)):
            found += piece
    except ConnectionError:
        return False
    return found.startswith(b"HTTP/1.1 200")


@pytest.mark.slow
def test_more_idle_connections_than_descriptors():
    """With 300 descriptors; without a limit of connections accept fails, with a traceback each second."""

    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300))

    with ExitStack() as stack:
        server = stack.enter_context(ServerProcess(preexec_fn=few))
        url = "http://{}:{}".format(*server.address)
        if sys.platform == "linux":
            assert resource.prlimit(server.popen.pid, resource.RLIMIT_NOFILE) == (300, 300)
        idle = [stack.enter_context(socket.create_connection(server.address, timeout=PATIENCE)) for _ in range(400)]
        assert HTTP.get(url + "/health", timeout=PATIENCE).json() == {"status": "ok"}
        reply = HTTP.post(url + "/v1/chat/completions", json=chat_body(max_tokens=2), timeout=PATIENCE)
        assert reply.status_code == 200
        assert idle[0].recv(1) == b""
        assert is_served(idle[-1])
        assert server.end() == 0
    (line,) = server.lines
    assert re.match(r"more than \d+ connections; closed the oldest idle ones \(1 since", line)


def test_the_oldest_idle_connection_is_closed_and_none_with_a_request():
    with served(limit=ConnectionLimit(4)) as server, ThreadPoolExecutor(1) as clients, ExitStack() as stack:
        wait_for(lambda: not server.server.server_state.connections)  # that of the fixture is closed
        server.gate.hold()
        busy = clients.submit(server.chat)
        wait_for(lambda: server.worker.n_open == 1)
        first, second, third = (stack.enter_context(connect(server)) for _ in range(3))
        wait_for(lambda: len(server.server.server_state.connections) == 4)
        assert is_served(first)  # and is now the youngest of the idle ones
        fourth = stack.enter_context(connect(server))
        assert is_served(fourth)
        assert second.recv(1) == b""
        assert is_served(first)
        assert is_served(third)
        server.gate.allow()
        assert busy.result().status_code == 200


def test_a_connection_is_refused_if_all_others_have_requests():
    with served(limit=ConnectionLimit(2)) as server, ExitStack() as stack:
        wait_for(lambda: not server.server.server_state.connections)  # that of the fixture is closed
        pages = [stack.enter_context(connect(server)) for _ in range(2)]
        for page in pages:
            page.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert page.recv(65536).startswith(b"HTTP/1.1 200")
        assert stack.enter_context(connect(server)).recv(1) == b""
        pages.pop().close()
        wait_for(lambda: len(server.server.server_state.connections) == 1)
        assert is_served(stack.enter_context(connect(server)))


def test_closed_connections_are_a_line_per_minute(caplog: pytest.LogCaptureFixture):
    clock = MagicMock()
    limit = ConnectionLimit(1, clock=clock)
    for clock.return_value in (0.0, 1.0, LOG_SECONDS - 1, LOG_SECONDS, LOG_SECONDS + 1):
        connection: Any = MagicMock()
        limit.add(connection, 2)
        connection.transport.abort.assert_called_once()
    counts = [re.search(r"\((\d+) since", record.message) for record in caplog.records]
    assert [found and found[1] for found in counts] == ["1", "3"]


@pytest.mark.parametrize(
    ("limits", "refused", "wanted"),
    [
        ((256, 4096), (), 4096),
        ((4096, 4096), (), None),
        ((256, resource.RLIM_INFINITY), (), 1 << 20),
        ((256, resource.RLIM_INFINITY), (1 << 20,), 10240),
        ((256, resource.RLIM_INFINITY), (1 << 20, 10240), None),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), (), None),
    ],
)
def test_the_limit_of_descriptors_is_raised(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], refused: tuple[int, ...], wanted: int | None
):
    given: list[int] = []

    def setrlimit(what: int, pair: tuple[int, int]) -> None:
        assert what == resource.RLIMIT_NOFILE
        if pair[0] in refused:
            raise ValueError("macOS refuses numbers that it has called unlimited")
        given.append(pair[0])

    fake = MagicMock(resource, RLIM_INFINITY=resource.RLIM_INFINITY, RLIMIT_NOFILE=resource.RLIMIT_NOFILE)
    fake.getrlimit, fake.setrlimit = lambda what: limits, setrlimit
    monkeypatch.setattr(module, "resource", fake)
    module.raise_descriptor_limit()
    assert given == ([] if wanted is None else [wanted])


def test_some_descriptors_are_left(monkeypatch: pytest.MonkeyPatch):
    fake = MagicMock(resource, RLIM_INFINITY=resource.RLIM_INFINITY, RLIMIT_NOFILE=resource.RLIMIT_NOFILE)
    monkeypatch.setattr(module, "resource", fake)
    # This process may have hundreds of open files.
    monkeypatch.setattr(module, "Path", lambda name: MagicMock(iterdir=lambda: iter(range(20))))
    for limit, most in [
        (10, 1),
        (1024, 1024 - 20 - module.SPARE_DESCRIPTORS),
        (1 << 20, 4096),
        (resource.RLIM_INFINITY, 4096),
    ]:
        fake.getrlimit = lambda what, limit=limit: (limit, limit)
        assert module.most_connections() == most
