"""The receipt of a reply over a real socket."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.serve.served import Served, events, served, wait_for

PARTS = ("tokenize_ms", "queue_ms", "prompt_ms", "predicted_ms", "write_ms")


def receipt(server: Served, **parameters: Any) -> dict[str, Any]:
    response = server.chat("a receipt, please", max_tokens=30, **parameters)
    return (events(response.content)[-2] if parameters.get("stream") else response.json())["mlx_engine"]["timings"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_the_parts_add_up_to_what_a_client_waits(server: Served, stream: bool, n: int):
    start = time.perf_counter()
    found = receipt(server, stream=stream, n=n)
    waited = (time.perf_counter() - start) * 1e3
    assert all(found[part] >= 0 for part in PARTS)
    assert sum(found[part] for part in PARTS) == pytest.approx(found["total_ms"], rel=0.05)
    assert 0 < found["total_ms"] < waited


def test_waiting_for_the_engine_is_queue_time():
    with served(slots=1) as server, ThreadPoolExecutor(1) as clients:
        server.gate.hold()
        job = clients.submit(receipt, server)
        wait_for(lambda: server.worker.n_open == 1)
        time.sleep(0.15)
        server.gate.allow()
        found = job.result()
    assert 150 <= found["queue_ms"] <= found["total_ms"]


def test_the_share_of_the_bandwidth_of_the_server():
    with served(bandwidth=1e9) as server:
        found = receipt(server)
    assert found["bytes_read"] > found["steps"] * 10_000
    assert 0 < found["bandwidth_share"] < 1000
