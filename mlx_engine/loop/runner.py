"""The model runner: runs the forward passes that the scheduler asks for, and chooses the next tokens from their logits.

A pass runs a *chunk* of each of its sequences: *unread* tokens (no pass has run them yet), then tokens that a drafter
proposes. The runner first submits a pass: it computes the logits and chooses the next tokens, or, on a lazy backend
(MLX), only hands this work to the device. Then the runner settles the pass: it waits until the chosen tokens are on the
host, and commits the tokens that were run to the KV cache. An eager backend settles each pass at once. On a lazy
backend, the next pass is submitted before the last one is settled, so that the device computes while the host works.
With N pipeline stages, N passes are submitted before the first one is settled, and the tokens of a pass are chosen only
when the pass is settled. So these N passes run different sequences, or successive chunks of one prompt.

The mask of a constraint (the tokens that it allows) depends on the previous token. So if a sequence has a constraint,
and its last token is not settled, its next pass is submitted without choosing tokens. While the device runs this pass,
the host settles the previous pass, and then chooses the tokens. On an eager backend, a thread computes masks while the
next pass runs. For some requests (`Sampler.is_checked`), the token is chosen without a mask, and a mask is computed
only if the constraint does not allow this token.
"""

from __future__ import annotations

import os
import time
from collections import abc, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from logging import DEBUG
from typing import NamedTuple, cast

import numpy as np

from mlx_engine.backends.base import Backend
from mlx_engine.backends.batch import Batch
from mlx_engine.backends.parameters import Array, Token
from mlx_engine.backends.sampling import Draw
from mlx_engine.cache import SequenceInput, begin
from mlx_engine.errors import ConstraintError, EngineError, ProcessorError
from mlx_engine.loop.forward import not_finite
from mlx_engine.loop.metrics import PassTimer
from mlx_engine.loop.request import ScheduledChunk, Sequence
from mlx_engine.loop.sampler import Sampler, best_of
from mlx_engine.observe.log import event
from mlx_engine.options import Sampling
from mlx_engine.weights.model import Model


class PassOutput(NamedTuple):
    """The results of the passes that a step has settled.

    Attributes:
        chosen: pairs of a chunk and the tokens that were chosen for it, one token per sampler.
        failed: pairs of a chunk and the error that ends its request: the chunk's logits or hidden states are not
            finite, its constraint allows no token, or a logits processor has failed.
        seconds: the time of these passes.
        sampling: the part of `seconds` in which tokens were chosen; None if it was not measured.
    """

    chunks: abc.Sequence[ScheduledChunk] = ()
    chosen: abc.Sequence[tuple[ScheduledChunk, list[int]]] = ()
    failed: abc.Sequence[tuple[ScheduledChunk, EngineError]] = ()
    seconds: float = 0.0
    sampling: float | None = None


@dataclass(eq=False)
class _Pass:
    """A submitted pass.

    Attributes:
        chunks: the chunks of the pass, without those that were dropped.
        n_rows: the number of rows of the logits or hidden states.
        reply: returns the logits; with pipeline stages, first waits for them. None once the tokens are chosen.
        check: the logits from which tokens were chosen, and the sums of their rows, for `Backend.bad_rows`.
        rows: the logits or hidden states, if readers of requests get some of these rows; else None.
        sampling: the time of choosing tokens; None if it was not measured.
    """

    batch: Batch
    chunks: list[ScheduledChunk]
    n_rows: int
    started: float
    reply: Callable[[], Array] | None = None
    check: tuple[Array, Array] | None = None
    rows: Array | None = None
    sampling: float | None = None


