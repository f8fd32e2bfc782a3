"""Several clients at once: the closed loop, its figures, and rounds, by a clock that moves only while a model works."""

import random
from types import SimpleNamespace

import pytest

from mlx_engine.bench import clients as of
from mlx_engine.bench.clients import Load, RequestTimes, Run, Scheduled, Steps
from mlx_engine.bench.concurrency import Plan, Sample, interleaved, row, shared_prefix, throughput
from mlx_engine.bench.work import Sizes
from mlx_engine.cache import KVLayer, KVPool
from mlx_engine.loop.output import Output
from mlx_engine.loop.request import Request
from mlx_engine.loop.scheduler import Scheduler
from tests.unit.timed_model import Backend, Clock, Spy, both_kinds

SIZES = Sizes(layers=100, head=10, nbytes=1000.0, cached=8, scored=2, head_nbytes=400.0)
SILENT = SimpleNamespace(add=lambda token: "x", finish=lambda: "")


class Engine:
    """A scheduler on the timed model: a pass takes a second, and a tenth of one for each token."""

    def __init__(self, *, lazy=False, cost=lambda n, at: 1 + n / 10):
        self.model = Spy(Backend(Clock(), lazy=lazy), cost)
        self.model.kv_layers = [KVLayer(1, 2)]
        self.config, self.clock, self.schedulers = self.model.config, self.model.backend.clock, []

    def request(self, prompt, options):
        output = Output(options, max_tokens=options.max_tokens, text=SILENT, end_ids=())
        return Request(prompt, options, [output])

    def scheduler(self, *, slots, kv_memory, prefix_cache, **options):
        n_tokens = kv_memory // (2 * 2 * 4)
        pool = KVPool(self.model.backend, self.model.kv_layers, n_tokens, n_sequences=slots)
        self.schedulers.append(Scheduler(self.model, pool, slots=slots, **options))
        return self.schedulers[-1]

    def target(self, slots=4, longest=32):
        return Scheduled(self, SIZES, slots=slots, longest=longest, clock=self.clock)


def run(n_clients, load, engine=None, **options):
    engine = engine or Engine()
    target = engine.target()
    prompts = load.prompts(target, random.Random(0), n_clients)
    return target.run(n_clients, prompts, load.n_gen, **options), engine.model


# ---- the closed loop ----


def test_one_client_sends_its_next_request_when_its_last_has_ended():
    found, model = run(1, Load(n_prompt=5, n_gen=3, requests=2))
    assert model.lengths == [5, 1, 1, 5, 1, 1]
    assert [one.submitted for one in found.requests] == pytest.approx([1000.0, 1003.7])
    assert [one.first for one in found.requests] == pytest.approx([1.5, 1.5])
    assert found.requests[0].arrivals == pytest.approx([1001.5, 1002.6, 1003.7])
    assert (found.n_tokens, found.seconds, found.was_cut) == (6, pytest.approx(7.4), False)


def test_clients_share_passes():
    found, model = run(2, Load(n_prompt=5, n_gen=3, requests=2))
    assert model.lengths == [10, 2, 2, 10, 2, 2]
    assert [one.first for one in found.requests] == pytest.approx([2.0] * 4)


def test_no_more_requests_run_than_there_are_clients():
    engine = Engine()
    seen = []
    engine.model.cost = lambda n, at: seen.append(len(engine.schedulers[0].running)) or 1.0
    found, _ = run(3, Load(n_prompt=2, n_gen=4, requests=3), engine)
    assert max(seen) == 3
    assert len(found.requests) == 9
    assert all(one.n_tokens == len(one.arrivals) == 4 for one in found.requests)


@both_kinds
def test_a_request_has_all_its_tokens_on_every_kind_of_backend(lazy):
    found, model = run(2, Load(n_prompt=5, n_gen=4), Engine(lazy=lazy))
    assert [one.n_tokens for one in found.requests] == [4] * 4
    assert found.steps.n_rows == sum(model.lengths) == 4 * (5 + 3)


def test_a_limit_of_time_cancels_what_runs_and_frees_its_pages():
    engine = Engine()
    found, _ = run(1, Load(n_prompt=5, n_gen=30), engine, seconds=4.0)
    assert found.was_cut
    assert (found.n_tokens, found.seconds) == (4, pytest.approx(4.8))
    scheduler = engine.schedulers[0]
    assert not scheduler.has_work
    assert scheduler.pool.used_pages(0) == 0


