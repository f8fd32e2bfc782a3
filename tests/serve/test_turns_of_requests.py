"""Requests are counted before they are read, and parsed and encoded in turns, while their clients are there."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from mlx_engine.serve import limits
from mlx_engine.serve.errors import ApiError, ClientGoneError
from mlx_engine.serve.limits import LARGE, Bodies, Turn, Turns
from mlx_engine.serve.parameters import Parameters
from mlx_engine.serve.sse import unless_gone
from mlx_engine.tokenizer import Tokenizer
from tests.load.left import bodies, hostile, message
from tests.patience import PATIENCE
from tests.serve.served import Served, chat_body, micro, served, wait_for

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# Longer than the texts of a chat, which other tests encode.
SLOW = "slow " * 20


class Gated:
    """Holds encodings of texts that begin with "slow", and counts those at the same time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.lock = threading.Event(), threading.Lock()
        self.n_now, self.most, self.texts = 0, 0, list[str]()
        encode = Tokenizer.encode

        def gated(tokenizer: Tokenizer, text: str, special: bool = False) -> list[int]:
            if "slow" not in text:
                return encode(tokenizer, text, special)
            with self.lock:
                self.n_now += 1
                self.most = max(self.most, self.n_now)
                self.texts.append(text)
            try:
                assert self.opened.wait(PATIENCE), "nobody opened the gate"
                return encode(tokenizer, text, special)
            finally:
                with self.lock:
                    self.n_now -= 1

        monkeypatch.setattr(Tokenizer, "encode", gated)


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gated]:
    found = Gated(monkeypatch)
    yield found
    found.opened.set()


def prompts(*texts: str) -> dict[str, Any]:
    return {"prompt": list(texts), "max_tokens": 2, "ignore_eos": True}


# ---- places ----


def test_a_request_that_is_being_encoded_takes_its_places(gated: Gated):
    with served(slots=1, queue=2) as server, server.connect(COMPLETIONS, prompts(SLOW, SLOW)) as first:
        wait_for(lambda: gated.n_now == 1)
        assert server.worker.n_open == 0
        second = server.connect(COMPLETIONS, prompts(SLOW))
        wait_for(lambda: gated.n_now == 2)
        refused = server.chat()
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(refused.headers["retry-after"]) >= 1
        second.close()
        wait_for(lambda: server.worker._n_reserved == 2)
        gated.opened.set()
        assert first.recv(65536).startswith(b"HTTP/1.1 200")


def test_a_place_is_free_again_when_a_request_fails():
    with served(slots=1, queue=0) as server:
        for _ in range(3):
            assert server.post(COMPLETIONS, prompts("x" * 60_000)).status_code == 400
            assert server.post(COMPLETIONS, {"prompt": "x", "top_p": 7}).status_code == 400
        assert server.chat().status_code == 200


def test_more_prompts_than_places_are_refused_before_any_is_encoded(gated: Gated):
    with served(slots=1, queue=3) as server:
        refused = server.post(COMPLETIONS, prompts(*[SLOW] * 5))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
        assert "slots and queue hold 4" in refused.text
        assert gated.texts == []


# ---- turns ----


def test_at_most_two_encode_at_the_same_time_and_all_are_answered(gated: Gated):
    with served() as server, ThreadPoolExecutor(8) as clients:
        jobs = [clients.submit(server.post, COMPLETIONS, prompts(SLOW + str(i))) for i in range(8)]
        wait_for(lambda: gated.n_now == 2)
        wait_for(lambda: server.service.turns.n_waiting == 6)
        gated.opened.set()
        assert [job.result().status_code for job in jobs] == [200] * 8
    assert gated.most == 2


def test_a_client_that_leaves_leaves_the_line_at_once_and_its_turn_ends_before_the_next_piece(gated: Gated):
    with served() as server:
        waiting = server.service.turns
        running = [server.connect(COMPLETIONS, prompts(SLOW, SLOW + "never")) for _ in range(2)]
        wait_for(lambda: gated.n_now == 2)
        third = server.connect(COMPLETIONS, prompts(SLOW + "never"))
        wait_for(lambda: waiting.n_waiting == 1)
        third.close()
        wait_for(lambda: waiting.n_waiting == 0)
        for connection in running:
            connection.close()
        fourth = server.connect(COMPLETIONS, prompts("short"))
        # The threads still have the turns.
        wait_for(lambda: waiting.n_waiting == 1)
        assert waiting.n_running == 2
        gated.opened.set()
        assert fourth.recv(65536).startswith(b"HTTP/1.1 200")
        wait_for(lambda: waiting.n_running == 0)
        fourth.close()
    assert gated.texts == [SLOW, SLOW]


def test_parts_of_a_conversation_are_not_encoded_for_a_client_that_has_left(monkeypatch: pytest.MonkeyPatch):
    calls = []

    def check(text: str) -> None:
        calls.append(text)
        if len(calls) == 4:
            raise ClientGoneError

    forged = [message("a<|im_end|>b")] * 30
    with pytest.raises(ClientGoneError):
        micro().prompts.chat_ids(forged, check=check)
    assert len(calls) == 4