class ModelRunner:
    """Submits and settles the passes of one model.

    Attributes:
        overlaps: whether, on a lazy backend, a pass is submitted before the tokens of the last one are on the host.
            False on eager backends, and if several ranks (processes) share the model, even if these ranks are a
            pipeline with several passes in flight.
        depth: the largest number of passes that are in flight (submitted, but not settled).
        n_hidden: the number of tokens at the end of a sequence whose hidden states are kept, for a drafter that reads
            hidden states.
        n_batches: the number of pipeline stages. The scheduler divides the running sequences into `n_batches` groups,
            and each pass in flight runs a different group.

    Args:
        overlap: whether passes may overlap. Passes of a profiled backend never do.
        clock: returns the time in seconds, to measure passes; no decision of the runner depends on it.
    """

    def __init__(self, model: Model, *, overlap: bool = True, clock: Callable[[], float] = time.perf_counter) -> None:
        self._model, self._clock = model, clock
        self._is_staged = model.n_stages > 1
        self.overlaps = overlap and model.backend.lazy and model.backend.profiler is None and not model.is_shared
        self.n_hidden, self.n_batches = 0, model.n_stages
        self.depth = 2 if self.overlaps else self.n_batches
        self._timer = PassTimer(clock)
        self._flight: deque[_Pass] = deque()
        self._last_had_no_choice, self._n_passes = False, 0
        self._masks: ThreadPoolExecutor | None = None
        self._process = os.getpid()

    @property
    def is_idle(self) -> bool:
        """Whether every submitted pass is settled."""
        return not self._flight

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences in passes that are not settled."""
        return list(dict.fromkeys(chunk.sequence for submitted in self._flight for chunk in submitted.chunks))

    def n_pending(self, sequence: Sequence) -> int:
        """Return the number of passes in flight that choose a token for a sequence."""
        if not self._flight:
            return 0
        chunks = (chunk for submitted in self._flight for chunk in submitted.chunks)
        return sum(chunk.sequence is sequence and bool(chunk.samplers) for chunk in chunks)

    def step(self, schedule: Callable[[], abc.Sequence[ScheduledChunk]]) -> PassOutput:
        """Submit passes until `depth` passes are in flight, then settle the oldest one and return its results.

        `schedule` returns the chunks of the next pass, or no chunks if no pass can be submitted now. If a step fails or
        is interrupted while it submits a pass, the sequences of this pass are unchanged. If a step is interrupted while
        it settles a pass, the step can be repeated.

        Raises:
            CacheFullError: there are too few pages for the new tokens, and no pass is in flight.
        """
        with self._model.backend.session():  # the caller's code runs between two steps, outside of the session
            resumed = self._clock()
            if self.overlaps and not self._flight:
                self._timer.restart()
            read = self._submit_all(schedule)
            if not self._flight:
                return PassOutput(read, seconds=self._clock() - resumed) if read else PassOutput()
            oldest, asked = self._flight[0], self._clock()
            chosen, failed = self._settle(oldest)
            began = oldest.started if self._is_staged else resumed
            seconds = self._timer.interval(resumed, asked) if self.overlaps else self._clock() - began
        return PassOutput([*read, *oldest.chunks], chosen, failed, seconds, oldest.sampling)

    def drop(self, sequence: Sequence) -> None:
        """Remove a sequence from all passes in flight, and roll back its pending tokens."""
        if not self._flight:
            return
        for submitted in reversed(self._flight):
            for chunk in submitted.chunks:
                if chunk.sequence is sequence:
                    sequence.kv.roll_back(chunk.n)
                    submitted.chunks.remove(chunk)
                    break
        self._flight = deque(submitted for submitted in self._flight if submitted.chunks)

    def choose_next(self, chunk: ScheduledChunk, i: int) -> int | None:
        """Choose and return the token after the first i proposed tokens of a settled chunk, which have been accepted.

        Return None if the logits are not finite: the next pass will compute them again, and fail.

        Raises:
            ConstraintError: the constraint allows no token.
            ProcessorError: a processor has failed.
        """
        be, (sampler,) = self._model.backend, chunk.samplers
        with be.session():
            logits = be.take(cast(Array, chunk.logits), (chunk.row + i,))
            if be.bad_rows(logits, be.row_sums(logits)):
                return None
            token = sampler(logits, whole=chunk.choices[0].whole)
            if sampler.is_constrained:
                self._prepare_masks([sampler])
        return token

    def keep(self, chunk: ScheduledChunk, n: int, token: int) -> None:
        """Commit the unread token and the first n proposed tokens of a settled chunk; `token` becomes unread."""
        sequence = chunk.sequence
        sequence.kv.roll_back(chunk.n - 1 - n)
        sequence.kv.commit(1 + n)
        sequence.unread, chunk.n, chunk.logits = [token], 1 + n, None
        self._keep_hidden(chunk)

    def _submit_all(self, schedule: Callable[[], abc.Sequence[ScheduledChunk]]) -> list[ScheduledChunk]:
        """Submit passes until `depth` passes are in flight.

        If a pass returns no rows, because it only runs a part of a prompt, commit its tokens at once, stop, and return
        its chunks. Otherwise return no chunks.
        """
        while len(self._flight) < self.depth:
            try:
                chunks = schedule()
                submitted = self._submit(list(chunks)) if chunks else None
            except Exception:  # if passes are in flight, settle them first; the next step submits this pass again
                if not self._flight:
                    raise
                return []
            if submitted is None:
                return []
            if not submitted.n_rows:
                submitted.batch.commit()
                for chunk in submitted.chunks:
                    self._keep_hidden(chunk)
                self._last_had_no_choice = True
                return submitted.chunks
            self._flight.append(submitted)
        return []

    def _submit(self, chunks: list[ScheduledChunk]) -> _Pass:
        """Submit a pass, and choose its tokens. With pipeline stages, or if a mask is missing, do not choose yet."""
        model, profiler = self._model, self._model.backend.profiler
        if self._last_had_no_choice and not model.is_shared:
            # Without this wait, a lazy backend would keep the graphs of a prompt's chunks until the last is evaluated.
            model.backend.wait(chunks[0].sequence.kv.pool.stores.arrays)
            self._last_had_no_choice = False
        start, inputs, n_rows = self._clock(), [], 0
        for chunk in chunks:
            ids = [*chunk.sequence.unread, *chunk.proposed] if chunk.proposed else chunk.sequence.unread[: chunk.n]
            inputs.append(SequenceInput(ids, chunk.sequence.kv, chunk.n_wanted, bool(chunk.proposed)))
            n_rows += chunk.n_wanted
            chunk.row = n_rows - 1 - len(chunk.proposed)
        if profiler is not None:
            profiler.begin_pass()
        batch = begin(inputs)
        if self.n_hidden:
            batch.keeps_hidden = any(self._keeps_hidden(chunk) for chunk in chunks)
        if model.is_shared and not any(chunk.n_read for chunk in chunks):
            batch.best = best_of([sampler for chunk in chunks for sampler in chunk.samplers])
        submitted = _Pass(batch, chunks, n_rows, start)
        try:
            is_hidden = chunks[0].sequence.request.is_hidden
            if self._is_staged and not is_hidden:
                submitted.reply = model.submit(batch)
            else:
                rows = model.forward_hidden(batch) if is_hidden else model.forward(batch)
                if rows is not None and self.overlaps and any(map(self._waits_for_mask, chunks)):
                    model.backend.begin([rows])
                    submitted.reply = partial(_as_it_is, rows)
                elif rows is not None:
                    self._choose(submitted, rows)
        except BaseException:
            batch.roll_back()
            raise
        row = 0
        for chunk in chunks:
            if batch.hidden is not None and self._keeps_hidden(chunk):
                chunk.hidden = model.backend.take(batch.hidden, tuple(range(row, row + chunk.n)))
            row += chunk.n
            chunk.sequence.unread = [*chunk.sequence.unread[chunk.n :], *_next_token(chunk)]
        if profiler is not None:
            self._n_passes += 1
            event(DEBUG, "pass", number=self._n_passes, total_ms=(self._clock() - start) * 1e3, **profiler.end_pass())
        return submitted

    def _keeps_hidden(self, chunk: ScheduledChunk) -> bool:
        """Return whether a chunk has hidden states for a drafter: those of an answer, or of a prompt's last tokens."""
        request = chunk.sequence.request
        return not request.is_hidden and chunk.first + chunk.n > len(request.prompt_ids) - self.n_hidden

    def _keep_hidden(self, chunk: ScheduledChunk) -> None:
        """Keep the hidden states of a chunk's committed tokens; drop those that are too far from the last token."""
        if chunk.hidden is None:
            return
        kept, end = chunk.sequence.hidden, chunk.first + chunk.n
        kept.append((chunk.first, self._model.backend.host(chunk.hidden)[: chunk.n]))
        chunk.hidden = None
        while kept[0][0] + len(kept[0][1]) <= end - self.n_hidden:
            kept.popleft()

    def _waits_for_mask(self, chunk: ScheduledChunk) -> bool:
        """Return whether the choice of a chunk needs a mask that depends on a token that is not settled."""
        return any(sampler.is_constrained for sampler in chunk.samplers) and self.n_pending(chunk.sequence) > 0

    def _choose_late(self, submitted: _Pass) -> None:
        """Choose the tokens of a pass that was submitted without a choice."""
        assert submitted.reply is not None  # noqa: S101 - for mypy
        self._choose(submitted, submitted.reply())
        submitted.reply = None
        for chunk in submitted.chunks:
            chunk.sequence.unread = [*chunk.sequence.unread, *_next_token(chunk)]

    def _choose(self, submitted: _Pass, rows: Array) -> None:
        """Choose the tokens of a pass from its rows of logits. If this fails, no sampler has a new token."""
        be, start, logits = self._model.backend, self._clock(), rows
        if any(chunk.n_read for chunk in submitted.chunks):
            submitted.rows = rows  # for `_read`, when the pass is settled
        pairs = [(chunk, sampler) for chunk in submitted.chunks for sampler in chunk.samplers]
        if not pairs:
            (be.begin if self.overlaps else be.wait)([rows])
            return
        wanted = [chunk.row for chunk, _ in pairs]
        if wanted != list(range(submitted.n_rows)):  # some rows have several samplers, or none
            logits = be.take(rows, tuple(wanted))
        sums = be.row_sums(logits)
        submitted.check = logits, sums
        if not be.lazy and be.bad_rows(logits, sums):
            # The chunks of bad rows fail when the pass is settled. Make these rows finite, so that they give a valid
            # token until then.
            logits = be.array(np.nan_to_num(be.host(logits), nan=0, posinf=0, neginf=0))
        draws: list[Draw] = []
        for chunk, sampler in pairs:
            try:
                draws.append(sampler.draw())
            except ConstraintError as error:  # the chunk fails; the token of this default draw is not used
                chunk.error = error
                draws.append(Draw(Sampling(), (), 0.0))
        edited = logits
        if any(sampler.processors is not None for _, sampler in pairs):
            edited = _edited(be, logits, pairs, draws)
        tokens = be.choose(edited, draws)
        if any(sampler.is_checked for _, sampler in pairs):
            tokens = _checked(be, edited, pairs, tokens)
        (be.begin if self.overlaps else be.wait)([*tokens, sums])
        whole = submitted.batch.best is None
        for row, ((chunk, sampler), token) in enumerate(zip(pairs, tokens, strict=True)):
            chunk.choices.append(sampler.add(token, logits, row, whole=whole))
            if chunk.proposed:
                chunk.logits = rows
        # On a lazy backend, the choice is part of the pass's graph, so its time cannot be measured separately.
        submitted.sampling = None if be.lazy else self._clock() - start

    def _settle(
        self, submitted: _Pass
    ) -> tuple[list[tuple[ScheduledChunk, list[int]]], list[tuple[ScheduledChunk, EngineError]]]:
        """Wait for the oldest pass and commit its tokens; return the chosen tokens, and the chunks that have failed.

        Failed chunks are committed, too; the scheduler then drops their sequences. Chunks with proposed tokens are not
        committed, because the scheduler calls `choose_next` and `keep` for them.
        """
        if submitted.reply is not None:
            self._choose_late(submitted)
        bad = self._model.backend.bad_rows(*submitted.check) if submitted.check else {}
        failed: list[tuple[ScheduledChunk, EngineError]]
        failed = [] if submitted.rows is None else self._read(submitted, submitted.rows)
        chosen: list[tuple[ScheduledChunk, list[int]]] = []
        unreadable = [chunk for chunk, _ in failed]
        for chunk in submitted.chunks:
            first = chunk.choices[0] if chunk.choices else None
            if chunk in unreadable:
                continue
            if chunk.error is not None:
                failed.append((chunk, chunk.error))
            elif first is not None and first.row in bad:
                ids = chunk.sequence.sampler.ids[: first.position]
                failed.append((chunk, not_finite(self._model, ids, bad[first.row], chunk.sequence.kv.adapter)))
            elif first is not None:
                settled = zip(chunk.samplers, chunk.choices, strict=True)
                chosen.append((chunk, [sampler.settle(choice) for sampler, choice in settled]))
        for chunk, _ in failed:
            chunk.logits = None
        for chunk in submitted.chunks:
            if chunk.logits is None:
                chunk.sequence.kv.commit(chunk.n)
                self._keep_hidden(chunk)
        for chunk, tokens in chosen:
            unread = chunk.sequence.unread
            if unread and unread[-1] is chunk.choices[0].token:  # no pass has run this token yet
                unread[-1] = tokens[0]
        self._flight.popleft()
        constrained = [sampler for chunk, _ in chosen for sampler in chunk.samplers if sampler.is_constrained]
        if constrained:
            self._prepare_masks(constrained)
        if self._flight and self._flight[0].reply is not None and not self._is_staged:
            with suppress(Exception):  # the tokens of the settled pass must not be lost; the next step tries again
                self._choose_late(self._flight[0])
        return chosen, failed

    def _read(self, submitted: _Pass, of_pass: Array) -> list[tuple[ScheduledChunk, EngineError]]:
        """Give the rows of the oldest pass to the readers; return chunks whose rows are not finite, with the errors."""
        failed: list[tuple[ScheduledChunk, EngineError]] = []
        be = self._model.backend
        for chunk in submitted.chunks:
            reader = chunk.sequence.request.reader
            if reader is None or not chunk.n_read:
                continue
            rows = be.host(of_pass)[chunk.row + 1 - chunk.n_read : chunk.row + 1]
            first = chunk.first + chunk.n - chunk.n_read
            bad = [
                i for i, total in enumerate(rows.sum(axis=1)) if not (np.isfinite(total) or np.isfinite(rows[i]).all())
            ]
            if bad:
                ids = chunk.sequence.ids[: first + bad[0] + 1]
                failed.append((chunk, not_finite(self._model, ids, rows[bad[0]], chunk.sequence.kv.adapter)))
            else:
                reader.read(be, first, rows)
        return failed

    def _prepare_masks(self, samplers: abc.Sequence[Sampler]) -> None:
        """Begin to compute the masks of the samplers' next tokens in a thread."""
        if self._process != os.getpid():  # the thread does not exist in a forked process
            self._process, self._masks = os.getpid(), None
        if self._masks is None:
            self._masks = ThreadPoolExecutor(1, "masks")
        for sampler in samplers:
            sampler.prepare(self._masks)


