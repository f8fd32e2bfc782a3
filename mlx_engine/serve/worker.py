"""The engine thread: it owns the model and the scheduler, and runs the scheduler's steps while there is work.

The event loop sends commands through an inbox, which the thread reads between two steps. After each step, the thread
sends one `StepUpdate` to the event loop. An error that does not belong to one request ends the thread.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, NamedTuple

from mlx_engine.cache.disk import DiskStats
from mlx_engine.engine import Engine
from mlx_engine.errors import EngineError, again
from mlx_engine.loop.request import Request
from mlx_engine.loop.scheduler import Scheduler, StepOutput
from mlx_engine.serve.call import Call, Progress
from mlx_engine.serve.errors import ApiError

# The engine counts as stalled if there is work, but no step has ended for this number of seconds.
STALLED_SECONDS = 60.0

# "submit" or "cancel", and the call whose requests are to be submitted or cancelled.
Command = tuple[str, Call]


class Load(NamedTuple):
    """The use of the engine after a step.

    Attributes:
        running: the number of answers with a slot.
        waiting: the number of answers without a slot.
        kv_usage: the share of the pages of the KV cache that answers or the prefix cache hold, 0 to 1. Layers with
            different attention windows have separate pages; `kv_usage` is the largest share of all windows.
        pages: the number of pages that answers hold. Pages that only the prefix cache holds do not count.
        disk: the counters of prefixes on disk, an object that later steps change; None if no prefixes are kept on disk.
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    pages: int = 0
    disk: DiskStats | None = None

    @classmethod
    def of(cls, scheduler: Scheduler) -> Load:
        """Return the use of the engine; called by the engine thread between two steps."""
        pool, prefix = scheduler.pool, scheduler.prefix
        used = [pool.used_pages(group) for group in range(len(pool.windows))]
        cached = [0 if prefix is None else prefix.evictable_pages(group) for group in range(len(used))]
        usage = max(n / of for n, of in zip(used, pool.n_pages, strict=True))
        disk = None if prefix is None or prefix.disk is None else prefix.disk.folder.stats
        return cls(len(scheduler.running), len(scheduler.waiting), usage, sum(used) - sum(cached), disk)