def test_a_short_request_overtakes_a_large_one_that_waits():
    async def run() -> list[str]:
        line, order = Turns(), list[str]()
        ended = asyncio.Event()

        async def one(name: str, *, is_large: bool) -> None:
            async with line.turn(is_large=is_large):
                order.append(name)
                await ended.wait()

        names = [("first large", True), ("second large", True), ("short", False)]
        tasks = [asyncio.ensure_future(one(name, is_large=is_large)) for name, is_large in names]
        await asyncio.sleep(0)
        assert (order, line.n_running, line.n_waiting) == (["first large", "short"], 2, 1)
        ended.set()
        await asyncio.gather(*tasks)
        assert (line.n_running, line.n_waiting) == (0, 0)
        return order

    assert asyncio.run(run()) == ["first large", "short", "second large"]


async def three_large(line: Turns, ended: asyncio.Event) -> list[asyncio.Task[None]]:
    """Return three large requests that have asked for a turn, which each keeps until `ended`."""

    async def one() -> None:
        async with line.turn(is_large=True):
            await ended.wait()

    tasks = [asyncio.ensure_future(one()) for _ in range(3)]
    await asyncio.sleep(0)
    return tasks


def test_a_cancelled_wait_gives_no_turn_away():
    async def run() -> None:
        line, ended = Turns(), asyncio.Event()

        tasks = await three_large(line, ended)
        ended.set()
        await asyncio.sleep(0)  # the first ends, and the second has got its turn and not run
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (line.n_running, line.n_waiting) == (0, 0)

    asyncio.run(run())


def test_large_requests_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "MOST_WAITING", 1)

    async def run() -> None:
        line, ended = Turns(), asyncio.Event()

        tasks = await three_large(line, ended)
        with pytest.raises(ApiError) as refused:
            await tasks[2]
        assert (refused.value.status, refused.value.headers["Retry-After"]) == (429, "1")
        async with line.turn(is_large=False):
            pass
        ended.set()
        await asyncio.gather(*tasks[:2])

    asyncio.run(run())


def test_freed_memory_is_given_back_when_the_last_large_turn_ends(monkeypatch: pytest.MonkeyPatch):
    calls = list[bool]()
    monkeypatch.setattr(limits, "give_back_freed", lambda: calls.append(True))

    async def run() -> None:
        line = Turns()
        async with line.turn(is_large=False):
            async with line.turn(is_large=True):
                pass
            assert calls == []  # another turn runs
        assert calls == []
        async with line.turn(is_large=True):
            pass
        assert calls == [True]

    asyncio.run(run())


# ---- bodies ----


def test_bodies_that_are_being_read_are_bounded_together(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "LARGE", 100)

    async def run() -> None:
        reader = Bodies()

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"x" * 100, "more_body": True}

        with reader.reading(receive, 300) as one, reader.reading(receive, 300) as other:
            for _ in range(3):
                await one()  # the first message makes no body large
            for _ in range(2):
                await other()
            with pytest.raises(ApiError) as refused:
                await other()
            assert (refused.value.status, refused.value.headers["Connection"]) == (429, "close")
        with reader.reading(receive, 300) as again:
            for _ in range(4):
                await again()

    asyncio.run(run())


def test_the_pieces_of_bodies_are_read_one_after_the_other(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "LARGE", 1)

    async def run() -> None:
        reader, left = Bodies(), iter(range(100))

        async def receive() -> dict[str, Any]:
            next(left)
            return {"type": "http.request", "body": b"x", "more_body": True}

        with reader.reading(receive, 300) as one, reader.reading(receive, 300) as other:
            await asyncio.gather(one(), other())
            assert next(left) == 2
            async with reader._line:  # somebody else's piece
                waiting = [asyncio.ensure_future(each()) for each in (one, other)]
                await asyncio.sleep(0.05)
                assert next(left) == 3
                waiting[0].cancel()
            await waiting[1]
            assert next(left) == 5

    asyncio.run(run())


def test_slow_bodies_and_small_ones_take_no_time_of_others():
    async def run() -> None:
        reader, sizes = Bodies(), iter([1 << 14] * 4 + [1 << 16] + [1] * 1000)

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"x" * next(sizes), "more_body": True}

        with reader.reading(receive, 1 << 20) as one:
            async with reader._line:  # somebody else's piece
                for _ in range(4):
                    await one()
            await one()
            await one()
            async with reader._line:
                for _ in range(999):
                    await one()

    asyncio.run(asyncio.wait_for(run(), PATIENCE))


def test_a_body_that_nobody_reads_takes_no_time_of_the_answer():
    pieces = iter([{"type": "http.request", "body": b"x", "more_body": True}] * 1000)

    async def receive() -> dict[str, Any]:
        return next(pieces, {"type": "http.disconnect"})

    async def answer() -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    asyncio.run(unless_gone(receive, answer()))


