"""Faults of the scheduler's requests and steps: they end what they must, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

import mlx_engine
from mlx_engine.backends.observed import tapped
from mlx_engine.loop.scheduler import Scheduler
from mlx_engine.loop.stream import Stream
from tests.scheduling import MICRO, PROMPTS, alone, ids, options, requests, run, scheduler_of


# `parallel` runs the compiled program of `simd`.
@pytest.fixture(scope="module", params=["simd", pytest.param("parallel", marks=pytest.mark.slow), "mlx"])
def engine(request: pytest.FixtureRequest) -> mlx_engine.Engine:
    return mlx_engine.load(MICRO, request.param)


@pytest.fixture(scope="module")
def expected(engine: mlx_engine.Engine) -> list[list[int]]:
    """The tokens that each request gets alone, before any fault."""
    return alone(engine)


@pytest.fixture(scope="module")
def simd() -> mlx_engine.Engine:
    return mlx_engine.load(MICRO, "simd")


@pytest.mark.some(1)
def test_a_failing_sampler_ends_its_request_alone(
    engine: mlx_engine.Engine, monkeypatch: pytest.MonkeyPatch, expected: list[list[int]]
):
    scheduler, found = scheduler_of(engine), requests(engine)
    for request in found:
        scheduler.submit(request)
    for _ in range(3):
        scheduler.step()

    def failing() -> object:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(scheduler.running[2].sampler, "draw", failing)
    ended = [request for report in run(scheduler) for request in report.ended]
    assert sorted(request.number for request in ended) == [request.number for request in found]
    assert isinstance(found[2].error, ZeroDivisionError)
    assert [request.output.token_ids for request in found if request is not found[2]] == expected[:2] + expected[3:]
    assert found[2].output.token_ids == expected[2][: len(found[2].output.token_ids)]


def test_a_text_that_cannot_be_decoded_ends_its_request_alone(engine: mlx_engine.Engine, expected: list[list[int]]):
    class Failing:
        def add(self, token_id: int) -> str:
            raise UnicodeError("planted")

    scheduler, found = scheduler_of(engine), requests(engine)
    found[1].output._text = Failing()
    for request in found:
        scheduler.submit(request)
    run(scheduler)
    assert isinstance(found[1].error, UnicodeError)
    assert ids(found)[:1] + ids(found)[2:] == expected[:1] + expected[2:]


def test_a_kernel_that_fails_for_one_sequence_ends_its_request_alone(
    engine: mlx_engine.Engine, monkeypatch: pytest.MonkeyPatch, expected: list[list[int]]
):
    """The pass of all fails, and is repeated for each alone."""
    forward = engine.model.forward

    def failing(batch):
        if 17 in [i for i in batch.ids if isinstance(i, int)]:
            raise MemoryError("planted")
        return forward(batch)

    monkeypatch.setattr(engine.model, "forward", failing)
    scheduler, found = scheduler_of(engine), requests(engine)
    for request in found:
        scheduler.submit(request)
    run(scheduler)
    assert isinstance(found[0].error, MemoryError)
    assert found[0].output.token_ids == []
    for request, tokens in zip(found[1:], expected[1:], strict=True):
        assert request.output.token_ids == tokens or isinstance(request.error, MemoryError)
    assert [request.output.token_ids for request in found[3:]] == expected[3:]


def test_if_every_pass_fails_all_requests_end_and_the_scheduler_can_be_used(
    engine: mlx_engine.Engine, monkeypatch: pytest.MonkeyPatch, expected: list[list[int]]
):
    scheduler, found = scheduler_of(engine), requests(engine)
    for request in found:
        scheduler.submit(request)
    scheduler.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "forward", lambda batch: 1 / 0)
        run(scheduler)
    assert all(isinstance(request.error, ZeroDivisionError) for request in found)
    assert len({id(request.error) for request in found}) == len(found)  # each has a traceback of its own
    again = requests(engine)
    for request in again:
        scheduler.submit(request)
    run(scheduler)
    assert ids(again) == expected


class Interrupted(BaseException):
    """As KeyboardInterrupt, but no debugger mistakes it for the user's."""


