"""What a benchmark times and what it leaves out: passes cost what a test says, by a clock that it holds."""

import statistics
from pathlib import Path

import pytest

import mlx_engine
from mlx_engine.bench import cells, samples
from mlx_engine.errors import OptionError
from tests.unit.timed_model import CONTEXT, WRITTEN, both_kinds, measured

MICRO = Path(__file__).parents[1] / "data" / "qwen3-micro" / "model-q8_0.gguf"


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
    assert samples.Test(*test).name == name
    assert samples.Test(*test).n_tokens == n_tokens


def test_rates_are_tokens_over_seconds():
    assert samples.Result(samples.Test(30, 10), seconds=[2.0, 4.0, 8.0]).rates == [20.0, 10.0, 5.0]


def test_depth_is_no_part_of_a_rate():
    assert samples.Result(samples.Test(0, 10, 4096), seconds=[2.0]).rates == [5.0]


def test_a_summary_is_about_rates_not_about_seconds():
    summary = samples.Result(samples.Test(40), seconds=[2.0, 4.0, 8.0], passes=[]).summary()
    assert summary["samples_ts"] == [20.0, 10.0, 5.0]
    assert summary["samples_s"] == [2.0, 4.0, 8.0]
    assert summary["avg_ts"] == pytest.approx(35 / 3)
    # Deviations 25/3, -5/3 and -20/3: their squares' sum over n - 1 = 2.
    assert summary["stddev_ts"] == pytest.approx(((625 + 25 + 400) / 9 / 2) ** 0.5)
    assert summary["median_ts"] == 10.0
    assert summary["estimated"] is None


def test_one_sample_deviates_by_nothing():
    assert samples.Result(samples.Test(40), seconds=[2.0]).summary()["stddev_ts"] == 0.0


def test_a_summary_names_the_test_in_numbers_too():
    summary = samples.Result(samples.Test(3, 4, 5), seconds=[1.0]).summary()
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
    assert seen == [(0, 3), (1, 3), (2, 3), (3, 3)]


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
    with pytest.raises(OptionError, match="the model's context has 2,048") as caught:
        measured(model, *test, kv=kv, budget=0.0)
    assert caught.value.option == samples.Test(*test).name
    assert caught.value.found == 2049
    assert model.passes == []


@pytest.mark.parametrize("test", [(2048, 0, 0), (16, 0, 2032)])
def test_a_prompt_that_fills_the_context_fits(spy, test):
    assert len(measured(spy(), *test, repetitions=1).seconds) == 1


@pytest.mark.slow
@pytest.mark.parametrize("test", [(0, 2048, 0), (16, 32, 2000)])
def test_no_pass_stands_beyond_the_context(spy, test):
    model = spy()
    measured(model, *test, repetitions=1)
    assert max(at + len(ids) for at, ids in zip(model.at, model.passes, strict=True)) <= CONTEXT


# ---- a real model ----


@pytest.mark.parametrize("kv", [True, False])
def test_a_real_model_is_measured(kv):
    engine = mlx_engine.load(MICRO, "simd")
    result = cells.measure(engine, samples.Test(12, 3, 5), kv=kv, repetitions=2)
    assert [len(passes) for passes in result.passes] == [3, 3]
    assert all(seconds > sum(passes) > 0 for seconds, passes in zip(result.seconds, result.passes, strict=True))
    assert result.summary()["avg_ts"] == pytest.approx(statistics.fmean(15 / s for s in result.seconds))
