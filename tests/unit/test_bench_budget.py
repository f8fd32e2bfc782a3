"""`bench` with a budget: what is measured, what is estimated, and what a budget never does."""

import pytest

from mlx_engine.errors import OptionError
from tests.unit.timed_model import both_kinds, measured

# ---- the budget ----


@pytest.mark.slow
def test_without_a_budget_nothing_is_estimated_however_slow(spy):
    for test in ((16, 0, 0), (0, 4, 0), (16, 4, 20)):
        result = measured(spy(lambda n, at: 1e9), *test, repetitions=3)
        assert result.estimated is None
        assert len(result.seconds) == 3


@pytest.mark.slow
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