class Cores:
    """Lets the engine threads of several models run their steps one at a time, in the order in which they ask.

    Each step uses all cores, so concurrent steps would slow each other down. A Lock alone would not be fair, because
    the thread that releases it usually acquires it again.
    """

    def __init__(self) -> None:
        self._condition, self._n_asked, self._n_done = threading.Condition(), 0, 0
        self._answering = set[object]()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for the threads that asked earlier, and hold the cores in the `with` block."""
        with self._condition:
            number, self._n_asked = self._n_asked, self._n_asked + 1
            self._condition.wait_for(lambda: self._n_done == number)
        try:
            yield
        finally:
            with self._condition:
                self._n_done += 1
                self._condition.notify_all()

    def step(self, scheduler: Scheduler) -> StepOutput:
        """Run a step. If another model generates answers, run few prompt tokens, so that those answers wait less."""
        with self.turn():
            scheduler.others_answer = bool(self._answering - {scheduler})
            try:
                return scheduler.step()
            finally:
                self.note(scheduler, is_answering=any(one.output.token_ids for one in scheduler.running))

    def note(self, scheduler: Scheduler, *, is_answering: bool) -> None:
        """Record whether a scheduler generates answers."""
        (self._answering.add if is_answering else self._answering.discard)(scheduler)


class StepUpdate(NamedTuple):
    """The results of a step, which the engine thread sends to the event loop.

    Attributes:
        report: the scheduler's report of the step.
        reached: maps each request to the progress of its outputs.
        load: the use of the engine.
        snapshot: the next value that `Worker.snapshots` yields; None if there is no new value.
    """

    report: StepOutput
    reached: Mapping[Request, Sequence[Progress]]
    load: Load
    snapshot: Any = None


class Worker:
    """Runs requests in the engine thread, which `start` starts.

    All methods are called in the event loop, except `_post` and those whose names begin with `_run`: the engine thread
    calls these.

    Attributes:
        engine: None until the model is loaded.
        slots: the largest number of answers that run at the same time.
        capacity: the number of tokens that fit into the KV cache.
        load: the use of the engine after the last step.
        kv_nbytes: bytes of the KV cache.
        fault: the error that ended the thread, or None.
        begun: an event that is set when the model has been loaded, or the thread has died.
        is_closing: whether new requests are refused, because the server stops or the model is unloaded.
        on_update: called in the event loop with each update of the thread.
        on_fault: called in the event loop when the thread has died.
    """

    def __init__(
        self,
        make: Callable[[], tuple[Engine, Scheduler]],
        *,
        queue: int = 64,
        on_ready: Callable[[], None] = lambda: None,
        measure: Callable[[Engine], object] = lambda engine: None,
        snapshot: Callable[[Scheduler, StepOutput], Any] | None = None,
        cores: Cores | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Make a worker.

        Args:
            make: loads the model and returns it with its scheduler; called in the thread.
            queue: the largest number of answers that wait for a slot.
            on_ready: called in the event loop when the model has been loaded, unless `close` has been called.
            measure: called once in the thread, when the model has been loaded. Requests wait until it returns.
            snapshot: called in the thread for each update; `snapshots` yields its results that are not None.
            cores: shared by the workers of several models; None if there is one worker.
            clock: returns seconds.
        """
        self.queue, self.slots, self.capacity, self.load = queue, 0, 0, Load()
        self.kv_nbytes, self.begun = 0, asyncio.Event()
        self.engine: Engine | None = None
        self.fault: BaseException | None = None
        self.is_closing = False
        self.rates = Rates(clock)
        self.on_ready, self.measure, self._cores = on_ready, measure, cores or Cores()
        self.on_update: Callable[[StepUpdate], None] = lambda update: None
        self.on_fault: Callable[[BaseException], None] = lambda fault: None
        self._make, self._snapshot, self._clock = make, snapshot, clock
        self._wake, self._inbox, self._is_stopping = threading.Condition(), deque[Command](), False
        self._beat = clock()
        self._calls: dict[Request, Call] = {}
        self._n_reserved = 0
        self._latest: Any = None
        self._updated = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # ---- in the event loop ----

    def start(self) -> None:
        """Start the thread."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def is_started(self) -> bool:
        """Whether `start` has been called."""
        return self._thread.ident is not None

    def close(self) -> None:
        """Refuse new requests, and end the iterators of `snapshots`. Running answers continue."""
        self.is_closing = True
        self._updated.set()

    async def stop(self, seconds: float = 10.0) -> None:
        """End the thread after its step, wait for it at most `seconds`, and end all calls with an error."""
        self.close()
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join, seconds)
        self.end_calls(ApiError(503, "the server is shutting down", code="closing"))

    @property
    def n_open(self) -> int:
        """The number of answers of all submitted calls. A streamed call is counted until its last event is sent."""
        return sum(len(request.outputs) for request in self._calls)

    @property
    def n_unfinished(self) -> int:
        """The number of requested answers that have not ended."""
        calls = {call for call in self._calls.values() if call.error is None}
        return sum(progress.finish_reason is None for call in calls for _, progress in call.outputs)

    @property
    def state(self) -> str:
        """The state of the engine: "ok", "loading", "closing", "stalled" or "dead"."""
        if self.fault is not None or not (self._thread.is_alive() or self.is_closing):
            return "dead"
        if self.is_closing:
            return "closing"
        if self.engine is None:
            return "loading"
        is_late = bool(self._calls) and self._clock() - self._beat > STALLED_SECONDS
        return "stalled" if is_late else "ok"

    def check_open(self) -> Engine:
        """Return the engine; raise ApiError if it does not take requests now."""
        if self.engine is None or self.is_closing or self.fault is not None:
            message = f"the engine is not ready ({self.state}); try again later"
            raise ApiError(503, message, code=self.state, headers={"Retry-After": "1"})
        return self.engine

    def check_room(self, n: int) -> None:
        """Raise ApiError if slots and queue are too small for n answers, or too full for n more answers now."""
        most = self.slots + self.queue
        if n > most:
            message = f"{n} answers are too many: slots and queue hold {most}; send fewer at once"
            raise ApiError(400, message, param="prompt", code="invalid_value")
        # Count unfinished answers only: an answer that has ended takes no place, even if its client still reads it.
        others = self.n_unfinished + self._n_reserved
        if others + n > most:
            message = f"the queue is full: {others} of {most} places are taken, {n} more do not fit; see Retry-After"
            seconds = self.rates.seconds_for(others + n - most)
            raise ApiError(429, message, code="rate_limit_exceeded", headers={"Retry-After": str(seconds)})

    @contextmanager
    def reserved(self) -> Iterator[Callable[[int], None]]:
        """Reserve a place in the slots and the queue for a request that is not parsed yet, until the block ends.

        Yield a function that changes the reservation to n places; call it when the number n of answers is known. The
        function and this method raise ApiError as `check_room` does.
        """
        held = 0

        def reserve(n: int) -> None:
            nonlocal held
            self._n_reserved, held = self._n_reserved - held, 0
            self.check_room(n)
            self._n_reserved, held = self._n_reserved + n, n

        try:
            reserve(1)
            yield reserve
        finally:
            self._n_reserved -= held

    @asynccontextmanager
    async def running(self, call: Call) -> AsyncIterator[Call]:
        """Submit the requests of a call; on exit cancel the requests that have not ended.

        Raises:
            ApiError: the queue is full, or the engine does not take requests now.
            EngineError: the scheduler refuses a request.
        """
        self.check_open()
        self.check_room(call.n_answers)
        self._calls.update(dict.fromkeys(call.requests, call))
        self._send("submit", call)
        try:
            await call.accepted
            yield call
        finally:
            if call.is_unfinished:
                self._send("cancel", call)
            for request in call.requests:
                self._calls.pop(request, None)

    def end_calls(self, error: ApiError) -> None:
        """End all calls with an error."""
        for call in set(self._calls.values()):
            of_call = again(error)
            self._accept(call, of_call)
            call.update({}, of_call)

    async def snapshots(self) -> AsyncIterator[Any]:
        """Yield the latest result of `snapshot`, and then newer results; a slow reader misses some."""
        while not self.is_closing:
            update = self._updated
            if self._latest is not None:
                yield self._latest
            await update.wait()

    def _send(self, what: str, call: Call) -> None:
        with self._wake:
            self._inbox.append((what, call))
            self._wake.notify()

    def _receive(self, update: StepUpdate) -> None:
        """Pass an update to the calls, to `on_update`, and to the readers of `snapshots`."""
        self.load = update.load
        for request, reached in update.reached.items():
            call = self._calls.get(request)
            if call is not None:
                call.update({request: reached}, request.error)
        for request in update.report.ended:
            self.rates.add_end(len(request.outputs))
        self.on_update(update)
        if update.snapshot is not None:
            self._latest = update.snapshot
            # Wake the readers that wait for this event; they then wait for a new event.
            self._updated.set()
            self._updated = asyncio.Event()

    def _accept(self, call: Call, error: Exception | None) -> None:
        if call.accepted.done():  # accepted or refused before, or cancelled because the client has disconnected
            return
        if error is None:
            call.accepted.set_result(None)
        else:
            call.error = error
            call.accepted.set_exception(error)

    def _become_ready(self, engine: Engine, scheduler: Scheduler) -> None:
        pool = scheduler.pool
        self.engine, self.slots, self.capacity, self.kv_nbytes = engine, scheduler.slots, pool.n_tokens, pool.nbytes
        self.begun.set()
        if not self.is_closing:  # `close` may have been called while the model was being loaded
            self.on_ready()

    def _die(self, fault: BaseException) -> None:
        """Record the error that ended the thread, and end all calls."""
        self.fault = fault
        self.end_calls(ApiError(503, "the engine thread has died; see the server's log", code="dead"))
        self.begun.set()
        self.on_fault(fault)

    # ---- in the thread ----

    def _post(self, call: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:  # the loop has been closed: nothing reads updates
            self._is_stopping = True

    def _run(self) -> None:
        scheduler: Scheduler | None = None
        try:
            engine, scheduler = self._make()
            self._post(partial(self._become_ready, engine, scheduler))
            self._run_post(scheduler, StepOutput())  # the first snapshot
            with self._cores.turn():
                self.measure(engine)
            while not self._is_stopping:
                self._run_commands(scheduler, self._run_wait(scheduler))
                if scheduler.has_work:
                    self._run_step(scheduler)
        except BaseException as fault:
            self._post(partial(self._die, fault))
        finally:
            if scheduler is not None:
                self._cores.note(scheduler, is_answering=False)

    def _run_wait(self, scheduler: Scheduler) -> list[Command]:
        """Wait for work; return the commands that have arrived."""
        with self._wake:
            while not (self._inbox or scheduler.has_work or self._is_stopping):
                self._wake.wait(1.0)
                self._beat = self._clock()
            commands = list(self._inbox)
            self._inbox.clear()
        return commands

    def _run_commands(self, scheduler: Scheduler, commands: Sequence[Command]) -> None:
        for what, call in commands:
            if what == "cancel":
                for request in call.requests:
                    scheduler.cancel(request)
                continue
            error = self._run_submit(scheduler, call)
            self._post(partial(self._accept, call, error))
        if commands and not scheduler.has_work:
            self._cores.note(scheduler, is_answering=False)
            self._run_post(scheduler, StepOutput())

    def _run_submit(self, scheduler: Scheduler, call: Call) -> Exception | None:
        """Submit all requests of a call, or none; return the error of the scheduler, or None."""
        try:
            for request in call.requests:
                scheduler.submit(request)
        except (EngineError, ValueError) as error:
            for request in call.requests:
                scheduler.cancel(request)
            return error
        return None

    def _run_step(self, scheduler: Scheduler) -> None:
        report = self._cores.step(scheduler)
        self._beat = self._clock()
        self._run_post(scheduler, report)

    def _run_post(self, scheduler: Scheduler, report: StepOutput) -> None:
        """Send the results of a step to the event loop."""
        reached = {request: [Progress.of(output) for output in request.outputs] for request in report.requests}
        load = Load.of(scheduler)
        snapshot = None if self._snapshot is None else self._snapshot(scheduler, report)
        self._post(partial(self._receive, StepUpdate(report, reached, load, snapshot)))


# The number of answers over which `Rates` measures.
ENDS = 64


class Rates:
    """The rate at which answers end, over the last ENDS answers."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=ENDS)

    def add_end(self, n: int = 1) -> None:
        """Record that n answers have ended now."""
        self._ends.extend([self._clock()] * n)

    def seconds_for(self, n: int) -> int:
        """Return the expected whole seconds until n more answers have ended, at least 1; 1 if the rate is unknown."""
        if len(self._ends) < 2:
            return 1
        seconds = max(self._clock() - self._ends[0], 1e-9)
        return max(1, math.ceil(n * seconds / len(self._ends)))
