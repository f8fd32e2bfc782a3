"""POST /v1/chat/completions: replies, streams, and that the answers are those of the engine."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mlx_engine.loop.logprobs import digest
from tests.serve.served import HTTP, Served, chat_body, events, micro, served
from tests.serve.shapes import Chat, Chunk, checked

MESSAGES = [{"role": "user", "content": "hello"}]


def alone(**options: Any) -> Any:
    """Run the request without a server."""
    return micro().generate(MESSAGES, 8, ignore_eos=True, logprobs=0, **options)


def stream(server: Served, **parameters: Any) -> list[Any]:
    response = server.chat(stream=True, **parameters)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    return events(response.content)


def test_reply_has_the_shape_of_the_api(server: Served):
    response = server.chat()
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    reply = checked(response.json(), Chat)
    assert reply.id.startswith("chatcmpl-")
    assert reply.choices[0].finish_reason == "length"
    assert reply.choices[0].logprobs is None


def test_usage_counts_the_tokens(server: Served):
    usage = server.chat().json()["usage"]
    assert usage["prompt_tokens"] == len(micro().chat_prompt(MESSAGES))
    assert usage["completion_tokens"] == 8
    assert usage["total_tokens"] == usage["prompt_tokens"] + 8


def test_a_second_request_takes_its_prompt_from_the_cache(server: Served):
    first = server.chat("the same twice").json()
    second = server.chat("the same twice").json()
    n = first["usage"]["prompt_tokens"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == n - 1
    assert (second["mlx_engine"]["timings"]["cache_n"], second["mlx_engine"]["timings"]["prompt_n"]) == (n - 1, 1)
    assert second["mlx_engine"]["digest"] == first["mlx_engine"]["digest"]


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_digest_is_that_of_the_same_request_alone(server: Served, temperature: float):
    ours = server.chat(temperature=temperature, seed=5).json()["mlx_engine"]
    result = alone(temperature=temperature, seed=5)
    assert result.logprobs is not None
    assert ours["digest"] == digest(result.token_ids, [token.logprob for token in result.logprobs])
    assert ours["seed"] == 5


def test_an_answer_without_a_seed_can_be_repeated(server: Served):
    first = server.chat(temperature=1).json()
    again = server.chat(temperature=1, seed=first["mlx_engine"]["seed"]).json()
    assert again["mlx_engine"]["digest"] == first["mlx_engine"]["digest"]
    assert server.chat(temperature=1).json()["mlx_engine"]["seed"] != first["mlx_engine"]["seed"]


def test_seeds_may_be_negative(server: Served):
    first, second = (server.chat(temperature=1, seed=seed).json()["mlx_engine"] for seed in (-1, (1 << 64) - 1))
    assert first["digest"] == second["digest"]


def test_stream_has_the_shape_of_the_api(server: Served):
    *chunks, last = stream(server)
    assert last == "[DONE]"
    typed = [checked(chunk, Chunk) for chunk in chunks]
    assert len({chunk.id for chunk in typed}) == 1
    first, *_, end = (chunk.choices[0] for chunk in typed)
    assert (first.delta.role, first.delta.content) == ("assistant", "")
    assert all(chunk.choices[0].delta.role is None for chunk in typed[1:])
    assert [chunk.choices[0].finish_reason for chunk in typed[:-1]] == [None] * (len(typed) - 1)
    assert (end.finish_reason, end.delta.content) == ("length", None)
    assert typed[-1].mlx_engine is not None


def test_stream_says_what_the_reply_says(server: Served):
    reply, *chunks = server.chat().json(), *stream(server)[:-1]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == reply["choices"][0]["message"]["content"] == alone().text
    assert chunks[-1]["mlx_engine"]["digest"] == reply["mlx_engine"]["digest"]
    assert all("usage" not in chunk for chunk in chunks)


def test_usage_of_a_stream_is_a_chunk_of_its_own(server: Served):
    *chunks, last, done = stream(server, stream_options={"include_usage": True})
    assert done == "[DONE]"
    assert all(checked(chunk, Chunk).usage is None and "usage" in chunk for chunk in chunks)
    assert last["choices"] == []
    usage = checked(last, Chunk).usage
    assert usage is not None
    assert (usage.completion_tokens, usage.total_tokens) == (8, usage.prompt_tokens + 8)
    assert last["mlx_engine"]["digests"]


def test_tokens_are_flushed_one_by_one():
    with served(slots=1) as server, server.client() as client:
        server.gate.hold()
        with client.stream("POST", "/v1/chat/completions", json=chat_body(stream=True, max_tokens=4)) as response:
            lines = response.iter_lines()
            for _ in range(4):
                server.gate.allow(1)  # the engine generates no other token before this one has been read
                assert next(line for line in lines if '"content":"q"' in line)
            server.gate.allow()
            assert list(lines)[-2] == "data: [DONE]"


def test_choices_are_those_of_runs_with_their_numbers(server: Served):
    reply = server.chat(n=3, temperature=1, seed=9).json()
    texts = [choice["message"]["content"] for choice in reply["choices"]]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert texts[0] == alone(temperature=1.0, seed=9).text
    assert reply["mlx_engine"]["digests"][0] == server.chat(temperature=1, seed=9).json()["mlx_engine"]["digest"]
    assert len(set(texts)) == 3
    assert reply["usage"]["completion_tokens"] == 24
    again = server.chat(n=3, temperature=1, seed=9, stream=True)
    streamed = [""] * 3
    for chunk in events(again.content)[:-1]:
        choice = chunk["choices"][0]
        streamed[choice["index"]] += choice["delta"].get("content", "")
    assert streamed == texts


def test_log_probabilities_have_bytes_and_alternatives(server: Served):
    reply = checked(server.chat(logprobs=True, top_logprobs=3).json(), Chat)
    (choice,) = reply.choices
    assert choice.logprobs is not None
    content = choice.logprobs.content
    assert b"".join(bytes(token.bytes) for token in content).decode("utf-8", "replace") == choice.message.content
    for token in content:
        assert [top.logprob for top in token.top_logprobs] == sorted(
            (t.logprob for t in token.top_logprobs), reverse=True
        )
        assert token.logprob == token.top_logprobs[0].logprob  # greedy
        assert math.exp(token.logprob) <= 1
    chunks = stream(server, logprobs=True, top_logprobs=3)[:-1]
    streamed = [token for chunk in chunks for token in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == server.chat(logprobs=True, top_logprobs=3).json()["choices"][0]["logprobs"]["content"]


def test_the_end_of_turn_is_counted_and_not_shown(server: Served):
    end = min(micro().tokenizer.eog_ids)
    reply = server.chat(logit_bias={str(end): 100}, ignore_eos=False, logprobs=True).json()
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["choices"][0]["message"]["content"] == ""
    assert reply["choices"][0]["logprobs"]["content"] == []
    assert reply["usage"]["completion_tokens"] == 1


def test_without_a_limit_the_context_is_the_limit(server: Served):
    capacity = min(micro().config.context_length, server.scheduler.pool.n_tokens + 1)
    reply = server.chat("~" * (capacity - 60), max_tokens=None).json()
    assert 1 <= reply["usage"]["completion_tokens"] < 60
    assert reply["usage"]["total_tokens"] == capacity
    assert reply["choices"][0]["finish_reason"] == "length"


def test_stop_strings_end_the_text(server: Served):
    text = server.chat(max_tokens=40).json()["choices"][0]["message"]["content"]
    stop = text[3:5]
    reply = server.chat(max_tokens=40, stop=[stop]).json()["choices"][0]
    assert reply["message"]["content"] == text[: text.index(stop)]
    assert (reply["finish_reason"], reply["stop_reason"]) == ("stop", stop)


@pytest.mark.parametrize("streams", [False, True])
def test_a_stop_token_ends_the_text_and_is_named(server: Served, streams: bool):
    made = alone()
    end = made.token_ids[3]
    n = made.token_ids.index(end)
    parameters = {"stop_token_ids": [end], "logprobs": True}
    if streams:
        choices = [chunk["choices"][0] for chunk in stream(server, **parameters)[:-1]]
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        shown = [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["content"]]
        assert all("stop_reason" not in choice for choice in choices[:-1])
    else:
        choices = server.chat(**parameters).json()["choices"]
        text, shown = choices[0]["message"]["content"], choices[0]["logprobs"]["content"]
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", end)
    assert text == micro().tokenizer.decode(made.token_ids[:n], at_start=False)
    assert len(shown) == n


def test_parameters_that_mean_nothing_are_accepted(server: Served):
    nothing = {
        "n": 1, "stream": False, "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "user": "me",
        "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "parallel_tool_calls": True, "top_k": -1,
        "stop": None, "audio": None, "model": "micro", "logit_bias": {}, "modalities": ["text"],
    }  # fmt: skip
    assert server.chat(**nothing).json()["mlx_engine"]["digest"] == server.chat().json()["mlx_engine"]["digest"]


def test_text_parts_and_developer_messages(server: Served):
    parts = [{"role": "developer", "content": [{"type": "text", "text": "be"}]}, *MESSAGES]
    plain = [{"role": "system", "content": "be"}, *MESSAGES]
    one, two = (server.post("/v1/chat/completions", chat_body(messages=m)).json() for m in (parts, plain))
    assert one["usage"]["prompt_tokens"] == two["usage"]["prompt_tokens"]
    assert one["mlx_engine"]["digest"] == two["mlx_engine"]["digest"]


def test_the_next_turn_finds_the_answer_in_the_cache(server: Served):
    # An answer whose ids are those of its text, as nearly all of a trained model are.
    replies = (server.chat("a first turn", max_tokens=6, temperature=1, seed=seed).json() for seed in range(100))
    first = next(
        reply for reply in replies if len(micro().tokenizer.encode(reply["choices"][0]["message"]["content"])) == 6
    )
    turns = [
        {"role": "user", "content": "a first turn"},
        {"role": "assistant", "content": first["choices"][0]["message"]["content"]},
        {"role": "user", "content": "and a second"},
    ]
    second = server.post("/v1/chat/completions", chat_body(messages=turns)).json()
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["total_tokens"] - 1


def test_an_answer_that_has_begun_is_continued(server: Served):
    text = "and then"
    messages = [*MESSAGES, {"role": "assistant", "content": text}]
    reply = server.chat(messages=messages, continue_final_message=True, temperature=0).json()
    ids = [*micro().chat_prompt(MESSAGES), *micro().tokenizer.encode(text)]
    assert reply["usage"]["prompt_tokens"] == len(ids)
    expected = micro().generate(ids, 8, ignore_eos=True, logprobs=0)
    assert reply["choices"][0]["message"]["content"] == expected.text
    assert reply["mlx_engine"]["digest"] == digest(expected.token_ids, [token.logprob for token in expected.logprobs])


def test_reasoning_before_a_continued_text_is_left_out_and_named(server: Served):
    last = {"role": "assistant", "content": "and then", "reasoning_content": "A thought."}
    reply = server.chat(messages=[*MESSAGES, last], continue_final_message=True).json()
    assert reply["mlx_engine"]["ignored"] == [f"messages[{len(MESSAGES)}].reasoning_content"]


@pytest.mark.parametrize(
    ("last", "more"),
    [
        ({"role": "user", "content": "x"}, {}),
        ({"role": "assistant", "content": ""}, {}),
        ({"role": "assistant", "content": "{"}, {"response_format": {"type": "json_object"}}),
    ],
)
def test_what_cannot_be_continued_is_refused_by_name(server: Served, last: dict[str, str], more: dict[str, Any]):
    response = server.chat(messages=[*MESSAGES, last], continue_final_message=True, **more)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "continue_final_message"


def test_the_card_of_the_model_has_its_context(server: Served):
    assert HTTP.get(server.url + "/v1/models").json()["data"][0]["max_model_len"] == micro().config.context_length
