"""A server of several models in a thread of this process. A test can hold a load, and moves the clock itself."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from mlx_engine.engine import CheckedCheckpoint, Engine, open_source
from mlx_engine.errors import FormatError
from mlx_engine.loop.scheduler import Scheduler
from mlx_engine.serve.app import create_app
from mlx_engine.serve.registry import Models, ServedModel
from mlx_engine.serve.server import listen
from mlx_engine.serve.service import Service
from mlx_engine.serve.worker import Cores, Worker
from mlx_engine.weights.outline import Need, need_of, outlined
from tests.patience import PATIENCE, wait_for
from tests.serve.served import HTTP, QuickServer, chat_body

DATA = Path(__file__).parents[1] / "data"
# Two architectures, the second with windows.
FILES = {"qwen": DATA / "qwen3-micro" / "model-q8_0.gguf", "gemma": DATA / "gemma3-micro" / "hf"}
KV = 1 << 20


class Loads:
    """Opens and loads a model; a test can hold its loads, or let them fail.

    Attributes:
        n: how many loads have begun.
        engines: the engines that have been loaded.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.n, self.fails = path, 0, False
        self.engines: list[Engine] = []
        self.schedulers: list[Scheduler] = []
        self.may_load = threading.Event()
        self.may_load.set()

    def open(self) -> Opened:
        if self.fails:
            raise FormatError(where=str(self.path), expected="a tensor", found="a part of it", hint="copy it again")
        return Opened(self, open_source(self.path, "parallel", threads=1))


class Opened:
    def __init__(self, loads: Loads, opened: CheckedCheckpoint) -> None:
        self.loads, self.opened = loads, opened

    @property
    def need(self) -> Need:
        return need_of(outlined(self.opened.planned, self.opened.made), kv=KV)

    def load(self, room: int) -> tuple[Engine, Scheduler]:
        self.loads.n += 1
        assert self.loads.may_load.wait(PATIENCE)
        engine = Engine(self.opened)
        scheduler = engine.scheduler(slots=4, kv_memory=KV)
        self.loads.engines.append(engine)
        self.loads.schedulers.append(scheduler)
        return engine, scheduler


def need(path: Path) -> int:
    """Return the bytes that a model takes when it is loaded."""
    return Loads(path).open().need.total


class Several:
    """A running server of several models.

    Attributes:
        loads: the loads of each model.
        now: the time of the clock by which models are idle, which a test moves.
        notes: the lines for the user.
    """

    def __init__(self, names: Sequence[str], *, queue: int = 64, service: Mapping[str, Any], **models: Any) -> None:
        self.loads = {name: Loads(FILES.get(name, FILES["qwen"])) for name in names}
        self.now, self.notes = 1000.0, list[str]()
        self._queue, self._service, self._options = queue, service, models
        listener = listen("127.0.0.1", 0)
        self.url = "http://{}:{}".format(*listener.getsockname()[:2])
        self.is_started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(listener)), name="server")
        self._thread.start()
        wait_for(self.is_started.is_set)

    async def _run(self, listener: socket.socket) -> None:
        cores = Cores()

        def served(name: str) -> ServedModel:
            def worker(make: Callable[[], tuple[Engine, Scheduler]]) -> Worker:
                return Worker(make, queue=self._queue, cores=cores)

            service = Service(worker(lambda: (_ for _ in ()).throw(AssertionError)), name, **self._service)
            return ServedModel(service, self.loads[name].open, worker)

        options = {"clock": lambda: self.now, "notice": self.notes.append, **self._options}
        self.models = Models([served(name) for name in self.loads], **options)
        self.models.on_started = self.is_started.set
        self.server = QuickServer(create_app(self.models), self.models, grace=PATIENCE)
        await self.server.serve([listener])

    def stop(self) -> None:
        for loads in self.loads.values():
            loads.may_load.set()
        self.server.close()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the server did not stop"

    def later(self, seconds: float) -> None:
        """Move the clock when all requests have ended: the server records the end after the client has its reply."""
        wait_for(lambda: not any(model.n_using for model in self.models))
        self.now += seconds

    def state(self, name: str) -> str:
        return str(HTTP.get(self.url + "/ready").json()["models"][name])

    def wait_for_state(self, name: str, state: str) -> None:
        wait_for(lambda: self.state(name) == state)

    def post(self, path: str, body: object, **options: Any) -> httpx.Response:
        return HTTP.post(self.url + path, json=body, **options)

    def complete(self, model: str | None, text: str = "hello", **parameters: Any) -> httpx.Response:
        body = {"prompt": text, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **parameters}
        return self.post("/v1/completions", body if model is None else {"model": model, **body})

    def chat(self, model: str, text: str = "hello", **parameters: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", chat_body(text, model=model, **parameters))

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=PATIENCE, verify=False)


@contextmanager
def several(*names: str, queue: int = 64, service: Mapping[str, Any] | None = None, **models: Any) -> Iterator[Several]:
    """Run a server of several models, the first of which is loaded."""
    found = Several(names or tuple(FILES), queue=queue, service=service or {}, **models)
    try:
        yield found
    finally:
        found.stop()
