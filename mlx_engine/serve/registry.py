"""The models of a server by name. `Models` loads a model when a request needs it, and unloads models to make room.

The methods of `Models` run in the event loop, but model files are read in threads. If a request names a model that is
not loaded, the model is put into a queue. A task loads the models of the queue in order, each in its own engine thread.
If the next model does not fit into the memory beside the loaded ones, unused models are unloaded, the least recently
used first. If all loaded models are in use, the least recently used one is *held*: its new requests wait. The held
model is unloaded when its running requests have ended, so no answer is interrupted. It is loaded again later for its
waiting requests. If the memory is still in use after MOST_SECONDS, the requests for the next model are refused.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

import msgspec
from anyio import move_on_after

from mlx_engine.engine import Engine
from mlx_engine.errors import EngineError, again
from mlx_engine.loop.scheduler import Scheduler
from mlx_engine.machine.memory import available_memory, give_back_freed
from mlx_engine.serve.errors import ApiError, api_error, cut
from mlx_engine.serve.parameters import parse
from mlx_engine.serve.prometheus import Metrics, text_of_models
from mlx_engine.serve.service import Service
from mlx_engine.serve.sse import comment
from mlx_engine.serve.worker import Worker
from mlx_engine.weights.outline import Need

LOGGER = logging.getLogger("mlx_engine.serve")

T = TypeVar("T")
State = Literal["loaded", "loading", "unloading", "on disk", "failed"]

# Seconds that a queued model may wait for the memory of models in use.
MOST_SECONDS = 60.0
# The most seconds that a reply of /v1/models waits for model files to be read. A model whose files are read later is
# described in later replies.
DESCRIBE_SECONDS = 2.0
# Seconds for which requests for a model are refused after it has failed. A later request loads the model again.
RETRY_SECONDS = 10.0


class Opened(Protocol):
    """A model whose files have been checked, and whose weights are not loaded."""

    @property
    def need(self) -> Need:
        """The memory that the model needs, with the smallest KV cache that it may get."""

    def load(self, room: int) -> tuple[Engine, Scheduler]:
        """Load the model; return its engine and scheduler. `room` is the bytes that are free for the KV cache."""


@dataclass(eq=False)
class ServedModel:
    """A model that requests can choose.

    Attributes:
        service: the objects that the model's requests use; each load replaces `service.worker`.
        open: checks the model's files, and returns an `Opened`; called in a thread. None for a model that is never
            unloaded.
        new_worker: gets a function that loads the model, and returns a worker that calls this function.
        describe: reads the model's files, and returns fields of its entry in /v1/models, such as `size`; called in a
            thread.
        exists: whether the model's files are still there.
        reason: why the model could not be loaded, or why its engine thread has died.
        nbytes: the bytes of memory that the model takes; 0 if it is on disk.
        used_at: when a request last began or ended, or when the model was loaded.
        failed_at: when the model last failed to load, or its engine thread died.
        is_held: whether new requests wait, because another model needs the memory.
        waiting: requests that wait until the model is loaded, or until it is no longer held.
        changed: an event that is set, and replaced by a new one, when the state changes.
        about: the result of `describe`, or the reason why `describe` failed. None until the files are read, and again
            after each load.
    """

    service: Service
    open: Callable[[], Opened] | None = None
    new_worker: Callable[[Callable[[], tuple[Engine, Scheduler]]], Worker] = Worker
    describe: Callable[[], Mapping[str, object]] = dict
    exists: Callable[[], bool] = lambda: True
    state: State = "on disk"
    reason: str | None = None
    nbytes: int = 0
    n_using: int = 0
    used_at: float = 0.0
    failed_at: float = 0.0
    is_held: bool = False
    waiting: list[Use] = field(default_factory=list)
    n_loads: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    about: Mapping[str, object] | None = None

    @property
    def name(self) -> str:
        """The name in requests."""
        return self.service.model

    @property
    def is_ready(self) -> bool:
        """Whether a request can use the model now."""
        return self.state == "loaded" and not self.is_held

    @property
    def is_on_disk(self) -> bool:
        """Whether the model's weights are not in memory."""
        return self.state in ("on disk", "failed")

    def become(self, state: State, reason: str | None = None) -> None:
        """Change the state, and wake the tasks that wait for a change."""
        self.state, self.reason = state, reason
        self.changed.set()
        self.changed = asyncio.Event()

    def read_about(self) -> None:
        """Set `about` from the files of the model; called in a thread."""
        try:
            self.about = self.describe()
        except Exception as error:
            self.about = {"state": "failed", "reason": api_error(error, "").message}


