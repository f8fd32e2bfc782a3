"""The notation of tests on the command line, and the estimate of passes that did not fit the budget."""

from __future__ import annotations

import pytest

from mlx_engine.bench.samples import ENOUGH, numbers, pair, rest
from mlx_engine.bench.samples import tests_of as combined
from mlx_engine.errors import OptionError


@pytest.mark.some(4)
@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("512", [512]),
        ("0", [0]),
        ("128,512", [128, 512]),
        ("512,128,512", [512, 128, 512]),
        (" 128, 512 ", [128, 512]),
        ("3-6", [3, 4, 5, 6]),
        ("7-7", [7]),
        ("64-256+64", [64, 128, 192, 256]),
        ("64-255+64", [64, 128, 192]),
        ("0-4+2", [0, 2, 4]),
        ("64-512*2", [64, 128, 256, 512]),
        ("64-511*2", [64, 128, 256]),
        ("1-100*10", [1, 10, 100]),
        ("8,64-256*2,3-4", [8, 64, 128, 256, 3, 4]),
    ],
)
def test_a_list_of_numbers(text, meant):
    assert numbers("-p", [text], [1]) == meant


def test_an_option_that_is_given_again_goes_on_with_the_list():
    assert numbers("-p", ["1,2", "5-6"], [9]) == [1, 2, 5, 6]


@pytest.mark.parametrize("texts", [None, []])
def test_without_a_list_the_default_holds(texts):
    assert numbers("-p", texts, [512]) == [512]


@pytest.mark.parametrize(
    "text",
    [
        *("", ",", "5,", "-5", "5-", "1.5", "1e3", "five", "1 2", "0x10", "+5", "1234567890", "1_000", "\n"),
        *("1-5+", "1-5*", "1-5+0", "1-5*0", "1-5*1", "0-5*2", "1-5/2", "1--5", "1-5+-1", "1-2-3", "5*2", "5+2"),
        *("1-5+2*2", "4,1-5+0"),
    ],
)
def test_a_list_that_cannot_be_understood_is_refused(text):
    with pytest.raises(OptionError) as caught:
        numbers("-p", [text], [1])
    assert caught.value.option == "-p"
    assert text.endswith(caught.value.found)


@pytest.mark.parametrize("text", ["512-64", "8,5-4", "512-64*2"])
def test_a_range_that_runs_backwards_is_refused(text):
    with pytest.raises(OptionError):
        numbers("-p", [text], [1])


@pytest.mark.parametrize(("text", "meant"), [("512,64", (512, 64)), (" 16,4 ", (16, 4))])
def test_a_pair(text, meant):
    assert pair(text) == meant


@pytest.mark.parametrize(
    "text", ["", "512", "512,", ",64", "512,64,1", "512, 64", "0,64", "512,0", "a,b", "1-2,3", "-1,5"]
)
def test_a_pair_that_cannot_be_understood_is_refused(text):
    with pytest.raises(OptionError, match="no pair of prompt and generated tokens") as caught:
        pair(text)
    assert caught.value.option == "-pg"


# ---- combinations ----


@pytest.mark.parametrize(
    ("p", "n", "pg", "d", "meant"),
    [
        (None, None, None, None, ["pp512", "tg64"]),
        (["16"], None, None, None, ["pp16", "tg64"]),
        (None, ["4"], None, None, ["pp512", "tg4"]),
        (["16"], ["0"], None, None, ["pp16"]),
        (["0"], ["4"], None, None, ["tg4"]),
        (["16,32"], ["4,8"], None, None, ["pp16", "pp32", "tg4", "tg8"]),
        (None, None, ["16,4"], None, ["pp16+tg4"]),
        (None, None, ["16,4", "8,2"], None, ["pp16+tg4", "pp8+tg2"]),
        (["32"], None, ["16,4"], None, ["pp32", "tg64", "pp16+tg4"]),
        (["32"], ["0"], ["16,4"], None, ["pp32", "pp16+tg4"]),
        (["16"], ["4"], None, ["0,8"], ["pp16", "tg4", "pp16 @ d8", "tg4 @ d8"]),
        (["16"], ["4"], ["2,1"], ["8"], ["pp16 @ d8", "tg4 @ d8", "pp2+tg1 @ d8"]),
    ],
)
def test_every_combination_at_every_depth(p, n, pg, d, meant):
    assert [test.name for test in combined(p, n, pg, d)] == meant


def test_nothing_to_measure_is_refused():
    with pytest.raises(OptionError, match="give at least one test"):
        combined(["0"], ["0"], None, None)


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
