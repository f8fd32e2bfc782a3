"""What a benchmark times and what it leaves out: passes cost what a test says, by a clock that it holds."""

import statistics
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

import mlx_engine
from mlx_engine.bench import cells
from mlx_engine.cache import KVLayer, KVPool
from mlx_engine.decode.metrics import Metrics
from mlx_engine.errors import OptionError

MICRO = Path(__file__).parents[1] / "data" / "qwen3-micro" / "model-q8_0.gguf"
WRITTEN = 7
CONTEXT = 2048


class Clock:
    """A clock that stands still until a pass moves it."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Token(int):
    """A written id, and when the device will have computed it; None before that has begun."""

    done = None


class Backend:
    """Eager, it works when it is called; lazy, it has a device, which works from when something is begun."""

    profiler = None

    def __init__(self, clock, *, lazy):
        self.clock, self.lazy, self.pending, self.is_open, self.choice = clock, lazy, 0.0, False, 0.0
        self.busy_until = 0.0

    @contextmanager
    def session(self):
        self.is_open = True
        yield
        self.is_open = False

    def spend(self, seconds):
        self.pending += seconds
        if not self.lazy:
            self.wait(None)

    def begin(self, x):
        self.busy_until = x.done = max(self.busy_until, self.clock.now) + self.pending
        self.pending = 0.0

    def wait(self, x):
        self.clock.now = max(self.busy_until, self.clock.now) + self.pending
        self.pending = 0.0

    def choose(self, logits, draws):
        self.spend(self.choice)
        return [Token(WRITTEN) for _ in draws]

    def kv_empty(self, n_kv_heads, head_dim, n_slots):
        return None

    def token_id(self, token):
        if token.done is None:
            self.wait(token)
        self.clock.now = max(self.clock.now, token.done or 0.0)
        return int(token)


class Spy:
    """A model that writes one id for ever. `passes` has the ids of each pass, `at` how many tokens were before them.

    A pass costs `cost(tokens, tokens before them)`, and without a cache `cost(tokens, None)`. Sequences become as long
    as they were promised to become, and no longer.
    """

    def __init__(self, backend, cost):
        self.backend, self.cost, self.passes, self.at = backend, cost, [], []
        self.config = SimpleNamespace(vocab_size=50, context_length=CONTEXT)

    def forward(self, batch):
        assert self.backend.is_open
        at = batch.positions[0] if batch.stores.are_kept else None
        self.passes.append(list(batch.ids))
        self.at.append(at)
        self.backend.spend(self.cost(len(batch.ids), at))
        return None if batch.want == "none" else "logits"

    def new_kv(self, n_tokens, *, kept=True):
        return KVPool(self.backend, [KVLayer(1, 2)], n_tokens, kept=kept).sequence()

    def scratch_kv(self, n_tokens):
        return self.new_kv(n_tokens, kept=False)

    @property
    def lengths(self):
        return [len(ids) for ids in self.passes]


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(cells, "time", SimpleNamespace(perf_counter=clock))
    monkeypatch.setattr(cells, "Metrics", partial(Metrics, clock=clock))
    return clock


@pytest.fixture
def spy(clock):
    def make(cost=lambda n, at: 1.0, *, lazy=False):
        return Spy(Backend(clock, lazy=lazy), cost)

    return make


def measured(model, n_prompt=0, n_gen=0, depth=0, **options):
    """A cell on `model`. The engine has no tokenizer: whoever asks for one fails."""
    engine = SimpleNamespace(model=model, backend=model.backend, config=model.config)
    return cells.measure(engine, cells.Test(n_prompt, n_gen, depth), **options)


both_kinds = pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])


# ---- names and arithmetic ----


@pytest.mark.parametrize(
    ("test", "name", "n_tokens"),
    [
        ((512, 0, 0), "pp512", 512),
        ((0, 64, 0), "tg64", 64),
        ((512, 64, 0), "pp512+tg64", 576),
        ((0, 64, 4096), "tg64 @ d4096", 64),
        ((16, 4, 8), "pp16+tg4 @ d8", 20),
    ],
)
def test_a_test_has_the_name_that_llama_bench_gives_it(test, name, n_tokens):
    assert cells.Test(*test).name == name
    assert cells.Test(*test).n_tokens == n_tokens


def test_rates_are_tokens_over_seconds():
    assert cells.Result(cells.Test(30, 10), seconds=[2.0, 4.0, 8.0]).rates == [20.0, 10.0, 5.0]


def test_depth_is_no_part_of_a_rate():
    assert cells.Result(cells.Test(0, 10, 4096), seconds=[2.0]).rates == [5.0]


def test_a_summary_is_about_rates_not_about_seconds():
    summary = cells.Result(cells.Test(40), seconds=[2.0, 4.0, 8.0], passes=[]).summary()
    assert summary["samples_ts"] == [20.0, 10.0, 5.0]
    assert summary["samples_s"] == [2.0, 4.0, 8.0]
    assert summary["avg_ts"] == pytest.approx(35 / 3)
    # Deviations 25/3, -5/3 and -20/3: their squares' sum over n - 1 = 2.
    assert summary["stddev_ts"] == pytest.approx(((625 + 25 + 400) / 9 / 2) ** 0.5)
    assert summary["median_ts"] == 10.0
    assert summary["estimated"] is None


def test_one_sample_deviates_by_nothing():
    assert cells.Result(cells.Test(40), seconds=[2.0]).summary()["stddev_ts"] == 0.0


def test_a_summary_names_the_test_in_numbers_too():
    summary = cells.Result(cells.Test(3, 4, 5), seconds=[1.0]).summary()
    assert [summary[key] for key in ("test", "n_prompt", "n_gen", "n_depth")] == ["pp3+tg4 @ d5", 3, 4, 5]


# ---- the passes that a test makes ----


def test_a_prompt_is_read_once_per_repetition_and_once_before(spy):
    model = spy()
    result = measured(model, 16, repetitions=3)
    assert model.lengths == [16] * 4
    assert model.at == [0] * 4
    assert len(result.seconds) == 3


def test_a_long_prompt_is_one_time_however_many_chunks(spy):
    model = spy(lambda n, at: n / 2)
    assert measured(model, 1030, repetitions=1).seconds == [515.0]
    assert model.lengths == [512, 512, 6] * 2
    assert model.at == [0, 512, 1024] * 2


def test_each_token_written_is_a_pass_of_one_token(spy):
    model = spy()
    result = measured(model, 0, 5, repetitions=2)
    assert model.lengths == [1] * 5 * 3
    assert model.at == [0, 1, 2, 3, 4] * 3
    assert [len(passes) for passes in result.passes] == [5, 5]


def test_depth_is_read_before_each_repetition_and_behind_it_stands_the_test(spy):
    model = spy()
    measured(model, 0, 3, 20, repetitions=2)
    assert model.lengths == [20, 1, 1, 1] * 3
    assert model.at == [0, 20, 21, 22] * 3


def test_a_prompt_behind_depth_is_read_in_the_same_cache(spy):
    model = spy()
    measured(model, 16, 0, 20, repetitions=1)
    assert (model.lengths, model.at) == ([20, 16] * 2, [0, 20] * 2)


def test_both_tests_run_in_one_cache(spy):
    model = spy()
    result = measured(model, 16, 3, 20, repetitions=1)
    assert model.lengths == [20, 16, 1, 1, 1] * 2
    assert model.at == [0, 20, 36, 37, 38] * 2
    assert result.passes == [[1.0, 1.0, 1.0]]


@pytest.mark.parametrize(
    ("test", "lengths"),
    [
        ((16, 0, 0), [16]),
        ((16, 0, 20), [36]),
        ((0, 3, 0), [1, 2, 3]),
        ((0, 3, 20), [21, 22, 23]),
        ((16, 3, 0), [16, 17, 18, 19]),
    ],
)
def test_without_a_cache_every_pass_brings_the_whole_sequence(spy, test, lengths):
    model = spy()
    measured(model, *test, kv=False, repetitions=1)
    assert model.lengths == lengths * 2
    assert set(model.at) == {None}


def test_without_a_cache_a_long_prompt_is_not_chunked(spy):
    model = spy()
    measured(model, 1030, kv=False, repetitions=1)
    assert model.lengths == [1030] * 2


def test_no_token_ends_a_test(spy):
    """Every token that the model writes is the same one, and nobody asks whether it is an end token."""
    model = spy()
    measured(model, 0, 100, repetitions=1)
    assert model.passes[100 + 1 :] == [[WRITTEN]] * 99


# ---- what is timed ----


@both_kinds
def test_the_first_run_is_not_timed(spy, clock, lazy):
    started = clock.now
    model = spy(lambda n, at: 1000.0 if clock.now < started + 1000 else 2.0, lazy=lazy)
    assert measured(model, 16, repetitions=3).seconds == [2.0] * 3


@both_kinds
def test_the_first_run_of_a_generation_is_not_timed(spy, clock, lazy):
    model = spy(lambda n, at: 1000.0 if len(model.passes) <= 4 else 2.0, lazy=lazy)
    result = measured(model, 0, 4, repetitions=2)
    assert result.seconds == [8.0] * 2
    assert result.passes == [[2.0] * 4] * 2


@both_kinds
@pytest.mark.parametrize(("test", "seconds"), [((16, 0, 20), 16.0), ((0, 3, 20), 3.0), ((16, 3, 20), 19.0)])
def test_reading_the_depth_is_not_timed(spy, lazy, test, seconds):
    model = spy(lambda n, at: 1000.0 if at == 0 else float(n), lazy=lazy)
    assert measured(model, *test, repetitions=2).seconds == [seconds] * 2


@both_kinds
def test_a_combined_test_adds_reading_and_writing(spy, lazy):
    model = spy(lambda n, at: 0.25 * n if n > 1 else 3.0, lazy=lazy)
    result = measured(model, 16, 4, repetitions=1)
    assert result.seconds == [16 * 0.25 + 4 * 3.0]
    assert result.rates == [20 / 16]


@both_kinds
def test_a_pass_ends_when_its_token_is_known(spy, lazy):
    model = spy(lambda n, at: 1.0, lazy=lazy)
    model.backend.choice = 0.5
    assert measured(model, 16, repetitions=1).seconds == [1.5]
    assert measured(model, 0, 4, repetitions=1).passes == [[1.5] * 4]


def test_every_pass_is_kept_in_the_order_of_its_run(spy):
    model = spy(lambda n, at: float(at + 1))
    assert measured(model, 0, 3, repetitions=2).passes == [[1.0, 2.0, 3.0]] * 2


def test_samples_are_in_the_order_in_which_they_were_taken(spy):
    costs = iter([9.0, 1.0, 2.0, 4.0])
    assert measured(spy(lambda n, at: next(costs)), 8, repetitions=3).rates == [8.0, 4.0, 2.0]


def test_progress_counts_the_run_that_is_not_timed(spy):
    seen = []
    measured(spy(), 4, repetitions=2, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]


# ---- the tokens ----


def test_ids_are_of_the_vocabulary_and_use_all_of_it(spy):
    model = spy()
    measured(model, 1000, repetitions=1)
    assert {i for ids in model.passes for i in ids} == set(range(50))


def test_one_seed_is_one_prompt_for_every_repetition_and_every_run(spy):
    one, other, unlike = spy(), spy(), spy()
    measured(one, 30, repetitions=2)
    measured(other, 30, repetitions=2)
    measured(unlike, 30, repetitions=2, seed=1)
    assert one.passes == other.passes == [one.passes[0]] * 3
    assert unlike.passes[0] != one.passes[0]


def test_the_cache_does_not_change_what_is_read(spy):
    cached, uncached = spy(), spy()
    measured(cached, 16, 0, 20, repetitions=1)
    measured(uncached, 16, 0, 20, kv=False, repetitions=1)
    assert cached.passes[0] + cached.passes[1] == uncached.passes[0]


# ---- the context ----


@pytest.mark.parametrize("kv", [True, False])
@pytest.mark.parametrize("test", [(2049, 0, 0), (0, 2049, 0), (0, 1, 2048), (2000, 40, 9)])
def test_what_does_not_fit_the_context_is_refused_before_any_pass(spy, test, kv):
    model = spy()
    with pytest.raises(OptionError, match="at most 2,048 tokens") as caught:
        measured(model, *test, kv=kv, budget=0.0)
    assert caught.value.option == cells.Test(*test).name
    assert caught.value.found == 2049
    assert model.passes == []


@pytest.mark.parametrize("test", [(2048, 0, 0), (16, 0, 2032)])
def test_a_prompt_that_fills_the_context_fits(spy, test):
    assert len(measured(spy(), *test, repetitions=1).seconds) == 1


@pytest.mark.parametrize("test", [(0, 2048, 0), (16, 32, 2000)])
def test_no_pass_stands_beyond_the_context(spy, test):
    model = spy()
    measured(model, *test, repetitions=1)
    assert max(at + len(ids) for at, ids in zip(model.at, model.passes, strict=True)) <= CONTEXT


# ---- the budget ----


def test_without_a_budget_nothing_is_estimated_however_slow(spy):
    for test in ((16, 0, 0), (0, 4, 0), (16, 4, 20)):
        result = measured(spy(lambda n, at: 1e9), *test, repetitions=3)
        assert result.estimated is None
        assert len(result.seconds) == 3


def test_a_large_budget_changes_no_sample(spy):
    model = spy(lambda n, at: float(n))
    result = measured(model, 16, repetitions=3, budget=1e9)
    assert result.estimated is None
    assert result.seconds == [16.0] * 3
    assert model.lengths == [16] * 4


def test_a_prompt_that_does_not_fit_is_estimated_from_a_short_one_and_marked(spy):
    model = spy(lambda n, at: float(n) if len(model.passes) > 1 else 50.0 * n)
    result = measured(model, 100, repetitions=2, budget=400.0)
    assert result.estimated == "from a pass of 64 tokens"
    assert result.seconds == [100.0]
    assert result.rates == [1.0]
    assert model.lengths == [4, 4, 64, 64]


@pytest.mark.parametrize(
    ("budget", "lengths", "told"),
    [(3.0, [4], 4), (100.0, [4, 4], 4), (390.0, [4, 4, 64], 64), (700.0, [4, 4, 64, 64], 64)],
)
def test_passes_that_tell_how_long_a_prompt_takes_keep_to_the_budget_too(spy, budget, lengths, told):
    model = spy(lambda n, at: 5.0 * n)
    result = measured(model, 1000, repetitions=2, budget=budget)
    assert (model.lengths, result.estimated) == (lengths, f"from a pass of {told} tokens")
    assert result.seconds == [5000.0]


def test_what_is_measured_beside_the_runs_is_called_around_each_and_takes_none_of_their_time(spy, clock):
    model, called = spy(), []

    def between():
        called.append(len(model.passes))
        clock.now += 1000.0

    result = measured(model, 8, 2, repetitions=2, between=between)
    assert called == [0, 3, 6, 9]
    assert result.seconds == [3.0, 3.0]


@both_kinds
def test_the_short_prompt_is_waited_for(spy, lazy):
    assert measured(spy(lambda n, at: float(n), lazy=lazy), 100, repetitions=1, budget=10.0).seconds == [100.0]


@pytest.mark.parametrize(("budget", "samples"), [(250.0, 1), (320.0, 1), (420.0, 2), (520.0, 3), (9999.0, 3)])
def test_a_prompt_is_repeated_as_often_as_it_fits(spy, budget, samples):
    """Two short prompts take 128 of the budget; the first of several runs warms up."""
    result = measured(spy(lambda n, at: float(n)), 100, repetitions=3, budget=budget)
    assert result.estimated is None
    assert result.seconds == [100.0] * samples


def test_a_prompt_shorter_than_the_short_one_is_read_itself(spy):
    model = spy(lambda n, at: float(n))
    result = measured(model, 3, repetitions=1, budget=0.0)
    assert (model.lengths, result.seconds, result.estimated) == ([3], [3.0], None)


def test_a_run_that_was_cut_is_dropped_where_there_are_whole_ones(spy):
    result = measured(spy(lambda n, at: 1.0), 0, 10, repetitions=5, budget=35.0)
    assert result.estimated is None
    assert result.seconds == [10.0] * 2


@pytest.mark.parametrize(("options", "test"), [({"repetitions": 0}, (1, 0)), ({"budget": -1.0}, (1, 0)), ({}, (0, 0))])
def test_what_cannot_be_measured_is_refused(spy, options, test):
    model = spy()
    with pytest.raises(OptionError):
        measured(model, *test, **options)
    assert model.passes == []


def test_a_generation_that_does_not_fit_is_extrapolated_from_its_passes_and_marked(spy):
    model = spy(lambda n, at: 2.0)
    result = measured(model, 0, 64, repetitions=5, budget=19.0)
    n = len(result.passes[0])
    assert 1 <= n <= 10
    assert result.estimated == f"from {n} of 64 passes"
    assert result.seconds == [64 * 2.0]
    assert result.rates == [0.5]
    assert len(model.passes) == n


def test_at_least_one_pass_is_made_whatever_the_budget(spy):
    result = measured(spy(lambda n, at: 2.0), 0, 64, repetitions=5, budget=0.0)
    assert result.passes == [[2.0]]
    assert result.seconds == [128.0]


def test_a_generation_that_fits_is_not_marked(spy):
    result = measured(spy(lambda n, at: 1.0), 0, 4, repetitions=3, budget=100.0)
    assert result.estimated is None
    assert result.seconds == [4.0] * 3


def test_a_cell_whose_budget_is_spent_starts_nothing_more(spy, clock):
    model = spy(lambda n, at: 1.0)
    measured(model, 0, 4, repetitions=1000, budget=60.0)
    # One pass may begin before the end of the budget, and one is always made behind a stand-in.
    assert clock.now - 1000.0 <= 60.0 + 2


def test_without_a_cache_later_passes_are_expected_to_take_longer(spy):
    result = measured(spy(lambda n, at: float(n)), 0, 9, kv=False, repetitions=1, budget=0.0)
    assert result.estimated is not None
    assert result.seconds == pytest.approx([1 + 2 + 3 + 4 + 5 + 6 + 7 + 8 + 9])


def test_an_estimate_of_a_combined_test_has_both_of_its_parts(spy):
    result = measured(spy(lambda n, at: float(n)), 100, 50, repetitions=1, budget=0.0)
    assert result.estimated is not None
    assert result.rates == pytest.approx([1.0], rel=0.1)


def test_every_cell_has_a_sample_whatever_its_depth_costs(spy):
    result = measured(spy(lambda n, at: float(n)), 2, 0, 100, repetitions=2, budget=70.0)
    assert result.seconds
    assert result.summary()["avg_ts"] > 0


# ---- a real model ----


@pytest.mark.parametrize("kv", [True, False])
def test_a_real_model_is_measured(kv):
    engine = mlx_engine.load(MICRO, "simd")
    result = cells.measure(engine, cells.Test(12, 3, 5), kv=kv, repetitions=2)
    assert [len(passes) for passes in result.passes] == [3, 3]
    assert all(seconds > sum(passes) > 0 for seconds, passes in zip(result.seconds, result.passes, strict=True))
    assert result.summary()["avg_ts"] == pytest.approx(statistics.fmean(15 / s for s in result.seconds))