@pytest.mark.some(2)
@pytest.mark.parametrize("passes", [1, 2, 5])
def test_a_scheduler_that_was_interrupted_refuses_to_continue(
    engine: mlx_engine.Engine, passes: int, expected: list[list[int]]
):
    """The step may have stopped anywhere. Another scheduler on the same model gives the same tokens."""
    original, seen = engine.model.backend, []

    def interrupt(name: str, _: object) -> None:
        seen.extend([name] if name == "blk.1.attn_out" else [])
        if len(seen) == passes:
            seen.append("once")
            raise Interrupted

    engine.model.run_on(tapped(original, interrupt))
    try:
        scheduler, found = scheduler_of(engine, budget=20), requests(engine)
        for request in found:
            scheduler.submit(request)
        with pytest.raises(Interrupted):
            run(scheduler)
        assert not scheduler.has_work
        assert not scheduler.is_sound
        with pytest.raises(RuntimeError, match="was interrupted: make a new scheduler"):
            scheduler.step()
        with pytest.raises(RuntimeError, match="was interrupted: make a new scheduler"):
            scheduler.submit(found[0])
        scheduler.cancel(found[0])
        again, scheduler = requests(engine), scheduler_of(engine)
        for request in again:
            scheduler.submit(request)
        run(scheduler)
    finally:
        engine.model.run_on(original)
    assert ids(again) == expected


# ---- forks, refusals, streams that are dropped ----


@pytest.mark.slow
def test_forks_find_pages_that_older_answers_would_take(simd: mlx_engine.Engine):
    """While the prompt of two answers is read in parts, the pages for its copy go to an older answer."""
    for n_prompt in range(5, 16, 2):
        for n_steps in range(2, 20):
            scheduler = scheduler_of(simd, 24, slots=4, page=2, shared_budget=1)
            old = simd.request([3, 4], options(n=21))
            new = simd.request(list(range(1, 1 + n_prompt)), options(1, n=3), n=2)
            scheduler.submit(old)
            for _ in range(n_steps):
                scheduler.step()
            if new.longest <= 12:
                scheduler.submit(new)
            run(scheduler)
            assert (old.error, new.error) == (None, None)


def test_a_refused_answer_is_admitted_when_another_one_ends(simd: mlx_engine.Engine):
    """Not only when all have ended."""
    scheduler = scheduler_of(simd, 400, slots=8, page=4)
    sizes = [(3, 300), (200, 2), (250, 2)]
    first, second, third = (simd.request([i + 1] * n, options(n=m)) for i, (n, m) in enumerate(sizes))
    for request in (first, second, third):
        scheduler.submit(request)
    for _ in range(12):
        scheduler.step()
    assert second.has_ended
    assert third.times.admitted is not None
    assert not first.has_ended
    run(scheduler)


def test_a_stream_that_is_dropped_within_a_step_leaves_before_the_next(simd: mlx_engine.Engine):
    found, scheduler = requests(simd), scheduler_of(simd)
    streams = [Stream(scheduler, request) for request in found]
    next(streams[0])
    original = scheduler._record

    def collecting(*done: Any) -> float:
        del streams[1:]  # as a collection of garbage would
        assert len(scheduler.running) == len(PROMPTS)
        scheduler._record = original
        return original(*done)

    scheduler._record = collecting
    next(streams[0])
    assert [answer.request for answer in scheduler.running] == found[:1]
    list(streams[0])
    assert scheduler.pool.used_pages(0) == 0
    assert found[0].output.token_ids == alone(simd)[0]


def test_a_stream_that_is_closed_leaves_and_the_others_go_on(simd: mlx_engine.Engine):
    found, scheduler = requests(simd, PROMPTS[:2]), scheduler_of(simd)
    first, second = (Stream(scheduler, request) for request in found)
    next(first)
    second.close()
    assert [answer.request for answer in scheduler.running] == found[:1]
    list(first)
    assert found[0].output.token_ids == alone(simd, PROMPTS[:1])[0]


def test_without_a_cache_a_request_that_fails_ends_alone(simd: mlx_engine.Engine):
    found = [simd.request(prompt, options(n=3)) for prompt in PROMPTS[:2]]
    pool = simd.model.new_pool(64, longest_pass=64, n_sequences=2, kept=False)
    uncached = Scheduler(simd.model, pool, slots=2)
    found[0].output._text = None
    streams = [Stream(uncached, request) for request in found]
    list(streams[1])
    assert len(found[1].output.token_ids) == 3
    with pytest.raises(AttributeError):
        list(streams[0])
    with pytest.raises(ValueError, match="one answer"):
        uncached.submit(simd.request([1], options(), n=2))