@dataclass(eq=False)
class Use:
    """The use of a model by a request, which may wait for the model.

    Attributes:
        granted: a future that is done when the model can be used; if it cannot be used, the future has the error.
    """

    model: ServedModel
    granted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    async def within(self, seconds: float | None = None) -> bool:
        """Wait at most `seconds` for the model; return whether it can be used.

        Raises:
            ApiError: the model cannot be loaded, or other models use the memory for too long.
        """
        await asyncio.wait({self.granted}, timeout=seconds)
        if self.granted.done():
            self.granted.result()
        return self.granted.done()

    async def comments(self, seconds: float) -> AsyncIterator[bytes]:
        """Yield an SSE comment at once, and then every `seconds` seconds until the model can be used.

        Raises:
            ApiError: see `within`.
        """
        yield comment(f"{self.model.state} {self.model.name}")
        while not await self.within(seconds):
            yield comment(f"{self.model.state} {self.model.name}")


class Asked(msgspec.Struct):
    """The fields of a request's body that are read before the model is loaded."""

    model: str | None = None
    stream: Any = None


class Models:
    """The models of a server.

    Attributes:
        default: the model for requests that name none.
        metrics: the counts of errors and disconnected clients; with a single model, the metrics of this model.
        on_started: called once, when the server is ready: in `start` if no model is loaded at the start, otherwise
            when the default model has been loaded or has failed. If `is_alone`, a failed load instead ends the server.
        is_closing: whether new requests are refused because the server stops.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        *,
        memory: int | None = None,
        idle_seconds: float | None = None,
        more: Callable[[Collection[str]], Iterable[ServedModel]] | None = None,
        is_loaded_at_start: bool = True,
        most_seconds: float = MOST_SECONDS,
        notice: Callable[[str], None] = LOGGER.info,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make the collection of models, without loading one.

        Args:
            models: the models; the first is the default.
            memory: bytes for all loaded models; None for the memory that is free now.
            idle_seconds: seconds without a request after which a model is unloaded; None for never.
            more: gets the names of the known models, and returns models that have appeared, such as new files of a
                folder. Called when the models are listed, and when a request names an unknown model. None if no model
                can appear.
            is_loaded_at_start: whether the default model is loaded before a request asks for it.
            most_seconds: seconds that a queued model may wait for the memory of models in use.
            notice: called with a line for the user when a model is unloaded, or cannot be loaded.
            clock: returns seconds, for `used_at`, `failed_at` and deadlines.
        """
        self._models = {model.name: model for model in models}
        self.default = models[0]
        self.memory = available_memory() if memory is None else memory
        self.idle_seconds, self.is_closing = idle_seconds, False
        self.on_started: Callable[[], None] = lambda: None
        self._more, self._is_loaded_at_start = more, is_loaded_at_start
        self._most_seconds, self._clock = most_seconds, clock
        self.metrics = self.default.service.metrics if self.is_single else Metrics()
        self._notice = notice
        self._queue, self._has_started = list[ServedModel](), not is_loaded_at_start
        self._loader: asyncio.Task[None] | None = None
        self._describer: asyncio.Future[None] | None = None
        self._released = asyncio.Event()

    @classmethod
    def alone(cls, service: Service) -> Models:
        """Return the models of a server with a single model, which is never unloaded."""
        return cls([ServedModel(service)], memory=0)

    def __iter__(self) -> Iterator[ServedModel]:
        """Yield all models, the default first."""
        return iter(list(self._models.values()))

    @property
    def is_alone(self) -> bool:
        """Whether the server has a single model, which is never unloaded."""
        return self.default.open is None

    @property
    def is_single(self) -> bool:
        """Whether the server has a single model. Unless `is_alone`, the model may be unloaded while it is idle."""
        return len(self._models) == 1 and self._more is None

    # ---- the server: its start, its end, and its state ----

    def start(self) -> None:
        """Begin to load the default model, if it is to be loaded at the start."""
        if self.is_alone:
            worker = self.default.service.worker
            on_ready = worker.on_ready

            def ready() -> None:
                on_ready()
                self.on_started()

            worker.on_ready, worker.on_update = ready, self.default.service.metrics.add
            worker.start()
        elif self._is_loaded_at_start:
            self._enqueue(self.default)
        else:
            self.on_started()

    def close(self) -> None:
        """Refuse new requests, and the requests that wait for a model. Running answers continue."""
        self.is_closing = True
        for model in self:
            model.service.worker.close()
            self._refuse(model, ApiError(503, "the server is shutting down", code="closing"))
            model.become(model.state, model.reason)

    async def stop(self) -> None:
        """End all engine threads."""
        self.close()
        if self._loader is not None:
            self._loader.cancel()
        await asyncio.gather(*(model.service.worker.stop() for model in self if model.service.worker.is_started))

    def tick(self) -> None:
        """Unload models that have not been used for `idle_seconds`; called several times a second."""
        if self.idle_seconds is None or self._queue or self.is_closing:
            return
        since = self._clock() - self.idle_seconds
        if any(model.used_at <= since for model in self._unused()):
            self._load_in_background()

    @property
    def n_open(self) -> int:
        """Number of answers of all submitted calls, see `Worker.n_open`."""
        return sum(model.service.worker.n_open for model in self)

    def end_calls(self, error: ApiError) -> None:
        """End all calls with an error."""
        for model in self:
            model.service.worker.end_calls(error)

    @property
    def fault(self) -> BaseException | None:
        """If `is_alone`, the error that ended the engine thread, and therefore ends the server; else None."""
        return self.default.service.worker.fault if self.is_alone else None

    @property
    def health(self) -> str:
        """The state of the server: "ok", or why it cannot answer: "loading", "closing", "stalled" or "dead"."""
        if self.is_alone:
            return self.default.service.worker.state
        if self.is_closing:
            return "closing"
        states = {model.service.worker.state for model in self if model.state == "loaded"}
        return "stalled" if "stalled" in states else "ok"

    @property
    def readiness(self) -> str:
        """Whether the server answers requests: "loading", "failed" (every model has failed), or `health`."""
        if self.is_alone or self.is_closing:
            return self.health
        if not self._has_started:
            return "loading"
        is_failed = all(model.state == "failed" for model in self)
        return "failed" if is_failed else self.health

    def check_open(self) -> None:
        """Raise ApiError if the server does not take requests now."""
        if self.is_alone:
            self.default.service.worker.check_open()
        elif self.is_closing:
            message = "the server is shutting down; try again later"
            raise ApiError(503, message, code="closing", headers={"Retry-After": "1"})

    # ---- requests ----

    def asked(self, body: bytes) -> Asked:
        """Parse a request's body; raise ApiError if it is not a JSON object, or the model's name is not a string."""
        try:
            return msgspec.json.decode(body, type=Asked)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return parse(body, Asked)

    def find(self, name: str | None) -> ServedModel:
        """Return the model with this name.

        Return the default model if `is_alone`, if the name is None, or if the name is unknown and `Service.any_model`
        is set.

        Raises:
            ApiError: there is no such model.
        """
        if name is None or self.is_alone:  # with a single model, `Service.check_model` checks the name later
            return self.default
        found = self._named(name)
        if found is None or (found.is_on_disk and not found.exists()):
            self._update(self._seen())
            found = self._named(name)
        if found is None and self.default.service.any_model:
            return self.default
        if found is None:
            names = ", ".join(repr(each) for model in self for each in model.service.models)
            message = f"no model {cut(name)!r}; this server has {names}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return found

    def _named(self, name: str) -> ServedModel | None:
        return self._models.get(name) or next((model for model in self if name in model.service.models), None)

    def _seen(self) -> tuple[list[ServedModel], list[ServedModel]]:
        """Return models that have appeared, and models whose files are gone.

        This method changes nothing, so a thread may call it.
        """
        found = list[ServedModel]()
        if self._more is not None:
            with suppress(OSError):  # a folder was removed while it was read
                found = list(self._more(set(self._models)))
        return found, [model for model in self if not model.exists()]

    def _update(self, seen: tuple[Iterable[ServedModel], Iterable[ServedModel]]) -> None:
        """Add models that have appeared, and remove models whose files are gone; `seen` is the result of `_seen`.

        A model whose files are gone is kept if it is the default, is in memory, or has waiting requests.
        """
        found, gone = seen
        for model in found:
            self._models.setdefault(model.name, model)
        for model in gone:
            is_idle = model.is_on_disk and not model.waiting
            if is_idle and model is not self.default and self._models.get(model.name) is model:
                del self._models[model.name]
                model.become(model.state, model.reason)  # wakes `snapshots`, which then ends

    @contextmanager
    def used(self, model: ServedModel) -> Iterator[Use]:
        """Load a model if needed, and keep it loaded during the `with` block. The block must first await `Use.within`.

        Raises:
            ApiError: the model failed a short time ago, too many requests wait for it, or the server stops.
        """
        use = Use(model)
        if self.is_alone or model.is_ready:
            self._grant(use)
        else:
            self._check_waiting(model)
            model.waiting.append(use)
            self._enqueue(model)
        try:
            yield use
        finally:
            if use in model.waiting:
                model.waiting.remove(use)
            elif not use.granted.exception():
                model.n_using -= 1
                model.used_at = self._clock()
            self._released.set()

    def _grant(self, use: Use) -> None:
        use.model.n_using += 1
        use.model.used_at = self._clock()
        use.granted.set_result(None)

    def _grant_all(self, model: ServedModel) -> None:
        waiting, model.waiting = model.waiting, []
        for use in waiting:
            self._grant(use)

    def _refuse(self, model: ServedModel, error: ApiError) -> None:
        waiting, model.waiting = model.waiting, []
        for use in waiting:
            use.granted.set_exception(again(error))
            # Read the exception: if the client has left, nothing else reads it, and asyncio would log it.
            use.granted.exception()

    def _check_waiting(self, model: ServedModel) -> None:
        """Raise ApiError if no further request may wait for a model that is not ready."""
        self.check_open()
        seconds = model.failed_at + RETRY_SECONDS - self._clock()
        if model.state == "failed" and seconds > 0:
            raise self._failure(model, seconds)
        n = len(model.waiting)
        if n >= max(1, model.service.worker.queue):
            message = f"model {model.name!r} is not loaded; requests that wait for it already: {n}; see Retry-After"
            raise ApiError(429, message, code="rate_limit_exceeded", headers={"Retry-After": "5"})

    def _failure(self, model: ServedModel, seconds: float) -> ApiError:
        message = f"model {model.name!r} cannot be loaded: {model.reason}"
        headers = {"Retry-After": str(max(1, round(seconds)))}
        return ApiError(503, message, param="model", code="model_not_loaded", headers=headers)

    # ---- loading and unloading ----

    def _enqueue(self, model: ServedModel) -> None:
        if model not in self._queue:
            self._queue.append(model)
            if model.is_on_disk:
                model.become("loading")
        self._load_in_background()

    def _load_in_background(self) -> None:
        if self._loader is None or self._loader.done():
            self._loader = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        """Unload models that have been idle for `idle_seconds`, and then load the models of the queue in order."""
        await self._unload_idle()
        while self._queue and not self.is_closing:
            model = self._queue[0]
            try:
                await self._load(model)
            except ApiError as error:
                self._refuse(model, error)
            except Exception as error:
                self._fail(model, error)
            finally:
                self._queue.remove(model)
                if model.state == "loading":
                    model.become("on disk")
            if model is self.default and not self._has_started:
                self._has_started = True
                self.on_started()

    async def _load(self, model: ServedModel) -> None:
        """Load a model unless it is loaded, and let the requests that wait for it begin.

        Raises:
            ApiError: see `_make_room`.
            Exception: `ServedModel.open` failed.
        """
        assert model.open is not None  # noqa: S101 - a model that is never unloaded is never in the queue
        if model.state != "loaded":
            model.become("loading")
            opened = await _in_daemon(model.open)
            if self.is_closing or not await self._make_room(model, opened.need):
                return
            others = sum(other.nbytes for other in self)
            room = max(0, self.memory - others - opened.need.total + opened.need.kv)
            model.nbytes = opened.need.total
            worker = model.service.worker = model.new_worker(partial(opened.load, room))
            worker.on_update = model.service.metrics.add
            worker.on_fault = partial(self._end, model, worker)
            worker.start()
            await worker.begun.wait()
            if worker.fault is not None:
                self._fail(model, worker.fault)
                return
            model.nbytes += worker.kv_nbytes - opened.need.kv
            model.n_loads += 1
            model.about = None
            model.used_at = self._clock()
            model.become("loaded")
        self._grant_all(model)

    async def _make_room(self, model: ServedModel, need: Need) -> bool:
        """Unload other models until this one fits, and return True.

        Return False if no request waits for the model any more. At the server's start, the default model is loaded even
        if no request waits for it.

        Raises:
            ApiError: the other models are in use for too long.
        """
        held: ServedModel | None = None
        deadline = self._clock() + self._most_seconds
        try:
            while not self._fits(need):
                unused = self._unused()
                if unused:
                    await self._unload(min(unused, key=lambda other: other.used_at))
                    continue
                held = held if held is not None and held.nbytes else self._hold()
                self._released.clear()
                with move_on_after(1.0):
                    await self._released.wait()
                is_at_start = model is self.default and not self._has_started
                if not model.waiting and not is_at_start:
                    return False
                if self._clock() >= deadline:
                    raise self._busy(model, held)
        finally:
            if held is not None:
                held.is_held = False
                if held.state == "loaded":
                    self._grant_all(held)
        return True

    def _busy(self, model: ServedModel, held: ServedModel) -> ApiError:
        message = (
            f"model {model.name!r} is not loaded: the memory is too small for it beside {held.name!r}, which has "
            f"been in use for more than {self._most_seconds:g} seconds; try again later"
        )
        return ApiError(503, message, param="model", code="model_not_loaded", headers={"Retry-After": "30"})

    def _fits(self, need: Need) -> bool:
        """Return whether a model fits beside the loaded ones.

        If no model is loaded, return True without a check, because `Opened.load` checks the memory.
        """
        others = sum(model.nbytes for model in self)
        return not others or (others + need.total <= self.memory and need.least <= available_memory())

    def _unused(self) -> list[ServedModel]:
        return [model for model in self if model.state == "loaded" and not model.n_using]

    def _hold(self) -> ServedModel:
        """Hold the least recently used of the loaded models, and return it."""
        held = min((model for model in self if model.nbytes), key=lambda model: model.used_at)
        held.is_held = True
        return held

    async def _unload_idle(self) -> None:
        for model in sorted(self._unused(), key=lambda model: model.used_at):
            # While another model was unloaded, a request may have begun to use this one, or its thread may have died.
            is_unused = model.state == "loaded" and not model.n_using
            if is_unused and self.idle_seconds is not None and model.used_at <= self._clock() - self.idle_seconds:
                await self._unload(model)

    async def _unload(self, model: ServedModel) -> None:
        """End the engine thread of a model that is not in use, and free the model's memory."""
        model.become("unloading")
        await self._freed(model)
        model.become("on disk")
        self._notice(f"Model {model.name} has been unloaded")

    async def _freed(self, model: ServedModel) -> None:
        worker = model.service.worker
        worker.on_fault = lambda fault: None
        await worker.stop()
        engine, worker.engine = worker.engine, None
        model.service.worker = model.new_worker(_not_loaded)
        del worker
        await asyncio.to_thread(_close, [engine])
        model.nbytes = 0

    def _fail(self, model: ServedModel, error: BaseException) -> None:
        """Record why a model could not be loaded, and refuse the requests that wait for it."""
        known = api_error(error, "") if isinstance(error, Exception) else ApiError(500, repr(error))
        if not isinstance(error, EngineError):
            LOGGER.error(f"model {model.name!r} cannot be loaded", exc_info=error)
        self._notice(f"warning: model {model.name} cannot be loaded: {error}")
        self._become_failed(model, known.message)

    def _end(self, model: ServedModel, worker: Worker, fault: BaseException) -> None:
        """Record that a loaded model's engine thread has died. A request after RETRY_SECONDS loads the model again."""
        if model.state != "loaded" or model.service.worker is not worker:
            return  # the task that loads or unloads this model handles the error
        LOGGER.error(f"the engine thread of model {model.name!r} has died", exc_info=fault)
        engine, worker.engine = worker.engine, None
        self._become_failed(model, f"its engine thread has died ({type(fault).__name__}); see the server's log")
        asyncio.get_running_loop().run_in_executor(None, _close, [engine])

    def _become_failed(self, model: ServedModel, reason: str) -> None:
        model.nbytes, model.is_held, model.failed_at = 0, False, self._clock()
        model.service.worker = model.new_worker(_not_loaded)
        model.become("failed", reason)
        self._refuse(model, self._failure(model, RETRY_SECONDS))

    # ---- /v1/models, metrics and snapshots ----

    async def cards(self) -> list[dict[str, object]]:
        """Return the entries of /v1/models: one for each name of each model."""
        self._update(await asyncio.to_thread(self._seen))
        await self._described()
        return [self._card(model, name) for model in self for name in model.service.models]

    async def card(self, name: str) -> dict[str, object]:
        """Return the entry of a name in /v1/models; raise ApiError if there is no such model."""
        model = self.find(name)
        model.service.check_model(name)
        await self._described()
        return self._card(model, name)

    async def _described(self) -> None:
        """Read the files of the models whose `about` is None or has an error; wait at most DESCRIBE_SECONDS."""
        if self._describer is None or self._describer.done():
            unknown = [model for model in self if model.about is None or "reason" in model.about]
            self._describer = asyncio.ensure_future(asyncio.to_thread(_read_abouts, unknown))
        await asyncio.wait({self._describer}, timeout=DESCRIBE_SECONDS)

    def _card(self, model: ServedModel, name: str) -> dict[str, object]:
        about, state = model.about or {}, {"state": self.state_of(model)}
        if model.reason is not None:
            state["reason"] = model.reason
        elif "reason" in about and model.state == "on disk":
            state = {}
        return {**about, **state, **model.service.model_card(name)}

    def state_of(self, model: ServedModel) -> str:
        """Return the state of a model, as /v1/models shows it."""
        if not self.is_alone:
            return model.state
        return {"ok": "loaded", "stalled": "loaded"}.get(model.service.worker.state, model.service.worker.state)

    def metrics_text(self) -> str:
        """Return all metrics as text. With several models, the metrics of each model have its name as a label."""
        if self.is_single:
            service = self.default.service
            return service.metrics.text(service.worker.load)
        found = {model.name: (model.service.metrics, model.service.worker.load) for model in self}
        loads = {model.name: (model.n_loads, model.state == "loaded") for model in self}
        return text_of_models(self.metrics, found, loads)

    async def snapshots(self, model: ServedModel) -> AsyncIterator[Any]:
        """Yield snapshots of the state of a model's scheduler while the model is loaded; wait while it is unloaded.

        End when the server stops, or when the model has been removed because its files are gone.
        """
        while not self.is_closing and self._models.get(model.name) is model:
            changed = model.changed
            if self.is_alone or model.state == "loaded":
                async for snapshot in model.service.worker.snapshots():
                    yield snapshot
            if self.is_alone:
                return
            await changed.wait()


