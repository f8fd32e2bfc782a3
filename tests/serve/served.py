"""A server in a thread of this process, whose engine's steps a test can hold."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

import mlx_engine
from mlx_engine.engine import Engine
from mlx_engine.loop.scheduler import Scheduler, StepOutput
from mlx_engine.serve.app import create_app
from mlx_engine.serve.registry import Models
from mlx_engine.serve.server import Patience, Server, listen
from mlx_engine.serve.service import Service
from mlx_engine.serve.status import Monitor
from mlx_engine.serve.worker import Worker
from tests.patience import PATIENCE as SECONDS
from tests.patience import wait_for

MICRO = Path(__file__).parents[1] / "data" / "qwen3-micro" / "model-q8_0.gguf"
# The header that requests with a body must have; `json=` of httpx adds it.
JSON = {"Content-Type": "application/json"}
# One client for all requests, because making one takes 20 ms; each request has a connection of its own.
HTTP = httpx.Client(verify=False, timeout=SECONDS, limits=httpx.Limits(max_keepalive_connections=0))


class Gate:
    """Lets the engine thread run its steps: all of them, or as many as a test allows."""

    def __init__(self) -> None:
        self._condition, self._allowed, self.n_steps, self.is_asked = threading.Condition(), float("inf"), 0, False

    def hold(self) -> None:
        with self._condition:
            self._allowed = 0

    def allow(self, n: float = float("inf")) -> None:
        with self._condition:
            self._allowed += n
            self._condition.notify_all()

    def run(self, n: int) -> None:
        """Let n steps run; return when the engine asks for another one."""
        end = self.n_steps + n
        self.allow(n)
        wait_for(lambda: self.n_steps == end and self.is_asked)

    def pass_one(self) -> None:
        with self._condition:
            self.is_asked = True
            assert self._condition.wait_for(lambda: self._allowed >= 1, SECONDS), "the gate stayed closed"
            self.is_asked = False
            self._allowed -= 1
            self.n_steps += 1


class QuickServer(Server):
    """A server that checks its connections, and whether it ends, every 10 ms and not every 100."""

    n_ticks = 0

    async def main_loop(self) -> None:
        while not await self.on_tick(self.n_ticks):
            self.n_ticks += 1
            await asyncio.sleep(0.01)


class Served:
    """A running server.

    Attributes:
        url: its address.
        scheduler: the scheduler; only the engine thread may change it.
        gate: holds its steps.
        threads: the names of the threads that have run a step.
    """

    def __init__(self, engine: Engine, *, queue: int, scheduler: dict[str, Any], **service: Any) -> None:
        self.gate, self.threads, self.finished = Gate(), set[str](), threading.Event()
        self._engine, self._scheduler_options = engine, scheduler
        self.loading = threading.Event()
        self.loading.set()
        self.fault: BaseException | None = None
        self._queue, self._patience = queue, service.pop("patience", Patience())
        self._limit = service.pop("limit", None)
        self._options = service
        self.grace, self._ahead = SECONDS, 0.0
        listener = listen("127.0.0.1", 0)
        # Small buffers of the system, so that a slow reader is noticed after little text.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 15)
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self.url = f"http://{self.address[0]}:{self.address[1]}"
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(listener)), name="server")

    async def _run(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        clock = loop.time
        loop.time = lambda: clock() + self._ahead  # type: ignore[method-assign]
        self.worker = Worker(self._make, queue=self._queue, snapshot=Monitor().after)
        self.service = Service(self.worker, **{"model": "micro", **self._options})
        models = Models.alone(self.service)
        self.server = QuickServer(
            create_app(models), models, grace=self.grace, patience=self._patience, limit=self._limit
        )
        self.server.config.timeout_graceful_shutdown = int(SECONDS)
        await self.server.serve([listener])
        self.fault = self.worker.fault
        self.finished.set()

    def _make(self) -> tuple[Engine, Scheduler]:
        assert self.loading.wait(SECONDS)
        self.scheduler = self._engine.scheduler(**self._scheduler_options)
        step = self.scheduler.step

        def gated() -> StepOutput:
            self.gate.pass_one()
            self.threads.add(threading.current_thread().name)
            return step()

        self.scheduler.step = gated  # type: ignore[method-assign]
        return self._engine, self.scheduler

    def start(self) -> None:
        self._thread.start()
        wait_for(lambda: not self.loading.is_set() or self.state() == 200)

    def state(self) -> int:
        try:
            return HTTP.get(self.url + "/health").status_code
        except httpx.TransportError:
            return 0

    def later(self, seconds: float) -> None:
        """Let time pass on the clock by which the server loses patience with its clients."""
        self._ahead += seconds

    def tick(self) -> None:
        """Return when the server has checked its connections once more."""
        end = self.server.n_ticks + 2
        wait_for(lambda: self.server.n_ticks >= end)

    def stop(self) -> None:
        self.gate.allow()
        self.server.close()
        self._thread.join(SECONDS)
        assert not self._thread.is_alive(), "the server did not stop"

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=SECONDS, verify=False, **options)

    def post(self, path: str, body: object, **options: Any) -> httpx.Response:
        return HTTP.post(self.url + path, json=body, **options)

    def chat(self, text: str = "hello", **parameters: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", chat_body(text, **parameters))

    def connect(self, path: str, body: object) -> socket.socket:
        """Send a request and return its socket, with the answer unread."""
        found = socket.create_connection(self.address, timeout=SECONDS)
        found.sendall(request(path, body))
        return found

    @property
    def all_pages_are_free(self) -> bool:
        """Whether nothing holds a page: without a prefix cache, when no request runs."""
        pool = self.scheduler.pool
        return [pool.free_pages(group) for group in range(len(pool.windows))] == list(pool.n_pages)


def chat_body(text: str = "hello", **parameters: Any) -> dict[str, Any]:
    defaults = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    return {"messages": [{"role": "user", "content": text}], **defaults, **parameters}


def request(path: str, body: object) -> bytes:
    """Return the bytes of a request."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


@contextmanager
def served(
    *,
    slots: int = 4,
    kv_memory: int = 4 << 20,
    queue: int = 64,
    prefix_cache: bool = True,
    explains_cache: bool = True,
    budget: int = 64,
    engine: Engine | None = None,
    **service: Any,
) -> Iterator[Served]:
    """Run a server of an engine, by default of the micro model."""
    scheduler = {"slots": slots, "kv_memory": kv_memory, "prefix_cache": prefix_cache, "budget": budget}
    scheduler["whole_pages"] = not explains_cache
    service["explains_cache"] = explains_cache
    found = Served(engine or micro(), queue=queue, scheduler=scheduler, **service)
    found.start()
    try:
        yield found
    finally:
        found.stop()


_loaded: list[Engine] = []


def micro() -> Engine:
    """Return the micro model, loaded once. Its caches belong to schedulers."""
    if not _loaded:
        _loaded.append(mlx_engine.load(MICRO, "parallel", threads=1))
    return _loaded[0]


def events(raw: bytes) -> list[Any]:
    """Parse the bytes of a stream strictly: return the data of its events; comments are checked and left out."""
    assert raw.endswith(b"\n\n")
    found: list[Any] = []
    for block in raw.decode().removesuffix("\n\n").split("\n\n"):
        assert "\n" not in block
        if block.startswith(": "):
            continue
        assert block.startswith("data: ")
        data = block.removeprefix("data: ")
        found.append(data if data == "[DONE]" else json.loads(data))
    return found
