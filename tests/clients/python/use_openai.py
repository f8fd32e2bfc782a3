"""OpenAI's own client, synchronous, with strict validation of what it gets."""

from __future__ import annotations

import json
from typing import Any

import openai
from checks import API_KEY, ASK, BASE_URL, BUSY_URL, MODEL, check, raises, run

STRICT: dict[str, Any] = {"api_key": API_KEY, "max_retries": 0, "_strict_response_validation": True}
client = openai.OpenAI(base_url=BASE_URL, **STRICT)
busy = openai.OpenAI(base_url=BUSY_URL, **STRICT)
create = client.chat.completions.create
GREEDY: dict[str, Any] = {"model": MODEL, "messages": ASK, "temperature": 0, "max_completion_tokens": 12}
# The helpers that put replies together refuse answers that end at the limit.
STOPPED = {**GREEDY, "max_completion_tokens": 300, "stop": "."}
TEXT: dict[str, Any] = {"model": MODEL, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 12}


def occupied() -> Any:
    """Return a stream that fills all slots of the busy server."""
    options = {"n": 4, "max_completion_tokens": 480, "logprobs": True, "top_logprobs": 20}
    patient = busy.with_options(max_retries=3)  # the stream of an earlier check may just be ending
    stream = patient.chat.completions.create(**{**GREEDY, **options}, extra_body={"ignore_eos": True}, stream=True)
    next(stream)
    return stream


@check
def models() -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    raises(openai.NotFoundError, lambda: client.models.retrieve("other"), status_code=404, code="model_not_found")


@check
def chat() -> None:
    reply = create(**GREEDY)
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.completion_tokens == 12
    assert reply.choices[0].message.content
    assert reply._request_id is None or isinstance(reply._request_id, str)


@check
def chat_with_all_parameters() -> None:
    sampled = {"temperature": 0.8, "top_p": 0.9, "seed": 7, "presence_penalty": 0.5, "frequency_penalty": 0.5, "n": 3}
    labels = {"user": "someone", "metadata": {"a": "b"}, "service_tier": "auto", "store": False}
    ours = {"top_k": 50, "min_p": 0.01, "repetition_penalty": 1.1, "ignore_eos": True}
    asked = {**GREEDY, **sampled, **labels, "extra_body": ours, "logprobs": True, "top_logprobs": 5, "stop": ["zzz"]}
    first, second = create(**asked), create(**asked)
    assert [c.message.content for c in first.choices] == [c.message.content for c in second.choices]
    assert len({c.message.content for c in first.choices}) > 1
    assert [c.index for c in first.choices] == [0, 1, 2]
    assert all(len(token.top_logprobs) == 5 for c in first.choices for token in c.logprobs.content)
    assert first.mlx_engine["digests"] == second.mlx_engine["digests"]


@check
def log_probabilities_spell_the_text() -> None:
    choice = create(**GREEDY, logprobs=True, top_logprobs=2).choices[0]
    spelled = b"".join(bytes(token.bytes) for token in choice.logprobs.content)
    assert spelled.decode() == choice.message.content
    assert all(token.logprob == token.top_logprobs[0].logprob for token in choice.logprobs.content)
    assert create(**GREEDY, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []


@check
def stop_ends_the_text() -> None:
    whole = create(**GREEDY).choices[0].message.content
    word = whole.split()[2]
    choice = create(**GREEDY, stop=word).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("stop", whole[: whole.index(word)])


@check
def logit_bias_forces_a_token() -> None:
    token = client.post("/../tokenize", body={"content": " bear"}, cast_to=object)["tokens"][0]
    choice = create(**GREEDY, logit_bias={str(token): 100}).choices[0]
    text = create(**GREEDY).choices[0].message.content
    assert choice.message.content != text
    assert len(set(choice.message.content.split())) == 1


@check
def roles_and_parts() -> None:
    parts = [{"type": "text", "text": "Tell me"}, {"type": "text", "text": "a story."}]
    history = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": parts, "name": "someone"},
        {"role": "assistant", "content": "Once upon a time."},
        {"role": "user", "content": "Go on."},
    ]
    assert create(**{**GREEDY, "messages": history}).choices[0].message.role == "assistant"


