"""The OpenAPI document: it has every route, and accepts a request exactly if the server does."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_engine.serve.openapi import OPERATIONS
from tests.serve.served import HTTP, Served, chat_body, served

CHAT, COMPLETIONS, DETOKENIZE = "/v1/chat/completions", "/v1/completions", "/detokenize"
TOKENIZE, EMBEDDINGS = "/tokenize", "/v1/embeddings"
RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
LETTERS = list("abeilos \ufffd")  # any answer has one of them soon
USER = {"role": "user", "content": "a"}


@pytest.fixture(scope="module")
def document(server: Served) -> Any:
    return HTTP.get(server.url + "/openapi.json").json()


def test_every_route_is_described(server: Served, document: Any):
    app = server.server.config.app
    routes = {(route.path.replace(":path", ""), method.lower()) for route in app.routes for method in route.methods}
    others = {(path, "get") for path in ("/", "/events", "/openapi.json")}
    described = {(path, method) for path, methods in document["paths"].items() for method in methods}
    assert {route for route in routes if route[1] != "head"} - others == described
    assert len(OPERATIONS) == len(described)


def test_the_document_needs_no_key_and_asks_for_one():
    with served(api_key="secret") as locked:
        found = HTTP.get(locked.url + "/openapi.json").json()
    assert found["security"] == [{"key": []}]
    assert found["paths"]["/health"]["get"]["security"] == []


ASKED = {"role": "user", "content": "a"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "b"}
VALID: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {}),
    (CHAT, {"max_tokens": 1, "temperature": 0, "top_p": 1, "top_k": -1, "min_p": 1, "seed": -(1 << 63), "n": 4}),
    (CHAT, {"max_tokens": 0, "top_p": 0}),
    (CHAT, {"max_tokens": None, "max_completion_tokens": 0}),
    (CHAT, {"max_tokens": 2.0, "seed": 3.0, "top_k": 0.0, "n": 1.0}),
    (CHAT, {"logprobs": True, "top_logprobs": 20, "logit_bias": {"0": 100}, "stop": ["a", "b"]}),
    (CHAT, {"logprobs": None, "top_logprobs": 0, "logit_bias": None, "stop": None, "stream": None}),
    (CHAT, {"stream_options": None, "stream": False}),
    (CHAT, {"stop": ["a" * 1000] * 16}),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 1, "stop": "a" * 1000}),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 1, "stop_token_ids": [0, 5, 0]}),
    (CHAT, {"stop_token_ids": []}),
    (CHAT, {"tools": [], "store": False, "parallel_tool_calls": True, "response_format": {"type": "text"}}),
    (CHAT, {"metadata": {"a": [1]}, "user": "x", "service_tier": "auto", "store": None}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}], "name": "b", "refusal": None}]}),
    (CHAT, {"messages": [ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT]}),
    (COMPLETIONS, {"prompt": "a", "echo": True, "max_tokens": 1}),
    (COMPLETIONS, {"prompt": "a", "echo": True, "logprobs": 0, "max_tokens": 1, "prompt_logprobs": 3}),
    (COMPLETIONS, {"prompt": "a", "echo": True, "max_tokens": 0}),
    (COMPLETIONS, {"prompt": ["a", "b"], "logprobs": 0, "echo": False, "max_tokens": 1}),
    (COMPLETIONS, {"prompt": [1.0, 2], "best_of": 1, "max_tokens": 1}),
    (COMPLETIONS, {"prompt": [[1], [2]], "max_tokens": 1}),
    (DETOKENIZE, {"tokens": [1, 2.0]}),
    *((TOKENIZE, body) for body in ({"content": "a"}, {"prompt": "a", "add_special_tokens": False})),
    *((EMBEDDINGS, {"input": given}) for given in ("a", ["a", "b"], [1, 2], [[1], [2, 3]])),
    (EMBEDDINGS, {"input": "a", "dimensions": 1, "encoding_format": "base64", "user": "me"}),
    (RESPONSES, {"input": "a", "max_output_tokens": 1, "store": True, "previous_response_id": None, "user": "b"}),
    (RESPONSES, {"input": [USER, {"type": "web_search_call"}], "max_output_tokens": 100_000, "stop": LETTERS}),
    (RESPONSES, {"input": [{"type": "reasoning", "content": None}, USER], "max_output_tokens": 1.0}),
    (RESPONSES, {"input": "a", "max_output_tokens": 1, "reasoning": {"effort": "low"}, "include": ["x"]}),
    (MESSAGES, {"messages": [USER], "max_tokens": 1, "system": [{"type": "text", "text": "b"}], "betas": ["c"]}),
    (MESSAGES, {"messages": [USER, {"role": "system", "content": "b"}], "max_tokens": 1, "stop_sequences": ["c"]}),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "max_tokens": 0}),
    (MESSAGES, {"messages": [USER], "max_tokens": 1, "thinking": {"type": "adaptive"}, "stop": None}),
    (COUNT, {"messages": [USER], "model": "micro"}),
]
INVALID: list[tuple[str, dict[str, Any]]] = [
    *((CHAT, {name: -2}) for name in ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")),
    *((CHAT, {name: 2.5}) for name in ("top_p", "min_p", "presence_penalty", "frequency_penalty", "n", "seed")),
    *((CHAT, {name: "1"}) for name in ("max_tokens", "temperature", "stream", "n", "logprobs", "messages")),
    (CHAT, {"n": 5}),
    (CHAT, {"messages": [{"role": "user", "content": "a", "tool_calls": [CALL]}]}),
    (CHAT, {"messages": [{"role": "assistant"}]}),
    (CHAT, {"tools": [{"type": "function", "function": {"name": ""}}]}),
    (CHAT, {"tools": [{"type": "function", "function": {}}]}),
    (CHAT, {"seed": 1 << 65}),
    (CHAT, {"model": 3}),
    (CHAT, {"unheard_of": None}),
    (CHAT, {"store": 0}),
    (CHAT, {"parallel_tool_calls": 1}),
    (CHAT, {"service_tier": "flex"}),
    (CHAT, {"tools": [{"type": "function"}]}),
    (CHAT, {"stop": [""]}),
    (CHAT, {"stop": ["a"] * 17}),
    (CHAT, {"stop_token_ids": [-1]}),
    (CHAT, {"stop_token_ids": [1 << 40]}),
    (CHAT, {"stop_token_ids": ["7"]}),
    (CHAT, {"stop": ["a" * 1001]}),
    (CHAT, {"stop": "a" * 1001}),
    (CHAT, {"logit_bias": {"01": 1}}),
    (CHAT, {"logit_bias": {"9" * 5000: 1}}),
    (CHAT, {"logit_bias": {"1": 101}}),
    (CHAT, {"top_logprobs": 1}),
    (CHAT, {"top_logprobs": 21, "logprobs": True}),
    (CHAT, {"stream_options": {"include_usage": True}}),
    (CHAT, {"stream_options": {"other": True}, "stream": True}),
    (CHAT, {"messages": []}),
    (CHAT, {"messages": [{"role": "robot", "content": "a"}]}),
    (CHAT, {"messages": [{"role": "user"}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    (CHAT, {"messages": [{"role": "user", "content": "a", "mood": "good"}]}),
    (COMPLETIONS, {}),
    (COMPLETIONS, {"prompt": ""}),
    (COMPLETIONS, {"prompt": []}),
    (COMPLETIONS, {"prompt": ["a", 1]}),
    (COMPLETIONS, {"prompt": [-1]}),
    (COMPLETIONS, {"prompt": "a", "best_of": True}),
    (COMPLETIONS, {"prompt": "a", "prompt_logprobs": 0, "stream": True}),
    (DETOKENIZE, {"tokens": [1.5]}),
    *((TOKENIZE, body) for body in ({}, {"content": "a", "prompt": "b"}, {"prompt": None})),
    *((EMBEDDINGS, {"input": given}) for given in ("", [], ["a", 1], [[]], [-1], ["a"] * 2049)),
    (EMBEDDINGS, {"input": "a", "dimensions": 0}),
    (EMBEDDINGS, {"input": "a", "encoding_format": "int8"}),
    (RESPONSES, {}),
    (RESPONSES, {"input": []}),
    (RESPONSES, {"input": [{"role": "tool", "content": "a"}]}),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "a"}]}),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
    (RESPONSES, {"input": "a", "max_output_tokens": -1}),
    (RESPONSES, {"input": "a", "previous_response_id": "b"}),
    (RESPONSES, {"input": "a", "tool_choice": "b"}),
    (RESPONSES, {"input": "a", "truncation": "b"}),
    (MESSAGES, {"messages": [USER]}),
    (MESSAGES, {"messages": [], "max_tokens": 1}),
    (MESSAGES, {"messages": [USER], "max_tokens": -1}),
    (MESSAGES, {"messages": [USER], "max_tokens": 1, "stop": "a"}),
    (MESSAGES, {"messages": [USER], "max_tokens": 1, "thinking": {"type": "a"}}),
    (MESSAGES, {"messages": [{"role": "user"}], "max_tokens": 1}),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 1}),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}], "max_tokens": 1}),
    (COUNT, {"messages": [USER], "max_token": 1}),
]


@pytest.mark.some(15)
@pytest.mark.parametrize(
    ("path", "parameters", "is_valid"),
    [(path, body, is_valid) for bodies, is_valid in ((VALID, True), (INVALID, False)) for path, body in bodies],
    ids=lambda value: str(value)[:40],
)
def test_server_and_document_accept_the_same(
    server: Served, document: Any, path: str, parameters: dict[str, Any], is_valid: bool
):
    jsonschema = pytest.importorskip("jsonschema")
    body = chat_body("a", **{"max_tokens": 1, **parameters}) if path == CHAT else parameters
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    validator = jsonschema.Draft202012Validator({**schema, "components": document["components"]})
    assert (server.post(path, body).status_code, validator.is_valid(body)) == (200 if is_valid else 400, is_valid)
