"""Every error in OpenAI's form: its status, its parameter, and that nothing was generated."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import pytest
from numpy.exceptions import AxisError

from mlx_engine.errors import CacheFullError, NotFiniteError, again
from mlx_engine.serve.errors import ApiError, api_error
from tests.patience import PATIENCE
from tests.serve.served import HTTP, JSON, MICRO, Served, chat_body, served
from tests.serve.shapes import Failure, checked

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def failure(response: httpx.Response, status: int, param: str | None, code: str) -> Any:
    assert response.status_code == status, response.text
    error = checked(response.json(), Failure).error
    assert (error.param, error.code) == (param, code)
    return error


@pytest.mark.some(12)
@pytest.mark.parametrize(
    ("parameters", "param", "code"),
    [
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": "hello"}, "messages", "invalid_type"),
        ({"messages": None}, "messages", "invalid_type"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "invalid_value"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "invalid_value"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
            "invalid_value",
        ),
        ({"messages": [{"role": "user", "content": "x", "mood": "good"}]}, "messages[0]", "invalid_value"),
        ({"max_tokens": -1}, "max_tokens", "invalid_value"),
        ({"max_tokens": None, "max_completion_tokens": -1}, "max_completion_tokens", "invalid_value"),
        ({"max_tokens": "8"}, "max_tokens", "invalid_type"),
        ({"max_tokens": 1.5}, "max_tokens", "invalid_type"),
        ({"max_tokens": True}, "max_tokens", "invalid_type"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens", "invalid_value"),
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"top_p": 1.5}, "top_p", "invalid_value"),
        ({"top_k": -2}, "top_k", "invalid_value"),
        ({"min_p": 2}, "min_p", "invalid_value"),
        ({"presence_penalty": 3}, "presence_penalty", "invalid_value"),
        ({"frequency_penalty": "x"}, "frequency_penalty", "invalid_type"),
        ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "invalid_value"),
        ({"seed": 1 << 64}, "seed", "invalid_value"),
        ({"stop": [""]}, "stop", "invalid_value"),
        ({"stop": 3}, "stop", "invalid_type"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 5}, "n", "invalid_value"),
        ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        ({"stream": True, "stream_options": {"speed": 3}}, "stream_options.speed", "unknown_parameter"),
        ({"temprature": 1}, "temprature", "unknown_parameter"),
        ({"unheard_of": None}, "unheard_of", "unknown_parameter"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "invalid_value"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "invalid_type"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]},
            "tools[0].function.x",
            "unknown_parameter",
        ),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name", "invalid_type"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tool_choice": "sometimes"}, "tool_choice", "invalid_value"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "invalid_value"),
        ({"functions": [{}]}, "functions", "unsupported_parameter"),
        ({"store": True}, "store", "unsupported_parameter"),
        ({"modalities": ["audio"]}, "modalities", "unsupported_parameter"),
        ({"reasoning_effort": "very"}, "reasoning_effort", "invalid_type"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)
def test_a_wrong_parameter_is_named(server: Served, parameters: dict[str, Any], param: str, code: str):
    error = failure(server.post(CHAT, chat_body(**parameters)), 400, param, code)
    assert error.type == "invalid_request_error"
    assert param.split("[")[0].split(".")[0] in error.message


@pytest.mark.parametrize(
    ("parameters", "param", "code"),
    [
        ({}, "prompt", "missing_required_parameter"),
        ({"prompt": []}, "prompt", "invalid_value"),
        ({"prompt": ""}, "prompt", "invalid_value"),
        ({"prompt": ["a", 1]}, "prompt", "invalid_value"),
        ({"prompt": [10**9]}, "prompt", "invalid_value"),
        ({"prompt": [[-1]]}, "prompt", "invalid_value"),
        ({"prompt": {"a": 1}}, "prompt", "invalid_type"),
        ({"prompt": "x", "suffix": "y"}, "suffix", "unsupported_parameter"),
        ({"prompt": "x", "best_of": 2}, "best_of", "unsupported_parameter"),
        ({"prompt": "x", "echo": True, "logprobs": 21}, "logprobs", "invalid_value"),
        ({"prompt": "x", "prompt_logprobs": 21}, "prompt_logprobs", "invalid_value"),
        ({"prompt": "x", "logprobs": True}, "logprobs", "invalid_type"),
        ({"prompt": "x", "messages": []}, "messages", "unknown_parameter"),
        ({"prompt": ["x"] * 100}, "prompt", "invalid_value"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)
def test_a_wrong_parameter_of_a_completion_is_named(server: Served, parameters: dict[str, Any], param: str, code: str):
    failure(server.post(COMPLETIONS, parameters), 400, param, code)


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_is_truncated(server: Served, stream: bool):
    response = server.chat("word " * 3000, stream=stream)
    message = failure(response, 400, "messages", "context_length_exceeded").message
    assert "4,096" in message
    assert "max_tokens is 8" in message


def test_the_context_of_a_server_may_be_smaller_than_the_model_s():
    with served(context_len=60, slots=1) as small:
        reply = small.chat("a", max_tokens=None).json()
        assert (reply["usage"]["total_tokens"], reply["choices"][0]["finish_reason"]) == (60, "length")
        message = failure(small.chat("word " * 30), 400, "messages", "context_length_exceeded").message
        assert "context_len allows 60 for prompt and answer" in message
        refused = small.post("/v1/completions", {"prompt": "a", "max_tokens": 60}).json()["error"]["message"]
        assert "the prompt has 1 token and max_tokens is 60; context_len allows 60 for prompt and answer" in refused


def test_memory_is_a_limit_as_the_context_is():
    with served(kv_memory=400_000, slots=1) as small:
        message = failure(small.chat("word " * 300, max_tokens=400), 400, "messages", "context_length_exceeded").message
        assert f"{small.scheduler.pool.n_tokens:,}" in message
        assert small.all_pages_are_free


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b"null", b"\xff\xfe", b'{"messages": "\xff"}', b"[" * 100_000, b'{"seed": 1e999}', b"{}{}"],
)
def test_a_body_that_is_no_object(server: Served, body: bytes):
    response = HTTP.post(server.url + CHAT, content=body, headers=JSON)
    assert checked(response.json(), Failure).error.type == "invalid_request_error"
    assert response.status_code == 400


def test_surrogates_are_refused(server: Served):
    body = b'{"messages": [{"role": "user", "content": "\\ud800"}]}'
    response = HTTP.post(server.url + CHAT, content=body, headers=JSON)
    assert response.status_code == 400


def test_other_models_paths_and_methods(server: Served):
    failure(server.chat(model="gpt-4"), 404, "model", "model_not_found")
    failure(HTTP.get(server.url + "/v1/models/gpt-4"), 404, "model", "model_not_found")
    failure(HTTP.get(server.url + "/v2"), 404, None, "not_found")
    wrong = HTTP.get(server.url + CHAT)
    failure(wrong, 405, None, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"


def test_a_key_is_asked_for():
    with served(api_key="secret") as locked:
        for key in (
            None,
            "Bearer wrong",
            "Bearer secre",
            "Bearer secrets",
            "Bearer s",
            "Bearer",
            "Basic secret",
            "secret",
        ):
            headers = {} if key is None else {"Authorization": key}
            response = locked.post(CHAT, chat_body(), headers=headers)
            failure(response, 401, None, "invalid_api_key")
            assert response.headers["www-authenticate"] == "Bearer"
        assert HTTP.get(locked.url + "/metrics").status_code == 401
        assert HTTP.get(locked.url + "/health").json() == {"status": "ok"}
        for scheme in ("Bearer", "bearer"):
            assert locked.post(CHAT, chat_body(), headers={"Authorization": f"{scheme} secret"}).status_code == 200


def raw(server: Served, request: bytes) -> bytes:
    with socket.create_connection(server.address, timeout=PATIENCE) as connection:
        connection.sendall(request)
        answer = b""
        while not answer.endswith(b"}}") and (piece := connection.recv(65536)):
            answer += piece
        return answer


def test_large_bodies_are_refused_before_they_are_read():
    with served(max_body=1000) as small:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
        announced = raw(small, f"{head}Content-Length: 100000000\r\n\r\n".encode())
        assert announced.startswith(b"HTTP/1.1 413")
        sent = raw(small, f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + b"400\r\n" + b" " * 1024 + b"\r\n")
        assert sent.startswith(b"HTTP/1.1 413")
        assert json.loads(sent.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_too_large"
        assert small.chat().status_code == 200


def test_a_client_that_sends_a_large_body_reads_the_refusal():
    with served(max_body=1000) as small, socket.create_connection(small.address, timeout=PATIENCE) as connection:
        for head in ("Content-Length: 20000000", "Content-Length: 20000000\r\nExpect: 100-continue"):
            head = f"Content-Type: application/json\r\n{head}"
            connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n".encode())
            connection.sendall(b" " * 20_000_000)
            assert connection.recv(65536).startswith(b"HTTP/1.1 413")


def test_a_body_that_ends_early_is_no_request(server: Served):
    with socket.create_connection(server.address, timeout=PATIENCE) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n"
        connection.sendall(head.encode() + b'{"messages"')
    assert server.chat().status_code == 200


@pytest.mark.parametrize(
    "error",
    [
        ApiError(429, "full", code="rate_limit_exceeded", headers={"Retry-After": "1"}),
        NotFiniteError(n_tokens=3, found="NaN", origin="first in output"),
        CacheFullError(length=3, wanted=2, capacity=4),
        OSError(2, "gone"),
        UnicodeDecodeError("utf-8", b"a", 0, 1, "bad"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_of_several_requests_is_one_for_each(error: Exception):
    """Each has the text and the attributes, and the traceback of its own request."""
    made = [again(error) for _ in range(2)]
    for one in made:
        with pytest.raises(type(error)) as raised:
            raise one
        assert raised.value is one
        assert (str(one), vars(one), one.args) == (str(error), vars(error), error.args)
    assert error.__traceback__ is None
    assert len({id(one) for one in (error, *made)}) == 3


class OddError(Exception):
    """An exception that cannot be made from its `args`."""

    def __new__(cls, *, code: int) -> OddError:
        return super().__new__(cls, code)

    def __init__(self, *, code: int) -> None:
        super().__init__(code)


@pytest.mark.parametrize(
    "error", [OSError(2, "gone", "here"), AxisError(3, 2), OddError(code=3)], ids=["file", "slots", "constructor"]
)
def test_an_error_that_cannot_be_copied_stays_itself(error: Exception):
    assert again(error) is error


def test_errors_that_nobody_expects():
    assert api_error(KeyError("x"), "prompt").status == 500
    assert "KeyError" in api_error(KeyError("x"), "prompt").message
    assert api_error(CacheFullError(length=1, wanted=2, capacity=2), "prompt").code == "engine_error"


LONG = "m" * 5000


@pytest.mark.parametrize(
    ("method", "path", "body", "param"),
    [
        ("POST", CHAT, chat_body(model=LONG), "model"),
        ("POST", CHAT, chat_body(**{LONG: 1}), LONG),
        ("POST", CHAT, chat_body(stream=True, stream_options={LONG: 1}), f"stream_options.{LONG}"),
        ("POST", CHAT, chat_body(logit_bias={LONG: 1}), "logit_bias"),
        ("POST", CHAT, chat_body(chat_template_kwargs={LONG: 1}), "chat_template_kwargs"),
        ("POST", CHAT, chat_body(messages=[{"role": LONG, "content": "a"}]), "messages[0].role"),
        ("POST", CHAT, chat_body(messages=[{"role": "user", "content": "a", LONG: 1}]), "messages[0]"),
        ("POST", COMPLETIONS, {"prompt": "a", "echo": LONG}, "echo"),
        ("GET", f"/v1/models/{LONG}", None, "model"),
        ("GET", f"/{LONG}", None, None),
        (LONG[:999], CHAT, None, None),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_long_name_is_not_repeated(server: Served, method: str, path: str, body: Any, param: str | None):
    response = HTTP.request(method, server.url + path, json=body)
    error = checked(response.json(), Failure).error
    assert 400 <= response.status_code < 500
    assert len(error.message) < 600
    assert "m" * 201 not in error.message
    assert error.param == (param if param is None or len(param) <= 200 else error.param)
    assert len(error.param or "") <= 200


@pytest.mark.parametrize("header", ["Host", "Origin", "Content-Type"])
def test_a_long_header_is_not_repeated(header: str):
    with served(hosts={"localhost", "127.0.0.1"}) as local:
        headers = {"Host": "localhost", "Content-Type": "application/json", header: LONG}
        response = HTTP.post(local.url + CHAT, content=b"{}", headers=headers)
    assert response.status_code == 403
    assert len(response.json()["error"]["message"]) < 600


def test_errors_do_not_say_where_the_model_lies(server: Served, monkeypatch: pytest.MonkeyPatch):
    failures = [HTTP.post(server.url + "/detokenize", json={"tokens": [10**8]})]
    with monkeypatch.context() as patch:
        patch.setattr("mlx_engine.tokenizer.tokenizer.Tokenizer.chat_template", "{{ raise_exception('no') }}")
        failures.append(server.chat())
        patch.setattr("mlx_engine.tokenizer.tokenizer.Tokenizer.chat_template", "{% for %}")
        failures.append(server.chat())
    for response in failures:
        message = response.json()["error"]["message"]
        assert message.startswith("model-q8_0.gguf: expected "), message
        assert str(MICRO.parent) not in response.text
