"""The handlers of the routes that generate text: parse a request, run it, and send a reply or a stream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from anyio import to_thread
from starlette.responses import Response

from mlx_engine.backends import types_of
from mlx_engine.conversation.answer import AnswerReader
from mlx_engine.conversation.formats import required_format
from mlx_engine.conversation.tools import with_choice
from mlx_engine.engine import constrained
from mlx_engine.loop.request import Request
from mlx_engine.options import Options
from mlx_engine.serve.call import Call
from mlx_engine.serve.errors import ApiError, ClientGoneError, api_error, json_response
from mlx_engine.serve.limits import LARGE, Turn, client_id
from mlx_engine.serve.messages import MessagesReply, count_request, messages_request
from mlx_engine.serve.parameters import (
    NOOPS_OF_CHAT,
    NOOPS_OF_COMPLETIONS,
    Body,
    ChatRequest,
    CompletionRequest,
    Reading,
    named,
    parse,
)
from mlx_engine.serve.replies import ChatReply, CompletionReply, Reply, echoes_of
from mlx_engine.serve.responses import ResponsesReply, responses_request
from mlx_engine.serve.service import Service
from mlx_engine.serve.sse import EventStream
from mlx_engine.tokenizer.chat import unchecked
from mlx_engine.tokenizer.chat_prompt import ChatPrompt
from mlx_engine.tokenizer.tokenizer import Tokenizer

LOGGER = logging.getLogger("mlx_engine.serve")

Respond = Callable[[Response], Awaitable[None]]


class Form(NamedTuple):
    """The differences between the routes that generate text."""

    parse: Callable[[bytes], Body]
    reply: type[Reply]
    prompt: str  # the name of the parameter that contains the prompt


CHAT = Form(lambda body: parse(body, ChatRequest, NOOPS_OF_CHAT), ChatReply, "messages")
COMPLETION = Form(lambda body: parse(body, CompletionRequest, NOOPS_OF_COMPLETIONS), CompletionReply, "prompt")
MESSAGES = Form(messages_request, MessagesReply, "messages")
RESPONSES = Form(responses_request, ResponsesReply, "input")
COUNT = Form(count_request, MessagesReply, "messages")


async def generate(service: Service, body: bytes, respond: Respond, *, form: Form) -> None:
    """Read a request, run it, and respond.

    Before the body is parsed, reserve one place in the slots or the queue; when the number of answers is known, reserve
    one place per answer. `limits.Turns` limits how many bodies are parsed at the same time, because parsed data takes
    more memory than the body, and parsing holds the GIL.
    """
    received, is_large = service.clock(), len(body) > LARGE
    _ = service.engine  # raises 503 if the engine accepts no requests
    with service.worker.reserved() as reserve:
        async with service.turns.turn(is_large=is_large) as turn:
            read = partial(_parsed, service, body, form)
            try:
                params = await turn.run(read) if is_large else read()
                reserve(params.n_answers)
                given = params.options(service.sampling)
                requests, reading = await turn.run(partial(_requests, service, params, given, turn))
            except Exception as error:
                raise logged(api_error(error, form.prompt), error) from error
        del body, read
        call = Call(requests, received=received, tokenized=service.clock(), client_id=client_id.get())
        reply = form.reply(call, service.engine.tokenizer, **_about(service, params, reading))
        params.forget_prompt()
        del reading
    # The reservation has ended. Until `_answer` submits the call, nothing may be awaited: another task could run, and
    # take the places.
    await _answer(service, params, call, reply, respond, form.prompt)


def _parsed(service: Service, body: bytes, form: Form) -> Body:
    """Return the checked parameters of a request; called in a thread, except by `generate` for a small body.

    Raises:
        ApiError: a parameter is invalid, or the model does not support it.
    """
    params = form.parse(body)
    service.check_model(params.model)
    if params.n_messages is not None:
        service.check_messages(params.n_messages)
    params.check(service.worker.slots)
    if params.n_messages is not None and service.engine.tokenizer.chat_template is None:
        message = "this model has no chat template; use /v1/completions"
        raise ApiError(400, message, param=form.prompt, code="no_chat_template")
    return params


def _about(service: Service, params: Body, reading: Reading) -> dict[str, Any]:
    return {
        **reading.about,
        "ignored": reading.ignored,
        "model": params.model or service.model,
        "fingerprint": service.fingerprint,
        "types": types_of(service.engine.backend),
        "explains_cache": service.explains_cache,
        "bandwidth": lambda: service.bandwidth,  # a function, because it may not be measured yet
        "clock": service.clock,
    }


def _requests(service: Service, params: Body, given: dict[str, Any], turn: Turn) -> tuple[list[Request], Reading]:
    """Return an engine request for each prompt, and the `Reading`: the HTTP request in the form that all APIs share.

    Called in a thread, because templates and tokenizers take time. `given` are keyword arguments of `Options.of`.

    Raises:
        ApiError, EngineError: a prompt or an option is invalid, or does not fit the context.
        ClientGoneError: the client has disconnected.
    """
    engine, requests, check = service.engine, list[Request](), partial(check_text, service, turn)
    asked, reading = params.asked(), params.read(engine.tokenizer.chat_template)
    given = {**given, "context_len": service.context_len, "constraint": asked.constraint}
    given["adapter"] = service.adapter(params.model)
    if params.predicted is not None and engine.speculation.is_on:
        check(params.predicted)
        given["prediction"] = params.predicted
    for prompt in reading.prompts:
        if isinstance(prompt, ChatPrompt):
            if prompt.tools:
                required_format(engine.tokenizer)
            ids = engine.prompts.chat_ids(prompt, check=check)
            ids = begun(engine.tokenizer, ids, reading, is_free=asked.constraint is None, check=check)
        else:
            check(prompt if isinstance(prompt, str) else "")
            ids = engine.prompt_ids(prompt)
        most, limit = service.most_tokens(ids, params.n_choices), params.limit
        limit = most if limit is None else min(limit, most) if params.limit_is_bound else limit
        options = Options.of(limit, logprobs=params.n_logprobs or 0, **given)
        with named(asked.param):
            options = constrained(options, is_chat=isinstance(prompt, ChatPrompt))
            if isinstance(prompt, ChatPrompt):
                chosen = with_choice(options.constraint, engine.tokenizer, prompt.tools, reading.choice)
                options = replace(options, constraint=chosen)
            requests.append(engine.request(ids, options, n=params.n_choices))
    if isinstance(params, CompletionRequest) and params.echo:
        echoes = echoes_of(requests, reading.prompts, engine.tokenizer)
        reading = reading._replace(about={**reading.about, "echoes": echoes})
    return requests, reading._replace(ignored=(*reading.ignored, *asked.ignored))


def begun(
    tokenizer: Tokenizer,
    ids: list[int],
    reading: Reading,
    *,
    is_free: bool = True,
    check: Callable[[str], None] = unchecked,
) -> list[int]:
    """Return the prompt `ids`, followed by the tokens of `reading.begun`, the beginning of the answer from the request.

    Generation then continues this beginning. `check` is called with the beginning before it is encoded.

    Raises:
        ApiError: the answer has a constraint (`is_free` is false), which would apply only to the new tokens; or the
            prompt ends inside reasoning, so the given beginning would become a part of the reasoning.
    """
    if not reading.begun:
        return ids
    is_thinking = AnswerReader.after(tokenizer, ids).is_thinking
    if is_thinking or not is_free:
        why = "the template begins an answer with reasoning" if is_thinking else "the answer has a constraint"
        message = f"{reading.begun_in}: an answer cannot be continued, because {why}; ask for the rest in a message"
        raise ApiError(400, message, param=reading.begun_in, code="unsupported_value")
    check(reading.begun)
    return [*ids, *tokenizer.encode(reading.begun)]


async def count_tokens(service: Service, body: bytes, respond: Respond) -> None:
    """Respond with the number of tokens of the prompt that /v1/messages would make from the body."""
    _ = service.engine  # raises 503 if the engine accepts no requests
    async with service.turns.turn(is_large=len(body) > LARGE, is_bounded=True) as turn:
        try:
            n = await turn.run(partial(_count, service, body, turn))
        except Exception as error:
            raise logged(api_error(error, COUNT.prompt), error) from error
    await respond(json_response({"input_tokens": n}))


def _count(service: Service, body: bytes, turn: Turn) -> int:
    params, engine = _parsed(service, body, COUNT), service.engine
    # Refuse the sampling options that generation would refuse.
    Options.of(**params.options(service.sampling)).check_vocabulary(engine.config.vocab_size)
    reading, check = params.read(engine.tokenizer.chat_template), partial(check_text, service, turn)
    ids = engine.prompts.chat_ids(reading.prompts[0], check=check)
    return len(begun(engine.tokenizer, ids, reading, check=check))


def check_text(service: Service, turn: Turn, text: str) -> None:
    """Raise an error if the client has disconnected or the text is too long; called before the text is encoded."""
    turn.check()
    service.check_length(text)


async def _answer(service: Service, params: Body, call: Call, reply: Reply, respond: Respond, param: str) -> None:
    """Run a call, and respond: with a stream from the beginning if `params.stream`, else with the reply at the end.

    `param` is the name of the parameter that contains the prompt, for errors.
    """
    try:
        async with service.worker.running(call):
            if params.stream:
                await respond(EventStream(_events(service, call, reply, param)))
                return
            await call.ended()
    except ClientGoneError:
        raise
    except Exception as error:
        raise logged(api_error(error, param), error) from error
    finally:
        if service.recorder is not None:
            service.recorder.record(call, reply.id)
    # In a thread, because encoding the log-probabilities of a long answer as JSON takes a tenth of a second.
    await respond(await to_thread.run_sync(lambda: json_response(reply.whole())))


async def _events(service: Service, call: Call, reply: Reply, param: str) -> AsyncIterator[bytes]:
    """Yield the events of a stream, and a heartbeat after each `keep_alive_seconds` without an event."""
    yield reply.begin()
    now = asyncio.get_running_loop().time
    due = now() + service.keep_alive_seconds
    while True:
        is_new = await call.changed(max(0.0, due - now()))
        if is_new and call.has_ended:
            break
        data = reply.news() if is_new else b""
        if not data and now() >= due:
            data = reply.heartbeat()
        if data:
            yield data
            due = now() + service.keep_alive_seconds
    if call.error is None:
        yield reply.end()
    else:
        yield reply.failure(logged(api_error(call.error, param), call.error))


def logged(error: ApiError, cause: Exception) -> ApiError:
    """Return `error`. If it is an internal error, also write the traceback of its cause to the log."""
    if error.code == "internal_error":
        LOGGER.error("a request failed", exc_info=cause)
    return error