def test_a_request_that_fails_ends_the_run():
    engine = Engine(cost=lambda n, at: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(1, Load(n_prompt=5, n_gen=3), engine)
    assert not engine.schedulers[0].has_work


def test_prompts_are_random_and_equal_for_one_seed():
    target, load = Engine().target(), Load(n_prompt=30)
    first, again, other = (load.prompts(target, load.draws(*key), 2) for key in ((0, 2), (0, 2), (1, 2)))
    assert first == again != other
    assert len({tuple(ids) for ids in [*first, *other]}) == 8
    assert {len(ids) for ids in first} == {30}
    assert all(0 <= i < 50 for ids in first for i in ids)


# ---- figures ----


def test_the_work_of_all_steps_is_counted():
    """A prompt of 2 tokens, then one token: 2 weights' bytes, the KV cache of 2 and of 3 tokens."""
    found, _ = run(1, Load(n_prompt=2, n_gen=2, requests=1))
    steps = found.steps
    assert (steps.n, steps.n_rows, steps.n_decoding, steps.n_decoded) == (2, 3, 1, 1)
    assert steps.nbytes == 2 * 1000 + 8 * (2 + 3)
    assert steps.flops == 2 * (3 * 100 + 2 * 10 + 2 * (1 + 2 + 3))


def test_weights_are_read_once_for_all_clients():
    found, _ = run(3, Load(n_prompt=2, n_gen=2, requests=1))
    assert found.steps.nbytes == 2 * 1000 + 3 * 8 * (2 + 3)
    assert found.steps.flops == 3 * 2 * (3 * 100 + 2 * 10 + 2 * (1 + 2 + 3))


def test_shares_are_of_what_the_machine_reached():
    steps = Steps(n=4, n_rows=12, n_decoding=3, n_decoded=6, flops=8e9, nbytes=4e9)
    run = Run([RequestTimes(0.0, [1.0, 2.0], n_tokens=10)], 2.0, steps)
    found = of.figures(run, {"read_gbs": 10.0, "peak_gflops": 16.0})
    assert (found["rows_per_step"], found["decode_rows_per_step"]) == (3.0, 2.0)
    assert (found["gbs"], found["gflops"]) == (2.0, 4.0)
    assert (found["read_share"], found["peak_share"]) == (0.2, 0.25)
    assert (found["memory_limit_ts"], found["arithmetic_limit_ts"]) == (25.0, 20.0)
    assert found["total_ts"] == 5.0


def test_latencies_are_of_all_requests():
    requests = [RequestTimes(0.0, [1.0, 1.5, 3.0], 3), RequestTimes(10.0, [13.0, 13.1], 2), RequestTimes(20.0)]
    found = of.figures(Run(requests, 100.0))
    assert (found["ttft_ms"], found["ttft_p99_ms"]) == (2000.0, 3000.0)
    assert (found["gap_ms"], found["gap_p99_ms"]) == (pytest.approx(500), 1500)
    assert found["request_ts"] == pytest.approx((3 / 3 + 2 / 3.1) / 2)
    assert "gbs" not in found


@pytest.mark.parametrize(("n", "p99"), [(1, 1), (99, 99), (100, 99), (101, 100), (200, 198)])
def test_p99_is_the_smallest_value_that_99_of_100_do_not_exceed(n, p99):
    values = list(range(1, n + 1))
    random.Random(0).shuffle(values)
    assert of.quantile(values, 0.99) == p99


def test_a_run_without_tokens_has_no_latencies():
    found = of.figures(Run([RequestTimes(0.0)], 1.0))
    assert (found["total_ts"], found["ttft_ms"], found["gap_p99_ms"]) == (0.0, None, None)


def test_medians_leave_out_rounds_that_have_no_figure():
    assert of.medians([{"a": 1.0, "b": None}, {"a": 3.0, "b": None}, {"a": 9.0, "c": 2.0}]) == {
        "a": 3.0, "b": None, "c": 2.0,
    }  # fmt: skip


# ---- rounds ----


def played(plan, sample):
    order = []

    def watched(number, n, left):
        order.append((number, n))
        return sample(number, n, left)

    (*_, last) = interleaved(plan, watched, lambda *report: None)
    return order, last


def test_every_other_round_is_in_reverse_order():
    order, found = played(Plan((1, 2, 4), rounds=3), lambda number, n, left: Sample({"x": number}))
    assert order == [(0, 1), (0, 2), (0, 4), (1, 4), (1, 2), (1, 1), (2, 1), (2, 2), (2, 4)]
    assert [sample.figures["x"] for sample in found[2]] == [0, 1, 2]


def test_the_budget_is_of_all_rounds_of_one_number_of_clients():
    clock, asked = Clock(), []

    def sample(number, n, left):
        asked.append((n, left))
        clock.now += n
        return Sample({}, was_cut=left < n)

    order, found = played(Plan((1, 2), rounds=4, budget=3.0, clock=clock), sample)
    assert asked == [(1, 3.0), (2, 3.0), (2, 1.0), (1, 2.0), (1, 1.0)]
    assert [len(samples) for samples in found.values()] == [3, 1]
    assert len(order) == 5


def test_a_run_that_was_cut_counts_if_there_is_no_other():
    _, found = played(Plan((8,), rounds=2), lambda number, n, left: Sample({"x": number}, was_cut=True))
    assert [sample.figures["x"] for sample in found[8]] == [0]
    assert row(Load(), 8, found[8])["estimated"] is not None
    assert row(Load(), 8, [Sample({"x": 1.0})])["estimated"] is None


def test_throughput_of_each_number_of_clients_and_the_gain_over_one():
    engine = Engine()
    plan = Plan((2, 1), Load(n_prompt=5, n_gen=3), rounds=3, clock=engine.clock)
    *_, (two, one) = throughput(engine.target(), plan, None, lambda *report: None)
    assert (one["concurrency"], one["gain"], one["rounds"]) == (1, 1.0, 3)
    assert one["total_ts"] == pytest.approx(3 / 3.7)
    assert two["total_ts"] == pytest.approx(6 / (2.0 + 1.2 + 1.2))
    assert two["gain"] == pytest.approx(two["total_ts"] / one["total_ts"])
    assert (two["ttft_ms"], two["gap_ms"]) == (pytest.approx(2000), pytest.approx(1200))
    assert [one["total_ts"] for one in two["samples"]] == pytest.approx([two["total_ts"]] * 3)


class Caching:
    """A target that takes a second per token that it has not seen at the same place of an earlier prompt."""

    def __init__(self):
        self.seen, self.forgot, self.runs = [], 0, []

    def prompt(self, draws, n_tokens):
        return draws.choices(range(1000), k=n_tokens)

    def forget(self):
        self.seen, self.forgot = [], self.forgot + 1

    def run(self, n_clients, prompts, n_gen, *, seconds=None):
        self.runs.append((n_clients, list(prompts)))
        timed = []
        for prompt in prompts:
            known = max((_alike(prompt, other) for other in self.seen), default=0)
            timed.append(RequestTimes(0.0, [float(len(prompt) - known)], n_gen, known))
            self.seen.append(prompt)
        return Run(timed, 1.0)


def _alike(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def test_a_shared_prefix_is_cold_once_then_warm_beside_a_control_of_equal_length():
    target, load = Caching(), Load(n_prompt=4, n_gen=1, requests=3, shared_prefix=20)
    *_, (found,) = shared_prefix(target, Plan((2,), load, rounds=2), lambda *report: None)
    assert found["cold_ttft_ms"] == 24_000
    assert found["warm_ttft_ms"] == pytest.approx(4000, abs=1000)
    assert found["control_ttft_ms"] == pytest.approx(24_000, abs=1000)
    assert found["warm_over_cold"] == found["warm_ttft_ms"] / found["cold_ttft_ms"]
    assert found["warm_over_control"] == found["warm_ttft_ms"] / found["control_ttft_ms"]
    assert found["cached_tokens"] == pytest.approx(20, abs=1)
    (_, (cold,)), (n_warm, warm), (n_control, control) = target.runs[:3]
    assert (n_warm, n_control, len(warm), len(control)) == (2, 2, 6, 6)
    assert {tuple(ids[:20]) for ids in [cold, *warm]} == {tuple(cold[:20])}
    assert len({tuple(ids[:20]) for ids in control}) == 6
    assert {len(ids) for ids in [cold, *warm, *control]} == {24}
    assert (target.forgot, found["rounds"]) == (4, 2)
    assert target.runs[3][1][0][:20] != cold[:20]


def test_forgetting_makes_a_new_scheduler():
    engine = Engine()
    target = engine.target()
    target.forget()
    assert len(engine.schedulers) == 2
    assert target._scheduler is engine.schedulers[-1]
