"""Records requests in a journal: what a line has of a job, a request and the server."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

import mlx_engine
from mlx_engine.loop.request import Request
from mlx_engine.serve.entry import Entry, ModelId, choices_of, plain_options
from mlx_engine.serve.job import Job, Mark
from mlx_engine.serve.journal import Journal
from mlx_engine.serve.timings import timings


class Recorder:
    """Appends a line to a journal for each request of a job. All methods are called in the event loop.

    Attributes:
        journal: the journal.
    """

    def __init__(
        self,
        journal: Journal,
        model: ModelId,
        *,
        backend: str,
        slots: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Make a recorder; the arguments are the same for all lines. `clock` is that of the jobs' times."""
        self.journal, self._clock = journal, clock
        self._about = {"version": mlx_engine.__version__, "backend": backend, "slots": slots, "model": model}

    def record(self, job: Job, reply_id: str) -> None:
        """Record a job that has ended or whose client has left; nothing of one that the scheduler has not taken."""
        written, ended = self._clock(), "failed" if job.error is not None else "finished"
        about = {
            **self._about,
            "id": reply_id,
            "client_id": job.client_id,
            "received": time.time() - (written - job.received),
            "ended": ended if job.has_ended else "cancelled",
            "error": None if job.error is None else type(job.error).__name__,
        }
        for request in job.requests if _was_taken(job) else ():
            times = {"received": job.received, "tokenized": job.tokenized, "written": written}
            self.journal.add(partial(_line, request, job.marks(request), about, times))


def _was_taken(job: Job) -> bool:
    accepted = job.accepted
    return accepted.done() and not accepted.cancelled() and accepted.exception() is None


def _line(request: Request, marks: Sequence[Mark], about: dict[str, Any], times: dict[str, float]) -> bytes:
    """Return the line of a request; called in the thread of the journal, because it takes time."""
    entry = Entry(
        prompt_ids=request.prompt_ids,
        options=plain_options(request.options),
        choices=choices_of(request, marks),
        timings=timings(request, **times),
        **about,
    )
    return msgspec.json.encode(entry)
