"""Faults of the engine and of clients: what each client sees, and that the others do not notice."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import anyio
import numpy as np
import pytest

from mlx_engine.backends.batch import Batch
from mlx_engine.commands import app
from mlx_engine.serve.app import refuse
from mlx_engine.serve.errors import ApiError
from mlx_engine.serve.server import Patience
from tests.patience import PATIENCE
from tests.serve.served import HTTP, JSON, Served, chat_body, events, micro, request, served, wait_for
from tests.serve.shapes import Failure, checked

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# Token ids that no other prompt of these tests has.
BAD = [77, 78, 77]


@pytest.fixture(scope="module")
def hasty() -> Iterator[Served]:
    """A server whose clock tests put forward (`later`)."""
    with served(patience=Patience(head=600, read=300), max_body=1 << 20, prefix_cache=False) as found:
        yield found


def body(prompt: object = "hello", **parameters: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **parameters}


def read(connection: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    found = b""
    while data := connection.recv(65536):
        found += data
    return found


def until(connection: socket.socket, *ends: bytes) -> bytes:
    """Read until what was read has one of these ends; the server must not close the connection before."""
    found = b""
    while not found.endswith(ends):
        data = connection.recv(65536)
        assert data, "the server has closed the connection"
        found += data
    return found


def error_of(reply: bytes) -> Any:
    """Return the status and the code of the only reply of a connection."""
    head, _, content = reply.partition(b"\r\n\r\n")
    return int(head.split()[1]), checked(json.loads(content), Failure).error.code


# ---- faults of the engine ----


@pytest.mark.some(1)
@pytest.mark.parametrize("stream", [False, True])
def test_logits_that_are_not_finite_are_an_error_of_one_request(
    server: Served, monkeypatch: pytest.MonkeyPatch, stream: bool
):
    embed = micro().model.embed

    def faulty(ids: list[int], positions: Any) -> Any:
        return np.where(np.array(ids)[:, None] == BAD[0], np.float32("nan"), embed(ids, positions))

    monkeypatch.setattr(micro().model, "embed", faulty)
    with ThreadPoolExecutor(1) as clients:
        good = clients.submit(server.post, COMPLETIONS, body("good", max_tokens=200))
        wait_for(lambda: server.scheduler.running)
        bad = server.post(COMPLETIONS, body(BAD, stream=stream))
        assert good.result().json()["usage"]["completion_tokens"] == 200
    error = checked(events(bad.content)[-1] if stream else bad.json(), Failure).error
    assert (error.code, error.type, error.param) == ("engine_error", "server_error", None)
    assert error.message.startswith("logits after 3 tokens: expected finite numbers, found NaN (")
    assert bad.status_code == (200 if stream else 500)
    assert server.post(COMPLETIONS, body("good")).status_code == 200


@pytest.mark.some(1)
@pytest.mark.parametrize("stream", [False, True])
def test_a_fault_in_a_pass_ends_the_request_that_has_it(server: Served, monkeypatch: pytest.MonkeyPatch, stream: bool):
    forward = micro().model.forward

    def faulty(batch: Batch, *given: Any) -> Any:
        if BAD[0] in list(batch.ids):
            raise FloatingPointError("planted")
        return forward(batch, *given)

    monkeypatch.setattr(micro().model, "forward", faulty)
    with ThreadPoolExecutor(1) as clients:
        good = clients.submit(server.post, COMPLETIONS, body("good", max_tokens=200))
        wait_for(lambda: server.scheduler.running)
        bad = server.post(COMPLETIONS, body(BAD, stream=stream))
        assert good.result().json()["usage"]["completion_tokens"] == 200
    found = events(bad.content)[-1] if stream else bad.json()
    assert found["error"]["code"] == "internal_error"
    assert bad.status_code == (200 if stream else 500)


def test_a_fault_in_every_pass_ends_every_request_and_not_the_server(monkeypatch: pytest.MonkeyPatch):
    with served(prefix_cache=False) as server:
        with monkeypatch.context() as patch:
            patch.setattr(micro().model, "forward", lambda *given: 1 / 0)
            for reply in [server.chat() for _ in range(3)]:
                assert (reply.status_code, reply.json()["error"]["code"]) == (500, "internal_error")
        assert server.state() == 200
        assert server.all_pages_are_free
        assert server.chat().status_code == 200


def test_a_fault_in_the_template_ends_the_request(server: Served, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr("mlx_engine.tokenizer.chat._rendered", lambda *given: 1 / 0)
        reply = server.chat(stream=True)
        assert (reply.status_code, reply.json()["error"]["code"]) == (500, "internal_error")
        assert server.post(COMPLETIONS, body()).status_code == 200
    assert server.chat().status_code == 200


@pytest.mark.some(1)
@pytest.mark.parametrize("fault", [SystemExit(0), MemoryError(), OSError(28, "No space left on device")])
def test_the_process_of_a_dead_engine_fails(monkeypatch: pytest.MonkeyPatch, fault: BaseException):
    def die(*given: object) -> None:
        raise fault

    # The last that the thread does before it waits for requests. The threads of other servers do not reach it.
    monkeypatch.setattr("mlx_engine.commands.serve.collect_garbage_again", die)
    with pytest.raises(RuntimeError, match="the engine thread has died") as found:
        app(["serve", "--port", "0", "--kv-memory", "4MB"], standalone_mode=False)
    assert found.value.__cause__ is fault


# ---- clients that make the server wait ----


def connections_of(server: Served) -> list[Any]:
    """Return the server's connections."""
    return list(server.server.server_state.connections)