@check
def stream_has_the_text_of_the_reply() -> None:
    asked = {**GREEDY, "n": 2, "logprobs": True, "top_logprobs": 2, "seed": 3, "temperature": 1}
    reply, texts, reasons, n_tokens = create(**asked), ["", ""], {}, [0, 0]
    with create(**asked, stream=True) as stream:
        for chunk in stream:
            assert chunk.usage is None
            (choice,) = chunk.choices
            texts[choice.index] += choice.delta.content or ""
            n_tokens[choice.index] += len(choice.logprobs.content) if choice.logprobs else 0
            reasons[choice.index] = choice.finish_reason
    assert texts == [c.message.content for c in reply.choices]
    assert reasons == {c.index: c.finish_reason for c in reply.choices}
    assert n_tokens == [len(c.logprobs.content) for c in reply.choices]


@check
def stream_with_usage() -> None:
    chunks = list(create(**GREEDY, stream=True, stream_options={"include_usage": True}))
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == create(**GREEDY).usage.total_tokens
    assert len({chunk.id for chunk in chunks}) == 1


@check
def stream_helper_puts_the_chunks_together() -> None:
    usage = {"stream_options": {"include_usage": True}}
    with client.chat.completions.stream(**STOPPED, **usage, logprobs=True) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta"} <= kinds
    assert final.choices[0].message.content == create(**STOPPED).choices[0].message.content
    assert final.usage.completion_tokens == create(**STOPPED).usage.completion_tokens


@check
def raw_and_parsed() -> None:
    raw = client.chat.completions.with_raw_response.create(**GREEDY)
    assert raw.headers["content-type"] == "application/json"
    assert raw.parse().choices[0].message.content == create(**GREEDY).choices[0].message.content
    parsed = client.chat.completions.parse(**STOPPED)
    assert parsed.choices[0].message.content == create(**STOPPED).choices[0].message.content
    assert parsed.choices[0].message.parsed is None
    with client.chat.completions.with_streaming_response.create(**GREEDY, stream=True) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert [line for line in response.iter_lines() if line.startswith("data")][-1] == "data: [DONE]"
    with client.models.with_streaming_response.list() as response:
        assert response.parse().data[0].id == MODEL


@check
def completions() -> None:
    reply = client.completions.create(**TEXT, logprobs=2)
    shown = reply.choices[0].logprobs
    assert "".join(shown.tokens) == reply.choices[0].text
    assert shown.text_offset[0] == 0
    assert [len(top) for top in shown.top_logprobs] == [2] * 12
    echoed = client.completions.create(**TEXT, echo=True, n=2)
    assert [choice.text for choice in echoed.choices] == [TEXT["prompt"] + reply.choices[0].text] * 2


@check
def prompts_as_texts_and_tokens() -> None:
    texts = ["Once upon a time", "The bear"]
    ids = [client.post("/../tokenize", body={"content": text}, cast_to=object)["tokens"] for text in texts]
    of_texts, of_ids = (client.completions.create(**{**TEXT, "prompt": prompt}) for prompt in (texts, ids))
    of_one = client.completions.create(**{**TEXT, "prompt": ids[1]})
    assert [c.text for c in of_texts.choices] == [c.text for c in of_ids.choices]
    assert of_one.choices[0].text == of_texts.choices[1].text


@check
def streams_of_completions() -> None:
    # The client's type for chunks has no null as finish_reason, which OpenAI's server sends: no strict validation here.
    lenient = openai.OpenAI(base_url=BASE_URL, api_key=API_KEY, max_retries=0)
    asked = {**TEXT, "prompt": ["Once upon a time", "The bear"], "logprobs": 1, "echo": False, "seed": 1}
    texts = ["", ""]
    for chunk in lenient.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in client.completions.create(**asked).choices]
    assert chunk.usage.completion_tokens == 24


