"""A small server for the page: an engine thread, and just enough of the API for a chat that streams.

The engine's model tells stories of animals. Answers with code, tables, tool calls or attacks are scripted: `script`
says which deltas answer a request.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import mlx_engine
from mlx_engine.errors import ContextLengthError, OptionError
from mlx_engine.loop.request import Request as Run
from mlx_engine.loop.scheduler import Scheduler
from mlx_engine.options import Options
from mlx_engine.serve.page import routes
from mlx_engine.serve.status import Monitor, Status

Delta = dict[str, Any]
# Returns the deltas that answer the body of a chat request, and the reason for their end; None leaves it to the engine;
# a response refuses it.
Script = Callable[[dict[str, Any]], tuple[list[Delta], str] | Response | None]


class Worker:
    """Runs the steps of a scheduler on a thread, and tells the event loop."""

    def __init__(self, scheduler: Scheduler, monitor: Monitor, *, pause: float = 0.0) -> None:
        self.scheduler, self.monitor, self.pause = scheduler, monitor, pause
        self.status: Status | None = None
        self.stepped = asyncio.Event()
        self._calls: deque[Callable[[], None]] = deque()
        self._wanted, self._is_closed = threading.Condition(), False
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], None]) -> None:
        """Call a function on the thread, between two steps."""
        with self._wanted:
            self._calls.append(function)
            self._wanted.notify()

    def close(self) -> None:
        """End the thread."""
        self._is_closed = True
        self.call(lambda: None)
        self._thread.join()
        self._told(None)

    async def snapshots(self) -> AsyncIterator[Status]:
        """Yield the latest status, and then each newer one, until the worker is closed."""
        last = None
        while not self._is_closed:
            stepped = self.stepped
            if self.status is not None and self.status is not last:
                last = self.status
                yield last
            await stepped.wait()

    def _run(self) -> None:
        self._tell(self.monitor.read(self.scheduler))
        while not self._is_closed:
            with self._wanted:
                while not (self._calls or self.scheduler.has_work):
                    self._wanted.wait()
            called = bool(self._calls)
            while self._calls:
                self._calls.popleft()()
            status = self.monitor.after(self.scheduler, self.scheduler.step())
            self._tell(self.monitor.read(self.scheduler) if called else status)
            time.sleep(self.pause)

    def _tell(self, status: Status | None) -> None:
        self._loop.call_soon_threadsafe(self._told, status)

    def _told(self, status: Status | None) -> None:
        if status is not None:
            self.status = status
        self.stepped.set()
        self.stepped = asyncio.Event()


def app(
    engine: mlx_engine.Engine,
    *,
    has_template: bool = True,
    key: str = "",
    pause: float = 0.0,
    script: Script = lambda body: None,
    ignore_eos: bool = False,
    **options: Any,
) -> Starlette:
    """Return an application that serves one engine; `pause` makes its steps slow enough to be seen.

    `app.state.bodies` has the bodies of all chat requests.
    """
    worker: Worker
    bodies: list[dict[str, Any]] = []

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        nonlocal worker
        scheduler = engine.scheduler(**options)
        monitor = Monitor(bandwidth=lambda: 1e10, text_of=engine.tokenizer.decode)
        worker = Worker(scheduler, monitor, pause=pause)
        app.router.routes.extend(routes(lambda query: worker.snapshots(), refusal=refusal))
        app.state.worker = worker
        yield
        worker.close()

    def refusal(headers: Headers) -> Response | None:
        is_right = not key or headers.get("authorization") == f"Bearer {key}"
        return None if is_right else error(401, "the API key is missing or wrong")

    def guarded(route: Route) -> Route:
        endpoint = route.endpoint

        async def checked(request: Request) -> Response:
            result = refusal(request.headers) or endpoint(request)
            return await result if asyncio.iscoroutine(result) else result

        return Route(route.path, checked, methods=route.methods)

    def models(request: Request) -> Response:
        card = {"id": "story", "object": "model", "max_model_len": engine.config.context_length}
        return JSONResponse({"object": "list", "data": [card]})

    async def tokenize(request: Request) -> Response:
        return JSONResponse({"count": len(engine.tokenizer.encode((await request.json())["content"]))})

    async def chat(request: Request) -> Response:
        if not has_template:
            return error(400, "messages: expected a chat template that writes the prompt, found none")
        body = await request.json()
        bodies.append(body)
        scripted = script(body)
        if isinstance(scripted, Response):
            return scripted
        if scripted is not None:
            return StreamingResponse(told(*scripted), media_type="text/event-stream")
        text = "\n".join(message["content"] for message in body["messages"])
        return answer(body, text, lambda piece: {"delta": {"content": piece}})

    async def completions(request: Request) -> Response:
        body = await request.json()
        return answer(body, body["prompt"], lambda piece: {"text": piece})

    def answer(body: dict[str, Any], text: str, choice: Callable[[str], dict[str, Any]]) -> Response:
        try:
            ids = engine.prompt_ids(text)
            most = max(1, engine.config.context_length - len(ids))
            given = {name: body[name] for name in ("temperature", "seed", "stop", "top_k", "min_p") if name in body}
            run = engine.request(ids, Options.of(body.get("max_tokens", most), ignore_eos=ignore_eos, **given))
        except ContextLengthError as fault:
            return error(400, str(fault), code="context_length_exceeded")
        except OptionError as fault:
            return error(400, str(fault), param=fault.option)
        return StreamingResponse(stream(run, choice), media_type="text/event-stream")

    async def stream(run: Run, choice: Callable[[str], dict[str, Any]]) -> AsyncIterator[str]:
        worker.call(lambda: worker.scheduler.submit(run))
        sent = 0
        try:
            while not (run.has_ended and sent == len(run.output.pieces)):
                stepped = worker.stepped
                while sent < len(run.output.pieces):
                    yield event(choices=[{"index": 0, "finish_reason": None, **choice(run.output.pieces[sent])}])
                    sent += 1
                if not run.has_ended:
                    await stepped.wait()
            yield event(choices=[{"index": 0, "finish_reason": run.output.finish_reason, **choice("")}])
            n, written = len(run.prompt_ids), len(run.output.token_ids)
            details = {"cached_tokens": run.n_cached}
            usage = {"prompt_tokens": n, "completion_tokens": written, "prompt_tokens_details": details}
            yield event(choices=[], usage=usage, mlx_engine={"timings": {"n_steps": run.n_steps}})
            yield "data: [DONE]\n\n"
        finally:
            worker.call(lambda: worker.scheduler.cancel(run))

    async def told(deltas: list[Delta], reason: str) -> AsyncIterator[str]:
        for delta in deltas:
            yield event(choices=[{"index": 0, "finish_reason": None, "delta": delta}])
            await asyncio.sleep(pause)
        yield event(choices=[{"index": 0, "finish_reason": reason, "delta": {}}])
        usage = {"prompt_tokens": 20, "completion_tokens": len(deltas), "prompt_tokens_details": {"cached_tokens": 0}}
        receipt = {"digest": "d" * 64, "seed": 2**62 + 1, "timings": {}, "speculation": {"proposed": 5, "accepted": 3}}
        yield event(choices=[], usage=usage, mlx_engine=receipt)
        yield "data: [DONE]\n\n"

    api = [
        Route("/v1/models", models),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
    ]
    made = Starlette(routes=[guarded(route) for route in api], lifespan=lifespan)
    made.state.bodies = bodies
    return made


def event(**data: Any) -> str:
    return f"data: {json.dumps(data)}\n\n"


def error(status: int, message: str, *, param: str | None = None, code: str | None = None) -> Response:
    about = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    return JSONResponse({"error": about}, status)
