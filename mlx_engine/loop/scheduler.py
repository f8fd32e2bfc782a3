"""The scheduler: decides which requests run, and which tokens each forward pass computes.

A step runs one forward pass. The pass computes the next token of every answer that is being generated, and runs chunks
of prompts. While answers are being generated, a pass has few tokens of prompts, so that no answer waits long for the
prompt of another request. Requests are admitted in their order of arrival, when a slot (the place of a running answer)
and the pages for their prompt are free. When the pages of the KV cache run out, cached prefixes that no sequence uses
are evicted. If this is not enough, the newest sequence is preempted: its pages are freed, and it is computed again
later. The tokens of a sequence do not depend on these decisions, see docs/exactness.md.

Without a KV cache (`--no-kv`), all tokens of a sequence are marked as unread (to be run) after each new token, so each
pass runs whole sequences again. With a `Speculation`, a pass may also run proposed next tokens of a sequence
(`speculation.py`).

The scheduler's decisions depend only on the order of calls, with two exceptions: the number of proposed tokens depends
on measured times, and with a prefix cache on disk, the cached prefixes depend on its files.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import abc, deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from mlx_engine.cache import KVPool
from mlx_engine.cache.pool import LONGEST_PASS
from mlx_engine.cache.prefix import PrefixCache
from mlx_engine.errors import ContextLengthError, DistributedError, again
from mlx_engine.loop.memory import Traffic
from mlx_engine.loop.output import FinishReason
from mlx_engine.loop.request import Request, ScheduledChunk, Sequence
from mlx_engine.loop.row_reader import MOST_BYTES
from mlx_engine.loop.runner import ModelRunner, PassOutput
from mlx_engine.weights.model import Model

if TYPE_CHECKING:
    from mlx_engine.loop.speculation import Speculation

# The largest number of prompt tokens in a pass: BUDGET while no answer is being generated, SHARED_BUDGET while one is.
# On a CPU, the tokens per second of a pass hardly depend on its length from 32 tokens on. So a small SHARED_BUDGET does
# not make prefill much slower.
BUDGET, SHARED_BUDGET = LONGEST_PASS, 64
_INTERRUPTED = "a step of this scheduler was interrupted: make a new scheduler"


class StepOutput(NamedTuple):
    """The result of one step.

    Attributes:
        requests: the requests that got new tokens, those that ran a chunk of their prompt, and those that failed.
        ended: the requests among these that have ended.
        n_decode: number of tokens of answers that the passes ran.
        n_prefill: number of tokens of prompts that the passes ran.
        nbytes: bytes of weights, keys and values that the passes read; 0 if the scheduler does not count them.
        drafts: for each answer with proposed tokens, the name of the drafter and the numbers of proposed and accepted
            tokens.
    """

    requests: abc.Sequence[Request] = ()
    ended: abc.Sequence[Request] = ()
    n_decode: int = 0
    n_prefill: int = 0
    seconds: float = 0.0
    nbytes: float = 0.0
    drafts: abc.Sequence[tuple[str, int, int]] = ()


class Scheduler:
    """Runs requests on one model, step by step.

    Attributes:
        waiting: sequences without a slot, in the order in which they will be admitted.
        running: sequences with a slot, in the order of arrival.
        others_answer: whether another scheduler on the same cores is generating answers. Passes of this scheduler then
            have at most `shared_budget` tokens of prompts.

    Args:
        pool: the memory for keys and values, made for at least `slots` sequences. A pool that was made with
            `kept=False` keeps nothing between passes, so each pass runs whole sequences again.
        slots: the largest number of sequences that run at the same time.
        prefix: the prefix cache; None for no prefix cache.
        budget: the largest number of prompt tokens in a pass while no answer is being generated.
        shared_budget: the largest number of prompt tokens in a pass while an answer is being generated.
        overlap: on a lazy backend, submit each pass before the tokens of the last one are on the host.
        traffic: computes the bytes that passes read; None if they are not counted.
        speculation: proposes tokens; None for no proposals. It is ignored without a KV cache.
    """

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        *,
        slots: int = 1,
        prefix: PrefixCache | None = None,
        budget: int = BUDGET,
        shared_budget: int = SHARED_BUDGET,
        overlap: bool = True,
        traffic: Traffic | None = None,
        speculation: Speculation | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if min(slots, budget, shared_budget) < 1:
            raise ValueError(f"expected at least one slot and token, found {slots}, {budget} and {shared_budget}")
        self._model, self._traffic, self._clock = model, traffic, clock
        self.pool, self.prefix, self.slots = pool, prefix, slots
        self._keeps_kv = pool.stores.are_kept
        # For layers with a window, the pool has pages only for passes of at most `longest_pass` tokens of a sequence.
        self._has_windows = any(window is not None for window in pool.windows)
        self._budget = min(budget, pool.longest_pass) if self._has_windows else budget
        self._shared_budget = min(self._budget, shared_budget)
        self._runner = ModelRunner(model, overlap=overlap and self._keeps_kv, clock=clock)
        # The largest number of tokens whose logits or hidden states one pass returns to `RowReader`s: `_read_budget`
        # while no answer is being generated, `_shared_read_budget` while one is.
        most = max(1, MOST_BYTES // (4 * int(model.config.vocab_size)))
        self._read_budget, self._shared_read_budget = most, min(most, max(1, self._shared_budget // 2))
        if not self._keeps_kv:  # every pass runs whole sequences, so the budget must not cut them
            self._budget = self._shared_budget = pool.n_tokens * self._runner.n_batches
            self._read_budget = self._shared_read_budget = self._budget
        self._was_hidden = self.others_answer = False
        self.speculation = speculation if self._keeps_kv else None
        if self.speculation is not None:
            self._runner.n_hidden = self.speculation.n_hidden
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._failed: list[Request] = []
        # The waiting sequence that was last refused for lack of pages; None after pages have been freed.
        self._refused: Sequence | None = None
        # Requests that `leave` cancels after the running step.
        self._left: deque[Request] = deque()
        self._is_stepping = self._is_broken = False

    @property
    def has_work(self) -> bool:
        """Whether there are requests that a step would continue or report."""
        return bool(self.waiting or self.running or self._failed) and not self._is_broken

    @property
    def is_sound(self) -> bool:
        """Whether no step was interrupted, see `step`."""
        return not self._is_broken

    def submit(self, request: Request) -> None:
        """Append a request to the queue.

        Raises:
            ContextLengthError: the answers of the request may need more tokens than the whole pool has room for.
            ValueError: the request asks for more answers than there are slots, or for several without a KV cache.
            RuntimeError: an earlier step was interrupted.
        """
        if self._is_broken:
            raise RuntimeError(_INTERRUPTED)
        n = len(request.outputs)
        if n > self.slots:
            raise ValueError(f"expected at most {self.slots} answers to a request, one per slot, found {n}")
        if n > 1 and not self._keeps_kv:
            raise ValueError(f"expected one answer to a request without a KV cache, found {n}")
        if request.longest > self.pool.n_tokens // n:
            most, n_prompt, n_new = self.pool.n_tokens // n, len(request.prompt_ids), request.output.max_tokens
            message = (
                f"the prompt has {n_prompt:,} tokens and max_tokens is {n_new:,}; "
                f"the memory for keys and values has room for {most:,}"
            )
            raise ContextLengthError(message, option="max_tokens", expected=f"at most {most:,}", found=n_prompt + n_new)
        request.times.submitted = self._clock()
        self.waiting.append(Sequence.of(request, self.pool, self._model.backend))

    def cancel(self, request: Request, reason: FinishReason | None = None) -> None:
        """End a request at once, and free its pages. If `reason` is given, unfinished outputs end with this reason."""
        sequences = [one for one in (*self.waiting, *self.running) if one.request is request]
        for sequence in sequences if not self._is_broken else ():
            self._remove(sequence)
        if reason is not None:
            for output in request.outputs:
                output.end(reason)
        self._stamp_end(request)

    def leave(self, request: Request) -> None:
        """Cancel a request. If a step is running, cancel the request after this step.

        The garbage collector may call this during a step.
        """
        self._left.append(request)
        while self._left and not self._is_stepping:
            self.cancel(self._left.popleft())

    def step(self) -> StepOutput:
        """Run one step: admit requests, run a forward pass, and append the tokens to the outputs of their requests.

        If the submission of a pass fails, the passes in flight (submitted, but not settled) are settled, and the pass
        is submitted again. If a submission fails while no pass is in flight, each sequence is run in a pass of its
        own, and a request ends with the error if its own pass fails. If a pass fails while it is settled, the requests
        of all passes in flight end with the error. A request whose logits are not finite also ends with an error. An
        interrupted step (KeyboardInterrupt) may leave the scheduler inconsistent. The scheduler then refuses further
        steps, and the caller must make a new one.

        Raises:
            RuntimeError: an earlier step was interrupted.
            DistributedError: the connection to another rank has failed, which ends the run.
        """
        if self._is_broken:
            raise RuntimeError(_INTERRUPTED)
        self._is_stepping = True
        try:
            done = self._step()
        except BaseException:
            self._is_broken = True
            raise
        finally:
            self._is_stepping = False
        while self._left:
            self.cancel(self._left.popleft())
        if not self.has_work:
            self._model.idle()  # the other ranks may sleep until the next pass
        return done

    def _step(self) -> StepOutput:
        if self.waiting:
            self._admit()
        done = self._run()
        failed = done.failed if self.speculation is None else [*done.failed, *self._accept(self.speculation, done)]
        n_rows = sum(chunk.n for chunk in done.chunks)
        decoding = [chunk for chunk in done.chunks if chunk.sequence.output.token_ids]
        n_decode = sum(chunk.n for chunk in decoding if chunk.n == 1 or chunk.proposed)
        nbytes = self._record(done, n_rows)
        for chunk, error in failed:
            self._fail(chunk.sequence, error)
        if self.prefix is not None:
            chunks = [chunk for chunk in done.chunks if chunk.sequence.request.error is None]
            self._keep_prompts(self.prefix, chunks)
        if done.chunks:
            self._was_hidden = done.chunks[-1].sequence.request.is_hidden
        if any(chunk.sequence.request.is_hidden for chunk in done.chunks):
            self._finish_hidden(done)
        for chunk, ids in done.chosen:
            if chunk.sequence.request.error is not None:  # another sequence of the request may have failed
                continue
            if not chunk.proposed:
                self._deliver(chunk.sequence, ids)
            elif chunk.sequence.output.finish_reason is not None:
                self._finish(chunk.sequence)
        reached = list(dict.fromkeys([*(chunk.sequence.request for chunk in done.chunks), *self._failed]))
        self._failed = []
        ended = [request for request in reached if request.has_ended]
        drafts: abc.Sequence[tuple[str, int, int]] = ()
        if self.speculation is not None:
            drafts = [(chunk.drafter, len(chunk.proposed), chunk.n - 1) for chunk, _ in done.chosen if chunk.proposed]
        return StepOutput(reached, ended, n_decode, n_rows - n_decode, done.seconds, nbytes, drafts)

    # ---- the decision: which sequences run, and which tokens ----

    def _admit(self) -> None:
        """Give slots to waiting sequences, in their order, while there are slots and pages for their prompts."""
        while self.waiting:
            first = self.waiting[0]
            n_slots = sum(1 + len(one.parallel) for one in (first, *self.running))
            if n_slots > self.slots or (first is self._refused and self.running):
                return
            if self._attach_prefix(first) and self.running:
                first.rewind()  # let the running answers have a pass before the next call reads more files
                return
            n_pages = sum(one.n_pages(len(one.unread)) for one in (first, *self.running))
            # Each parallel sample (a further answer to the prompt) needs a copy of the prompt's last page.
            if self.running and not self._make_room(n_pages + len(first.parallel)):
                first.rewind()
                self._refused = first
                return
            insort(self.running, self.waiting.pop(0), key=Sequence.arrival)
            if first.request.times.admitted is None:
                first.request.times.admitted = self._clock()

    def _schedule(self, only: Sequence | None = None) -> list[ScheduledChunk]:
        """Return the chunks of the next pass, for all sequences or only for `only`.

        If too few pages are free, evict unused prefixes. If this is not enough, and passes are in flight, return no
        chunks: the tokens of these passes may end a sequence, which frees its pages. If no pass is in flight, preempt
        the newest sequence, and try again.
        """
        while True:
            chunks = self._chunks() if only is None else self._chunk_alone(only)
            n_pages = sum(chunk.sequence.n_pages(chunk.n) for chunk in chunks)
            # After the pass with a prompt's last token, parallel samples become sequences, and each copies a page.
            ends = [chunk.sequence for chunk in chunks if chunk.samplers]
            forked = [one for one in self.running if one.parallel and (one in ends or self._runner.n_pending(one))]
            n_copies = sum(len(one.parallel) for one in forked)
            if not n_pages + n_copies or self._make_room(n_pages, n_copies):
                if self.speculation is not None:
                    self.speculation.propose(chunks, self._is_settled, n_pages + n_copies)
                return chunks
            if not self._runner.is_idle:
                return []
            if len(self.running) == 1:
                return chunks  # too few pages even for this sequence alone: the pass raises CacheFullError
            self._preempt(self.running[-1])

    def _chunks(self) -> list[ScheduledChunk]:
        """Return one token of every answer that is being generated, then chunks of prompts within the budget.

        A pass returns either logits or hidden states. If some requests need logits and others hidden states, the two
        kinds of passes alternate. With N pipeline stages, a pass continues at most 1/N of the running sequences, and
        its budget is 1/N of the whole budget.
        """
        ready, n_batches = [one for one in self.running if self._is_ready(one)], self._runner.n_batches
        if any(one.request.is_hidden != ready[0].request.is_hidden for one in ready):
            ready = [one for one in ready if one.request.is_hidden != self._was_hidden]
        chunks = [sequence.chunk(1) for sequence in ready if len(sequence.unread) == 1]
        chunks = chunks[: -(-len(self.running) // n_batches)]
        # A pass that returns hidden states runs no tokens of answers. Its budget is small while answers are being
        # generated, so that they do not wait long.
        is_hidden = bool(ready) and ready[0].request.is_hidden
        is_shared = (
            self.others_answer or bool(chunks) or (is_hidden and any(one.output.token_ids for one in self.running))
        )
        left = -(-(self._shared_budget if is_shared else self._budget) // n_batches)
        rows = -(-(self._shared_read_budget if is_shared else self._read_budget) // n_batches)
        for sequence in ready:
            is_read = sequence.request.reader is not None
            if left and len(sequence.unread) > 1 and (rows or not is_read):
                chunks.append(sequence.chunk(left, rows if is_read else None))
                left -= chunks[-1].n
                rows -= chunks[-1].n_read
        return chunks

    def _chunk_alone(self, sequence: Sequence) -> list[ScheduledChunk]:
        """Return the next chunk of one sequence; no chunk if the sequence lost its slot or a pass is in flight."""
        is_free = sequence in self.running and self._runner.is_idle
        return [sequence.chunk(self._budget, self._read_budget)] if is_free else []

    def _is_ready(self, sequence: Sequence) -> bool:
        """Return whether a sequence has unread tokens that the next pass may run."""
        if not sequence.unread:  # a pass in flight computes the sequence's next token
            return False
        n_pending = self._runner.n_pending(sequence)
        most = max(1, sequence.output.max_tokens)  # the prompt is run even if no token is wanted
        # A user's function in `processors` needs the ids of all earlier tokens, and must not be called for a token that
        # is later rolled back. So a sequence with processors waits until none of its passes in flight chooses a token.
        waits = bool(sequence.parallel) or sequence.sampler.processors is not None
        if self.speculation is not None and n_pending:
            waits = waits or self.speculation.is_promising(sequence)
        return len(sequence.output.token_ids) + n_pending < most and not (waits and n_pending)

    def _is_settled(self, sequence: Sequence) -> bool:
        return not self._runner.n_pending(sequence)

    def _make_room(self, n_pages: int, n_copies: int = 0) -> bool:
        """Evict unused prefixes until there are enough free pages; return whether there are now enough.

        A group is the layers with the same attention window. The group without a window needs `n_pages + n_copies` free
        pages. A group with a window needs pages only for the copies, because the pool has enough pages of this group
        for one sequence per slot.
        """
        return self.pool.make_room([n_copies + (n_pages if window is None else 0) for window in self.pool.windows])

    def _preempt(self, sequence: Sequence) -> None:
        """Free a sequence's pages, and put the sequence back into the queue, in the order of arrival."""
        self.running.remove(sequence)
        self._refused = None
        if self.speculation is not None:
            self.speculation.release(sequence)
        sequence.rewind()
        sequence.request.n_preemptions += 1
        insort(self.waiting, sequence, key=Sequence.arrival)

    def _run(self) -> PassOutput:
        """Run a pass over all sequences. If its submission fails and no pass is in flight, run each sequence alone."""
        try:
            return self._runner.step(self._schedule)
        except DistributedError:  # the connection to another rank failed, which ends the run
            raise
        except Exception as error:
            if not self._runner.is_idle:  # a pass failed while it was settled, so later passes are invalid, too
                for sequence in self._runner.sequences:
                    self._fail(sequence, again(error))
                return PassOutput()
        outputs = []
        for sequence in [sequence for sequence in self.running if self._is_ready(sequence)]:
            try:
                outputs.append(self._runner.step(partial(self._schedule, sequence)))
            except Exception as error:
                self._fail(sequence, error)
        return PassOutput(
            [chunk for output in outputs for chunk in output.chunks],
            [chosen for output in outputs for chosen in output.chosen],
            [failed for output in outputs for failed in output.failed],
            sum(output.seconds for output in outputs),
        )

    # ---- prefixes ----

    def _attach_prefix(self, sequence: Sequence) -> bool:
        """Begin a sequence with its longest cached prefix; return whether a later call could read more from disk."""
        if self.prefix is None:
            return False
        ids, request = sequence.ids, sequence.request
        # The cache has no logits or hidden states, so positions whose rows the request's reader needs must be run.
        most = len(ids) - 1 if request.reader is None else min(len(ids) - 1, request.reader.start)
        match = self.prefix.attach(sequence.kv, ids, most, is_busy=bool(self.running))
        sequence.unread = list(ids[match.length :])
        if request.times.admitted is None:
            request.match = match._replace(pages=[], state=None)  # the pages may soon be reused
            request.n_cached = request.n_prefilled = match.length
            request.n_from_disk = min(match.length, request.n_from_disk + match.from_disk)
        return match.has_more

    def _keep_prompts(self, prefix: PrefixCache, chunks: abc.Sequence[ScheduledChunk]) -> None:
        """Add prompts that the chunks have run, and recurrent states at page boundaries, to the prefix cache."""
        for chunk in chunks:
            sequence = chunk.sequence
            request, kv, has_states = sequence.request, sequence.kv, self.pool.states.n_slots > 0
            # If only whole pages are reused, or prefixes are kept on disk, reuse needs recurrent states at page
            # boundaries. So insert the sequence when its answer reaches such a boundary.
            on_page = kv.length % self.pool.page < (chunk.n if chunk.proposed else 1)
            at_page = (prefix.whole_pages or prefix.disk is not None) and on_page
            if sequence.output.token_ids and at_page and has_states:
                prefix.insert(sequence.ids[: kv.length], kv, on_disk=False)
            # Insert the prompt after each chunk if layers with a window soon free its first pages, or if the model has
            # recurrent states, which allow reuse only up to a stored state. Otherwise insert the whole prompt once.
            after_each = self._has_windows or has_states
            if not sequence.output.token_ids and (after_each or kv.length >= len(request.prompt_ids)):
                prefix.insert(request.prompt_array[: kv.length], kv)

    # ---- results ----

    def _record(self, done: PassOutput, n_rows: int) -> float:
        """Add times, rows and bytes of the settled passes to their requests; return the bytes, 0 if not counted."""
        nbytes = self._traffic.nbytes(done.chunks) if self._traffic and done.chunks else 0.0
        for request in dict.fromkeys(chunk.sequence.request for chunk in done.chunks):
            request.n_steps += 1
            request.n_rows += n_rows
            request.n_bytes += nbytes
            if request.times.first_token is not None:
                request.decode_bytes += nbytes
                request.decode_seconds += done.seconds
        for chunk in done.chunks:
            sequence = chunk.sequence
            request = sequence.request
            request.n_prefilled = max(request.n_prefilled, min(len(request.prompt_ids), sequence.kv.length))
            sequence.seconds += done.seconds
            sequence.share += done.seconds * chunk.n / n_rows
        sampling = None if done.sampling is None or not done.chosen else done.sampling / len(done.chosen)
        for chunk, _ in done.chosen:
            sequence = chunk.sequence
            if sequence.index == 0:
                seconds, share, n = sequence.seconds, sequence.share, chunk.n if chunk.proposed else 1
                sequence.request.metrics.record_pass(seconds, share=share, sampling=sampling, n_tokens=n)
            sequence.seconds = sequence.share = 0.0
        return nbytes

    def _accept(self, speculation: Speculation, done: PassOutput) -> list[tuple[ScheduledChunk, Exception]]:
        """Accept or reject proposed tokens of chunks; return the chunks for which this failed, with the errors."""
        failed = []
        if done.chunks:
            is_decode = all(chunk.samplers and chunk.sequence.output.token_ids for chunk in done.chunks)
            speculation.measure(sum(chunk.n for chunk in done.chunks), done.seconds, is_decode=is_decode)
        for chunk, ids in done.chosen:
            if chunk.proposed:
                try:
                    self._accept_chunk(chunk, *ids)
                except Exception as error:
                    failed.append((chunk, error))
                speculation.learn(chunk)
        return failed

    def _accept_chunk(self, chunk: ScheduledChunk, token: int) -> None:
        """Append the chosen token to the output. While it equals the proposed one, choose and append the next token.

        Each token is appended before the next one is chosen. So penalties, masks and processors depend only on tokens
        of the answer, and not on rejected proposals.
        """
        output, sampler, n = chunk.sequence.output, chunk.sequence.sampler, 0
        n_logprobs = chunk.sequence.request.options.logprobs
        try:
            output.append(token, sampler, n_logprobs)
            while output.finish_reason is None and n < len(chunk.proposed) and token == chunk.proposed[n]:
                following = self._runner.choose_next(chunk, n + 1)
                if following is None:
                    return
                n, token = n + 1, following
                output.append(token, sampler, n_logprobs)
        finally:
            self._runner.keep(chunk, n, token)

    def _deliver(self, first: Sequence, ids: abc.Sequence[int]) -> None:
        """Append the chosen tokens to the outputs of a sequence and of its parallel samples.

        `ids` has one token for each sampler of the chunk. After the pass with the last token of the prompt, the
        parallel samples become sequences of their own.
        """
        request, sequences = first.request, [first]
        try:
            if request.times.first_token is None:
                request.times.first_token = self._clock()
            for sampler, token in zip(first.parallel, ids[1:], strict=True):
                sequences.append(first.fork(sampler, token))
                insort(self.running, sequences[-1], key=Sequence.arrival)
            first.parallel = ()
            for sequence, token in zip(sequences, ids, strict=True):
                sequence.output.append(token, sequence.sampler, request.options.logprobs)
                if sequence.output.finish_reason is not None:
                    self._finish(sequence)
                elif not self._keeps_kv:
                    sequence.rewind()
        except Exception as error:
            self._fail(first, error)

    def _finish_hidden(self, done: PassOutput) -> None:
        """End each request for hidden states if its whole prompt has been run."""
        for chunk in done.chunks:
            sequence = chunk.sequence
            # The last pass of the prompt may still be in flight, so compare the committed length.
            has_run = sequence.kv.length == len(sequence.request.prompt_ids)
            if sequence.request.is_hidden and sequence.request.error is None and has_run:
                if sequence.request.times.first_token is None:
                    sequence.request.times.first_token = self._clock()
                sequence.output.end("length")
                self._finish(sequence)

    def _finish(self, sequence: Sequence) -> None:
        """Add an ended sequence to the prefix cache, and free the pages that the cache does not keep."""
        self._runner.drop(sequence)
        if self.speculation is not None:
            self.speculation.end(sequence)
        if self.prefix is not None:
            self.prefix.insert(sequence.ids[: sequence.kv.length], sequence.kv)
        self._remove(sequence)
        if sequence.request.has_ended:
            self._stamp_end(sequence.request)

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        """End the request of a sequence with an error, and remove all sequences of this request."""
        request = sequence.request
        request.error = error
        for other in [other for other in (*self.waiting, *self.running) if other.request is request]:
            self._remove(other)
        self._failed.append(request)
        self._stamp_end(request)

    def _remove(self, sequence: Sequence) -> None:
        """Remove a sequence from the queue, its slot and all passes, and free its pages."""
        self._runner.drop(sequence)
        self._refused = None
        if self.speculation is not None:
            self.speculation.release(sequence)
        for sequences in (self.waiting, self.running):
            if sequence in sequences:
                sequences.remove(sequence)
        sequence.kv.close()

    def _stamp_end(self, request: Request) -> None:
        if request.times.ended is None:
            request.times.ended = self._clock()
