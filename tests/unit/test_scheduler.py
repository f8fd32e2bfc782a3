"""The scheduler, step by step: who runs when, what a pass has, and that nobody's tokens depend on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import mlx_engine
from mlx_engine.backends.taps import tapped
from mlx_engine.decode.options import Options
from mlx_engine.errors import ContextLengthError
from mlx_engine.schedule import Report, Request, Scheduler
from mlx_engine.schedule.stream import Stream
from mlx_engine.schedule.uncached import Uncached

MICRO = Path(__file__).parents[1] / "data" / "qwen3-micro" / "model-q8_0.gguf"
PROMPTS = [[5, 9, 300, 17, 2], [8], list(range(1, 31)), [400, 3], [7] * 12]
N = 12


@pytest.fixture(scope="module", params=["simd", "parallel", "mlx"])
def engine(request: pytest.FixtureRequest) -> mlx_engine.Engine:
    return mlx_engine.load(MICRO, request.param)


@pytest.fixture(scope="module")
def simd() -> mlx_engine.Engine:
    return mlx_engine.load(MICRO, "simd")


class Clock:
    """A clock that moves by a second whenever it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


def options(i: int = 0, n: int = N, **more: object) -> Options:
    """Every other one is sampled."""
    sampled = {"temperature": 1.5, "seed": i} if i % 2 else {}
    return Options.of(n, ignore_eos=True, **{**sampled, **more})


def requests(engine: mlx_engine.Engine, prompts: Sequence[list[int]] = PROMPTS, **more: object) -> list[Request]:
    return [engine.request(prompt, options(i, **more)) for i, prompt in enumerate(prompts)]


def alone(engine: mlx_engine.Engine, prompts: Sequence[list[int]] = PROMPTS, **more: object) -> list[list[int]]:
    streams = [engine.run(prompt, options(i, **more)) for i, prompt in enumerate(prompts)]
    return [(list(stream), stream.generation.token_ids)[1] for stream in streams]


def scheduler_of(engine: mlx_engine.Engine, n_tokens: int = 400, *, slots: int = 8, page: int = 4, **of: object):
    pool = engine.model.new_pool(n_tokens, n_sequences=slots, page=page)
    return Scheduler(engine.model, pool, slots=slots, **of)


def run(scheduler: Scheduler, limit: int = 1000) -> list[Report]:
    reports = list(_steps(scheduler, limit))
    assert scheduler.pool.free_pages(0) == pages(scheduler), "pages are missing"
    return reports


def _steps(scheduler: Scheduler, limit: int) -> Iterator[Report]:
    for _ in range(limit):
        if not scheduler.has_work:
            return
        yield scheduler.step()
    raise AssertionError(f"still at work after {limit} steps")


