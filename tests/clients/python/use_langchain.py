"""langchain-openai: its chat model and its model for completions."""

from __future__ import annotations

from typing import Any

import openai
from checks import API_KEY, BASE_URL, BUSY_URL, MODEL, check, raises, run
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI

SERVER: dict[str, Any] = {"base_url": BASE_URL, "api_key": API_KEY, "model": MODEL, "max_retries": 0}
GREEDY: dict[str, Any] = {**SERVER, "temperature": 0, "max_tokens": 12}
QUESTION = "Tell me a story."
chat = ChatOpenAI(**GREEDY)


@check
def invoke() -> None:
    found = chat.invoke(QUESTION)
    assert isinstance(found, AIMessage)
    assert found.content
    assert found.usage_metadata["output_tokens"] == 12
    assert found.response_metadata["finish_reason"] == "length"
    assert found.response_metadata["model_name"] == MODEL


@check
def conversation() -> None:
    history = [SystemMessage("Be kind."), HumanMessage("Hello."), AIMessage("Hello."), HumanMessage(QUESTION)]
    assert chat.invoke(history).content


@check
def stream() -> None:
    whole = None
    for chunk in chat.stream(QUESTION, stream_usage=True):
        whole = chunk if whole is None else whole + chunk
    assert whole.content == chat.invoke(QUESTION).content
    assert whole.usage_metadata["output_tokens"] == 12
    assert whole.response_metadata["finish_reason"] == "length"


@check
def batch() -> None:
    questions = [QUESTION, "What is a bear?", "Hello."]
    assert [found.content for found in chat.batch(questions)] == [chat.invoke(text).content for text in questions]


@check
async def asynchronous() -> None:
    text = (await chat.ainvoke(QUESTION)).content
    assert "".join([chunk.content async for chunk in chat.astream(QUESTION)]) == text
    assert [found.content for found in await chat.abatch([QUESTION] * 3)] == [text] * 3


@check
def log_probabilities_and_stop() -> None:
    found = chat.bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    tokens = found.response_metadata["logprobs"]["content"]
    assert "".join(token["token"] for token in tokens) == found.content
    word = found.content.split()[2]
    assert chat.invoke(QUESTION, stop=[word]).content == found.content[: found.content.index(word)]


@check
def sampling_options() -> None:
    options = {"temperature": 0.9, "top_p": 0.9, "seed": 5, "presence_penalty": 0.1, "frequency_penalty": 0.1}
    sampled = ChatOpenAI(**{**GREEDY, **options}, n=2, extra_body={"top_k": 20})
    first, second = (sampled.generate([[HumanMessage(QUESTION)]]).generations[0] for _ in range(2))
    assert [found.text for found in first] == [found.text for found in second]
    assert len(first) == 2


@check
def completions() -> None:
    llm = OpenAI(**GREEDY)
    text = llm.invoke("Once upon a time")
    assert "".join(llm.stream("Once upon a time")) == text
    assert llm.batch(["Once upon a time", "The bear"])[0] == text


@check
def errors() -> None:
    raises(openai.BadRequestError, lambda: ChatOpenAI(**{**GREEDY, "top_p": 2}).invoke(QUESTION), param="top_p")
    tools = chat.bind(tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}])
    raises(openai.BadRequestError, lambda: tools.invoke(QUESTION), param="tools", code="invalid_value")
    stranger = ChatOpenAI(**{**GREEDY, "api_key": "wrong"})
    raises(openai.AuthenticationError, lambda: stranger.invoke(QUESTION), status_code=401)
    raises(openai.AuthenticationError, lambda: list(stranger.stream(QUESTION)), status_code=401)
    raises(openai.NotFoundError, lambda: ChatOpenAI(**{**GREEDY, "model": "gpt-4"}).invoke(QUESTION), param="model")


@check
def too_long_prompts() -> None:
    raises(ContextOverflowError, lambda: chat.invoke("word " * 2000), code="context_length_exceeded", param="messages")
    raises(ContextOverflowError, lambda: list(chat.stream("word " * 2000)), code="context_length_exceeded")


@check
def a_full_server() -> None:
    many = ChatOpenAI(**{**GREEDY, "base_url": BUSY_URL, "max_tokens": 480}, extra_body={"ignore_eos": True})
    answers = many.batch([QUESTION] * 12, config={"max_concurrency": 12}, return_exceptions=True)
    assert all(isinstance(answer, AIMessage | openai.RateLimitError) for answer in answers), answers
    assert any(isinstance(answer, AIMessage) for answer in answers)


run("langchain-openai")
