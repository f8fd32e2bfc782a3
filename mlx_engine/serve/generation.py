"""The two routes that generate text: from a parsed request to a reply or a stream."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from anyio import to_thread
from starlette.responses import Response

from mlx_engine.decode.options import Options
from mlx_engine.engine import Engine
from mlx_engine.schedule import Request
from mlx_engine.serve.errors import ApiError, ClientGoneError, api_error, json_response
from mlx_engine.serve.job import Job
from mlx_engine.serve.limits import client_id
from mlx_engine.serve.parameters import ChatRequest, CompletionRequest, chat_request, completion_request
from mlx_engine.serve.replies import ChatReply, CompletionReply, Reply, echoes_of
from mlx_engine.serve.service import Service
from mlx_engine.serve.sse import DONE, EventStream, comment, event
from mlx_engine.tokenizer.chat_prompt import ChatPrompt

LOGGER = logging.getLogger("mlx_engine.serve")

Respond = Callable[[Response], Awaitable[None]]


async def chat(service: Service, body: bytes, respond: Respond) -> None:
    """Answer POST /v1/chat/completions."""
    received, params = service.clock(), chat_request(body)
    engine = _checked(service, params)
    if engine.tokenizer.chat_template is None:
        message = "messages: expected a model with a chat template, found one without; use /v1/completions"
        raise ApiError(400, message, param="messages", code="no_chat_template")
    prompt = ChatPrompt(params.messages, variables=params.chat_template_kwargs or {})
    read = partial(engine.chat_prompt, prompt)
    job = await _job(service, params, [read], received, "messages")
    reply = ChatReply(job, engine.tokenizer, **_about(service, params))
    await _answer(service, params, job, reply, respond, "messages")


async def completion(service: Service, body: bytes, respond: Respond) -> None:
    """Answer POST /v1/completions."""
    received, params = service.clock(), completion_request(body)
    engine = _checked(service, params)
    reads = [partial(engine.prompt_ids, prompt) for prompt in params.prompts]
    job = await _job(service, params, reads, received, "prompt")
    reply = CompletionReply(job, engine.tokenizer, **_about(service, params))
    if params.echo:
        reply.echoes = echoes_of(job.requests, params.prompts, engine.tokenizer)
    await _answer(service, params, job, reply, respond, "prompt")


def _checked(service: Service, params: ChatRequest | CompletionRequest) -> Engine:
    engine = service.engine
    service.check_model(params.model)
    params.check(service.worker.slots)
    return engine


def _about(service: Service, params: ChatRequest | CompletionRequest) -> dict[str, Any]:
    return {
        "model": service.model,
        "fingerprint": service.fingerprint,
        "n_logprobs": params.n_logprobs,
        "includes_usage": params.includes_usage,
        "shows_expected": service.shows_expected,
        "bandwidth": lambda: service.bandwidth,  # it may be measured before the reply is complete
        "clock": service.clock,
    }


async def _job(
    service: Service,
    params: ChatRequest | CompletionRequest,
    reads: Sequence[Callable[[], list[int]]],
    received: float,
    prompt: str,
) -> Job:
    """Make the requests of all prompts in another thread, so that long prompts do not hold up the event loop.

    Raises:
        ApiError: a prompt or an option is invalid, or does not fit the context.
    """
    given = params.options(service.sampling)

    def make() -> list[Request]:
        requests = []
        for read in reads:
            ids = read()
            limit = service.room(ids, params.n_choices) if params.limit is None else params.limit
            options = Options.of(limit, logprobs=params.n_logprobs or 0, context_len=service.context_len, **given)
            requests.append(service.engine.request(ids, options, n=params.n_choices))
        return requests

    try:
        requests = await to_thread.run_sync(make, abandon_on_cancel=True)
    except Exception as error:
        raise _logged(api_error(error, prompt), error) from error
    return Job(requests, received=received, tokenized=service.clock(), client_id=client_id.get())


async def _answer(
    service: Service,
    params: ChatRequest | CompletionRequest,
    job: Job,
    reply: Reply,
    respond: Respond,
    prompt: str,
) -> None:
    """Run a job, and respond with its reply, or with a stream that begins at once."""
    try:
        async with service.worker.running(job):
            if params.stream:
                events = _events(service, job, reply, prompt, usage=params.includes_usage)
                await respond(EventStream(events))
                return
            await job.ended()
    except ClientGoneError:
        raise
    except Exception as error:
        raise _logged(api_error(error, prompt), error) from error
    finally:
        if service.recorder is not None:
            service.recorder.record(job, reply.id)
    # Log-probabilities of a long answer take a tenth of a second to write.
    await respond(await to_thread.run_sync(lambda: json_response(reply.whole())))


async def _events(service: Service, job: Job, reply: Reply, prompt: str, *, usage: bool) -> AsyncIterator[bytes]:
    """Yield the events of a stream; comments while nothing else is to be said."""
    yield comment(job.phase)
    while True:
        if not await job.changed(service.keep_alive_seconds):
            yield comment(job.phase)
            continue
        chunks = reply.chunks()
        if job.has_ended:
            break
        if chunks:
            yield b"".join(map(event, chunks))
    if job.error is not None:
        failure = _logged(api_error(job.error, prompt), job.error)
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