async def _in_daemon(work: Callable[[], T]) -> T:
    """Run `work` in a daemon thread, so that a long download does not delay the exit, and return the result."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def end(set_outcome: Callable[[], None]) -> None:
        if not done.cancelled():
            set_outcome()

    def run() -> None:
        try:
            set_outcome = partial(done.set_result, work())
        except Exception as error:
            set_outcome = partial(done.set_exception, error)
        with suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(end, set_outcome)

    threading.Thread(target=run, name="open-model", daemon=True).start()
    return await done


def _read_abouts(models: Sequence[ServedModel]) -> None:
    for model in models:
        model.read_about()


def _not_loaded() -> tuple[Engine, Scheduler]:
    raise AssertionError("the worker of a model that is not loaded is never started")


def _close(engines: list[Engine | None]) -> None:
    """Close the only engine of a list, and return its memory to the system; called in a thread.

    The engine is removed from the list, so that no caller's frame refers to it during garbage collection. After a
    model is loaded, the command `serve` excludes all objects from collection (`gc.freeze` in `collect_garbage_again`,
    commands/serve.py). So this function calls `gc.unfreeze` before the collection.
    """
    engine = engines.pop()
    if engine is not None:
        engine.close()
    del engine
    was_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if was_frozen:
        gc.freeze()
    give_back_freed()
