"""The benchmark of a model with states: what is asked of the engines, and what is told about it."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import sections, states
from benchmarks.peers.contests import LLAMA, OURS, Contestant
from mlx_engine.bench.samples import Test as Cell

CACHE = {"tokens": 4128, "kv_bytes": 50_000_000, "state_bytes": 20_000_000}


class Asked:
    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, Any]]] = []

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        self.requests.append((do, request))
        return CACHE if do == "cache" else {"seconds": 2.0}


@pytest.mark.some(1)
@pytest.mark.parametrize(("depth", "asked"), [(0, ["run", "cache"]), (4096, ["fill", "run", "cache"])])
def test_the_tokens_before_a_test_are_read_anew(depth: int, asked: list[str]):
    process: Any = Asked()
    found = states.timed(process, Contestant(OURS), Cell(n_gen=32, depth=depth))
    assert [do for do, _ in process.requests] == asked
    assert process.requests[-2][1]["n_depth"] == depth
    assert found == {"seconds": 2.0, "cache": CACHE}


def test_factors_are_those_of_rounds():
    common: dict[str, Any] = {
        "time": "2020-01-02T03:04", "commit": "abc", "versions": {"numpy": "2"}, "model_name": "m", "model_size": 4e6,
        "model_n_params": 2e6, "machine": {"processor": "p", "cores": 2, "memory_bytes": 2**30, "system": "Linux"},
        "what": "tg32 @ d4096", "n_prompt": 0, "n_gen": 32, "depth": 4096,
    }  # fmt: skip
    text = sections.states([
        {**common, "engine": OURS, "seconds": [1.0, 2.0, 1.0], "cache": CACHE},
        {**common, "engine": LLAMA, "seconds": [2.0, 2.0, 4.0], "cache": {}},
    ])  # fmt: skip
    assert "| tg32 @ d4096 | 32 (16 to 32) | 16 (8 to 16) | 2 | 20 | 50 |" in text
