"""A client that leaves is noticed at once, and its pages are free one step later: in every phase, streaming or not."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator

import pytest

from mlx_engine.serve.server import Patience
from tests.serve.served import Served, chat_body, request, served, wait_for

CHAT = "/v1/chat/completions"
LONG = "word " * 100


@pytest.fixture
def held() -> Iterator[Served]:
    """A server with one slot and without a prefix cache, whose steps wait."""
    with served(slots=1, prefix_cache=False, keep_alive_seconds=0.05) as found:
        found.gate.hold()
        yield found


def leave(server: Served, connection: socket.socket) -> None:
    """Close a connection; check that the event loop has noticed while the engine runs no step."""
    n_open, n_steps = server.worker.n_open, server.gate.n_steps
    connection.close()
    wait_for(lambda: server.worker.n_open == n_open - 1)
    assert server.gate.n_steps == n_steps


@pytest.mark.some(1)
@pytest.mark.parametrize("stream", [False, True])
def test_in_the_queue(held: Served, stream: bool):
    with held.connect(CHAT, chat_body(max_tokens=300)) as first:
        wait_for(lambda: held.scheduler.running or held.scheduler.waiting)
        second = held.connect(CHAT, chat_body(stream=stream))
        wait_for(lambda: held.worker.n_open == 2)
        held.gate.run(3)
        assert len(held.scheduler.waiting) == 1
        leave(held, second)
        held.gate.allow(2)
        wait_for(lambda: not held.scheduler.waiting)
        assert len(held.scheduler.running) == 1, "the request of another client was cancelled"
        held.gate.allow()
        assert first.recv(65536).startswith(b"HTTP/1.1 200")
    wait_for(lambda: held.all_pages_are_free)


@pytest.mark.parametrize("stream", [False, True])
def test_during_prefill(held: Served, stream: bool):
    connection = held.connect(CHAT, chat_body(LONG, stream=stream))
    held.gate.run(2)
    assert 0 < held.scheduler.running[0].request.n_prefilled < len(held.scheduler.running[0].request.prompt_ids)
    leave(held, connection)
    assert not held.all_pages_are_free
    held.gate.allow(1)
    wait_for(lambda: held.all_pages_are_free)
    assert not held.scheduler.has_work
    assert held.gate.n_steps == 3


@pytest.mark.each_value
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/messages"])
def test_during_decode(held: Served, path: str, stream: bool):
    body = chat_body(stream=stream, max_tokens=300)
    if path == "/v1/responses":
        body |= {"input": body.pop("messages"), "max_output_tokens": body.pop("max_tokens")}
    connection = held.connect(path, body)
    held.gate.run(6)
    assert len(held.scheduler.running[0].output.token_ids) >= 5
    leave(held, connection)
    held.gate.allow(1)
    wait_for(lambda: held.all_pages_are_free)
    assert not held.scheduler.has_work
    assert held.gate.n_steps == 7


def test_a_silent_prefill_is_filled_with_comments_and_chunks_without_text(held: Served):
    with held.connect(CHAT, chat_body(LONG, stream=True)) as connection:
        held.gate.allow(1)
        found = b""
        while found.count(b": prefill 64/") < 2:
            found += connection.recv(65536)
        chunks = [json.loads(data) for data in re.findall(rb"data: (.*)\n", found)]
        assert chunks
        assert [choice["delta"] for chunk in chunks for choice in chunk["choices"]] == [{}] * len(chunks)
        held.gate.allow()
        while b"[DONE]" not in found:
            found += connection.recv(65536)


@pytest.mark.slow
def test_a_reader_that_does_not_read_is_dropped_and_stops_nobody():
    with served(slots=2, prefix_cache=False, patience=Patience(read=30), kv_memory=8 << 20) as server:
        # Log-probabilities make the stream larger than the buffers of the sockets.
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(server.address)
        with slow:
            long = chat_body(stream=True, max_tokens=400, logprobs=True, top_logprobs=20)
            slow.sendall(request(CHAT, long))
            wait_for(lambda: server.worker.n_open == 1)
            assert server.post(CHAT, long).content.endswith(b"[DONE]\n\n")
            wait_for(lambda: server.later(31) or server.worker.n_open == 0)
            wait_for(lambda: server.all_pages_are_free)
            assert server.chat().status_code == 200


@pytest.mark.slow
def test_a_reply_that_waits_for_its_reader_takes_no_place_in_the_queue():
    with served(slots=1, queue=0, prefix_cache=False, kv_memory=8 << 20) as server, socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(server.address)
        slow.sendall(request(CHAT, chat_body(stream=True, max_tokens=400, logprobs=True, top_logprobs=20)))
        wait_for(lambda: server.worker.n_open == 1)
        wait_for(lambda: server.worker.n_unfinished == 0)
        assert server.worker.n_open == 1
        assert server.chat().status_code == 200
