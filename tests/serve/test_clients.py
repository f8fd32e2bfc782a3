"""The tools of `python -m tests.clients` report what is wrong; the clients themselves need a network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clients.recorder import Exchange, Recording, recording
from tests.serve.served import HTTP, Served, chat_body, wait_for

pytest.importorskip("jsonschema")
from tests.clients.documents import Document, documents

CHAT = "/v1/chat/completions"
INTEGER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
COMPLETION = {
    "properties": {
        "choices": {"items": {"properties": {"finish_reason": {"enum": ["stop"]}}}},
        "usage": {"type": "object"},
    }
}
NAMES = ("CreateChatCompletionResponse", "CreateChatCompletionStreamResponse", "ErrorResponse", "Model")


@pytest.fixture
def document(tmp_path: Path) -> Document:
    schemas = {**dict.fromkeys(NAMES, INTEGER), "CreateCompletionResponse": COMPLETION}
    path = tmp_path / "document.json"
    path.write_text(json.dumps({"components": {"schemas": schemas}}))
    return Document(path)


def exchange(body: Any, *, path: str = CHAT, status: int = 200, is_whole: bool = True) -> Exchange:
    is_stream = isinstance(body, bytes)
    media_type = "text/event-stream" if is_stream else "application/json"
    return Exchange("POST", path, b"", status, media_type, body if is_stream else json.dumps(body).encode(), is_whole)


def test_bytes_and_exchanges_are_recorded(server: Served):
    with recording(server.url) as recorder, server.client() as client:
        whole = client.post(recorder.url + CHAT, json=chat_body())
        stream = client.post(recorder.url + CHAT, json=chat_body(stream=True))
        client.get(recorder.url + "/v1/models/other")
    first, second, third = recorder.exchanges()
    assert (first.body, second.body) == (whole.content, stream.content)
    assert second.events[-1] == "[DONE]"
    assert json.loads(first.request)["max_tokens"] == 8
    assert (third.method, third.path, third.status, third.is_whole) == ("GET", "/v1/models/other", 404, True)


def test_a_client_that_leaves_ends_the_connection_to_the_server(server: Served):
    with recording(server.url) as recorder:
        with HTTP.stream("POST", recorder.url + CHAT, json=chat_body(max_tokens=1000, stream=True)) as stream:
            next(stream.iter_lines())
        wait_for(lambda: not server.worker.n_open)
    (found,) = recorder.exchanges()
    assert not found.is_whole


def test_a_response_that_is_cut_off_is_not_whole():
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    cut = Recording(bytearray(b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n"), bytearray(head + b"c\r\ndata: 1\n\ndat\r\n"))
    (found,) = cut.exchanges()
    assert (found.is_whole, found.events) == (False, ["1"])


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (exchange({"a": 1}), None),
        (exchange({"a": "1"}), "CreateChatCompletionResponse.a: '1' is not of type 'integer'"),
        (exchange({"a": "1"}, status=400), "ErrorResponse.a"),
        (exchange({"a": "1"}, path="/v1/models/x"), "Model.a"),
        (exchange({"a": 1}, status=201), "expected the status 200"),
        (exchange(b'data: {"a": 1}\n\ndata: [DONE]\n\n'), None),
        (exchange(b'data: {"a": 1}\n\ndata: {"b": 1}\n\ndata: [DONE]\n\n'), "'a' is a required property"),
        (exchange(b'data: {"a": 1}\n\n'), "expected [DONE]"),
        (exchange(b'data: {"a": 1}\n\n', is_whole=False), None),
        (exchange(b"data: {\n\ndata: [DONE]\n\n"), "Expecting property name"),
        (exchange(b'data: {"a": 1, "error": 1}\n\n'), None),
        (exchange(b'data: {"error": 1}\n\n'), "ErrorResponse"),
        (exchange({"b": 1}, path="/tokenize"), None),
    ],
    ids=str,
)
def test_every_reply_chunk_and_error_is_checked(document: Document, found: Exchange, problem: str | None):
    counts, wrong = document.check([found])
    assert len(wrong) == (problem is not None)
    assert problem is None or problem in wrong[0]
    assert counts.total() > 0 or problem is not None or found.path == "/tokenize"


def test_null_is_allowed_in_chunks_of_completions_alone(document: Document):
    value = {"choices": [{"finish_reason": None}], "usage": None}
    assert document.problems("CreateCompletionResponse", value, is_chunk=True) == []
    assert len(document.problems("CreateCompletionResponse", value)) == 2
    chunk = exchange(b"data: " + json.dumps(value).encode() + b"\n\ndata: [DONE]\n\n", path="/v1/completions")
    assert [is_chunk for _, _, is_chunk in documents(chunk)] == [True]
