"""The two routes that generate text: from a parsed request to a reply or a stream."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple

from anyio import to_thread
from starlette.responses import Response

from mlx_engine.loop.request import Request
from mlx_engine.options import Options
from mlx_engine.serve.call import Call
from mlx_engine.serve.errors import ApiError, ClientGoneError, api_error, json_response
from mlx_engine.serve.limits import LARGE, Turn, client_id
from mlx_engine.serve.parameters import ChatRequest, CompletionRequest, chat_request, completion_request
from mlx_engine.serve.replies import ChatReply, CompletionReply, Reply, echoes_of
from mlx_engine.serve.service import Service
from mlx_engine.serve.sse import DONE, EventStream, comment, event
from mlx_engine.tokenizer.chat_prompt import ChatPrompt

LOGGER = logging.getLogger("mlx_engine.serve")

Respond = Callable[[Response], Awaitable[None]]


class Form(NamedTuple):
    """What differs between the two routes.

    Attributes:
        parse: parses and checks a body.
        reply: the class of the replies.
        prompt: the name of the parameter that has the prompt.
    """

    parse: Callable[[bytes], ChatRequest | CompletionRequest]
    reply: type[Reply]
    prompt: str


CHAT = Form(chat_request, ChatReply, "messages")
COMPLETION = Form(completion_request, CompletionReply, "prompt")


async def generate(service: Service, body: bytes, respond: Respond, *, form: Form) -> None:
    """Read a request, run it, and respond.

    Its answers count against the slots and the queue from the beginning: first as one, and as many as they are when the
    body has been parsed. While the request waits for its turn, there are only the bytes of its body.
    """
    received, is_large = service.clock(), len(body) > LARGE
    _ = service.engine  # refuse at once what cannot be answered now
    with service.worker.reserved() as reserve:
        async with service.turns.turn(is_large=is_large) as turn:
            read = partial(_parsed, service, body, form)
            try:
                params = await turn.run(read) if is_large else read()
                reserve(params.n_answers)
                given = params.options(service.sampling)
                requests, echoes = await turn.run(partial(_requests, service, params, given, turn))
            except Exception as error:
                raise _logged(api_error(error, form.prompt), error) from error
        del body, read
        params.forget_prompt()
        call = Call(requests, received=received, tokenized=service.clock(), client_id=client_id.get())
        reply = form.reply(call, service.engine.tokenizer, **_about(service, params))
        if isinstance(reply, CompletionReply) and isinstance(params, CompletionRequest):
            reply.echoes, reply.is_scored = echoes, params.is_scored
    # Nothing may be awaited here: the places are free until the call has them.
    await _answer(service, params, call, reply, respond, form.prompt)


def _parsed(service: Service, body: bytes, form: Form) -> ChatRequest | CompletionRequest:
    """Return the checked parameters of a request; called in a thread if the body is large.

    Raises:
        ApiError: a parameter is invalid, or the model does not suit it.
    """
    params = form.parse(body)
    service.check_model(params.model)
    if isinstance(params, ChatRequest):
        service.check_messages(len(params.messages))
    params.check(service.worker.slots)
    if isinstance(params, ChatRequest) and service.engine.tokenizer.chat_template is None:
        message = "this model has no chat template; use /v1/completions"
        raise ApiError(400, message, param="messages", code="no_chat_template")
    return params


def _about(service: Service, params: ChatRequest | CompletionRequest) -> dict[str, Any]:
    return {
        "model": service.model,
        "fingerprint": service.fingerprint,
        "n_logprobs": params.n_logprobs,
        "n_prompt_logprobs": params.prompt_logprobs,
        "includes_usage": params.includes_usage,
        "explains_cache": service.explains_cache,
        "bandwidth": lambda: service.bandwidth,  # it may be measured before the reply is complete
        "clock": service.clock,
    }


def _requests(
    service: Service, params: ChatRequest | CompletionRequest, given: dict[str, Any], turn: Turn
) -> tuple[list[Request], list[str]]:
    """Return the requests of all prompts, and the texts to repeat before the answers; called in a thread.

    Raises:
        EngineError: a prompt or an option is invalid, or does not fit the context.
        ClientGoneError: no client waits for the answers any more.
    """
    engine, requests = service.engine, list[Request]()

    def check(text: str) -> None:
        turn.check()
        service.check_length(text)

    for prompt in params.prompts:
        if isinstance(prompt, ChatPrompt):
            ids = engine.prompts.chat_ids(prompt, check=check)
        else:
            check(prompt if isinstance(prompt, str) else "")
            ids = engine.prompt_ids(prompt)
        limit = service.most_tokens(ids, params.n_choices) if params.limit is None else params.limit
        options = Options.of(limit, logprobs=params.n_logprobs or 0, context_len=service.context_len, **given)
        requests.append(engine.request(ids, options, n=params.n_choices))
    is_echoed = isinstance(params, CompletionRequest) and params.echo
    return requests, echoes_of(requests, params.prompts, engine.tokenizer) if is_echoed else []


async def _answer(
    service: Service,
    params: ChatRequest | CompletionRequest,
    call: Call,
    reply: Reply,
    respond: Respond,
    prompt: str,
) -> None:
    """Run a call, and respond with its reply, or with a stream that begins at once."""
    try:
        async with service.worker.running(call):
            if params.stream:
                events = _events(service, call, reply, prompt, usage=params.includes_usage)
                await respond(EventStream(events))
                return
            await call.ended()
    except ClientGoneError:
        raise
    except Exception as error:
        raise _logged(api_error(error, prompt), error) from error
    finally:
        if service.recorder is not None:
            service.recorder.record(call, reply.id)
    # Log-probabilities of a long answer take a tenth of a second to write.
    await respond(await to_thread.run_sync(lambda: json_response(reply.whole())))


async def _events(service: Service, call: Call, reply: Reply, prompt: str, *, usage: bool) -> AsyncIterator[bytes]:
    """Yield the events of a stream; comments while nothing else is to be said."""
    yield comment(call.phase)
    while True:
        if not await call.changed(service.keep_alive_seconds):
            yield comment(call.phase)
            continue
        chunks = reply.chunks()
        if call.has_ended:
            break
        if chunks:
            yield b"".join(map(event, chunks))
    if call.error is not None:
        failure = _logged(api_error(call.error, prompt), call.error)
        yield b"".join(map(event, [*chunks, failure.body()]))
        return
    if usage:
        chunks.append(reply.usage_chunk())
    chunks[-1]["mlx_engine"] = reply.receipt()
    yield b"".join(map(event, chunks)) + DONE


def _logged(error: ApiError, cause: Exception) -> ApiError:
    """Write the traceback of an internal error to the log; return the error."""
    if error.code == "internal_error":
        LOGGER.error("a request failed", exc_info=cause)
    return error
