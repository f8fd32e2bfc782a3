"""Forward passes that are submitted and settled in order, each with the choice of the tokens that follow.

A pass runs unread tokens of one or more sequences. It is submitted first: the batch is computed, on a lazy backend it
is only handed to the device. It is settled later: the chosen tokens are on the host, and its tokens are committed to
the KV cache. An eager backend settles each pass at once. On a lazy backend the next pass is submitted before the last
one is settled, so that the device computes while the host works. If several machines run the model, as many passes as
there are machines are submitted before the first is settled: the tokens of a pass are chosen when it is settled, so
these passes have different sequences, or later tokens of a prompt.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from logging import DEBUG
from typing import NamedTuple

import numpy as np

from mlx_engine.backends.batch import Batch
from mlx_engine.backends.parameters import Array, Token
from mlx_engine.cache import KVSequence, New, begin
from mlx_engine.decode.finite import FiniteCheck, not_finite
from mlx_engine.decode.sampler import Choice, Sampler, best_of
from mlx_engine.decode.timing import PassTimer
from mlx_engine.errors import NotFiniteError
from mlx_engine.observe.log import event
from mlx_engine.weights.model import Model


@dataclass(eq=False)
class Running:
    """A sequence that is being generated.

    Attributes:
        kv: its KV cache.
        pick: its sampler.
        unread: its tokens that no pass has run yet. The last one may be a token that the device has not computed yet.
    """

    kv: KVSequence
    pick: Sampler
    unread: list[Token] = field(default_factory=list)


class Part(NamedTuple):
    """A sequence's part of a pass.

    Attributes:
        sequence: the sequence.
        n: the number of unread tokens to run.
        picks: the samplers that each choose a token from the logits of the last of these tokens. The first one is the
            sequence's own. Empty if other unread tokens follow.
    """

    sequence: Running
    n: int
    picks: Sequence[Sampler] = ()


class Chosen(NamedTuple):
    """The tokens that were chosen for a part, one per sampler."""

    part: Part
    ids: list[int]


class Failed(NamedTuple):
    """A part whose logits are not finite, so that no token was chosen."""

    part: Part
    error: NotFiniteError


class Step(NamedTuple):
    """What a step did.

    Attributes:
        parts: the parts whose passes have ended.
        chosen: the tokens of those parts that have any.
        seconds: the time of these passes.
        sampling: the part of it that chose tokens, where it was measured.
        failed: the parts whose logits are not finite; their sequences cannot go on.
    """

    parts: Sequence[Part] = ()
    chosen: Sequence[Chosen] = ()
    seconds: float = 0.0
    sampling: float | None = None
    failed: Sequence[Failed] = ()

    @property
    def n_rows(self) -> int:
        """Number of tokens that were run."""
        return sum(part.n for part in self.parts)


@dataclass(eq=False)
class _Pass:
    """A submitted pass: its batch, its parts, the choices of each part, and the check of the logits they are from.

    Attributes:
        asked: the parts that choose, in the order of the rows of logits; a part that was dropped stays here.
        reply: waits for the logits of a pass that several machines run; None for other passes.
        started: the time when it was submitted.
    """

    batch: Batch
    parts: list[Part]
    choices: list[list[Choice]]
    asked: list[Part]
    started: float
    reply: Callable[[], Array] | None = None
    check: FiniteCheck | None = None
    sampling: float | None = None


class Passes:
    """Submits and settles the passes of one model.

    Attributes:
        overlaps: whether a pass is submitted before the tokens of the last one are on the host.
        depth: the largest number of passes that are submitted and not settled.

    Args:
        model: the model.
        overlap: submit a pass before the last one is settled, if the backend is lazy and not profiled.
        clock: read for the times of passes; no decision depends on it.
    """

    def __init__(self, model: Model, *, overlap: bool = True, clock: Callable[[], float] = time.perf_counter) -> None:
        self._model, self._clock = model, clock
        self._is_staged = model.n_stages > 1
        self.overlaps = overlap and model.backend.lazy and model.backend.profiler is None and not model.is_shared
        self.depth = model.n_stages if self._is_staged else 2 if self.overlaps else 1
        self._timer = PassTimer(clock)
        self._flight: deque[_Pass] = deque()
        self._last_had_no_choice, self._n_passes = False, 0

    @property
    def n_apart(self) -> int:
        """How many passes under way have different sequences: one for each machine, if several run the model."""
        return self.depth if self._is_staged else 1

    @property
    def is_idle(self) -> bool:
        """Whether every submitted pass is settled."""
        return not self._flight

    @property
    def sequences(self) -> list[Running]:
        """The sequences of passes that are not settled."""
        return list(dict.fromkeys(part.sequence for submitted in self._flight for part in submitted.parts))

    def n_pending(self, sequence: Running) -> int:
        """Return the number of passes that are not settled and choose a token for a sequence."""
        if not self._flight:
            return 0
        parts = (part for submitted in self._flight for part in submitted.parts)
        return sum(part.sequence is sequence and bool(part.picks) for part in parts)

    def step(self, plan: Callable[[], Sequence[Part]]) -> Step:
        """Submit the pass that `plan` returns, and settle the oldest one.

        `plan` is called up to `depth` times, so that other passes are submitted before the first is settled. An empty
        plan submits nothing. A step that fails or is interrupted while a pass is submitted leaves the sequences of
        this pass unchanged; one that is interrupted while a pass is settled can be repeated.

        Raises:
            CacheFullError: there are too few pages for the new tokens, and no pass was left to settle.
        """
        with self._model.backend.session():  # the caller's code runs between two steps, outside of the session
            resumed = self._clock()
            read = self._submit_all(plan)
            if not self._flight:
                return Step(read, (), self._timer.chunk(resumed)) if read else Step()
            oldest, asked = self._flight[0], self._clock()
            chosen, failed = self._settle(oldest)
            began = oldest.started if self._is_staged else resumed
            seconds = self._timer.interval(resumed, asked) if self.overlaps else self._timer.since(began)
        return Step([*read, *oldest.parts], chosen, seconds, oldest.sampling, failed)

    def drop(self, sequence: Running) -> None:
        """Remove a sequence from all passes that are not settled, and discard its pending tokens."""
        for submitted in reversed(self._flight):
            for i, part in enumerate(submitted.parts):
                if part.sequence is sequence:
                    sequence.kv.roll_back(part.n)
                    del submitted.parts[i], submitted.choices[i]
                    break
        self._flight = deque(submitted for submitted in self._flight if submitted.parts)

    def rest(self) -> None:
        """Signal that there is no work: other machines may sleep until the next pass."""
        self._model.rest()

    def close(self) -> None:
        """Discard all passes that are not settled."""
        for sequence in self.sequences:
            self.drop(sequence)

    def _submit_all(self, plan: Callable[[], Sequence[Part]]) -> list[Part]:
        """Submit passes until enough are pending; return the parts of one without choices, which ends this."""
        while len(self._flight) < self.depth:
            try:
                parts = plan()
                submitted = self._submit(list(parts)) if parts else None
            except Exception:  # it will fail again, when nothing is left to settle
                if not self._flight:
                    raise
                return []
            if submitted is None:
                return []
            if not any(part.picks for part in submitted.parts):
                submitted.batch.commit()
                self._last_had_no_choice = True
                return submitted.parts
            self._flight.append(submitted)
        return []

    def _submit(self, parts: list[Part]) -> _Pass:
        model, profiler = self._model, self._model.backend.profiler
        if self._last_had_no_choice and not model.is_shared:
            # A lazy backend would otherwise keep the graphs of all chunks in memory until the last is evaluated.
            model.backend.wait(parts[0].sequence.kv.pool.stores.arrays)
            self._last_had_no_choice = False
        news = [New(part.sequence.unread[: part.n], part.sequence.kv, int(bool(part.picks))) for part in parts]
        start = self._clock()
        if profiler is not None:
            profiler.begin_pass()
        batch = begin(news)
        if model.is_shared:
            batch.best = best_of([pick for part in parts for pick in part.picks])
        try:
            submitted = _Pass(batch, parts, [[] for _ in parts], [part for part in parts if part.picks], start)
            if self._is_staged:
                submitted.reply = model.submit(batch)
            else:
                logits = model.forward(batch)
                if logits is not None:
                    self._choose(submitted, logits)
        except BaseException:
            batch.roll_back()
            raise
        for part, choices in zip(parts, submitted.choices, strict=True):
            part.sequence.unread = [*part.sequence.unread[part.n :], *(choice.token for choice in choices[:1])]
        if profiler is not None:
            self._n_passes += 1
            event(DEBUG, "pass", number=self._n_passes, total_ms=(self._clock() - start) * 1e3, **profiler.end_pass())
        return submitted

    def _choose(self, submitted: _Pass, logits: Array) -> None:
        """Choose the tokens of a pass. No sampler has changed if this fails."""
        be, start = self._model.backend, self._clock()
        picks = [pick for part in submitted.parts for pick in part.picks]
        here = {id(part) for part in submitted.parts}
        rows = [r for r, part in enumerate(submitted.asked) if id(part) in here for _ in part.picks]
        if rows != list(range(len(submitted.asked))):  # several samplers choose from one row, or a part was dropped
            logits = be.take(logits, tuple(rows))
        submitted.check = check = FiniteCheck(be, logits)
        if not be.lazy and check.bad_rows():
            # These rows fail when the pass is settled. Until then they have some token, which NaN does not give.
            logits = be.array(np.nan_to_num(be.host(logits), nan=0, posinf=0, neginf=0))
        tokens = be.choose(logits, [pick.draw() for pick in picks])
        (be.begin if self.overlaps else be.wait)([*tokens, check.sums])
        whole = submitted.batch.best is None
        chosen = enumerate(zip(picks, tokens, strict=True))
        choices = iter([pick.add(token, logits, i, whole=whole) for i, (pick, token) in chosen])
        submitted.choices = [[next(choices) for _ in part.picks] for part in submitted.parts]
        # On a lazy backend the choice is part of the graph: its time cannot be separated from the time of the pass.
        submitted.sampling = None if be.lazy else self._clock() - start

    @staticmethod
    def _choices(submitted: _Pass) -> list[tuple[Part, list[Choice]]]:
        """Return the parts that have choices, with them."""
        return [(part, cs) for part, cs in zip(submitted.parts, submitted.choices, strict=True) if cs]

    def _settle(self, submitted: _Pass) -> tuple[list[Chosen], list[Failed]]:
        """Wait for the oldest pass and commit what it has run. Return its tokens, and the parts without finite logits.

        A part that has failed is committed, too: its owner drops the sequence.
        """
        if submitted.reply is not None:
            self._choose(submitted, submitted.reply())
            submitted.reply = None
            for part, choices in self._choices(submitted):
                part.sequence.unread = [*part.sequence.unread, choices[0].token]
        check, all_choices = submitted.check, self._choices(submitted)
        bad = check.bad_rows() if check else {}
        sound = [(part, choices) for part, choices in all_choices if choices[0].row not in bad]
        failed = [self._failed(part, cs[0], bad[cs[0].row]) for part, cs in all_choices if cs[0].row in bad]
        chosen = [
            Chosen(part, [pick.settle(choice) for pick, choice in zip(part.picks, choices, strict=True)])
            for part, choices in sound
        ]
        for part in submitted.parts:
            part.sequence.kv.commit(part.n)
        for (part, choices), (_, ids) in zip(sound, chosen, strict=True):
            unread = part.sequence.unread
            if unread and unread[-1] is choices[0].token:  # no pass has run it yet
                unread[-1] = ids[0]
        self._flight.popleft()
        return chosen, failed

    def _failed(self, part: Part, choice: Choice, logits: np.ndarray) -> Failed:
        """Return the error of a part whose logits (V,) are not finite."""
        return Failed(part, not_finite(self._model, part.picks[0].ids[: choice.position], logits))
