"""Requests that come, are cancelled and end in any order: each that ends has the bits that it has alone."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

pytest.importorskip("numba")

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mlx_engine.backends import create_backend
from mlx_engine.cache.prefix import PrefixCache
from mlx_engine.loop.draft import DraftModel
from mlx_engine.loop.logprobs import digest
from mlx_engine.loop.lookup import Lookups
from mlx_engine.loop.request import Request
from mlx_engine.loop.scheduler import Scheduler
from mlx_engine.loop.speculation import Speculation
from mlx_engine.options import Options
from mlx_engine.weights.model import Model
from tests.random_models import random_model
from tests.streams import request_of

KINDS = (
    Options.of(logprobs=0),
    Options.of(logprobs=0, temperature=1.5, seed=3),
    Options.of(logprobs=0, temperature=0.7, top_p=0.8, repetition_penalty=1.3, frequency_penalty=0.4, seed=4),
)
# Prompts begin with a part of this one, so that prefixes are shared.
STEM = [(7 * i * i + 3 * i) % 300 for i in range(90)]


@cache
def model(architecture: str) -> Model:
    return random_model(architecture, "F32", create_backend("parallel", threads=1))


def digests(request: Request) -> list[str]:
    return [digest(output.token_ids, [of.logprob for of in output.logprobs or ()]) for output in request.outputs]


@cache
def alone(architecture: str, prompt: tuple[int, ...], kind: int, n_tokens: int, n: int) -> list[str]:
    of = model(architecture)
    request = request_of(prompt, KINDS[kind], max_tokens=n_tokens, n=n)
    scheduler = Scheduler(of, of.new_pool(request.longest * n, n_sequences=n), slots=n)
    scheduler.submit(request)
    while scheduler.has_work:
        scheduler.step()
    return digests(request)


class Proposes(Speculation):
    """Any number of tokens after those that followed before, or any tokens; or tokens of a draft model."""

    def __init__(self, seed: int, passes: tuple[DraftModel, ...] = ()) -> None:
        super().__init__(Lookups(keeps_others=True), 300, passes=passes)
        self.random = np.random.default_rng(seed)

    def look(self, sequence):
        draft = super().look(sequence)
        draft.ids = draft.ids or (() if self.passes else self.random.integers(0, 300, 4).tolist())
        return draft

    def depths(self, drafter, asking, n_sequences, n_rows):
        return [int(self.random.integers(0, min(drafter.most, self._most_of(one)) + 1)) for one, _ in asking]

    def plan(self, chunks, drafts, n_rows):
        room = [min(len(draft.ids), c.sequence.output.max_tokens - len(c.sequence.output.token_ids) - 1)
                for c, draft in zip(chunks, drafts, strict=True)]  # fmt: skip
        return [int(self.random.integers(0, n + 1)) for n in room]


class Serving(RuleBasedStateMachine):
    """A scheduler with little memory, and requests whose prompts share their beginnings."""

    @initialize(
        architecture=st.sampled_from(["qwen3", "gemma3"]),
        slots=st.integers(2, 5),
        page=st.sampled_from([4, 16, 64]),
        memory=st.integers(150, 500),
        budget=st.sampled_from([1, 5, 16, 100, 512]),
        shared=st.sampled_from([1, 7, 64]),
        cached=st.booleans(),
        proposes=st.sampled_from([None, 1, 2, "draft"]),
    )
    def begin(self, architecture, slots, page, memory, budget, shared, cached, proposes):
        self.architecture, of = architecture, model(architecture)
        pool = of.new_pool(memory, n_sequences=slots, page=page)
        prefix = PrefixCache(pool) if cached else None
        self.drafts: tuple[DraftModel, ...] = ()
        if proposes == "draft":  # with states, or layers with windows; its memory may be too small
            draft = model("lfm2" if slots % 2 else "gemma3")
            self.drafts = (DraftModel(draft, draft.new_pool(memory - 100, n_sequences=slots, n_proposed=slots), 0.1),)
        how = {} if proposes is None else {"speculation": Proposes(slots, self.drafts)}
        self.scheduler = Scheduler(of, pool, slots=slots, prefix=prefix, budget=budget, shared_budget=shared, **how)
        self.open: list[tuple[Request, tuple[int, ...], int]] = []

    @rule(
        cut=st.integers(0, 90), tail=st.lists(st.integers(0, 299), min_size=1, max_size=20), kind=st.integers(0, 2),
        n_tokens=st.integers(1, 12), n=st.sampled_from([1, 1, 1, 2]),
    )  # fmt: skip
    def submit(self, cut, tail, kind, n_tokens, n):
        prompt = (*STEM[:cut], *tail)
        request = request_of(prompt, KINDS[kind], max_tokens=n_tokens, n=n)
        if request.longest <= self.scheduler.pool.n_tokens // n:
            self.scheduler.submit(request)
            self.open.append((request, prompt, kind))

    @rule(n=st.integers(1, 8))
    def step(self, n):
        for _ in range(n):
            self.scheduler.step()
        self.check()

    @rule(data=st.data())
    def cancel(self, data):
        if self.open:
            request, *_ = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
            self.scheduler.cancel(request)

    @invariant()
    def slots_are_not_exceeded(self):
        if hasattr(self, "scheduler"):
            assert len(self.scheduler.running) <= self.scheduler.slots

    def check(self):
        for entry in [entry for entry in self.open if entry[0].has_ended]:
            request, prompt, kind = entry
            if request.error is not None:
                raise request.error
            n_tokens, n = request.output.max_tokens, len(request.outputs)
            assert digests(request) == alone(self.architecture, prompt, kind, n_tokens, n)
            self.open.remove(entry)

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        for _ in range(3000):
            if not self.scheduler.has_work:
                break
            self.scheduler.step()
        self.check()
        assert self.open == []
        of = [*([self.scheduler] if self.scheduler.prefix is not None else ()), *self.drafts]
        for one in of:
            one.prefix.clear()
        for pool in (self.scheduler.pool, *(draft.pool for draft in self.drafts)):
            assert [pool.used_pages(group) for group in range(len(pool.windows))] == [0] * len(pool.windows)
            assert pool.states.n_free == max(0, pool.states.n_slots - 1)


Serving.TestCase.settings = settings(
    max_examples=30, stateful_step_count=20, deadline=None, derandomize=True, database=None
)
TestServing = Serving.TestCase
