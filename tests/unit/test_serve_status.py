"""The status of a scheduler: phases, the owners of pages, the prefix tree, the last steps and their limits."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import pytest

import mlx_engine
from mlx_engine.cache.prefix import PrefixCache
from mlx_engine.loop.memory import Traffic
from mlx_engine.loop.request import Request
from mlx_engine.loop.scheduler import Scheduler, StepOutput
from mlx_engine.options import Options
from mlx_engine.serve.status import N_NODES, N_STEPS, N_WAITING, Monitor, Status

MICRO = Path(__file__).parents[1] / "data" / "qwen3-micro" / "model-q8_0.gguf"
PAGE = 4


class Clock:
    """A clock that stands still until it is moved."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def engine() -> mlx_engine.Engine:
    return mlx_engine.load(MICRO, "simd")


def scheduler_of(engine: mlx_engine.Engine, n_tokens: int = 400, *, slots: int = 4, prefix: bool = True, **of: object):
    pool = engine.model.new_pool(n_tokens, n_sequences=slots, page=PAGE)
    return Scheduler(engine.model, pool, slots=slots, prefix=PrefixCache(pool) if prefix else None, **of)


def request(engine: mlx_engine.Engine, prompt: list[int], n_new: int = 6, n: int = 1) -> Request:
    return engine.request(prompt, Options.of(n_new, ignore_eos=True, temperature=1.0, seed=1), n=n)


def owners(scheduler: Scheduler, group: int = 0) -> dict[str, object]:
    """Count the pages again, from sets of page numbers."""
    pool, answers = scheduler.pool, [set(answer.kv.pages(group).tolist()) for answer in scheduler.running]
    cached: set[int] = set()
    if scheduler.prefix is not None:
        cached = {int(page) for node in scheduler.prefix._nodes for page in node.pages[group] if page >= 0}
    holders = Counter(page for pages in [*answers, cached] for page in pages)
    held = set().union(*answers)
    return {
        "free": pool.n_pages[group] - len(holders),
        "cached": len(cached - held),
        "shared": sum(holders[page] > 1 for page in held),
        "owned": tuple(sum(holders[page] == 1 for page in pages) for pages in answers),
    }


def test_phases_follow_an_answer_from_the_queue_to_its_end(engine: mlx_engine.Engine):
    scheduler, monitor = scheduler_of(engine, slots=1, budget=8), Monitor()
    first, second = request(engine, list(range(1, 21))), request(engine, [3, 4, 5])
    scheduler.submit(first)
    scheduler.submit(second)
    status = monitor.read(scheduler)
    assert [(w.number, w.phase, w.n_pages) for w in status.waiting] == [
        (first.number, "waiting", 0),
        (second.number, "waiting", 0),
    ]
    seen = []
    while scheduler.has_work:
        scheduler.step()
        status = monitor.read(scheduler)
        seen += [(r.number - first.number, r.phase, r.n_read, r.n_written) for r in status.running]
    assert seen[:4] == [(0, "prefill", 8, 0), (0, "prefill", 16, 0), (0, "decode", 20, 1), (0, "decode", 20, 2)]
    assert seen[-1] == (1, "decode", 3, 5)
    assert (status.running, status.waiting, status.n_waiting) == ((), (), 0)


def test_an_answer_that_lost_its_pages_is_recomputed(engine: mlx_engine.Engine):
    scheduler, monitor = scheduler_of(engine, 60, slots=3, prefix=False, budget=4), Monitor()
    for i in range(3):
        scheduler.submit(request(engine, [i + 1] * 12, 30))
    seen = []
    while scheduler.has_work:
        scheduler.step()
        seen += [answer for answer in monitor.read(scheduler).running if answer.phase == "recompute"]
    assert {answer.n_read for answer in seen} >= {4, 8, 12}
    assert all(0 < answer.n_written < 30 and answer.n_preemptions for answer in seen)


def test_every_page_is_counted_once(engine: mlx_engine.Engine):
    scheduler, monitor = scheduler_of(engine, slots=4, budget=8), Monitor()
    scheduler.submit(request(engine, list(range(1, 12)), n=2))
    scheduler.submit(request(engine, list(range(1, 11)), 12))
    scheduler.submit(request(engine, [*range(1, 9), 300], 12))
    scheduler.submit(request(engine, [*range(1, 9), 300, 7], 12))
    kinds: Counter[str] = Counter()
    while scheduler.has_work:
        scheduler.step()
        status = monitor.read(scheduler)
        (group,) = status.pages
        assert msgspec.structs.asdict(group) == {"window": None, **owners(scheduler)}
        assert len(group.owned) == len(status.running)
        kinds.update(name for name in ("free", "cached", "shared") if getattr(group, name))
        kinds.update("owned" for n in group.owned if n)
    assert min(kinds[name] for name in ("free", "cached", "shared", "owned")) > 0


def test_pages_have_owners_without_a_prefix_cache(engine: mlx_engine.Engine):
    scheduler = scheduler_of(engine, prefix=False)
    scheduler.submit(request(engine, list(range(1, 12)), n=2))
    scheduler.step()
    status = Monitor().read(scheduler)
    assert msgspec.structs.asdict(status.pages[0]) == {"window": None, **owners(scheduler)}
    assert (status.pages[0].shared, status.pages[0].cached, status.prefix) == (2, 0, None)