def test_a_head_that_does_not_end(hasty: Served):
    """Nothing, a part of the first head, and a part of the second: all wait at the same time."""
    parts = (
        b"",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n",
        b"GET /health HTT",
    )
    with ExitStack() as stack:
        connections = [stack.enter_context(socket.create_connection(hasty.address, timeout=PATIENCE)) for _ in parts]
        connections[2].sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert until(connections[2], b"}").startswith(b"HTTP/1.1 200")
        for connection, part in zip(connections, parts, strict=True):
            connection.sendall(part)
        wait_for(lambda: sorted(each.conn.trailing_data[0] for each in connections_of(hasty)) == sorted(parts))
        hasty.later(601)
        nothing, first, second = map(read, connections)
    assert nothing == b""
    assert error_of(first) == error_of(second) == (408, "request_timeout")


def test_a_reader_that_does_not_read_loses_its_connection(hasty: Served):
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(hasty.address)
        slow.sendall(request(COMPLETIONS, body(max_tokens=400, stream=True, logprobs=20)))
        wait_for(lambda: hasty.worker.n_open == 1)
        assert hasty.post(COMPLETIONS, body()).status_code == 200
        # Nothing is read, however late it is.
        wait_for(lambda: hasty.later(301) or hasty.worker.n_open == 0)
        wait_for(lambda: not connections_of(hasty))
        wait_for(lambda: hasty.all_pages_are_free)


@pytest.mark.slow
def test_a_slow_reader_that_reads_keeps_its_connection(hasty: Served):
    wait_for(lambda: not connections_of(hasty))
    with socket.socket() as slow:
        slow.settimeout(PATIENCE)
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(hasty.address)
        slow.sendall(request(COMPLETIONS, body(max_tokens=300, stream=True, logprobs=20)))
        reply = slow.recv(1024)
        (connection,) = connections_of(hasty)
        wait_for(lambda: connection._n_unsent > 0)
        wait_for(lambda: hasty.worker.n_unfinished == 0)  # all that is left will be written at once
        n_rounds = 0
        while n_rounds < 3:  # together longer than the server waits for a reader that reads nothing
            assert b"data: [DONE]" not in reply, "too early"
            hasty.later(200)
            moved_at = connection._moved_at
            for _ in range(200):
                reply += slow.recv(4096)
                hasty.tick()
                if connection._moved_at != moved_at:
                    break
            else:
                pytest.fail("the server has not noticed that its client reads")
            n_rounds += connection._n_unsent > 0  # a part has been read, and not all that was written
        reply += until(slow, b"0\r\n\r\n")
    assert b"data: [DONE]" in reply