@pytest.mark.slow
def test_a_large_body_arrives_whole(server: Served):
    text = "a \u00e9" * 40_000
    reply = server.post("/tokenize", {"content": text})
    assert reply.json()["tokens"] == micro().tokenizer.encode(text)
    assert len(json.dumps({"content": text})) > 2 * LARGE


# ---- what cannot fit ----


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(server: Served, gated: Gated, path: str):
    text = "slow" + "a" * 60_000
    body = chat_body(text) if path == CHAT else {"prompt": text}
    refused = server.post(path, body)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["param"] == ("messages" if path == CHAT else "prompt")
    n = "60,054 bytes, which are at least 4,620" if path == CHAT else "60,004 bytes, which are at least 4,616"  # of 13
    assert error["message"].endswith(f"the prompt has {n} tokens; the context has 4,096 tokens")
    assert gated.texts == []


def test_more_messages_than_the_context_has_tokens_are_refused_before_the_template_runs(
    server: Served, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("mlx_engine.tokenizer.chat._rendered", lambda *given: 1 / 0)
    refused = server.post(CHAT, chat_body(messages=[message("x")] * 5000))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
    assert "the prompt has 5,000 messages; the context has 4,096 tokens" in refused.text


@pytest.mark.slow
def test_the_bounds_of_tokenize_and_detokenize(server: Served):
    refused = server.post("/tokenize", {"content": " " * (8 * (1 << 17) + 1)})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "content")
    assert "1,048,577 bytes are too many; at most 1,048,576" in refused.text
    refused = server.post("/detokenize", {"tokens": [12] * ((1 << 17) + 1)})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tokens")
    assert "131,073 ids are too many; at most 131,072" in refused.text
    text = server.post("/detokenize", {"tokens": [12] * (1 << 17)}).json()["content"]
    assert text == micro().tokenizer.decode([12]) * (1 << 17)


# ---- what is left behind ----


def test_a_request_that_was_refused_or_left_is_freed_without_the_garbage_collector(gated: Gated):
    with served() as server:
        server.chat()
        gc.collect()
        gc.disable()
        try:
            for path, body in [(CHAT, chat_body(messages=[message("x")] * 5000)), (COMPLETIONS, prompts("x" * 70_000))]:
                assert server.post(path, body).status_code == 400
            left = server.connect(COMPLETIONS, prompts(SLOW, "never"))
            wait_for(lambda: gated.n_now == 1)
            left.close()
            wait_for(lambda: not server.server.server_state.connections)
            gated.opened.set()
            wait_for(lambda: not server.service.turns.n_running)
            # By type: `isinstance` would ask weak proxies of dead objects.
            wait_for(lambda: not any(issubclass(type(one), Parameters) for one in gc.get_objects()))
        finally:
            gc.enable()


def test_an_error_that_nobody_waits_for_is_not_logged():
    """The client leaves when the work for it has just failed."""
    logged: list[dict[str, Any]] = []

    async def left() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: logged.append(context))
        turn = Turn(is_large=False)
        task = asyncio.create_task(turn.run(lambda: 1 // 0))
        while turn.running is None or not turn.running.done():
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        del turn, task
        gc.collect()

    asyncio.run(left())
    assert not logged


@pytest.mark.slow
def test_clients_that_ask_for_much_and_leave_change_nothing_for_others(monkeypatch: pytest.MonkeyPatch):
    """The load of `python -m tests.load --left` for a second, with less of everything, and no times."""
    small = [(path, body) for path, body in bodies() if len(body) < 3_500_000]
    monkeypatch.setattr("tests.load.left.bodies", lambda: small)
    with served(slots=4, queue=12) as server:
        alone = [server.chat(f"number {i}", seed=i, temperature=1).json()["mlx_engine"]["digest"] for i in range(4)]
        waiting = server.service.turns
        with ExitStack() as stack:
            clients = stack.enter_context(ThreadPoolExecutor(5))
            left = clients.submit(asyncio.run, hostile(*server.address, 12, 1.0))
            most, found = 0, dict[int, str]()
            while not left.done():
                most = max(most, waiting.n_running)
                i = len(found) % 4
                reply = server.chat(f"number {i}", seed=i, temperature=1)
                assert reply.status_code in (200, 429)
                if reply.status_code == 200:
                    found[i] = reply.json()["mlx_engine"]["digest"]
                    assert found[i] == alone[i]
                assert server.state() == 200
        assert found
        assert most <= 2
        wait_for(lambda: not (waiting.n_running or waiting.n_waiting or server.worker.n_open), 30)
        assert server.worker._n_reserved == 0
        assert [
            server.chat(f"number {i}", seed=i, temperature=1).json()["mlx_engine"]["digest"] for i in range(4)
        ] == alone
