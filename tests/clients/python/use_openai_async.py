"""OpenAI's own client, asynchronous, with strict validation of what it gets."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
from checks import API_KEY, ASK, BASE_URL, BUSY_URL, MODEL, check, run

GREEDY: dict[str, Any] = {"model": MODEL, "messages": ASK, "temperature": 0, "max_completion_tokens": 12}


def strict(url: str = BASE_URL, **options: Any) -> openai.AsyncOpenAI:
    given = {"api_key": API_KEY, "max_retries": 0, "_strict_response_validation": True, **options}
    return openai.AsyncOpenAI(base_url=url, **given)


@check
async def models() -> None:
    async with strict() as client:
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).owned_by == "mlx_engine"


@check
async def streams_at_once_have_the_text_of_replies() -> None:
    async def streamed(client: Any, seed: int) -> str:
        chunks = await client.chat.completions.create(**GREEDY | {"temperature": 1}, seed=seed, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    async def whole(client: Any, seed: int) -> str:
        reply = await client.chat.completions.create(**GREEDY | {"temperature": 1}, seed=seed)
        return reply.choices[0].message.content

    async with strict() as client:
        texts = await asyncio.gather(*(streamed(client, seed) for seed in range(8)))
        assert texts == await asyncio.gather(*(whole(client, seed) for seed in range(8)))
        assert texts == [await whole(client, seed) for seed in range(8)]
        assert len(set(texts)) > 1


@check
async def stream_helper_raw_and_parsed() -> None:
    stopped = {**GREEDY, "max_completion_tokens": 300, "stop": "."}
    async with strict() as client:
        async with client.chat.completions.stream(**stopped) as stream:
            text = (await stream.get_final_completion()).choices[0].message.content
        raw = await client.chat.completions.with_raw_response.create(**stopped)
        assert raw.parse().choices[0].message.content == text
        parsed = await client.chat.completions.parse(**stopped)
        assert parsed.choices[0].message.content == text


@check
async def completions() -> None:
    asked = {"model": MODEL, "prompt": ["Once upon a time", "The bear"], "max_tokens": 8, "temperature": 0}
    async with strict() as client, strict(_strict_response_validation=False) as lenient:
        reply, texts = await client.completions.create(**asked, logprobs=1, echo=False), ["", ""]
        # The client's type for chunks has no null as finish_reason, which OpenAI's server sends.
        async for chunk in await lenient.completions.create(**asked, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert texts == [choice.text for choice in reply.choices]


@check
async def errors_have_their_classes() -> None:
    async def error(client: Any, **parameters: Any) -> Any:
        try:
            await client.chat.completions.create(**{**GREEDY, **parameters})
        except openai.APIStatusError as found:
            return type(found), found.status_code, found.param
        raise AssertionError("expected an error")

    async with strict() as client, strict(api_key="wrong") as stranger:
        assert await error(client, top_p=2) == (openai.BadRequestError, 400, "top_p")
        assert await error(client, top_p=2, stream=True) == (openai.BadRequestError, 400, "top_p")
        assert await error(client, model="gpt-4") == (openai.NotFoundError, 404, "model")
        assert await error(stranger) == (openai.AuthenticationError, 401, None)


@check
async def a_full_server_refuses_and_retries_succeed() -> None:
    async with strict(BUSY_URL) as busy:
        many = {"n": 4, "max_completion_tokens": 480, "logprobs": True, "top_logprobs": 20}
        options = {**GREEDY, **many, "extra_body": {"ignore_eos": True}, "stream": True}
        stream = await busy.chat.completions.create(**options)
        await anext(aiter(stream))
        refused = await asyncio.gather(
            *(busy.chat.completions.create(**GREEDY) for _ in range(3)), return_exceptions=True
        )
        assert [type(error) for error in refused] == [openai.RateLimitError] * 3
        patient = busy.with_options(max_retries=5)
        assert (await patient.chat.completions.create(**GREEDY)).usage.completion_tokens == 12
        await stream.close()


@check
async def a_cancelled_request_frees_its_slots() -> None:
    long = {**GREEDY, "n": 4, "max_completion_tokens": 480, "logprobs": True, "extra_body": {"ignore_eos": True}}
    async with strict(BUSY_URL) as busy:
        for _ in range(5):
            task = asyncio.create_task(busy.chat.completions.create(**long))
            await asyncio.sleep(0.05)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert task.cancelled()
            reply = await busy.with_options(max_retries=2).chat.completions.create(**GREEDY, n=4)
            assert len(reply.choices) == 4


run("openai", "async")