# ---- requests that are none ----


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 100_000 + b"\r\n\r\n",
        b"".join([b"GET /health HTTP/1.1\r\nHost: x\r\n", *(b"X-%d: 1\r\n" % i for i in range(10_000)), b"\r\n"]),
    ],
    ids=["request line", "header", "many headers"],
)
@pytest.mark.parametrize("n_pieces", [1, 10])
def test_long_heads_are_refused(server: Served, head: bytes, n_pieces: int):
    with socket.create_connection(server.address, timeout=PATIENCE) as connection:
        size = -(-len(head) // n_pieces)
        for start in range(0, len(head), size):
            connection.sendall(head[start : start + size])
        assert error_of(read(connection)) == (431, "headers_too_large")


@pytest.mark.parametrize(
    "data",
    [
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20 + b"\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/completions HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX: \x00\r\n\r\n",
    ],
    ids=["words", "TLS", "negative length", "two lengths", "chunk", "no host", "null"],
)
def test_what_is_no_request_is_400(server: Served, data: bytes):
    with socket.create_connection(server.address, timeout=PATIENCE) as connection:
        connection.sendall(data)
        assert error_of(read(connection)) == (400, "invalid_http")


def test_a_length_that_is_too_short_begins_another_request(server: Served):
    with socket.create_connection(server.address, timeout=PATIENCE) as connection:
        connection.sendall(request(COMPLETIONS, body()) + b"garbage\r\n\r\n")
        reply = read(connection)
    assert reply.startswith(b"HTTP/1.1 200")
    assert error_of(reply[reply.rindex(b"HTTP/1.1 400") :]) == (400, "invalid_http")


def test_a_client_sees_why_its_large_body_is_refused(hasty: Served, monkeypatch: pytest.MonkeyPatch):
    """Its reply arrives although the client goes on to send, and although it was never read to its end."""
    monkeypatch.setattr("mlx_engine.serve.app.LINGER_SECONDS", PATIENCE)
    large = b" " * (8 << 20)
    assert HTTP.post(hasty.url + COMPLETIONS, content=large, headers=JSON).status_code == 413
    assert HTTP.post(hasty.url + COMPLETIONS, content=iter([large]), headers=JSON).status_code == 413
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection(hasty.address, timeout=PATIENCE) as connection:
        connection.sendall(f"{head}Content-Length: {len(large)}\r\n\r\n".encode() + large)
        connection.shutdown(socket.SHUT_WR)
        assert error_of(read(connection)) == (413, "request_too_large")


def test_what_a_client_still_sends_is_discarded_before_its_connection_is_closed():
    """Closing a socket with unread data would reset the connection, and the reply would be lost."""
    order, left = [], iter([True, True, False])

    async def receive() -> dict[str, Any]:
        order.append("read")
        return {"type": "http.request", "body": b" ", "more_body": next(left)}

    async def send(message: Any) -> None:
        order.append("end" if message.get("more_body") is False else "reply")

    async def wait() -> None:
        order.append("wait")

    anyio.run(refuse, ApiError(408, "too slow", headers={"Connection": "close"}).response(), receive, send, wait)
    assert order == ["reply", "reply", *["wait", "read"] * 3, "end"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "latin-1"])
def test_bodies_are_utf_8(server: Served, encoding: str):
    data = json.dumps(body("ä"), ensure_ascii=False).encode(encoding)
    reply = HTTP.post(server.url + COMPLETIONS, content=data, headers=JSON)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_json")


def test_pipelined_requests_are_answered_in_order(server: Served):
    first, second = request(COMPLETIONS, body("a", max_tokens=20)), request(COMPLETIONS, body("b", max_tokens=2))
    last = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with socket.create_connection(server.address, timeout=PATIENCE) as connection:
        connection.sendall(first + second + last)
        replies = [part.partition(b"\r\n\r\n")[2] for part in read(connection).split(b"HTTP/1.1 200 OK")[1:]]
    counts = [json.loads(reply)["usage"]["completion_tokens"] for reply in replies[:2]]
    assert counts == [20, 2]
    assert json.loads(replies[2]) == {"status": "ok"}


def test_a_connection_is_kept(server: Served):
    with socket.create_connection(server.address, timeout=PATIENCE) as connection:
        for path, of in [(CHAT, chat_body()), (CHAT, {}), (COMPLETIONS, body(stream=True)), ("/v2", {})]:
            connection.sendall(request(path, of))
            assert until(connection, b"}", b"0\r\n\r\n").startswith(b"HTTP/1.1 ")


# ---- the end ----


@pytest.mark.parametrize("stream", [False, True])
def test_answers_that_take_too_long_end_with_an_error_when_the_server_stops(stream: bool):
    with served() as server, ThreadPoolExecutor(1) as clients:
        server.gate.hold()
        running = clients.submit(server.chat, max_tokens=50, stream=stream)
        wait_for(lambda: server.worker.n_open == 1)
        server.gate.run(2)
        server.server.handle_exit(15, None)
        server.server.handle_exit(15, None)
        reply = running.result()
        error = events(reply.content)[-1]["error"] if stream else reply.json()["error"]
        assert error["code"] == "closing"
        server.gate.allow()
        assert server.finished.wait(PATIENCE)


def test_a_port_in_use_is_named(server: Served, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as found:
        app(["serve", "--port", str(server.address[1])])
    assert found.value.code == 1
    assert f"127.0.0.1:{server.address[1]} is in use by another program" in capsys.readouterr().err