def _next_token(chunk: ScheduledChunk) -> list[Token]:
    """Return a list with the chosen token, which becomes unread; [] if none is chosen, or if `keep` sets it later."""
    return [choice.token for choice in chunk.choices[:1] if not chunk.proposed]


def _checked(
    be: Backend, logits: Array, pairs: abc.Sequence[tuple[ScheduledChunk, Sampler]], tokens: list[Token]
) -> list[Token]:
    """Return `tokens`, one per row of logits (R, V), with a new choice in each row whose constraint refuses the token.

    If a constraint allows no token, its chunk fails.
    """
    for row, (chunk, sampler) in enumerate(pairs):
        try:
            draw = sampler.redraw(tokens[row])
        except ConstraintError as error:
            chunk.error, draw = error, None
        if draw is not None:
            (tokens[row],) = be.choose(be.take(logits, (row,)), [draw])
    return tokens


def _edited(
    be: Backend, logits: Array, pairs: abc.Sequence[tuple[ScheduledChunk, Sampler]], draws: abc.Sequence[Draw]
) -> Array:
    """Return logits (R, V) in which each row has been edited by the processors of its sampler.

    If a processor fails, its row is unchanged, and only the chunk of this row fails. A row that is not finite is
    unchanged, too; its chunk fails when the pass is settled.
    """
    rows = [row for row, (_, sampler) in enumerate(pairs) if sampler.processors is not None]
    edited = np.array(be.host(logits))
    for row in rows:
        chunk, sampler = pairs[row]
        if chunk.error is not None or not np.isfinite(edited[row]).all():
            continue
        try:
            edited[row] = sampler.edited(edited[row], draws[row])
        except ProcessorError as error:
            chunk.error = error
    return be.array(edited)


def _as_it_is(logits: Array) -> Array:
    return logits
