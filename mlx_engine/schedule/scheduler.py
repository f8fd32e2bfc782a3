"""The scheduler: which requests run, and what each forward pass computes.

It does no input or output. Its decisions depend on the order of calls alone: the clock is read for times of requests.

A step runs one forward pass: the next token of every answer that is being generated, and parts of prompts. While
answers are being generated, a pass has few tokens of prompts, so that nobody waits long for the prompt of somebody
else. Requests are admitted in their order of arrival, when there are slots and pages for their prompts. When the pages
run out, unused prefixes are evicted; then the newest answer gives its pages back, and is computed again later. The
tokens of an answer do not depend on any of this: see the order of summation in `backends/base.py`.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, cast

from mlx_engine.cache import KVPool
from mlx_engine.cache.pool import LONGEST_PASS
from mlx_engine.cache.prefix import PrefixCache
from mlx_engine.decode.output import FinishReason
from mlx_engine.decode.passes import Part, Passes, Step
from mlx_engine.errors import CacheFullError, ContextLengthError, DistributedError
from mlx_engine.schedule.accounting import account
from mlx_engine.schedule.answer import Answer, answer_of
from mlx_engine.schedule.request import Request
from mlx_engine.schedule.traffic import Traffic
from mlx_engine.weights.model import Model

# Tokens of prompts in one pass while no answer is being generated, and while there is one: on a CPU, passes of 32 or
# more tokens compute prompts equally fast.
BUDGET, SHARED_BUDGET = LONGEST_PASS, 64


class Report(NamedTuple):
    """What one step did.

    Attributes:
        requests: the requests that got tokens, or whose prompt was read further, or that failed.
        ended: those of them that have ended.
        n_decode: tokens that continued an answer.
        n_prefill: tokens of prompts.
        seconds: the time of the passes.
        nbytes: bytes of weights, keys and values that the passes read; 0 if the scheduler does not count them.
    """

    requests: Sequence[Request] = ()
    ended: Sequence[Request] = ()
    n_decode: int = 0
    n_prefill: int = 0
    seconds: float = 0.0
    nbytes: float = 0.0


class Scheduler:
    """Runs requests on one model, step by step.

    Attributes:
        pool: the memory for keys and values.
        prefix: the prefix cache, or None.
        slots: the largest number of answers that run at the same time.
        waiting: answers without a slot, in the order in which they will be admitted.
        running: answers with a slot, in the order of arrival.
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
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Make a scheduler.

        Args:
            model: the model.
            pool: the memory for keys and values, made for at least `slots` sequences.
            slots: the largest number of answers that run at the same time.
            prefix: where the keys and values of prompts and answers are kept for later requests; None keeps none.
            budget: the largest number of prompt tokens in a pass while no answer is being generated.
            shared_budget: the same while an answer is being generated.
            overlap: on a lazy backend, submit each pass before the tokens of the last one are on the host.
            traffic: counts the bytes that passes read; None counts none.
            clock: read for the times of requests.
        """
        if min(slots, budget, shared_budget) < 1:
            raise ValueError(f"expected at least one slot and token, found {slots}, {budget} and {shared_budget}")
        self._model, self._traffic, self._clock = model, traffic, clock
        self.pool, self.prefix, self.slots = pool, prefix, slots
        # A layer with a window has pages for passes of a limited length.
        self._has_windows = any(window is not None for window in pool.windows)
        self._budget = min(budget, pool.longest_pass) if self._has_windows else budget
        self._shared_budget = min(self._budget, shared_budget)
        self._passes = Passes(model, overlap=overlap, clock=clock)
        self.waiting: list[Answer] = []
        self.running: list[Answer] = []
        self._failed: list[Request] = []
        # The answer that was last refused for lack of pages, until pages are freed.
        self._refused: Answer | None = None
        # Requests whose streams were dropped, perhaps by a garbage collection within a step.
        self._left: deque[Request] = deque()
        self._is_stepping = self._is_broken = False

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.waiting or self.running or self._failed) and not self._is_broken

    @property
    def is_sound(self) -> bool:
        """Whether no step was interrupted. If one was, make another scheduler."""
        return not self._is_broken

    def submit(self, request: Request) -> None:
        """Append a request to the queue.

        Raises:
            ContextLengthError: the request could not be completed even if it had all pages for itself.
            ValueError: it asks for more answers than there are slots.
        """
        self._check_sound()
        n = len(request.outputs)
        if n > self.slots:
            raise ValueError(f"expected at most {self.slots} answers to a request, one per slot, found {n}")
        if request.longest > self.pool.n_tokens // n:
            most, n_prompt, n_new = self.pool.n_tokens // n, len(request.prompt_ids), request.output.max_tokens
            message = (
                f"the prompt has {n_prompt:,} tokens and max_tokens is {n_new:,}; "
                f"the memory for keys and values has room for {most:,}"
            )
            raise ContextLengthError(message, option="max_tokens", expected=f"at most {most:,}", found=n_prompt + n_new)
        request.times.submitted = self._clock()
        self.waiting.append(Answer.of(request, self.pool, self._model.backend))

    def cancel(self, request: Request, reason: FinishReason | None = None) -> None:
        """End a request where it is, and free its pages. Its outputs that have not ended get the reason."""
        answers = [answer for answer in (*self.waiting, *self.running) if answer.request is request]
        for answer in answers if not self._is_broken else ():
            self._remove(answer)
        if reason is not None:
            for output in request.outputs:
                output.end(reason)
        self._stamp_end(request)

    def leave(self, request: Request) -> None:
        """Cancel a request at once or, within a step, before the next one. May be called by the garbage collector."""
        self._left.append(request)
        if not self._is_stepping:
            self._cancel_left()

    def step(self) -> Report:
        """Run one step: admit requests, run a forward pass, and append the tokens to the outputs of their requests.

        A pass that fails is repeated for each of its sequences alone. The request of one that fails again ends with
        this error. A request whose logits are not finite ends with an error, too. A step that is interrupted
        (KeyboardInterrupt) may have stopped anywhere: the scheduler then refuses to continue, and its owner makes
        another.

        Raises:
            RuntimeError: an earlier step was interrupted.
        """
        self._check_sound()
        self._is_stepping = True
        try:
            self._cancel_left()
            report = self._step()
        except BaseException:
            self._is_broken = True
            raise
        finally:
            self._is_stepping = False
        self._cancel_left()
        if not self.has_work:
            self._passes.rest()
        return report

    def _step(self) -> Report:
        self._admit()
        step = self._run()
        n_decode = sum(part.n for part in step.parts if part.n == 1 and answer_of(part).output.token_ids)
        nbytes = account(step, self._traffic)
        for part, error in step.failed:
            self._fail(answer_of(part), error)
        self._keep_prompts([part for part in step.parts if answer_of(part).request.error is None])
        for part, ids in step.chosen:
            if answer_of(part).request.error is None:  # another answer to the request may have failed
                self._deliver(answer_of(part), ids)
        reached = list(dict.fromkeys([*(answer_of(part).request for part in step.parts), *self._failed]))
        self._failed = []
        ended = [request for request in reached if request.has_ended]
        return Report(reached, ended, n_decode, step.n_rows - n_decode, step.seconds, nbytes)

    def _check_sound(self) -> None:
        if self._is_broken:
            raise RuntimeError("expected a scheduler whose steps have ended, found an interrupted one; make another")

    def _cancel_left(self) -> None:
        while self._left:
            self.cancel(self._left.popleft())

    # ---- admission ----

    def _admit(self) -> None:
        """Give slots to waiting answers, in their order, while there are slots and pages for their prompts."""
        while self.waiting:
            first = self.waiting[0]
            n_slots = sum(1 + len(answer.forks) for answer in (first, *self.running))
            if n_slots > self.slots or (first is self._refused and self.running):
                return
            self._attach(first)
            # Each fork continues in a copy of the prompt's last page.
            n_pages = sum(answer.n_pages(len(answer.unread)) for answer in (first, *self.running)) + len(first.forks)
            if self.running and not self._has_room(n_pages):
                first.rewind()
                self._refused = first
                return
            insort(self.running, self.waiting.pop(0), key=Answer.arrival)
            if first.request.times.admitted is None:
                first.request.times.admitted = self._clock()

    def _attach(self, answer: Answer) -> None:
        """Take what the prefix cache has of an answer's tokens; at least the last token is left to be run."""
        if self.prefix is None:
            return
        ids = answer.ids
        match = self.prefix.attach(answer.kv, ids[:-1])
        answer.unread = list(ids[match.length :])
        if answer.request.times.admitted is None:
            answer.request.match = match._replace(pages=[], state=None)  # they may soon belong to others
            answer.request.n_cached = answer.request.n_prefilled = match.length

    def _has_room(self, n_pages: int) -> bool:
        """Return whether there are so many free pages, after evicting unused prefixes.

        Layers with a window always have pages for as many sequences as there are slots.
        """
        return self.pool.make_room([n_pages if window is None else 0 for window in self.pool.windows])

    # ---- passes ----

    def _plan(self) -> list[Part]:
        """Return the parts of the next pass: a token of every answer that is being generated, and parts of prompts.

        If several machines run the model, a pass has its share of the answers and of the budget.
        """
        ready = [answer for answer in self.running if self._can_go_on(answer)]
        n_passes = self._passes.n_apart
        parts = [answer.part(1) for answer in ready if len(answer.unread) == 1]
        parts = parts[: -(-len(self.running) // n_passes)]
        left = -(-(self._shared_budget if parts else self._budget) // n_passes)
        for answer in ready:
            if left and len(answer.unread) > 1:
                parts.append(answer.part(left))
                left -= parts[-1].n
        self._reserve_forks(parts)
        return parts

    def _reserve_forks(self, parts: Sequence[Part]) -> None:
        """Check that forks which this pass or a pending one makes will find pages: each copies the prompt's last page.

        Raises:
            CacheFullError: there are too few pages for the pass and the forks.
        """
        ends = {id(part.sequence) for part in parts if part.picks}
        due = [one for one in self.running if one.forks and (id(one) in ends or self._passes.n_pending(one))]
        n_forks = sum(len(answer.forks) for answer in due)
        if not n_forks:
            return
        n_pages = sum(answer_of(part).n_pages(part.n) for part in parts)
        if not self.pool.make_room([n_forks + (n_pages if window is None else 0) for window in self.pool.windows]):
            page, length = self.pool.page, due[0].kv.length
            free = self.pool.free_tokens
            raise CacheFullError(length=length, wanted=n_forks * page, capacity=length + free, pool_is_full=True)

    def _can_go_on(self, answer: Answer) -> bool:
        """Return whether an answer has unread tokens, and a pass may run them."""
        if not answer.unread:  # a pass that is under way computes its next token
            return False
        n_pending = self._passes.n_pending(answer)
        most = max(1, answer.output.max_tokens)  # the prompt is run even if no token is wanted
        return len(answer.output.token_ids) + n_pending < most and not (answer.forks and n_pending)

    def _alone(self, answer: Answer) -> list[Part]:
        """Return the next part of one answer, unless it runs already."""
        return [answer.part(self._budget)] if answer in self.running and self._passes.is_idle else []

    def _run(self) -> Step:
        """Run a pass over all answers; if it fails, run one for each answer alone."""
        try:
            return self._run_with_room(self._plan)
        except Exception as error:
            if isinstance(error, DistributedError):  # no request's fault
                raise
            if not self._passes.is_idle:  # the tokens of submitted passes cannot be computed
                for answer in self._passes.sequences:
                    self._fail(cast(Answer, answer), error)
                return Step()
        steps = []
        for answer in [answer for answer in self.running if self._can_go_on(answer)]:
            try:
                steps.append(self._run_with_room(partial(self._alone, answer)))
            except Exception as error:
                self._fail(answer, error)
        return Step(
            [part for step in steps for part in step.parts],
            [chosen for step in steps for chosen in step.chosen],
            sum(step.seconds for step in steps),
            failed=[failed for step in steps for failed in step.failed],
        )

    def _run_with_room(self, plan: Callable[[], Sequence[Part]]) -> Step:
        """Run a step; while there are too few pages, even after unused prefixes are evicted, preempt the newest answer.

        Raises:
            CacheFullError: there are too few pages for one answer alone.
        """
        while True:
            try:
                return self._passes.step(plan)
            except CacheFullError:
                if len(self.running) < 2:
                    raise
                self._preempt(self.running[-1])

    def _preempt(self, answer: Answer) -> None:
        """Take an answer's pages, and put it back into the queue at its place."""
        self.running.remove(answer)
        self._refused = None
        answer.rewind()
        answer.request.n_preemptions += 1
        insort(self.waiting, answer, key=Answer.arrival)

    # ---- results ----

    def _keep_prompts(self, parts: Sequence[Part]) -> None:
        """Keep the prompts that have been run, as prefixes for later requests."""
        if self.prefix is None:
            return
        for answer in map(answer_of, parts):
            n_prompt = len(answer.request.prompt_ids)
            # The state after an answer is that of a whole page only by chance: keep those on the way.
            at_page = self.prefix.whole_pages and answer.kv.length % self.pool.page == 0
            if answer.output.token_ids and at_page and self.pool.states.n_slots:
                self.prefix.insert(answer.ids[: answer.kv.length], answer.kv)
            # After each part of a prompt if there are windows: their layers soon give back the pages of its beginning.
            # The same if there is a state: a prefix is reused where its state is held.
            parts_count = self._has_windows or self.pool.states.n_slots > 0
            if not answer.output.token_ids and (parts_count or answer.kv.length >= n_prompt):
                self.prefix.insert(answer.request.prompt_array[: answer.kv.length], answer.kv)

    def _deliver(self, first: Answer, ids: Sequence[int]) -> None:
        """Append the tokens that were chosen for an answer and, after its prompt, for those that fork from it."""
        request, answers = first.request, [first]
        try:
            if request.times.first_token is None:
                request.times.first_token = self._clock()
            for index, (pick, token) in enumerate(zip(first.forks, ids[1:], strict=True), start=1):
                answers.append(first.fork(index, pick, token))
                insort(self.running, answers[-1], key=Answer.arrival)
            first.forks = ()
            for answer, token in zip(answers, ids, strict=True):
                answer.output.append(token, answer.pick, request.options.logprobs)
                if answer.output.finish_reason is not None:
                    self._finish(answer)
        except Exception as error:
            self._fail(first, error)

    def _finish(self, answer: Answer) -> None:
        """Free the pages of an answer that has ended; the prefix cache keeps those that it wants."""
        self._passes.drop(answer)
        if self.prefix is not None:
            self.prefix.insert(answer.ids[: answer.kv.length], answer.kv)
        self._remove(answer)
        if answer.request.has_ended:
            self._stamp_end(answer.request)

    def _fail(self, answer: Answer, error: Exception) -> None:
        """End a request with an error."""
        request = answer.request
        request.error = error
        for other in [other for other in (*self.waiting, *self.running) if other.request is request]:
            self._remove(other)
        self._failed.append(request)
        self._stamp_end(request)

    def _remove(self, answer: Answer) -> None:
        """Remove an answer from the queue, its slot and all passes, and free its pages."""
        self._passes.drop(answer)
        self._refused = None
        for answers in (self.waiting, self.running):
            if answer in answers:
                answers.remove(answer)
        answer.kv.close()

    def _stamp_end(self, request: Request) -> None:
        if request.times.ended is None:
            request.times.ended = self._clock()
