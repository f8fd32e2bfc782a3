"""The receipt of a request: its parts follow each other, and add up to the total."""

from __future__ import annotations

from typing import Any

import pytest

import mlx_engine
from mlx_engine.bench.work import bytes_per_weight, pass_work, sizes
from mlx_engine.checkpoint.model_files import open_checkpoint
from mlx_engine.loop.memory import Traffic
from mlx_engine.loop.request import Request
from mlx_engine.options import Options
from mlx_engine.serve.replies import timings
from tests.golden.goldens import DATA
from tests.unit.test_chat import MICRO

PARTS = ("tokenize_ms", "queue_ms", "prompt_ms", "predicted_ms", "write_ms")


class Clock:
    """A clock that a test moves; each reading takes a microsecond."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now


@pytest.fixture(scope="module")
def engine() -> Any:
    return mlx_engine.load(MICRO, "parallel", threads=1)


def run(engine: Any, n: int = 1, **about: Any) -> tuple[dict[str, Any], Request]:
    """Run a request that waits 3 s for another one, reads its prompt in 2 s, and takes 0.5 s for each token."""
    clock = Clock()
    scheduler = engine.scheduler(slots=n, kv_memory=4 << 20, budget=64, clock=clock)
    received = clock()
    clock.now += 1.0
    tokenized = clock()
    clock.now += 0.5  # in the inbox of the engine thread
    before, request = (engine.request([i] * 64, Options.of(6, ignore_eos=True), n=n) for i in (1, 2))
    for one in (before, request):
        scheduler.submit(one)
    while scheduler.has_work:
        started = request.times.first_token is not None
        running = any(answer.request is request for answer in scheduler.running)
        clock.now += 0.5 if started else 2.0 if before.has_ended else 0.25
        scheduler.step()
        assert running or not started
    clock.now += 0.125  # a slow reader
    return timings(request, received=received, tokenized=tokenized, written=clock(), **about), request


def test_the_parts_add_up_to_the_total(engine: Any):
    found, _ = run(engine)
    assert sum(found[part] for part in PARTS) == pytest.approx(found["total_ms"], rel=1e-9)
    # Six tokens of the other request take six steps; the slot is given at the beginning of the step after.
    wanted = {"tokenize_ms": 1000, "queue_ms": 500 + 6 * 250 + 2000, "predicted_ms": 5 * 500, "write_ms": 125}
    assert {part: found[part] for part in wanted} == pytest.approx(wanted, abs=0.1)


def test_a_step_counts_once_for_all_answers_of_a_request(engine: Any):
    found, request = run(engine, n=3)
    assert (found["steps"], found["predicted_n"], found["prompt_n"]) == (6, 18, 64)
    assert found["rows_per_step"] == pytest.approx((64 + 5 * 3) / 6)
    per_token = request.decode_bytes / 5
    assert request.n_bytes == pytest.approx(6 * per_token, rel=0.1)


@pytest.mark.parametrize("name", ["qwen3-micro/model-q8_0.gguf", "gemma3-micro/hf"])
def test_the_bytes_of_passes_are_those_of_the_benchmarks(name: str):
    path = DATA / name
    engine = mlx_engine.load(path, "parallel", threads=1)
    of = sizes(open_checkpoint(path), lambda type_: bytes_per_weight(engine.backend, type_))
    scheduler = engine.scheduler(slots=2, kv_memory=8 << 20, prefix_cache=False, budget=512)
    requests = [engine.request([5] * n, Options.of(4, ignore_eos=True)) for n in (90, 20)]
    for request in requests:
        scheduler.submit(request)
    while scheduler.has_work:
        scheduler.step()
    wanted = [[(90, 0, 1), (20, 0, 1)], *([(1, 90 + i, 1), (1, 20 + i, 1)] for i in range(3))]
    nbytes = [pass_work(of, parts).nbytes for parts in wanted]
    for request in requests:
        assert request.n_bytes == pytest.approx(sum(nbytes), rel=0.02)
        assert request.decode_bytes == pytest.approx(sum(nbytes[1:]), rel=0.02)


def test_the_share_is_that_of_the_measured_bandwidth(engine: Any):
    found, request = run(engine)
    assert found["bandwidth_share"] is None
    assert (
        found["bytes_read"]
        == round(request.n_bytes)
        > 6 * Traffic.of(engine.model, engine.scheduler(slots=1, kv_memory=1 << 20).pool).weights
    )
    with_limit, request = run(engine, bandwidth=1e9)
    assert with_limit["bandwidth_share"] == pytest.approx(request.decode_bytes / request.decode_seconds / 1e9)


def test_a_request_without_a_second_token(engine: Any):
    request = engine.request([1, 2, 3], Options.of(1))
    scheduler = engine.scheduler(slots=1, kv_memory=4 << 20)
    scheduler.submit(request)
    scheduler.step()
    found = timings(request, received=0.0, tokenized=0.0, written=1.0, bandwidth=1e9)
    assert (found["predicted_per_second"], found["bandwidth_share"], found["steps"]) == (None, None, 1)