def pages(scheduler: Scheduler) -> int:
    """How many pages its pool has."""
    pool = scheduler.pool
    return -(-pool.n_tokens // pool.page) + scheduler.slots - 1


def ids(found: Sequence[Request]) -> list[list[int]]:
    return [request.output.token_ids for request in found]


# ---- the tokens ----


@pytest.mark.parametrize("budget", [1, 7, 512])
@pytest.mark.parametrize("slots", [1, 2, 8])
def test_each_gets_the_tokens_that_it_gets_alone(engine: mlx_engine.Engine, slots: int, budget: int):
    scheduler, found = scheduler_of(engine, slots=slots, budget=budget, shared_budget=3), requests(engine)
    for request in found:
        scheduler.submit(request)
    run(scheduler)
    assert ids(found) == alone(engine)
    assert all(request.output.finish_reason == "length" for request in found)


def test_some_come_later(engine: mlx_engine.Engine):
    scheduler, found = scheduler_of(engine, slots=3), requests(engine)
    for request in found:
        scheduler.submit(request)
        for _ in range(4):
            scheduler.step()
    run(scheduler)
    assert ids(found) == alone(engine)


def test_without_pages_for_all_the_newest_is_computed_again(engine: mlx_engine.Engine):
    """Six pages of four tokens: one that was admitted loses its pages, and gets the same tokens afterwards."""
    prompts = [[5, 9, 300], [8, 4, 1], [400, 3]]
    scheduler, found = scheduler_of(engine, 20, slots=3), requests(engine, prompts)
    for request in found:
        scheduler.submit(request)
    run(scheduler)
    assert ids(found) == alone(engine, prompts)
    assert found[0].n_preemptions == 0
    assert sum(request.n_preemptions for request in found[1:]) > 0


def test_the_newest_ends_last_when_pages_are_short(simd: mlx_engine.Engine):
    prompts = [[5, 9, 300], [8, 4, 1], [400, 3]]
    scheduler, found = scheduler_of(simd, 20, slots=3), requests(simd, prompts)
    for request in found:
        scheduler.submit(request)
    assert [request.number for report in run(scheduler) for request in report.ended] == [r.number for r in found]


def test_one_token_each(engine: mlx_engine.Engine):
    scheduler, found = scheduler_of(engine), requests(engine, n=1)
    for request in found:
        scheduler.submit(request)
    reports = run(scheduler)
    assert ids(found) == alone(engine, n=1)
    assert len(reports) == 1


def test_no_token_depends_on_the_clock(simd: mlx_engine.Engine):
    def rows(**of: object) -> list[tuple[int, int]]:
        scheduler, found = scheduler_of(simd, slots=2, **of), requests(simd)
        for request in found:
            scheduler.submit(request)
        return [(report.n_decode, report.n_prefill) for report in run(scheduler)]

    assert rows() == rows(clock=Clock())


# ---- what a pass has ----


def spied(engine: mlx_engine.Engine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The numbers of new tokens of each sequence, for every pass."""
    seen: list[tuple[int, ...]] = []
    forward = engine.model.forward
    monkeypatch.setattr(engine.model, "forward", lambda batch: (seen.append(batch.lengths), forward(batch))[1])
    return seen


def test_all_answers_share_one_pass(simd: mlx_engine.Engine, monkeypatch: pytest.MonkeyPatch):
    seen, scheduler, found = spied(simd, monkeypatch), scheduler_of(simd), requests(simd)
    for request in found:
        scheduler.submit(request)
    run(scheduler)
    assert seen[0] == (1, 5, 30, 2, 12)
    assert seen[1:] == [(1,) * len(PROMPTS)] * (N - 1)


def test_a_prompt_is_read_in_parts_while_others_are_answered(simd: mlx_engine.Engine, monkeypatch: pytest.MonkeyPatch):
    seen, scheduler = spied(simd, monkeypatch), scheduler_of(simd, budget=16, shared_budget=8)
    first, second = requests(simd, [[5, 9, 300], list(range(1, 31))])
    scheduler.submit(first)
    scheduler.step()
    scheduler.submit(second)
    reports = run(scheduler)
    # Eight tokens of the prompt beside each token of the other answer; the last four are six.
    assert seen[:6] == [(3,), (1, 8), (1, 8), (1, 8), (1, 6), (1, 1)]
    assert [(report.n_decode, report.n_prefill) for report in reports[:5]] == [(1, 8), (1, 8), (1, 8), (1, 6), (2, 0)]


def test_without_answers_prompts_fill_the_budget_in_their_order(
    simd: mlx_engine.Engine, monkeypatch: pytest.MonkeyPatch
):
    seen, scheduler = spied(simd, monkeypatch), scheduler_of(simd, budget=16)
    for request in requests(simd, [list(range(1, 13)), list(range(1, 31))]):
        scheduler.submit(request)
    run(scheduler)
    assert seen[0] == (12, 4)


def test_a_short_request_ends_before_a_long_one_that_came_first(simd: mlx_engine.Engine):
    scheduler = scheduler_of(simd, budget=8, shared_budget=8)
    long, short = simd.request([3] * 200, options(n=40)), simd.request([5], options(n=3))
    scheduler.submit(long)
    scheduler.step()
    scheduler.submit(short)
    assert [request for report in run(scheduler) for request in report.ended] == [short, long]


# ---- slots and the queue ----


def test_requests_are_admitted_in_their_order(engine: mlx_engine.Engine):
    scheduler, found = scheduler_of(engine, slots=2), requests(engine)
    for request in found:
        scheduler.submit(request)
    scheduler.step()
    assert [answer.request for answer in scheduler.running] == found[:2]
    assert [answer.request for answer in scheduler.waiting] == found[2:]
    order = [request for report in run(scheduler) for request in report.ended]
    assert order == found
    admitted = [request.times.admitted for request in found]
    assert admitted == sorted(admitted)


def test_a_request_that_can_never_run_is_refused_with_both_numbers(simd: mlx_engine.Engine):
    scheduler = scheduler_of(simd, 16)
    with pytest.raises(ContextLengthError, match=r"at most 16 tokens.*a prompt of 12 and 12 more"):
        scheduler.submit(requests(simd)[4])
    assert not scheduler.has_work


def test_pages_that_lie_apart_are_as_good_as_others(simd: mlx_engine.Engine):
    """A of 50, B of 100 and C of 38 tokens; A ends, then D of 60 needs A's pages and those at the end."""
    scheduler = scheduler_of(simd, 212, slots=4, page=4)
    a, b, c, d = (
        simd.request([i] * n, options(n=m)) for i, (n, m) in enumerate([(48, 3), (60, 41), (20, 19), (52, 9)])
    )
    for request in (a, b, c):
        scheduler.submit(request)
    while not a.has_ended:
        scheduler.step()
    scheduler.submit(d)
    scheduler.step()
    assert d.times.admitted is not None
    run(scheduler)
    assert d.n_preemptions == 0


@pytest.mark.parametrize("after", [0, 1, 2, 6])
def test_a_cancelled_request_gives_its_pages_back_at_once(engine: mlx_engine.Engine, after: int):
    """In the queue, within its prompt, and while it is answered; the others get their tokens."""
    scheduler, found = scheduler_of(engine, slots=2, budget=6, shared_budget=6), requests(engine)
    for request in found[:3]:
        scheduler.submit(request)
    for _ in range(after):
        scheduler.step()
    gone = found[1]
    scheduler.cancel(gone)
    assert gone not in [answer.request for answer in (*scheduler.waiting, *scheduler.running)]
    run(scheduler)
    assert gone.output.finish_reason is None
    assert [found[0].output.token_ids, found[2].output.token_ids] == alone(engine)[0:3:2]
    scheduler.cancel(gone)  # nothing happens


# ---- failures ----


def test_a_failing_sampler_ends_its_request_alone(engine: mlx_engine.Engine, monkeypatch: pytest.MonkeyPatch):
    scheduler, found = scheduler_of(engine), requests(engine)
    for request in found:
        scheduler.submit(request)
    for _ in range(3):
        scheduler.step()

    def failing() -> object:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(scheduler.running[2].pick, "draw", failing)
    ended = [request for report in run(scheduler) for request in report.ended]
    assert sorted(request.number for request in ended) == [request.number for request in found]
    assert isinstance(found[2].error, ZeroDivisionError)
    want = alone(engine)
    assert [request.output.token_ids for request in found if request is not found[2]] == want[:2] + want[3:]
    assert found[2].output.token_ids == want[2][: len(found[2].output.token_ids)]


def test_a_text_that_cannot_be_decoded_ends_its_request_alone(engine: mlx_engine.Engine):
    class Failing:
        def add(self, token_id: int) -> str:
            raise UnicodeError("planted")

    scheduler, found = scheduler_of(engine), requests(engine)
    found[1].output._text = Failing()
    for request in found:
        scheduler.submit(request)
    run(scheduler)
    assert isinstance(found[1].error, UnicodeError)
    want = alone(engine)
    assert ids(found)[:1] + ids(found)[2:] == want[:1] + want[2:]


def test_a_kernel_that_fails_for_one_sequence_ends_its_request_alone(
    engine: mlx_engine.Engine, monkeypatch: pytest.MonkeyPatch
):
    """The pass of all fails, and is repeated for each alone."""
    forward = engine.model.forward

    def failing(batch):
        if 17 in [i for i in batch.ids if isinstance(i, int)]:
            raise MemoryError("planted")
        return forward(batch)

    want = alone(engine)
    monkeypatch.setattr(engine.model, "forward", failing)
    scheduler, found = scheduler_of(engine), requests(engine)
    for request in found:
        scheduler.submit(request)
    run(scheduler)
    assert isinstance(found[0].error, MemoryError)
    assert found[0].output.token_ids == []
    for request, tokens in zip(found[1:], want[1:], strict=True):
        assert request.output.token_ids == tokens or isinstance(request.error, MemoryError)
    assert [request.output.token_ids for request in found[3:]] == want[3:]


def test_if_every_pass_fails_all_requests_end_and_the_scheduler_can_be_used(
    engine: mlx_engine.Engine, monkeypatch: pytest.MonkeyPatch
):
    scheduler, found = scheduler_of(engine), requests(engine)
    for request in found:
        scheduler.submit(request)
    scheduler.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "forward", lambda batch: 1 / 0)
        run(scheduler)
    assert all(isinstance(request.error, ZeroDivisionError) for request in found)
    again = requests(engine)
    for request in again:
        scheduler.submit(request)
    run(scheduler)
    assert ids(again) == alone(engine)


class Interrupted(BaseException):
    """As KeyboardInterrupt, but no debugger mistakes it for the user's."""


@pytest.mark.parametrize("passes", [1, 2, 5])
def test_a_scheduler_that_was_interrupted_refuses_to_continue(engine: mlx_engine.Engine, passes: int):
    """The step may have stopped anywhere. Another scheduler on the same model gives the same tokens."""
    original, seen = engine.model.backend, []

    def interrupt(name: str, _: object) -> None:
        seen.extend([name] if name == "blk.1.attn_out" else [])
        if len(seen) == passes:
            seen.append("once")
            raise Interrupted

    engine.model.backend = tapped(original, interrupt)
    try:
        scheduler, found = scheduler_of(engine, budget=20), requests(engine)
        for request in found:
            scheduler.submit(request)
        with pytest.raises(Interrupted):
            run(scheduler)
        assert not scheduler.has_work
        assert not scheduler.is_sound
        with pytest.raises(RuntimeError, match="interrupted one; make another"):
            scheduler.step()
        with pytest.raises(RuntimeError, match="interrupted one; make another"):
            scheduler.submit(found[0])
        scheduler.cancel(found[0])
        again, scheduler = requests(engine), scheduler_of(engine)
        for request in again:
            scheduler.submit(request)
        run(scheduler)
    finally:
        engine.model.backend = original
    assert ids(again) == alone(engine)


# ---- forks, refusals, streams that are dropped ----


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
    original = scheduler._account

    def collecting(step: object) -> None:
        del streams[1:]  # as a collection of garbage would
        assert len(scheduler.running) == len(PROMPTS)
        scheduler._account = original
        original(step)

    scheduler._account = collecting
    next(streams[0])
    assert [answer.request for answer in scheduler.running] == found[:1]
    list(streams[0])
    assert scheduler.pool.used_pages(0) == 0
    assert found[0].output.token_ids == alone(simd)[0]


def test_without_a_cache_a_request_that_fails_ends_alone(simd: mlx_engine.Engine):
    uncached, found = Uncached(simd.model), [simd.request(prompt, options(n=3)) for prompt in PROMPTS[:2]]
    found[0].output._text = None
    streams = [Stream(uncached, request) for request in found]
    list(streams[1])
    assert len(found[1].output.token_ids) == 3
    with pytest.raises(AttributeError):
        list(streams[0])
    with pytest.raises(ValueError, match="one answer"):
        uncached.submit(simd.request([1], options(), n=2))


# ---- times ----


def test_the_shares_of_a_pass_add_up_to_its_time(simd: mlx_engine.Engine):
    """Within a prompt, in a batch, and for one that is left alone at the end."""
    scheduler, found = scheduler_of(simd, budget=16, shared_budget=4), requests(simd, n=4)
    found[0] = simd.request(PROMPTS[0], options(n=30))
    for request in found:
        scheduler.submit(request)
    reports = run(scheduler)
    shares = sum(sum(request.metrics.shares) for request in found)
    assert shares == pytest.approx(sum(report.seconds for report in reports))
    assert all(len(request.metrics.passes) == len(request.output.token_ids) for request in found)
    assert all(request.n_rows >= request.n_steps for request in found)


def test_a_request_has_the_times_of_its_stages(simd: mlx_engine.Engine):
    scheduler, found = scheduler_of(simd, slots=2, clock=Clock()), requests(simd)
    for request in found:
        scheduler.submit(request)
    run(scheduler)
    for request in found:
        times = request.times
        assert times.submitted < times.admitted < times.first_token < times.ended
    assert found[2].times.admitted > found[0].times.ended