def test_the_tree_has_texts_only_if_they_are_wanted(engine: mlx_engine.Engine):
    scheduler = scheduler_of(engine, budget=512)
    for prompt in ([*range(1, 21)], [*range(1, 9), 300, 7]):
        scheduler.submit(request(engine, prompt, 2))
        while scheduler.has_work:
            scheduler.step()
    prefix = Monitor(text_of=lambda ids: ",".join(map(str, ids))).read(scheduler).prefix
    assert prefix is not None
    root, *others = prefix.nodes
    assert (root.parent, root.start, root.n_tokens, root.text) == (-1, 0, 8, "1,2,3,4,5,6,7,8")
    assert {(node.parent, node.start) for node in others} == {(0, 8)}
    assert sorted(node.text.split(",")[0] for node in others) == ["300", "9"]
    assert [node.text.endswith("…") for node in others] == [node.n_tokens > 8 for node in others]
    assert (prefix.n_nodes, prefix.queries, prefix.hits, prefix.cached_tokens) == (3, 2, 1, 8)
    assert prefix.n_tokens == sum(node.n_tokens for node in prefix.nodes)
    hidden = Monitor().read(scheduler).prefix
    assert hidden is not None
    assert {node.text for node in hidden.nodes} == {None}


@pytest.mark.slow
def test_the_status_has_a_bound(engine: mlx_engine.Engine):
    scheduler, monitor = scheduler_of(engine, 2000), Monitor()
    for i in range(N_NODES + 5):
        scheduler.submit(request(engine, [i + 1, 5], 1))
    status = monitor.read(scheduler)
    assert (len(status.waiting), status.n_waiting) == (N_WAITING, N_NODES + 5)
    while scheduler.has_work:
        scheduler.step()
    for _ in range(N_STEPS + 3):
        monitor.after(scheduler, StepOutput(n_decode=2, n_prefill=1, seconds=0.5))
    status = monitor.read(scheduler)
    assert status.prefix is not None
    assert (len(status.prefix.nodes), status.prefix.n_nodes) == (N_NODES, N_NODES + 5)
    assert (len(status.steps), status.n_steps) == (N_STEPS, N_STEPS + 3)
    assert msgspec.json.encode(status.steps[0]) == b"[2,1,0.5,null]"


@pytest.mark.slow
def test_a_parent_comes_before_its_children_where_the_list_is_cut(engine: mlx_engine.Engine):
    scheduler = scheduler_of(engine, 2000)
    for i in range(N_NODES):
        for prompt in ([1, 2, 3, i + 1, 5], [1, i + 1, 5]):
            scheduler.submit(request(engine, prompt, 1))
    while scheduler.has_work:
        scheduler.step()
    prefix = Monitor().read(scheduler).prefix
    assert prefix is not None
    assert prefix.n_nodes > len(prefix.nodes) == N_NODES
    for i, node in enumerate(prefix.nodes):
        above = prefix.nodes[node.parent] if node.parent >= 0 else None
        assert node.parent < i
        assert node.start == (above.start + above.n_tokens if above else 0)


def test_a_status_is_due_at_intervals_and_at_the_end(engine: mlx_engine.Engine):
    clock = Clock()
    scheduler, monitor = scheduler_of(engine), Monitor(interval=0.2, clock=clock)
    scheduler.submit(request(engine, [1, 2, 3], 8))
    due = []
    while scheduler.has_work:
        due.append(monitor.after(scheduler, scheduler.step()) is not None)
        clock.now += 0.07
    assert due == [True, False, False, True, False, False, True, True]


def test_the_tree_is_read_once_a_second(engine: mlx_engine.Engine):
    clock = Clock()
    scheduler, monitor = scheduler_of(engine), Monitor(clock=clock)
    scheduler.submit(request(engine, [1, 2, 3], 8))
    scheduler.step()
    first = monitor.read(scheduler)
    scheduler.submit(request(engine, [9, 2, 3], 20))
    scheduler.step()
    clock.now = 0.9
    assert monitor.read(scheduler).prefix is first.prefix
    clock.now = 1.0
    later = monitor.read(scheduler).prefix
    assert later is not None
    assert later.n_nodes == 2


def test_two_readings_of_an_idle_scheduler_are_equal(engine: mlx_engine.Engine):
    clock = Clock()
    scheduler, monitor = scheduler_of(engine), Monitor(clock=clock)
    scheduler.submit(request(engine, [1, 2, 3], 3))
    statuses: list[Status | None] = []
    while scheduler.has_work:
        statuses.append(monitor.after(scheduler, scheduler.step()))
    clock.now = 100.0
    assert monitor.read(scheduler) == statuses[-1]
    assert statuses[0] != statuses[-1]


def test_the_limit_of_a_step_is_the_time_to_read_its_bytes(engine: mlx_engine.Engine):
    """All weights once, and the keys and values of both sequences."""
    scheduler, monitor = engine.scheduler(slots=2, kv_memory=1 << 22), Monitor(bandwidth=lambda: 1e9)
    for prompt in ([1, 2, 3], [1, 2, 3, 4, 5]):
        scheduler.submit(request(engine, prompt, len(prompt) - 1))
    read = []
    while scheduler.has_work:
        report = scheduler.step()
        monitor.after(scheduler, report)
        read.append(report.nbytes)
    traffic = Traffic.of(engine.model, scheduler.pool)
    per_token = sum(traffic.kv.values())
    assert read[:2] == [traffic.weights + per_token * n for n in (3 + 5, 4 + 6)]
    assert [step.limit for step in monitor.read(scheduler).steps] == [round(nbytes / 1e9, 6) for nbytes in read]
