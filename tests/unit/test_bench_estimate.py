"""What passes would have taken that nobody had the time for."""

import pytest

from mlx_engine.bench.samples import ENOUGH, rest


def test_with_a_cache_passes_are_alike():
    assert rest([1.0, 3.0], [1] * 5) == [2.0] * 3
    assert rest([1.0, 3.0] * 10, [1] * 22) == [2.0] * 2


@pytest.mark.parametrize("n", [1, 3, ENOUGH - 1])
def test_of_a_few_passes_without_one_the_time_is_that_of_the_length(n):
    lengths = list(range(5, 15))
    assert rest([0.5 * length for length in lengths[:n]], lengths) == pytest.approx([0.5 * x for x in lengths[n:]])


@pytest.mark.parametrize("n", [ENOUGH, 40])
def test_of_more_passes_the_weights_are_told_from_the_tokens(n):
    lengths = list(range(1, 257))
    times = [0.1 + 0.005 * length for length in lengths]
    assert rest(times[:n], lengths) == pytest.approx(times[n:])


def test_the_first_lengths_may_go_another_way():
    lengths = list(range(1, 257))
    times = [0.03 * length if length <= 4 else 0.15 + 0.005 * length for length in lengths]
    assert rest(times[:20], lengths) == pytest.approx(times[20:])


def test_longer_sequences_are_never_expected_to_take_less():
    assert rest([9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0], list(range(1, 11))) == pytest.approx([3.5, 3.5])


def test_nothing_is_missing():
    assert rest([1.0] * 9, list(range(9))) == []
