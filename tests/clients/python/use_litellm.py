"""litellm, with the version 2 of OpenAI's client that it needs."""

from __future__ import annotations

from typing import Any

import litellm
from checks import API_KEY, ASK, BASE_URL, MODEL, check, raises, run

GREEDY: dict[str, Any] = {
    "model": f"openai/{MODEL}",
    "api_base": BASE_URL,
    "api_key": API_KEY,
    "max_retries": 0,
    "temperature": 0,
    "max_tokens": 12,
}
CHAT: dict[str, Any] = {**GREEDY, "messages": ASK}


def content(chunk: Any) -> str:
    return chunk.choices[0].delta.content or "" if chunk.choices else ""


@check
def completion() -> None:
    found = litellm.completion(**CHAT)
    assert found.choices[0].message.content
    assert (found.choices[0].finish_reason, found.usage.completion_tokens) == ("length", 12)


@check
def stream() -> None:
    chunks = list(litellm.completion(**CHAT, stream=True, stream_options={"include_usage": True}))
    assert "".join(map(content, chunks)) == litellm.completion(**CHAT).choices[0].message.content
    assert litellm.stream_chunk_builder(chunks).usage.completion_tokens == 12


@check
def batch() -> None:
    many = [ASK, [{"role": "user", "content": "Hello."}]]
    found = litellm.batch_completion(**GREEDY, messages=many)
    alone = [litellm.completion(**GREEDY, messages=messages) for messages in many]
    assert [a.choices[0].message.content for a in found] == [a.choices[0].message.content for a in alone]


@check
async def asynchronous() -> None:
    text = (await litellm.acompletion(**CHAT)).choices[0].message.content
    assert "".join([content(chunk) async for chunk in await litellm.acompletion(**CHAT, stream=True)]) == text


@check
def parameters() -> None:
    options = {"temperature": 1, "top_p": 0.9, "seed": 5, "n": 2, "logprobs": True, "top_logprobs": 2, "stop": ["zzz"]}
    first, second = (litellm.completion(**{**CHAT, **options, "top_k": 20}) for _ in range(2))
    assert [c.message.content for c in first.choices] == [c.message.content for c in second.choices]
    assert len(first.choices[1].logprobs.content[0].top_logprobs) == 2


@check
def text_completion() -> None:
    asked = {**GREEDY, "model": f"text-completion-openai/{MODEL}", "prompt": "Once upon a time"}
    text = litellm.text_completion(**asked, echo=True).choices[0].text
    assert text.startswith("Once upon a time")
    parts = [chunk.choices[0].text or "" for chunk in litellm.text_completion(**asked, stream=True)]
    assert asked["prompt"] + "".join(parts) == text


@check
def errors_have_their_classes() -> None:
    long = [{"role": "user", "content": "word " * 2000}]
    for kind, parameters in [
        (litellm.BadRequestError, {"top_p": 2}),
        (litellm.BadRequestError, {"response_format": {"type": "json_object"}}),
        (litellm.ContextWindowExceededError, {"messages": long}),
        (litellm.AuthenticationError, {"api_key": "wrong"}),
        (litellm.NotFoundError, {"model": "openai/gpt-4"}),
    ]:
        for stream in (False, True):
            asked = {**CHAT, **parameters, "stream": stream}
            raises(kind, lambda asked=asked: list(litellm.completion(**asked)))


run("litellm")
