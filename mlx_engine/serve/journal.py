"""The journal of `serve --journal`: a JSON line per request, with its answers and all data needed to run it again.

A thread appends the lines, so that a slow or full disk never delays answers.

The command `replay` calls the function `replay`, which runs the requests of a journal again, and compares every token
and log-probability. So the command shows whether another machine, version or option changes any answer.
"""

from __future__ import annotations

import base64
import logging
import os
import stat
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields
from functools import partial
from itertools import zip_longest
from pathlib import Path
from queue import Full, Queue
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np

import mlx_engine
from mlx_engine.constraint import Constraint
from mlx_engine.engine import Engine
from mlx_engine.errors import EngineError, FormatError, OptionError, SourceError
from mlx_engine.loop.logprobs import digest
from mlx_engine.loop.output import Output
from mlx_engine.loop.request import Request
from mlx_engine.loop.scheduler import Scheduler
from mlx_engine.options import Options, Sampling
from mlx_engine.serve.call import Call, Progress
from mlx_engine.serve.prometheus import Counter
from mlx_engine.serve.replies import timings

LOGGER = logging.getLogger("mlx_engine.serve")

# The largest number of lines that wait to be written; further lines are dropped and counted.
QUEUE = 1024


class Journal:
    """Appends lines to a file. A line that cannot be written is lost.

    `written` counts the lines that this process has written. `lost` counts the lost lines by reason: "queue" (the
    queue was full), "disk" (writing failed), "error" (encoding failed).
    """

    def __init__(self, path: Path, *, warn: Callable[[str], None], queue: int = QUEUE) -> None:
        """Open a file, and start the thread. A new file can be read only by its owner.

        `warn` is called once, with a text, when the first line is lost because of the queue or the disk.

        Raises:
            OptionError: the file cannot be written.
        """
        self._path, self._warn = path, warn
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            self._is_torn = _is_torn(path)
        except OSError as error:
            message = f"--journal: {path} cannot be written: {error.strerror or error}"
            raise OptionError(message, option="--journal", found=str(path)) from error
        self.written = Counter("journal_lines", "Requests that were written to the journal.")
        self.lost = Counter("journal_lost", "Requests that could not be written to the journal, by reason.", "reason")
        for reason in ("queue", "disk", "error"):
            self.lost.add(0, reason)
        self._queue: Queue[Callable[[], bytes] | None] = Queue(queue)
        self._has_warned = False
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def add(self, line: Callable[[], bytes]) -> None:
        """Queue a function that returns a line without its line feed; never wait or raise.

        The journal's thread calls the function. If the queue is full, the line is lost.
        """
        try:
            self._queue.put_nowait(line)
        except Full:
            self.lost.add(1, "queue")
            self._warn_once("the disk is too slow")

    def close(self, seconds: float = 5.0) -> None:
        """Write the waiting lines and end the thread; give up after at most twice `seconds`."""
        try:
            self._queue.put(None, timeout=seconds)
        except Full:
            return
        self._thread.join(seconds)

    def lines(self) -> Iterator[str]:
        """Yield the counters in the text format of Prometheus."""
        yield from self.written.lines()
        yield from self.lost.lines()

    def _run(self) -> None:
        while (line := self._queue.get()) is not None:
            try:
                self._write(line() + b"\n")
                self.written.add()
            except OSError as error:
                self.lost.add(1, "disk")
                self._warn_once(error.strerror or str(error))
            except Exception:
                self.lost.add(1, "error")
                LOGGER.exception("a line of the journal failed")
        os.close(self._file)

    def _write(self, line: bytes) -> None:
        """Append a line. If the file ends with an incomplete line, first end that line with a line feed."""
        rest = b"\n" + line if self._is_torn else line
        while rest:
            rest = rest[os.write(self._file, rest) :]
            self._is_torn = bool(rest)

    def _warn_once(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            lost = "lines are lost until writing succeeds again; /metrics counts them"
            self._warn(f"warning: the journal {self._path} cannot be written: {why}; {lost}")


def _is_torn(path: Path) -> bool:
    """Return whether a file ends with an incomplete line, as after a process was killed."""
    if not stat.S_ISREG(path.stat().st_mode):
        return False
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


# Options that are not written: options that change no token, and `sampling`, whose fields are written instead.
LEFT_OUT = ("sampling", "logprobs", "timeout", "prediction")

# The options of `load` that a line may have; the command `replay` passes them to `load`.
LOAD_OPTIONS = ("activations", "kv_type", "allow_settings", "jit", "context", "quant", "quant_min_dim", "quant_layers")


class ModelId(msgspec.Struct, frozen=True):
    """A loaded model."""

    name: str  # the name of the model in the API
    source: str  # a path, a hub id or "builtin"
    digest: str  # the identity of the model's files, see `checkpoint/identity.py`
    options: dict[str, Any]  # the keyword arguments of `load` that can change answers, see `LOAD_OPTIONS`


class Choice(msgspec.Struct, frozen=True):
    """An answer. It is incomplete if its request was cancelled or failed before the answer ended."""

    token_ids: list[int]
    logprobs: str  # the log-probabilities of the tokens, little-endian float32 as base64
    digest: str  # SHA-256 of token ids and log-probabilities, see `loop/logprobs.py`
    finish_reason: str | None  # None if the answer is incomplete

    @classmethod
    def of(cls, output: Output, progress: Progress) -> Choice:
        """Return the answer with the tokens of `output` that `progress` counts."""
        ids = output.token_ids[: progress.n_tokens]
        values = [token.logprob for token in (output.logprobs or [])[: progress.n_tokens]]
        packed = base64.b64encode(np.array(values, "<f4").tobytes()).decode()
        return cls(ids, packed, digest(ids, values), progress.finish_reason)

    @property
    def logprob_values(self) -> list[float]:
        """The log-probabilities."""
        values: list[float] = np.frombuffer(base64.b64decode(self.logprobs, validate=True), "<f4").tolist()
        return values


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a line of the journal: a request that has ended."""

    id: str  # the id of the reply
    client_id: str | None  # the id that the client gave the HTTP request
    received: float  # when the body was read and the model was loaded, in Unix seconds
    ended: Literal["finished", "cancelled", "failed"]
    error: str | None  # the name of the exception's class, if the request failed
    version: str  # the version of mlx_engine
    backend: str
    slots: int  # how many answers the server could run at the same time
    model: ModelId
    prompt_ids: Annotated[list[int], msgspec.Meta(min_length=1)]
    options: dict[str, Any]  # the result of `plain_options`; always contains the seed
    choices: Annotated[list[Choice], msgspec.Meta(min_length=1)]
    timings: dict[str, Any]  # the result of `replies.timings`
    format: Literal[1] = 1  # the version of the journal's format

    @property
    def n_tokens(self) -> int:
        """The number of tokens of the longest answer."""
        return max(len(choice.token_ids) for choice in self.choices)

    def run_options(self) -> Options:
        """Return the options to run the request again.

        If the request was cancelled or failed, `max_tokens` is `n_tokens`.

        Raises:
            OptionError, TypeError: an option is invalid.
        """
        given = {**self.options, "logprobs": 0}
        if "constraint" in given:
            given["constraint"] = Constraint(**given["constraint"])
        return Options.of(**(given if self.ended == "finished" else {**given, "max_tokens": self.n_tokens}))


def plain_options(options: Options) -> dict[str, Any]:
    """Return the keyword arguments of `Options.of` that differ from the defaults, except LEFT_OUT, as JSON types."""
    found = {**asdict(options), **asdict(options.sampling)}
    defaults = {f.name: f.default for f in (*fields(Options), *fields(Sampling))}
    return {name: v for name, v in found.items() if name not in LEFT_OUT and v != defaults[name]}


def parse_entry(line: bytes, where: str) -> Entry:
    """Return the entry of a journal's line; `where` is the place of the line, for errors.

    Raises:
        FormatError: the line is damaged.
    """
    try:
        entry = msgspec.json.decode(line, type=Entry)
        if entry.n_tokens:
            entry.run_options()
        if not set(entry.model.options) <= set(LOAD_OPTIONS):
            raise ValueError(f"options of the model besides {', '.join(LOAD_OPTIONS)}")
        for choice in entry.choices:
            if len(choice.logprob_values) != len(choice.token_ids):
                raise ValueError(f"{len(choice.token_ids)} tokens and {len(choice.logprob_values)} log-probabilities")
    except (msgspec.DecodeError, RecursionError, TypeError, ValueError) as error:
        hint = "the line was cut off or edited"
        raise FormatError(where=where, expected="a line of a journal", found=str(error), hint=hint) from error
    return entry


class Recorder:
    """Appends a line to a journal for each request of a call. All methods are called in the event loop."""

    def __init__(
        self,
        journal: Journal,
        model: ModelId,
        *,
        backend: str,
        slots: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Make a recorder for lines with `model`, `backend` and `slots`. `clock` is the clock of `Call.received`."""
        self.journal, self._clock = journal, clock
        self._about = {"version": mlx_engine.__version__, "backend": backend, "slots": slots, "model": model}

    def record(self, call: Call, reply_id: str) -> None:
        """Add a line for each request of a call, if the scheduler accepted the call.

        This is called when the call has ended, or when its client has disconnected.
        """
        written, ended = self._clock(), "failed" if call.error is not None else "finished"
        about = {
            **self._about,
            "id": reply_id,
            "client_id": call.client_id,
            "received": time.time() - (written - call.received),
            "ended": ended if call.has_ended else "cancelled",
            "error": None if call.error is None else type(call.error).__name__,
        }
        for request in call.requests if _was_accepted(call) else ():
            times = {"received": call.received, "tokenized": call.tokenized, "written": written}
            self.journal.add(partial(_line, request, call.reached(request), about, times))


def _was_accepted(call: Call) -> bool:
    accepted = call.accepted
    return accepted.done() and not accepted.cancelled() and accepted.exception() is None


def _line(request: Request, reached: Sequence[Progress], about: dict[str, Any], times: dict[str, float]) -> bytes:
    """Return the line of a request; called in the thread of the journal, because it takes time."""
    entry = Entry(
        prompt_ids=request.prompt_ids,
        options=plain_options(request.options),
        choices=[Choice.of(output, progress) for output, progress in zip(request.outputs, reached, strict=True)],
        timings=timings(request, **times),
        **about,
    )
    return msgspec.json.encode(entry)


class Line(NamedTuple):
    """A line of a journal: its number, counted from 1, and its entry, or the error if the line is damaged."""

    number: int
    entry: Entry | FormatError


class Result(NamedTuple):
    """The result of running a request of the journal again."""

    number: int  # the number of the request's line
    differences: Sequence[str] = ()  # a text for each answer that differs
    error: Exception | None = None  # why the request was refused or failed; None if it ended normally

    @property
    def agrees(self) -> bool:
        """Whether every answer is equal to the answer in the journal."""
        return not self.differences and self.error is None


def read_journal(path: Path) -> Iterator[Line]:
    """Yield the lines of a journal that are not empty.

    Raises:
        SourceError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    yield Line(number, parse_entry(line, f"{path}:{number}"))
                except FormatError as error:
                    yield Line(number, error)
    except OSError as error:
        raise SourceError(f"{path}: cannot be read ({error.strerror}); check the path") from error


def replay(engine: Engine, entries: Sequence[tuple[int, Entry]], slots: int) -> Iterator[Result]:
    """Run requests again, `slots` answers at the same time, and yield a result for each request when it ends.

    If a request has more answers than `slots`, it runs in a scheduler with one slot per answer. Each element of
    `entries` is a pair: the number of a line, and the entry in this line.
    """
    by_slots = defaultdict(list)
    for number, entry in entries:
        by_slots[max(slots, len(entry.choices))].append((number, entry))
    for n, some in by_slots.items():
        yield from _replayed(engine, engine.scheduler(slots=n), some)


def _replayed(engine: Engine, scheduler: Scheduler, entries: Sequence[tuple[int, Entry]]) -> Iterator[Result]:
    queue, running = deque(entries), dict[Request, tuple[int, Entry]]()
    while queue or running:
        # Submit twice as many requests as there are slots, so that a free slot is filled in the next step.
        while queue and len(running) < 2 * scheduler.slots:
            number, entry = queue.popleft()
            try:
                request = engine.request(entry.prompt_ids, entry.run_options(), n=len(entry.choices))
                scheduler.submit(request)
                running[request] = number, entry
            except EngineError as error:
                yield Result(number, error=error)
        for request in scheduler.step().ended if running else ():
            number, entry = running.pop(request)
            yield Result(number, differences(engine, entry, request), request.error)


def differences(engine: Engine, entry: Entry, request: Request) -> list[str]:
    """Return a text for each answer that differs from the journal; an empty list if the request failed."""
    if request.error is not None:
        return []
    found = []
    for i, (choice, output) in enumerate(zip(entry.choices, request.outputs, strict=True)):
        # The new run may have continued an incomplete answer to the length of the request's longest answer, so only the
        # n tokens of the incomplete answer are compared.
        n = None if choice.finish_reason is not None else len(choice.token_ids)
        difference = _difference(engine, choice, output, n)
        if difference is not None:
            found.append(f"choice {i}: {difference}" if len(entry.choices) > 1 else difference)
    return found


def _difference(engine: Engine, choice: Choice, output: Output, n: int | None) -> str | None:
    """Describe the first difference between a journal's answer and the new output; return None if there is none.

    Only the output's first n tokens are compared; n = None compares all.
    """
    ids, values = output.token_ids[:n], [token.logprob for token in (output.logprobs or [])[:n]]
    for position, (expected, got) in enumerate(zip_longest(choice.token_ids, ids)):
        if expected != got:
            return f"token {position}: expected {_named(engine, expected)}, found {_named(engine, got)}"
    for position, (before, now) in enumerate(zip(choice.logprob_values, values, strict=True)):
        if np.float32(before).tobytes() != np.float32(now).tobytes():
            return f"token {position}: expected the log-probability {before!r}, found {now!r}"
    if digest(ids, values) != choice.digest:
        return "tokens and log-probabilities are equal, but the digest in the journal differs"
    return None


def _named(engine: Engine, token_id: int | None) -> str:
    if token_id is None:
        return "the end"
    if not 0 <= token_id < engine.config.vocab_size:
        return f"{token_id}, which is no token"
    return f"{token_id} ({engine.tokenizer.token_bytes(token_id).decode('utf-8', 'replace')!r})"
