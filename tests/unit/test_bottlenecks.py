"""The bottleneck report: operations beside their limits, and a whole report of a world that has a clock of its own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import mlx_engine
from mlx_engine.backends.numpy.simd import SimdBackend
from mlx_engine.backends.observed import profiled
from mlx_engine.bench.bottlenecks import analysis, report
from mlx_engine.bench.bottlenecks.analysis import BETWEEN, Kind, Limits, Operation, Pass, phase
from mlx_engine.bench.bottlenecks.page import page, ranking
from mlx_engine.bench.bottlenecks.report import Settings, described, loaded, measured, summed
from mlx_engine.bench.origin import origin
from mlx_engine.checkpoint.model_files import open_checkpoint
from mlx_engine.observe.profiler import Cost, Profiler
from tests.unit.test_spans import span

DATA = Path(__file__).parents[1] / "data"
MICRO = DATA / "qwen3-micro" / "model-q8_0.gguf"

# A machine that reads a million bytes in a millisecond, and computes two million in one.
LIMITS = Limits(read=1e9, peak=2e9)


def operation(role: str, ms: float, *, calls: int = 1, kbytes: float = 0.0, kflops: float = 0.0) -> Operation:
    return Operation(role, "layers", [ms], calls, Cost(kflops * 1e3, kbytes * 1e3))


# ---- limits and gains ----


def test_the_limit_is_the_longer_of_reading_and_computing():
    memory = operation("head", 5.0, kbytes=3000, kflops=2000)
    arithmetic = operation("head", 5.0, kbytes=1000, kflops=8000)
    assert (LIMITS.floor(memory), LIMITS.bound(memory)) == (3.0, "memory")
    assert (LIMITS.floor(arithmetic), LIMITS.bound(arithmetic)) == (4.0, "arithmetic")


def test_the_gain_is_the_time_beyond_the_limit():
    (line,) = analysis.lines_of([operation("head", 5.0, kbytes=3000)], LIMITS, off=0.0)
    assert (line.ms, line.floor, line.gain, line.reached, line.bound) == (5.0, 3.0, 2.0, 0.6, "memory")


def test_what_needs_next_to_nothing_is_bound_by_its_calls():
    (line,) = analysis.lines_of([operation("merge", 1.0, kbytes=99)], LIMITS, off=0.0)
    assert line.bound == "calls"
    (line,) = analysis.lines_of([operation("merge", 1.0, kbytes=101)], LIMITS, off=0.0)
    assert line.bound == "memory"


def test_nothing_is_gained_where_the_cache_is_faster_than_the_limit():
    (line,) = analysis.lines_of([operation("add", 1.0, kbytes=4000)], LIMITS, off=0.1)
    assert (line.ms, line.gain, line.reached) == (1.0, 0.0, 4.0)


def test_an_operation_of_which_nothing_is_left_reaches_no_share():
    (line,) = analysis.lines_of([operation("merge", 1.0, calls=10, kbytes=10)], LIMITS, off=0.5)
    assert (line.ms, line.measured, line.bound, line.reached, line.gain) == (0.01, 1.0, None, None, 0.0)


def test_without_limits_nothing_is_invented():
    (line,) = analysis.lines_of([operation("head", 5.0, kbytes=3000)], None, off=0.5)
    assert (line.ms, line.floor, line.gain, line.bound, line.reached) == (4.5, None, None, None, None)


def test_nothing_is_taken_off_where_the_plain_pass_is_longer():
    assert analysis.overhead_per_call([operation("head", 5.0)], LIMITS, too_much=-0.5) == 0.0
    assert analysis.overhead_per_call([], LIMITS, too_much=1.0) == 0.0


def test_as_much_is_taken_off_as_makes_the_sum_the_plain_pass():
    ops = [operation("a", 10.0, calls=10), operation("b", 20.0, calls=10), operation("c", 30.0, calls=20)]
    off = analysis.overhead_per_call(ops, LIMITS, too_much=10.0)
    assert off == pytest.approx(0.25)
    assert sum(line.ms for line in analysis.lines_of(ops, LIMITS, off)) == pytest.approx(50.0)


def test_no_operation_is_taken_below_its_limit_and_the_others_give_for_it():
    at_limit = operation("a", 10.0, calls=10, kbytes=9000)
    ops = [at_limit, operation("b", 20.0, calls=10), operation("c", 60.0, calls=30)]
    off = analysis.overhead_per_call(ops, LIMITS, too_much=11.0)
    found = analysis.lines_of(ops, LIMITS, off)
    assert off == pytest.approx(0.25)
    assert [line.ms for line in found] == pytest.approx([9.0, 17.5, 52.5])


def test_a_slow_operation_keeps_its_time():
    """2 ms in every call of one, which a pass that runs all layers in one call does not have."""
    ops = [operation(name, 1.0, calls=10) for name in "abcde"]
    ops.append(operation("attention", 21.0, calls=10))
    off = analysis.overhead_per_call(ops, LIMITS, too_much=25.5)
    assert off == pytest.approx(0.2)  # twice as much as a call usually takes, and no more
    assert analysis.lines_of(ops, LIMITS, off)[-1].gain == pytest.approx(19.0)


def test_what_would_gain_most_is_first():
    ops = [operation("big", 50.0, kbytes=49000), operation("slow", 6.0, kbytes=1000), operation("small", 1.0)]
    rows = analysis.ranked(analysis.lines_of(ops, LIMITS, 0.0), whole=60.0, between=3.0)
    assert [(row["role"], row["gain_ms"]) for row in rows] == [
        ("slow", 5.0), (BETWEEN, 3.0), ("big", 1.0), ("small", 1.0),
    ]  # fmt: skip
    assert [row["share"] for row in rows] == pytest.approx([5 / 60, 3 / 60, 1 / 60, 1 / 60])
    unsure = analysis.ranked(analysis.lines_of(ops, LIMITS, 0.0), whole=60.0, between=3.0, is_sure=False)
    assert (unsure[-1]["role"], unsure[-1]["ms"], unsure[-1]["gain_ms"], unsure[-1]["share"]) == (BETWEEN, 3.0, 0, 0)


def test_without_limits_what_takes_longest_is_first():
    ops = [operation("small", 1.0), operation("big", 50.0, kbytes=49000), operation("slow", 6.0)]
    rows = analysis.ranked(analysis.lines_of(ops, None, 0.0), whole=100.0, between=0.0)
    assert [row["role"] for row in rows] == ["big", "slow", "small", BETWEEN]
    assert rows[0]["share"] == 0.5
    assert rows[0]["gain_ms"] is None


# ---- a world with its own clock ----


class World:
    """A clock that moves when an operation runs, by as much as that costs here; and a machine that is all even."""

    def __init__(self) -> None:
        self.now = 0.0
        self.read, self.peak = [], []

    def __call__(self) -> float:
        return self.now

    def sample(self) -> None:
        self.read.append(1e10)
        self.peak.append(1e12)


COSTS = {"linear": 100e-6, "attention": 30e-6, "rms_norm": 10e-6, "embed": 10e-6, "argmax": 20e-6}
OPS = (*COSTS, "rope", "silu", "multiply", "add", "heads", "merge", "take", "kv_write")


@pytest.fixture
def world(monkeypatch):
    found = World()

    def costing(name, method):
        def run(self, *args, **kwargs):
            found.now += COSTS.get(name, 2e-6)
            return method(self, *args, **kwargs)

        return run

    for name in OPS:
        monkeypatch.setattr(SimdBackend, name, costing(name, getattr(SimdBackend, name)))
    return found


def plant(monkeypatch, world: World, op: str, seconds: float) -> None:
    method = getattr(SimdBackend, op)

    def slow(self, *args, **kwargs):
        world.now += seconds
        return method(self, *args, **kwargs)

    monkeypatch.setattr(SimdBackend, op, slow)


def reported(world: World, **options):
    settings = Settings(str(MICRO), "simd", n_prompt=5, n_gen=3, repetitions=2, **options)
    engine = mlx_engine.load(MICRO, "simd", jit=False)
    rounds = measured(engine, settings, world, lambda *args: None, world)
    about = {"kind": "bottlenecks", **origin(), "settings": vars(settings)}
    about |= described(engine, open_checkpoint(MICRO), "0" * 64)
    return about | summed(engine, settings, [engine.phases], rounds, world)


def test_in_a_world_with_a_clock_every_figure_is_known(world):
    report = reported(world)
    layers = report["model"]["layers"]
    decode = report["phases"]["decode"]
    ops = {op["role"]: op for op in decode["operations"]}
    assert ops["head"]["ms"] == pytest.approx(0.1)
    assert ops["attn_q"]["ms"] == pytest.approx(0.1 * layers)
    assert ops["attention"]["ms"] == pytest.approx(0.03 * layers)
    assert ops["rms_norm"]["calls"] == 4 * layers
    assert ops["output_norm"]["ms"] == pytest.approx(0.01)
    assert decode["off_every_call_us"] == pytest.approx(0.0, abs=1e-6)
    assert decode["between_ms"] == pytest.approx(0.0, abs=1e-9)
    # The rest take 2 us each; blocks take none, for what they consist of takes it all.
    cheap = sum(op["calls"] for op in ops.values() if op["role"] in OPS and op["role"] not in COSTS)
    assert cheap == (2 + 3 + 1 + 1 + 1 + 2 + 1) * layers
    dear = 0.01 + 0.1 + 0.01 + 0.02 + (0.7 + 0.03 + 0.04) * layers
    assert decode["plain_ms"]["median"] == pytest.approx(dear + 2e-3 * cheap)
    assert sum(decode["parts"].values()) == pytest.approx(decode["plain_ms"]["median"])
    assert report["timing"]["first_token"]["n"] == 2
    assert report["timing"]["decode"]["n"] == 6
    assert report["timing"]["sampling"]["median"] == pytest.approx(0.02)
    head = ops["head"]
    assert head["limit_ms"] == pytest.approx(head["bytes"] / 1e10 * 1e3)
    assert head["gain_ms"] == pytest.approx(0.1 - head["limit_ms"])
    assert head["gbs"] == pytest.approx(head["bytes"] / 0.1e-3 / 1e9)
    assert [row["step"] for row in report["steps"]] == [0, 1, 2, 3]
    assert report["steps"][2]["plain"] == pytest.approx(report["steps"][2]["sum"])
    # Before each of two runs in three rounds, and once behind them.
    assert len(world.read) == 7


@pytest.mark.some(2)
@pytest.mark.parametrize("op", ["attention", "argmax", "rope", "norm_head"])
def test_a_planted_delay_is_first_with_its_gain(monkeypatch, world, op):
    calls = {"attention": 1, "rope": 2}  # of a layer
    plant(monkeypatch, world, op, 2e-3)
    report = reported(world)
    planted = 2.0 * calls.get(op, 1) * (report["model"]["layers"] if op in calls else 1)
    first = report["phases"]["decode"]["ranking"][0]
    assert first["role"] == op
    assert first["gain_ms"] == pytest.approx(planted, rel=0.1)
    assert first["share"] == pytest.approx(planted / report["phases"]["decode"]["plain_ms"]["median"], rel=0.1)


def test_an_operation_that_was_replaced_on_one_backend_is_timed_too():
    clock, be = World(), SimdBackend()

    def slow(logits):
        clock.now += 2e-3
        return 7

    be.argmax = slow
    profiler = Profiler(clock, keep=True)
    assert profiled(be, profiler).argmax(np.ones((1, 9), np.float32)) == 7
    assert [(span.role, span.own) for span in profiler.spans] == [("argmax", 2e-3)]
    assert be.argmax is slow


def test_a_slow_pass_around_its_operations_is_told_as_between_them(monkeypatch, world):
    from mlx_engine.models.qwen3 import Model

    forward = Model.forward

    def slow(self, *args, **kwargs):
        world.now += 2e-3
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(Model, "forward", slow)
    first = reported(world)["phases"]["decode"]["ranking"][0]
    assert (first["role"], first["gain_ms"]) == (BETWEEN, pytest.approx(2.0))


def test_the_page_says_what_was_measured(monkeypatch, world):
    plant(monkeypatch, world, "attention", 2e-3)
    report = reported(world)
    text = page(report)
    layers = report["model"]["layers"]
    first = next(line for line in text.splitlines() if line.startswith("|  1 |"))
    assert [cell.strip() for cell in first.split("|")][1:4] == ["1", "attention", f"{2.03 * layers:.3f}"]
    assert "python cli.py report --model" in text
    assert "-p 5 -n 3 --depth 0 -r 2" in text
    assert "10.0 (10.0 to 10.0) GB/s" in text
    assert sum(line.lstrip("| ").startswith(("prefill |", "step ")) for line in text.splitlines()) == 4
    assert json.loads(json.dumps(report)) == report


def test_where_no_limit_is_known_the_page_says_so(world):
    settings = Settings(str(MICRO), "simd", n_prompt=5, n_gen=3, repetitions=1)
    report = reported(world)
    engine = mlx_engine.load(MICRO, "simd", jit=False)
    rounds = measured(engine, settings, None, lambda *args: None, world)
    report |= summed(engine, settings, [engine.phases], rounds, None)
    text = page(report)
    assert report["limits"] is None
    assert "unknown for cpu" in text
    assert "at the machine's limits it would" not in text
    assert all(row["gain_ms"] is None for row in report["phases"]["decode"]["ranking"])
    assert "of the limit" not in text


def test_reading_alone_has_no_decode(world):
    settings = Settings(str(MICRO), "simd", n_prompt=5, n_gen=0, repetitions=1)
    engine = mlx_engine.load(MICRO, "simd", jit=False)
    rounds = measured(engine, settings, world, lambda *args: None, world)
    assert list(summed(engine, settings, [engine.phases], rounds, world)["phases"]) == ["prefill"]


def test_rounds_end_with_the_budget(world):
    engine = mlx_engine.load(MICRO, "simd", jit=False)
    settings = Settings(str(MICRO), "simd", n_prompt=2, n_gen=1, repetitions=5, budget=0.0)
    told = []
    rounds = measured(engine, settings, world, lambda *args: told.append(args), world)
    assert (len(rounds), told) == (1, [(0, 6, "pp2+tg1 on simd"), (1, 6, "pp2+tg1 on simd")])


def rounds_of(plain: list[float], apart: list[float]) -> Kind:
    passes = [[Pass([span("head", ms / 1e3)], 1.0)] for ms in apart]
    return Kind(passes, [[ms] for ms in plain])


def test_what_may_be_chance_is_no_bottleneck():
    """The plain pass is longer by 2 ms in most rounds, and the machine is slower in some."""
    sure = phase(rounds_of([12.0, 32.0, 52.5, 13.0], [10.0, 30.0, 50.0, 10.5]), LIMITS, 0.0, {}, lazy=False)
    assert sure["between_by_round_ms"]["median"] == pytest.approx(2.25)
    gains = {row["role"]: (row["ms"], row["gain_ms"], row["says"]) for row in sure["ranking"]}
    assert gains[BETWEEN][0] == gains[BETWEEN][1] > 0
    assert "noise" not in gains[BETWEEN][2]
    chance = phase(rounds_of([12.0, 32.0, 50.0, 10.0], [20.0, 30.0, 10.0, 10.5]), LIMITS, 0.0, {}, lazy=False)
    assert chance["between_ms"] == pytest.approx(22.0 - 15.25)
    (last,) = [row for row in chance["ranking"] if row["role"] == BETWEEN]
    assert (last["ms"], last["gain_ms"]) == (pytest.approx(22.0 - 15.25), 0)
    assert "may be noise" in last["says"]
    assert BETWEEN in ranking(chance, "decode")


def test_shares_never_add_up_to_more_than_all():
    longer = phase(rounds_of([5.0], [20.0]), None, 0.0, {}, lazy=False)
    assert longer["between_ms"] == pytest.approx(-15.0)
    assert [op["share"] for op in longer["operations"]] == [1.0]
    assert [(row["role"], row["share"]) for row in longer["ranking"]] == [("head", 1.0), (BETWEEN, 0.0)]
    assert "of the sum" in ranking(longer, "prefill").splitlines()[0]
    even = phase(rounds_of([20.0], [20.0]), None, 0.0, {}, lazy=False)
    assert "of prefill" in ranking(even, "prefill").splitlines()[0]


# ---- the model, and loading it ----


@pytest.mark.parametrize(("kind", "bits"), [("q8_0", 8.5), ("f32", 32.0)])
def test_the_model_is_told_as_its_backend_holds_it(kind, bits):
    engine = mlx_engine.load(MICRO.with_name(f"model-{kind}.gguf"), "parallel")
    known = report.about(engine, open_checkpoint(engine.path), "0")
    n = 7 * known["layers"] + 1
    assert (known["linears"], known["linears_quantised"]) == (n, n if kind == "q8_0" else 0)
    assert set(known["bits"]) == {"attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "head"}
    assert set(known["bits"].values()) == {bits}


def test_a_model_is_loaded_several_times_where_that_is_quick():
    class Loaded:
        phases = {"load": 1.0, "warm_up": 0.5}  # noqa: RUF012

    def every(seconds: float):
        now = [0.0]

        def load():
            now[0] += seconds
            return Loaded()

        return len(loaded(load, lambda: now[0])[1])

    assert (every(0.1), every(4.0), every(60.0)) == (3, 2, 1)