@check
def bad_requests() -> None:
    kind, base = openai.BadRequestError, {**GREEDY}
    for parameters, param, code in [
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"max_completion_tokens": 10_000}, "messages", "context_length_exceeded"),
        ({"extra_body": {"best": True}}, "best", "unknown_parameter"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "invalid_value"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "invalid_value"),
        ({"logit_bias": {"999999": 1}}, "logit_bias", "invalid_value"),
    ]:
        for stream in (False, True):
            asked = {**base, **parameters, "stream": stream}
            raises(kind, lambda asked=asked: create(**asked), param=param, code=code, type="invalid_request_error")


@check
def keys_models_and_paths() -> None:
    stranger = openai.OpenAI(base_url=BASE_URL, **{**STRICT, "api_key": "wrong"})
    wanted = {"status_code": 401, "code": "invalid_api_key"}
    raises(openai.AuthenticationError, lambda: stranger.models.list(), **wanted)
    raises(openai.AuthenticationError, lambda: stranger.chat.completions.create(**GREEDY), **wanted)
    raises(openai.NotFoundError, lambda: create(**{**GREEDY, "model": "gpt-4"}), code="model_not_found", param="model")
    raises(openai.NotFoundError, lambda: client.embeddings.create(model=MODEL, input="x"), code="not_found")
    raises(openai.APIStatusError, lambda: client.get("/completions", cast_to=object), code="method_not_allowed")


@check
def large_bodies() -> None:
    huge = {**GREEDY, "messages": [{"role": "user", "content": "x" * (5 << 20)}]}
    raises(openai.APIStatusError, lambda: create(**huge), status_code=413, code="request_too_large")


@check
def a_full_server_refuses() -> None:
    stream = occupied()
    error = raises(openai.RateLimitError, lambda: busy.chat.completions.create(**GREEDY), status_code=429)
    assert int(error.response.headers["retry-after"]) >= 1
    stream.close()


@check
def retries_succeed() -> None:
    stream = occupied()
    patient = busy.with_options(max_retries=5)
    raw = patient.chat.completions.with_raw_response.create(**GREEDY)
    assert raw.retries_taken >= 1
    assert raw.parse().usage.completion_tokens == 12
    stream.close()


@check
def a_closed_stream_frees_its_slots() -> None:
    for _ in range(5):
        occupied().close()
        patient = busy.with_options(max_retries=2)
        assert patient.chat.completions.create(**GREEDY, n=4).choices[3].index == 3


RESPONSE: dict[str, Any] = {"model": MODEL, "input": "Tell me a story.", "temperature": 0, "max_output_tokens": 12}


@check
def response() -> None:
    reply = client.responses.create(**RESPONSE)
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert reply.output_text == create(**GREEDY).choices[0].message.content
    assert reply.usage.output_tokens == 12


@check
def response_stream() -> None:
    with client.responses.stream(**{**RESPONSE, "max_output_tokens": 300}, extra_body={"stop": "."}) as stream:
        events = list(stream)
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert (events[-1].type, events[-1].response.output_text) == ("response.completed", text)


@check
def response_with_a_schema() -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    form = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    asked = {**RESPONSE, "max_output_tokens": 100, "text": form, "metadata": {"a": "b"}, "instructions": "Be kind."}
    reply = client.responses.create(**asked, include=["reasoning.encrypted_content"], store=False)
    assert json.loads(reply.output_text)["n"] in (1, 2)


@check
def response_errors() -> None:
    raises(openai.NotFoundError, lambda: client.responses.create(**{**RESPONSE, "model": "other"}), status_code=404)
    stored = {**RESPONSE, "previous_response_id": "resp_1"}
    raises(openai.BadRequestError, lambda: client.responses.create(**stored), param="previous_response_id")
    raises(openai.BadRequestError, lambda: client.responses.create(**{**RESPONSE, "input": "a " * 9999}), param="input")


run("openai", "sync")
