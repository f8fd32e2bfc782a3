"""The page and its events, as the server mounts them."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

from tests.patience import PATIENCE
from tests.serve.served import HTTP, served, wait_for


def test_the_page_needs_no_key_and_its_events_do():
    with served(api_key="secret") as server, server.client() as client:
        page = client.get("/")
        assert page.status_code == 200
        assert page.headers["content-type"].startswith("text/html")
        assert client.get("/events").status_code == 401


def test_events_show_what_runs_and_end_with_the_server():
    with served() as server, ThreadPoolExecutor(1) as clients, server.client() as client:
        server.gate.hold()
        job = clients.submit(server.chat, max_tokens=5)
        wait_for(lambda: server.gate.is_asked)
        server.gate.run(2)
        time.sleep(0.3)  # the least time between two statuses
        server.gate.run(1)
        with client.stream("GET", "/events") as response:
            lines = response.iter_lines()
            events = (json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: "))
            status = next(event for event in events if event["running"] or event["n_steps"])
            assert [answer["max_tokens"] for answer in status["running"]] == [5]
            server.gate.allow()
            assert job.result().status_code == 200
            idle = next(line for line in lines if line.startswith("data: ") and '"running":[]' in line)
            assert json.loads(idle.removeprefix("data: "))["n_steps"] == 5
            server.server.close()
            assert list(lines)[-1:] in ([], [""])
        assert server.finished.wait(PATIENCE)


def test_every_reader_gets_the_latest_status():
    with served() as server:
        server.chat()
        for _ in range(2):
            with HTTP.stream("GET", server.url + "/events") as response:
                assert next(response.iter_lines()).startswith("data: ")
