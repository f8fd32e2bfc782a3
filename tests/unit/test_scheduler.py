"""The scheduler, step by step: who runs when, what a pass has, and that nobody's tokens depend on it."""

from __future__ import annotations

import pytest

import mlx_engine
from mlx_engine.errors import ContextLengthError
from tests.scheduling import MICRO, PROMPTS, Clock, N, alone, ids, options, requests, run, scheduler_of


@pytest.fixture(scope="module", params=["simd", "parallel", "mlx"])
def engine(request: pytest.FixtureRequest) -> mlx_engine.Engine:
    return mlx_engine.load(MICRO, request.param)


@pytest.fixture(scope="module")
def simd() -> mlx_engine.Engine:
    return mlx_engine.load(MICRO, "simd")


@pytest.fixture(scope="module")
def expected(engine: mlx_engine.Engine) -> list[list[int]]:
    """The tokens that each request gets alone."""
    return alone(engine)


# ---- the tokens ----

# Each number of slots and each budget once; the rest of the table is slow.
SIZES = [(1, 512), (2, 7), (8, 1)]
REST = [(slots, budget) for slots in (1, 2, 8) for budget in (1, 7, 512) if (slots, budget) not in SIZES]


@pytest.mark.some(2)
@pytest.mark.parametrize(("slots", "budget"), [*SIZES, *(pytest.param(*size, marks=pytest.mark.slow) for size in REST)])
def test_each_gets_the_tokens_that_it_gets_alone(
    engine: mlx_engine.Engine, expected: list[list[int]], slots: int, budget: int
):
    scheduler, found = scheduler_of(engine, slots=slots, budget=budget, shared_budget=3), requests(engine)
    for request in found:
        scheduler.submit(request)
    run(scheduler)
    assert ids(found) == expected
    assert all(request.output.finish_reason == "length" for request in found)


@pytest.mark.some(1)
def test_some_come_later(engine: mlx_engine.Engine, expected: list[list[int]]):
    scheduler, found = scheduler_of(engine, slots=3), requests(engine)
    for request in found:
        scheduler.submit(request)
        for _ in range(4):
            scheduler.step()
    run(scheduler)
    assert ids(found) == expected


@pytest.mark.some(1)
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


def test_an_answer_with_its_last_token_pending_holds_up_nobody(monkeypatch: pytest.MonkeyPatch):
    """A lazy backend has two passes submitted until the end. The next pass has no place for an answer that is done."""
    lazy = mlx_engine.load(MICRO, "mlx")
    seen, scheduler = spied(lazy, monkeypatch), scheduler_of(lazy)
    for request in (lazy.request([5, 9], options(n=2)), lazy.request([8], options(n=5))):
        scheduler.submit(request)
    submitted = []
    while scheduler.has_work:
        scheduler.step()
        submitted.append(len(seen))
    assert seen == [(1, 2), (1, 1), (1,), (1,), (1,)]
    assert submitted == [2, 3, 4, 5, 5]


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


@pytest.mark.some(1)
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
    with pytest.raises(ContextLengthError, match=r"the prompt has 12 tokens and max_tokens is 12; .* room for 16"):
        scheduler.submit(requests(simd)[4])
    assert not scheduler.has_work


def test_answers_whose_prompt_is_being_read_have_their_slots(simd: mlx_engine.Engine):
    """The second and third answer fork from the first when the prompt has been run; nobody else gets their slots."""
    scheduler = scheduler_of(simd, slots=3, budget=4, shared_budget=4)
    three, other = simd.request([3] * 10, options(1), n=3), simd.request([5], options())
    scheduler.submit(three)
    scheduler.submit(other)
    scheduler.step()
    assert [answer.request for answer in scheduler.waiting] == [other]
    while not three.has_ended:
        scheduler.step()
        assert len(scheduler.running) <= scheduler.slots
    run(scheduler)
    assert other.has_ended


def test_the_answers_to_one_prompt_draw_differently(engine: mlx_engine.Engine):
    request, scheduler = engine.request([5, 9, 300], options(1), n=3), scheduler_of(engine)
    scheduler.submit(request)
    run(scheduler)
    single = engine.run([5, 9, 300], options(1))
    list(single)
    answers = [output.token_ids for output in request.outputs]
    assert answers[0] == single.generation.token_ids
    assert len({tuple(answer) for answer in answers}) == 3


def test_a_preempted_answer_waits_before_those_that_came_later(simd: mlx_engine.Engine):
    scheduler = scheduler_of(simd, 20, slots=2)
    found = requests(simd, [[5, 9, 300], [8, 4, 1], [400, 3]])
    for request in found:
        scheduler.submit(request)
    while not found[1].n_preemptions:
        scheduler.step()
    assert [answer.request for answer in scheduler.waiting] == found[1:]
    run(scheduler)


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


@pytest.mark.some(3)
@pytest.mark.parametrize("after", [0, 1, 2, 6])
def test_a_cancelled_request_gives_its_pages_back_at_once(
    engine: mlx_engine.Engine, expected: list[list[int]], after: int
):
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
    assert [found[0].output.token_ids, found[2].output.token_ids] == expected[0:3:2]
    scheduler.cancel(gone)  # nothing happens


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
