"""Clients over HTTP against small servers of this file: streams, refusals, and what a server leaves out."""

import itertools
import json
import random
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from mlx_engine.bench.clients import Load, Served
from mlx_engine.bench.concurrency import Plan, server_rows
from mlx_engine.errors import OptionError, SourceError
from tests.patience import wait_for

KNOWN = {"model", "prompt", "max_tokens", "temperature", "stream", "stream_options", "ignore_eos"}


class Handler(BaseHTTPRequestHandler):
    """Writes as many words as it is asked for."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *args):
        pass

    def do_GET(self):
        body = json.dumps({"data": [{"id": "first"}, {"id": "second"}]}).encode()
        self.reply(200, body if self.path == "/v1/models" else b"{}")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        self.has_left = False
        with server.lock:
            server.seen.append((self.path, body, self.headers.get("Authorization")))
            server.running += 1
            server.most = max(server.most, server.running)
        try:
            if set(body) - server.known:
                self.leave()
                self.reply(400, b'{"error": {"message": "unknown parameter"}}')
            else:
                self.stream(body)
        finally:
            self.leave()

    def leave(self):
        """Count the request as ended: before its last byte, after which its client sends the next one."""
        with self.server.lock:
            self.server.running -= not getattr(self, "has_left", False)
        self.has_left = True

    def stream(self, body):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for i in range(body["max_tokens"]):
            self.event({"choices": [{"text": f" word{i}", "finish_reason": None}]})
            time.sleep(self.server.pause)
            wait_for(lambda: self.server.most >= self.server.together)
        if self.server.fails:
            self.event({"error": {"message": "the engine has ended"}})
        self.event({"choices": [{"text": "", "finish_reason": "length"}]})
        if body.get("stream_options"):
            usage = {"completion_tokens": 2 * body["max_tokens"], "prompt_tokens_details": {"cached_tokens": 3}}
            self.event({"choices": [], "usage": usage})
        self.leave()
        self.chunk(b": a comment\n\ndata: [DONE]\n\n")
        self.chunk(b"")

    def event(self, event):
        self.chunk(b"data: " + json.dumps(event).encode() + b"\n\n")

    def chunk(self, data):
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def reply(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def serving(*, known=KNOWN, pause=0.0, fails=False):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.known, server.pause, server.fails, server.together = known, pause, fails, 0
    server.seen, server.running, server.most, server.lock = [], 0, 0, threading.Lock()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_clients_run_at_the_same_time_in_a_closed_loop():
    with serving(pause=0.01) as (server, url):
        target = Served(url, api_key="key")
        server.together = 3  # a client that starts late is waited for
        prompts = Load(n_prompt=5).prompts(target, random.Random(0), 3)
        found = target.run(3, prompts, 4)
        assert server.most == 3
        assert sorted(body["prompt"] for _, body, _ in server.seen[1:]) == sorted(prompts)
    assert (target.model, target.url) == ("first", f"{url}/v1")
    assert all(path == "/v1/completions" and key == "Bearer key" for path, _, key in server.seen)
    sent = server.seen[-1][1]
    assert (sent["model"], sent["max_tokens"], sent["temperature"], sent["ignore_eos"]) == ("first", 4, 0, True)
    assert len(found.requests) == 6
    for one in found.requests:
        assert (len(one.arrivals), one.n_tokens, one.n_cached) == (4, 8, 3)
        assert one.submitted < one.arrivals[0]
        assert one.arrivals[-1] - one.submitted >= 0.03
    assert found.steps is None


def test_prompts_are_words_and_can_be_concatenated():
    with serving() as (_, url):
        prompt = Served(url).prompt(random.Random(0), 7)
    assert len(prompt.split(" ")[1:]) == 7
    assert prompt.startswith(" ")


@pytest.mark.parametrize(
    ("unknown", "n_tokens"), [({"ignore_eos"}, 6), ({"ignore_eos", "stream_options"}, 3)], ids=["eos", "usage"]
)
def test_parameters_that_a_server_refuses_are_left_out(unknown, n_tokens):
    with serving(known=KNOWN - unknown) as (server, url):
        (one,) = Served(url, model="mine").run(1, [" a"], 3).requests
        assert not unknown & set(server.seen[-1][1])
        assert server.seen[-1][1]["model"] == "mine"
    assert one.n_tokens == n_tokens


def test_a_limit_of_time_ends_all_clients():
    readings = itertools.count()
    with serving() as (_, url):
        target = Served(url, clock=lambda: 0.01 * next(readings))
        found = target.run(2, [" a"] * 6, 50, seconds=0.1)
    assert found.was_cut
    assert found.seconds < 1.0
    # Both clients read the clock: one of them may reach the limit before the other has a token.
    assert len(found.requests) in (1, 2)
    assert all(0 < one.n_tokens < 50 for one in found.requests)


def test_a_refusal_names_the_status_and_what_the_server_wrote():
    with serving(known=set()) as (_, url), pytest.raises(SourceError, match=r"status 200, found 400: .*unknown param"):
        Served(url)


def test_an_error_within_a_stream_is_raised():
    with serving(fails=True) as (_, url), pytest.raises(SourceError, match="the engine has ended"):
        Served(url)


def test_no_server_is_an_error_that_says_so():
    with serving() as (_, url):
        pass
    with pytest.raises(SourceError, match=r"no OpenAI-compatible server answers .Connection.*check that it"):
        Served(url)


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http:///v1"])
def test_an_address_needs_a_host_and_http(url):
    with pytest.raises(OptionError, match="--url"):
        Served(url)


def test_rows_of_a_server_have_rates_and_no_limits():
    with serving() as (_, url):
        plan = Plan((1, 2), Load(n_prompt=2, n_gen=3, requests=1), rounds=2)
        *_, rows = server_rows(Served(f"{url}/v1/"), plan)
    assert [row["concurrency"] for row in rows] == [1, 2]
    for row in rows:
        assert (row["backend"], row["model_name"], row["url"], row["rounds"]) == ("HTTP", "first", f"{url}/v1", 2)
        assert row["total_ts"] > 0
        assert row["ttft_ms"] > 0
        assert "read_share" not in row
