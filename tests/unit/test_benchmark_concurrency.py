"""The benchmark of several sequences beside llama.cpp: its loop, our engine's side of it, and its table."""

from __future__ import annotations

import json

import pytest

from benchmarks import concurrency, sections
from benchmarks.peers import child
from benchmarks.peers.contests import LLAMA, OURS
from benchmarks.peers.loop import WARM_STEPS, BatchPeer, decode, prompts
from benchmarks.peers.ours import open_peer
from mlx_engine.checkpoint.sources import BUILTIN


class Clockwork(BatchPeer):
    """A step takes as many seconds as there were steps before."""

    def __init__(self):
        self.now, self.calls = 0.0, []

    def facts(self):
        return {"versions": {"clockwork": "1"}}

    def begin(self, n_sequences, n_steps):
        self.calls.append((n_sequences, n_steps))
        self.n = 0

    def step(self):
        self.now += self.n
        self.n += 1

    def clock(self):
        return self.now


def test_steps_are_timed_after_a_warm_up():
    peer = Clockwork()
    assert decode(peer, {"n_sequences": 4, "n_steps": 3}, peer.clock) == {"seconds": [1.0, 2.0, 3.0]}
    assert peer.calls == [(4, 3 + WARM_STEPS)]


def test_requests_reach_an_engine_with_several_sequences():
    peer = Clockwork()
    assert len(child.answer_batch(peer, {"do": "decode", "n_sequences": 2, "n_steps": 2})["seconds"]) == 2
    assert child.answer_batch(peer, {"do": "limits"}) == {}
    with pytest.raises(ValueError, match="expected decode or limits, found 'run'"):
        child.answer_batch(peer, {"do": "run"})


def test_prompts_are_equal_for_every_engine_and_differ_from_each_other():
    assert prompts(50, 3, 8) == prompts(50, 3, 8)
    assert len({tuple(ids) for ids in prompts(50, 3, 8)}) == 3


def test_our_scheduler_runs_so_many_rows_per_step():
    peer = open_peer({"model": str(BUILTIN), "n_sequences": 5, "depth": 70, "spare": 8, "backend": "simd"})
    for n in (3, 5, 1):
        assert len(decode(peer, {"n_sequences": n, "n_steps": 4})["seconds"]) == 4
        running = peer._scheduler.running
        assert len(running) == n
        assert all(answer.request.n_cached == 69 for answer in running)
    peer._n = 2
    with pytest.raises(RuntimeError, match="expected a step of 2 answers, found 1, 0"):
        peer.step()


def row(depth=128, **rates):
    medians = {name: {"1": one, "8": eight} for name, (one, eight) in rates.items()}
    samples = {name: {n: [rate] for n, rate in of.items()} for name, of in medians.items()}
    return {
        "medians_ts": medians, "samples_ts": samples,
        "limits_ts": {"1": [100.0, 400.0], "8": [800.0, 400.0]}, "absent": {}, "read_gbs": 30.0, "peak_gflops": 400.0,
        "depth": depth, "threads": 2, "model_name": "m", "commit": "abc", "time": "2026-01-01", "versions": {},
        "machine": {"processor": "P", "cores": 2, "memory_bytes": None, "system": "S"},
    }  # fmt: skip


def test_gain_factor_and_share_are_printed():
    found = row(**{OURS: (50.0, 200.0), LLAMA: (40.0, 80.0), "another": (30.0, 100.0)})
    assert concurrency.fastest(found, "8") == 100.0
    one, eight = concurrency.report_lines(found)
    assert "1.00 times one; llama.cpp 40.0, factor 1.25" in one
    assert one.endswith("50%")
    assert "4.00 times one; llama.cpp 100.0, factor 2.00" in eight
    assert "800 by memory, 400 by arithmetic" in eight


def test_the_page_has_the_newest_row_of_each_depth():
    rows = [row(**{OURS: (9.0, 9.0)}), row(**{OURS: (50.0, 200.0), LLAMA: (40.0, 80.0)})]
    text = sections.concurrency([json.loads(json.dumps(one)) for one in rows])
    assert text.splitlines()[-1] == "| 8 | 200 | 80 | 4 | 2.5 | 0.50 |"
    assert text.count("| sequences |") == 1
