"""GET /metrics: the text format of Prometheus."""

from __future__ import annotations

import re

from mlx_engine.serve.prometheus import Counter, Histogram
from tests.serve.served import HTTP, Served, chat_body, served, wait_for

LINE = re.compile(r'(mlx_engine:[a-z0-9_]+)(\{[a-z_]+="[^"]*"\})? (\S+)')


def read(server: Served) -> dict[str, float]:
    response = HTTP.get(server.url + "/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    values: dict[str, float] = {}
    typed: set[str] = set()
    for line in response.text.splitlines():
        if line.startswith("# TYPE "):
            typed.add(line.split()[2])
        elif not line.startswith("#"):
            match = LINE.fullmatch(line)
            assert match, line
            assert any(match[1] in (name, f"{name}_bucket", f"{name}_sum", f"{name}_count") for name in typed)
            values[match[1].removeprefix("mlx_engine:") + (match[2] or "")] = float(match[3])
    return values


def test_counts_are_those_of_the_requests():
    with served(slots=2) as server:
        before = read(server)
        usages = [server.chat("count me", n=n, max_tokens=6).json()["usage"] for n in (1, 2)]
        server.chat(max_tokens="x")
        after = {name: value - before.get(name, 0) for name, value in read(server).items()}
        assert after["prompt_tokens_total"] == sum(usage["prompt_tokens"] for usage in usages)
        assert after["generation_tokens_total"] == 18
        hits = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
        assert after["prefix_cache_hits_total"] == hits > 0
        assert after['request_success_total{finished_reason="length"}'] == 3
        assert after['http_errors_total{status="400"}'] == 1
        n_prefill = after["prompt_tokens_total"] - hits
        assert after['engine_step_rows_total{phase="prefill"}'] == n_prefill
        assert after['engine_step_rows_total{phase="decode"}'] == 15  # the first token of each comes from its prompt
        for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_decode_time"):
            assert after[f"{name}_seconds_count"] == 2
        assert after["inter_token_latency_seconds_count"] == 10
        assert after["num_requests_running"] == after["kv_cache_pages_in_use"] == 0
        assert after["kv_cache_usage_perc"] > 0  # the prefix cache has pages that no answer holds


def test_what_runs_and_waits_is_a_gauge():
    with served(slots=1, prefix_cache=False) as server:
        server.gate.hold()
        first, second = (server.connect("/v1/chat/completions", chat_body(max_tokens=300)) for _ in range(2))
        with first, second:
            wait_for(lambda: server.worker.n_open == 2)
            server.gate.run(2)
            wait_for(lambda: read(server)["num_requests_running"] == 1)
            wait_for(lambda: read(server)["num_requests_waiting"] == 1)
            assert 0 < read(server)["kv_cache_usage_perc"] < 1
            assert read(server)["kv_cache_pages_in_use"] == server.scheduler.running[0].kv.n_pages
        wait_for(lambda: server.worker.n_open == 0)
        server.gate.allow()
        wait_for(lambda: read(server)["num_requests_running"] == 0 == read(server)["kv_cache_usage_perc"])
        assert read(server)["request_cancelled_total"] == 2


def test_histograms_are_cumulative():
    histogram = Histogram("x", "About x.", (1, 2))
    for value in (0.5, 1.0, 1.5, 7, None):
        histogram.observe(value)
    assert list(histogram.lines())[2:] == [
        'mlx_engine:x_bucket{le="1"} 2',
        'mlx_engine:x_bucket{le="2"} 3',
        'mlx_engine:x_bucket{le="+Inf"} 4',
        "mlx_engine:x_sum 10",
        "mlx_engine:x_count 4",
    ]


def test_a_counter_has_a_line_for_each_value():
    counter = Counter("y", "About y.", "kind")
    counter.add(2, "a")
    counter.add(1, "b")
    assert list(counter.lines())[2:] == ['mlx_engine:y_total{kind="a"} 2', 'mlx_engine:y_total{kind="b"} 1']
