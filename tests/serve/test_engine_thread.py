"""The engine thread: slots and order, limits of the queue, faults of one request and of the thread, shutdown."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mlx_engine.loop.sampler import Sampler
from mlx_engine.serve.worker import Rates, Worker
from tests.patience import PATIENCE
from tests.serve.served import HTTP, Served, chat_body, events, micro, served, wait_for

CHAT = "/v1/chat/completions"


def test_slots_and_order_of_arrival():
    with served(slots=2) as server, ThreadPoolExecutor(8) as clients:
        server.gate.hold()
        jobs = []
        for i in range(6):
            jobs.append(clients.submit(server.chat, f"number {i}", max_tokens=3 + i))
            wait_for(lambda n=i + 1: server.worker.n_open == n)
        most, admitted = 0, dict[int, None]()
        while not all(job.done() for job in jobs):
            n_steps = server.gate.n_steps
            server.gate.allow(1)
            wait_for(
                lambda n=n_steps + 1: (server.gate.n_steps == n and server.gate.is_asked) or not server.worker.n_open
            )
            running = [answer.output.max_tokens for answer in list(server.scheduler.running)]
            most = max(most, len(running))
            admitted.update(dict.fromkeys(running))
        assert most == 2
        assert [job.result().status_code for job in jobs] == [200] * 6
        assert list(admitted) == [3, 4, 5, 6, 7, 8]
        assert server.threads == {"engine"}


def test_a_short_answer_overtakes_a_long_one():
    with served(slots=2) as server, ThreadPoolExecutor(2) as clients:
        server.gate.hold()
        long = clients.submit(server.chat, "long", max_tokens=60)
        wait_for(lambda: server.worker.n_open == 1)
        short = clients.submit(server.chat, "short", max_tokens=3)
        wait_for(lambda: server.worker.n_open == 2)
        server.gate.run(20)
        assert short.result().status_code == 200
        assert not long.done()
        server.gate.allow()
        assert long.result().json()["usage"]["completion_tokens"] == 60


@pytest.mark.slow
def test_answers_side_by_side_are_those_alone(server: Served):
    def ask(i: int) -> str:
        return server.chat(f"question {i}", temperature=1, seed=i, max_tokens=20).json()["mlx_engine"]["digest"]

    with ThreadPoolExecutor(8) as clients:
        together = list(clients.map(ask, range(8)))
    assert together == [ask(i) for i in range(8)]
    assert len(set(together)) == 8


@pytest.mark.slow
def test_health_answers_while_the_engine_works(server: Served):
    with ThreadPoolExecutor(4) as clients, server.client() as client:
        jobs = [clients.submit(server.chat, f"busy {i}", max_tokens=1000) for i in range(2)]
        wait_for(lambda: server.scheduler.running)
        n_answers, n_steps = 0, server.gate.n_steps
        while not all(job.done() for job in jobs) and n_answers < 50:
            assert client.get("/health").json() == {"status": "ok"}
            n_answers += 1
        # Seconds would depend on what else runs; the engine's steps take longer then, too.
        assert n_answers > (server.gate.n_steps - n_steps) / 200


def test_a_full_queue_is_429_with_a_time_to_wait():
    with served(slots=1, queue=1) as server, ThreadPoolExecutor(2) as clients:
        server.gate.hold()
        jobs = [clients.submit(server.chat) for _ in range(2)]
        wait_for(lambda: server.worker.n_open == 2)
        refused = server.chat()
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        server.gate.allow()
        assert [job.result().status_code for job in jobs] == [200, 200]
        assert server.chat().status_code == 200


def test_retry_after_is_measured():
    now = [0.0]
    rates = Rates(lambda: now[0])
    assert rates.seconds_for(3) == 1
    for second in range(0, 40, 4):  # an answer in four seconds
        now[0] = float(second)
        rates.add_end()
    now[0] = 40.0
    assert rates.seconds_for(1) == 4
    assert rates.seconds_for(3) == 12


@pytest.mark.some(1)
@pytest.mark.parametrize("stream", [False, True])
def test_a_fault_of_one_request_ends_that_request_alone(server: Served, monkeypatch: pytest.MonkeyPatch, stream: bool):
    draw = Sampler.draw

    def faulty(self: Sampler) -> Any:
        if self._sampling.seed == 666 and len(self._recent) > self._n_prompt + 3:
            raise RuntimeError("planted")
        return draw(self)

    monkeypatch.setattr(Sampler, "draw", faulty)
    with ThreadPoolExecutor(2) as clients:
        good = clients.submit(server.chat, "good", max_tokens=300)
        bad = server.chat("bad", max_tokens=300, seed=666, stream=stream)
        assert good.result().json()["usage"]["completion_tokens"] == 300
    if stream:
        *chunks, last = events(bad.content)
        assert len(chunks) > 1
        assert last["error"]["code"] == "internal_error"
    else:
        assert bad.status_code == 500
        assert bad.json()["error"]["type"] == "server_error"
        assert "planted" not in bad.text
    assert server.state() == 200


def test_a_dead_engine_is_not_healthy_and_ends_the_server():
    with served() as server:
        server.gate.hold()
        with ThreadPoolExecutor(2) as clients:
            waiting = clients.submit(server.chat)
            streaming = clients.submit(server.chat, stream=True)
            wait_for(lambda: server.worker.n_open == 2)
            server.gate.run(2)
            assert len(server.scheduler.running) == 2
            assert server.state() == 200

            def die() -> None:
                raise MemoryError("planted")

            server.scheduler._run = die  # type: ignore[method-assign]
            server.gate.allow()
            assert waiting.result().status_code == 503
            assert events(streaming.result().content)[-1]["error"]["code"] == "dead"
            wait_for(lambda: server.worker.state == "dead")
        assert server.finished.wait(PATIENCE)
        assert isinstance(server.fault, MemoryError)


def test_a_server_that_loads_says_so():
    server = Served(micro(), queue=1, scheduler={"slots": 1, "kv_memory": 4 << 20})
    server.loading.clear()
    server._thread.start()
    wait_for(lambda: server.state() == 503)
    assert HTTP.get(server.url + "/health").json() == {"status": "loading"}
    refused = server.chat()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "loading")
    server.loading.set()
    wait_for(lambda: server.state() == 200)
    server.stop()


def test_a_server_that_stops_finishes_what_runs_and_refuses_the_rest():
    with served() as server, ThreadPoolExecutor(1) as clients:
        server.gate.hold()
        running = clients.submit(server.chat, max_tokens=50)
        wait_for(lambda: server.worker.n_open == 1)
        server.server.handle_exit(15, None)
        refused = server.chat()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "closing")
        assert server.state() == 503
        server.gate.allow()
        assert running.result().json()["usage"]["completion_tokens"] == 50
        assert server.finished.wait(PATIENCE)
        assert server.fault is None


@pytest.mark.parametrize("stream", [False, True])
def test_what_runs_when_the_grace_is_over_gets_an_error(stream: bool):
    server = Served(micro(), queue=1, scheduler={"slots": 1, "kv_memory": 4 << 20})
    server.grace = 0.1
    server.start()
    server.gate.hold()
    with ThreadPoolExecutor(1) as clients:
        running = clients.submit(server.chat, max_tokens=50, stream=stream)
        wait_for(lambda: server.gate.is_asked)
        server.gate.run(2)
        server.server.handle_exit(15, None)
        response = running.result()
        error = events(response.content)[-1] if stream else response.json()
        assert error["error"]["code"] == "closing"
        assert response.status_code == (200 if stream else 503)
        server.stop()


def test_an_engine_that_gives_no_sign_of_life_is_stalled(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mlx_engine.serve.worker.STALLED_SECONDS", 0.05)
    with served() as server, ThreadPoolExecutor(1) as clients:
        assert server.state() == 200
        server.gate.hold()
        job = clients.submit(server.chat)
        wait_for(lambda: server.worker.n_open == 1)
        wait_for(lambda: HTTP.get(server.url + "/health").json() == {"status": "stalled"})
        server.gate.allow()
        assert job.result().status_code == 200
        wait_for(lambda: server.state() == 200)


def test_threads_end_with_the_server():
    before = set(threading.enumerate())
    with served() as server:
        server.post(CHAT, chat_body(stream=True))
    left = [thread for thread in set(threading.enumerate()) - before if thread.name in ("engine", "server")]
    assert left == []


def test_one_thread_calls_the_model(monkeypatch: pytest.MonkeyPatch):
    with served(slots=2) as server:
        model, names = server.worker.engine.model, set()
        forward = model.forward
        monkeypatch.setattr(
            model, "forward", lambda batch: (names.add(threading.current_thread().name), forward(batch))[1]
        )
        with ThreadPoolExecutor(4) as clients:
            assert {reply.status_code for reply in clients.map(lambda _: server.chat(max_tokens=4), range(6))} == {200}
    assert names == {"engine"}


def test_a_worker_that_is_stopped_leaves_no_client_waiting():
    with served(slots=2) as server, ThreadPoolExecutor(2) as clients:
        server.gate.hold()
        jobs = [clients.submit(server.chat) for _ in range(2)]
        wait_for(lambda: server.gate.is_asked and server.worker.n_open == 2)
        calls = set(server.worker._calls.values())
        asyncio.run_coroutine_threadsafe(server.worker.stop(0.05), server.worker._loop).result(PATIENCE)
        for reply in [job.result(PATIENCE) for job in jobs]:
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "closing")
        assert len({id(call.error) for call in calls}) == 2
        server.gate.allow()


def test_a_model_that_is_loaded_after_the_server_closes_is_not_announced():
    loaded, announced = threading.Event(), []

    def make() -> Any:
        assert loaded.wait(PATIENCE)
        engine = micro()
        return engine, engine.scheduler(slots=1)

    async def run() -> Worker:
        worker = Worker(make, on_ready=lambda: announced.append(True))
        worker.start()
        worker.close()
        loaded.set()
        await worker.stop(PATIENCE)
        return worker

    worker = asyncio.run(run())
    assert worker.engine is not None
    assert worker.state == "closing"
    assert not announced
