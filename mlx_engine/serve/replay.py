"""Run the requests of a journal again through a scheduler, and compare every token and log-probability.

An operator who changes the machine, the version or the options can see whether any answer changes.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mlx_engine.engine import Engine
from mlx_engine.errors import EngineError, FormatError, SourceError
from mlx_engine.loop.logprobs import digest
from mlx_engine.loop.output import Output
from mlx_engine.loop.request import Request
from mlx_engine.loop.scheduler import Scheduler
from mlx_engine.serve.journal import Choice, Entry, parse_entry


class Line(NamedTuple):
    """A line of a journal: its number from 1, and its entry, or the error in the line."""

    number: int
    entry: Entry | FormatError


class Result(NamedTuple):
    """The result of running a line again.

    Attributes:
        number: the number of the line.
        differences: for each answer that differs, a text.
        error: the reason why the request could not be run, or None.
    """

    number: int
    differences: Sequence[str] = ()
    error: Exception | None = None

    @property
    def agrees(self) -> bool:
        """Whether every answer is the one in the journal."""
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
    """Run requests, `slots` answers at the same time, and yield a result for each as it ends.

    A request with more answers than `slots` gets one slot per answer. Cancelled requests are run up to the token at
    which they were cancelled.
    """
    by_slots = defaultdict(list)
    for number, entry in entries:
        by_slots[max(slots, len(entry.choices))].append((number, entry))
    for n, some in by_slots.items():
        yield from _replayed(engine, engine.scheduler(slots=n), some)


def _replayed(engine: Engine, scheduler: Scheduler, entries: Sequence[tuple[int, Entry]]) -> Iterator[Result]:
    queue, running = deque(entries), dict[Request, tuple[int, Entry]]()
    while queue or running:
        # As many requests wait as run, so that a free slot is filled in the next step.
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
        # Answers of a cancelled request end at different lengths; the run ends with the longest.
        n = None if choice.finish_reason is not None else len(choice.token_ids)
        difference = _difference(engine, choice, output, n)
        if difference is not None:
            found.append(f"choice {i}: {difference}" if len(entry.choices) > 1 else difference)
    return found


def _difference(engine: Engine, choice: Choice, output: Output, n: int | None) -> str | None:
    """Describe the difference between the first n tokens of an output (or all) and an answer; None without one."""
    ids, values = output.token_ids[:n], [token.logprob for token in (output.logprobs or [])[:n]]
    for position, (expected, got) in enumerate(zip_longest(choice.token_ids, ids)):
        if expected != got:
            return f"token {position}: expected {_named(engine, expected)}, found {_named(engine, got)}"
    for position, (before, now) in enumerate(zip(choice.logprob_values, values, strict=True)):
        if np.float32(before).tobytes() != np.float32(now).tobytes():
            return f"token {position}: expected the log-probability {before!r}, found {now!r}"
    if digest(ids, values) != choice.digest:
        return "tokens and log-probabilities are equal, but the digest in the journal is another"
    return None


def _named(engine: Engine, token_id: int | None) -> str:
    if token_id is None:
        return "the end"
    if not 0 <= token_id < engine.config.vocab_size:
        return f"{token_id}, which is no token"
    return f"{token_id} ({engine.tokenizer.token_bytes(token_id).decode('utf-8', 'replace')!r})"
