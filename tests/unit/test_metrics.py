"""Times of passes, with a clock that the test holds."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_engine.loop.metrics import Metrics


class Clock:
    """A clock that stands still until `work` moves it."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now

    def work(self, seconds, result=None):
        def run():
            self.now += seconds
            return result

        return run


def recorded(*seconds):
    metrics = Metrics()
    for s in seconds:
        metrics.record_pass(s)
    return metrics


def test_time_to_first_token_is_the_first_pass_in_milliseconds():
    assert recorded(0.5, 0.25, 2.0).time_to_first_token_ms == 500.0


def test_nothing_is_defined_before_the_first_pass():
    metrics = recorded()
    assert metrics.time_to_first_token_ms is None
    assert metrics.decode_tokens_per_second is None


def test_one_pass_has_no_decode_rate():
    assert recorded(0.5).decode_tokens_per_second is None


def test_prefill_is_not_in_the_decode_rate():
    assert recorded(0.5, 0.25, 0.25).decode_tokens_per_second == 4.0
    assert recorded(60.0, 0.25, 0.25).decode_tokens_per_second == 4.0


def test_a_rate_over_no_time_is_undefined_not_infinite():
    assert recorded(0.5, 0.0, 0.0).decode_tokens_per_second is None


def test_two_runs_share_no_passes():
    Metrics().record_pass(0.5)
    assert Metrics().passes == []


def test_without_a_clock_of_the_caller_phases_are_in_seconds():
    metrics = Metrics()
    start = time.monotonic()
    metrics.record_phase("load", lambda: time.sleep(0.05))
    elapsed = time.monotonic() - start
    assert 0.04 < metrics.phases["load"] <= elapsed


def test_the_summary_is_json_and_says_what_the_properties_say():
    summary = json.loads(json.dumps(recorded(0.5, 0.25).summary()))
    assert summary["time_to_first_token_ms"] == 500.0
    assert summary["decode_tokens_per_second"] == 4.0
    assert summary["per_forward_ms"]["n"] == 2
    assert summary["per_pass_ms"] == [500.0, 250.0]


def test_what_is_undefined_is_null_in_the_summary():
    summary = json.loads(json.dumps(recorded().summary(), allow_nan=False))
    assert summary["time_to_first_token_ms"] is None
    assert summary["decode_tokens_per_second"] is None
    assert summary["per_forward_ms"] is None


@settings(max_examples=60)
@given(st.lists(st.floats(1e-6, 10), min_size=2, max_size=40))
def test_decode_is_tokens_after_the_first_over_their_time(seconds):
    rate = recorded(*seconds).decode_tokens_per_second
    # The clock counts from 1,000, which costs digits of each difference.
    assert rate * sum(seconds[1:]) == pytest.approx(len(seconds) - 1, rel=1e-3)


def test_a_pass_that_others_share_takes_its_whole_time_and_counts_for_a_share():
    metrics = recorded(0.5)
    metrics.record_pass(1.0, share=0.25, sampling=0.125)
    assert (metrics.passes, metrics.shares, metrics.sampling) == ([0.5, 1.0], [0.5, 0.25], [0.125])
    assert metrics.decode_tokens_per_second == 1.0


def test_phases_and_sampling_stay_out_of_the_passes():
    clock = Clock()
    metrics = Metrics(clock=clock)
    assert metrics.record_phase("load", clock.work(7.0, "model")) == "model"
    metrics.sampling.append(0.125)
    assert (metrics.passes, metrics.phases, metrics.sampling) == ([], {"load": 7.0}, [0.125])
    assert metrics.summary()["load_ms"] == 7000.0
    assert metrics.summary()["sampling_ms"] == 125.0


def test_the_spread_of_the_passes():
    assert recorded().per_forward_ms is None
    assert recorded(0.5, 0.25, 0.75).per_forward_ms == {"min": 250.0, "max": 750.0, "mean": 500.0, "n": 3}


def test_the_summary_as_text():
    metrics = recorded(0.5, 0.25)
    metrics.phases["load"] = 0.03125
    assert metrics.text(per_pass=True).splitlines() == [
        "metrics:",
        "  load_ms: 31.250",
        "  time_to_first_token_ms: 500.000",
        "  decode_tokens_per_second: 4.000",
        "  per_forward_ms: min 250.000 max 500.000 mean 375.000 (n=2)",
        "  forward 1: 500.000 ms",
        "  forward 2: 250.000 ms",
    ]
    assert "forward 1" not in metrics.text(per_pass=False)


def test_what_is_undefined_is_a_dash_in_the_summary():
    assert recorded().text(per_pass=True).splitlines() == [
        "metrics:",
        "  time_to_first_token_ms: —",
        "  decode_tokens_per_second: —",
        "  per_forward_ms: —",
    ]
