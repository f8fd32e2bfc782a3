"""Several models behind one server: which one answers, and when each is loaded and unloaded."""

from __future__ import annotations

import asyncio
import gc
import json
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import httpx
import pytest

import mlx_engine
from mlx_engine.commands import serve
from mlx_engine.commands.serve import (
    AddressOptions,
    CapacityOptions,
    Loading,
    ModelsOptions,
    served_models,
    specs_of,
)
from mlx_engine.errors import OptionError
from mlx_engine.loop.scheduler import StepOutput
from mlx_engine.serve.errors import ApiError
from mlx_engine.serve.registry import RETRY_SECONDS
from mlx_engine.serve.service import Service
from mlx_engine.serve.worker import Cores, Worker
from tests.patience import PATIENCE, wait_for
from tests.serve.served import HTTP
from tests.serve.several import FILES, Several, need, several

PROMPTS = ("hello", "the quick brown fox", "one two three", "a")


@cache
def memory_for_one() -> int:
    """Return the bytes into which each of the models fits, and no two."""
    return max(need(path) for path in FILES.values()) + 1000


@cache
def alone(name: str, prompt: str = "hello") -> str:
    """Return the text that a model generates if it is alone in its process."""
    with mlx_engine.load(FILES[name], "simd") as engine:
        return engine.generate(prompt, 8, ignore_eos=True).text


@pytest.fixture(scope="module")
def both() -> Iterator[Several]:
    """A server with memory for both models."""
    with several() as server:
        yield server


def answer(reply: httpx.Response) -> str:
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


def code(reply: httpx.Response) -> tuple[int, str]:
    return reply.status_code, reply.json()["error"]["code"]


def hold(server: Several, name: str) -> Callable[[], None]:
    """Let the steps of a loaded model do nothing until the result is called."""
    scheduler, gate = server.loads[name].schedulers[-1], threading.Event()
    step = scheduler.step

    def held() -> StepOutput:
        return step() if gate.wait(0.001) else StepOutput()

    scheduler.step = held  # type: ignore[method-assign]
    return gate.set


def test_a_model_is_loaded_when_it_is_first_asked_for():
    with several() as server:
        assert (server.state("qwen"), server.state("gemma")) == ("loaded", "on disk")
        assert answer(server.complete(None)) == answer(server.complete("qwen")) == alone("qwen")
        assert server.loads["gemma"].n == 0
        assert answer(server.complete("gemma")) == alone("gemma")
        assert server.complete("gemma").json()["model"] == "gemma"
        assert (server.state("qwen"), server.loads["gemma"].n) == ("loaded", 1)


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 2}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 2}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/embeddings", {"input": "hi"}),
        ("/tokenize", {"content": "hi"}),
        ("/detokenize", {"tokens": [1]}),
    ],
)
def test_every_route_chooses_by_name(both: Several, path: str, body: dict[str, Any]):
    replies = {name: both.post(path, {"model": name, **body}) for name in FILES}
    assert {reply.status_code for reply in replies.values()} <= {200, 400}, [reply.text for reply in replies.values()]
    has_template = {name: list(both.models)[i].service.engine.tokenizer.chat_template for i, name in enumerate(FILES)}
    for name, reply in replies.items():
        assert reply.status_code == 200 or has_template[name] is None, reply.text
    unknown = both.post(path, {"model": "gpt-9", **body})
    assert unknown.status_code == 404
    assert "this server has 'qwen', 'gemma'" in unknown.text
    if "messages" not in path:
        assert unknown.json()["error"]["code"] == "model_not_found"
        assert unknown.json()["error"]["param"] == "model"


def test_the_list_says_what_each_model_is_doing(both: Several):
    cards = {card["id"]: card for card in HTTP.get(both.url + "/v1/models").json()["data"]}
    assert list(cards) == ["qwen", "gemma"]
    assert cards["qwen"]["state"] == "loaded"
    assert HTTP.get(both.url + "/v1/models/gemma").json()["id"] == "gemma"
    assert code(HTTP.get(both.url + "/v1/models/llama")) == (404, "model_not_found")


def test_a_wrong_body_loads_nothing():
    with several() as server:
        for body in (b"{", b"[]", b'{"model": 1, "prompt": "a"}', b'{"model": "gemma"'):
            reply = HTTP.post(
                server.url + "/v1/completions", content=body, headers={"Content-Type": "application/json"}
            )
            assert reply.status_code == 400, reply.text
        assert server.loads["gemma"].n == 0


def test_any_model_and_aliases():
    with several("qwen", service={"any_model": True, "aliases": ("claude",)}, idle_seconds=60.0) as server:
        assert answer(server.complete("claude")) == answer(server.complete("whatever")) == alone("qwen")


@pytest.mark.slow
@pytest.mark.parametrize("turns", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_32_clients_alternate_between_models_in_the_memory_of_one(both: Several, turns: int):
    """Each answer has the bits that it has alone. A switch serves all who wait: there are fewer loads than requests."""
    digests = {
        (name, prompt): both.complete(name, prompt, logprobs=1).json()["mlx_engine"]["digest"]
        for name in FILES
        for prompt in PROMPTS
    }
    assert len(set(digests.values())) == len(digests)
    names = list(FILES)
    with several(memory=memory_for_one()) as server, ThreadPoolExecutor(32) as clients:

        def run(client: int) -> list[tuple[tuple[str, str], str]]:
            found = []
            for turn in range(turns):
                name, prompt = names[(client + turn) % 2], PROMPTS[(client // 2 + turn) % len(PROMPTS)]
                reply = server.complete(name, prompt, logprobs=1)
                assert reply.status_code == 200, reply.text
                found.append(((name, prompt), reply.json()["mlx_engine"]["digest"]))
            return found

        found = [pair for pairs in clients.map(run, range(32)) for pair in pairs]
        n_loads = sum(loads.n for loads in server.loads.values())
    assert len(found) == 32 * turns
    assert all(digest == digests[key] for key, digest in found)
    assert n_loads <= 16 * turns
    assert all(engine._model is None for loads in server.loads.values() for engine in loads.engines[:-1])


@pytest.mark.slow
def test_the_least_recently_used_model_is_unloaded_and_none_that_is_answering():
    names = ("a", "b", "c")
    with several(*names, memory=2 * need(FILES["qwen"]) + 1000) as server:
        answer(server.complete("b"))
        server.later(1)
        answer(server.complete("a"))
        server.later(1)
        answer(server.complete("c"))
        assert [server.state(name) for name in names] == ["loaded", "on disk", "loaded"]
        go = hold(server, "a")
        with ThreadPoolExecutor(1) as clients:  # `a`, used longest ago, is answering
            first = clients.submit(server.complete, "a")
            wait_for(lambda: server.models.default.n_using == 1)
            server.now += 1
            answer(server.complete("b"))
            assert [server.state(name) for name in names] == ["loaded", "loaded", "on disk"]
            go()
            assert answer(first.result()) == alone("qwen")


@pytest.mark.slow
def test_a_model_that_must_go_takes_no_more_requests_and_comes_back():
    """While `qwen` is answering, `gemma` waits for its memory; what comes then for `qwen` waits for its return."""
    with several(memory=memory_for_one()) as server, ThreadPoolExecutor(4) as clients:
        go = hold(server, "qwen")
        first = clients.submit(server.complete, "qwen")
        wait_for(lambda: server.models.default.n_using == 1)
        other = clients.submit(server.complete, "gemma")
        wait_for(lambda: server.models.default.is_held)
        late = clients.submit(server.complete, "qwen", "one two three")
        wait_for(lambda: bool(server.models.default.waiting))
        go()
        assert answer(first.result()) == alone("qwen")
        assert answer(other.result()) == alone("gemma")
        assert answer(late.result()) == alone("qwen", "one two three")
        assert [server.loads[name].n for name in FILES] == [2, 1]


@pytest.mark.slow
def test_a_client_is_refused_if_a_model_is_in_use_for_too_long():
    with several(memory=memory_for_one(), most_seconds=30.0) as server, ThreadPoolExecutor(3) as clients:
        go = hold(server, "qwen")
        first = clients.submit(server.complete, "qwen")
        wait_for(lambda: server.models.default.n_using == 1)
        other = clients.submit(server.complete, "gemma")
        wait_for(lambda: server.models.default.is_held)
        late = clients.submit(server.complete, "qwen", "a")
        server.now += 31
        refused = other.result()
        assert code(refused) == (503, "model_not_loaded")
        assert int(refused.headers["Retry-After"]) > 0
        go()  # `qwen` goes on
        assert answer(first.result()) == alone("qwen")
        assert answer(late.result()) == alone("qwen", "a")
        assert server.loads["gemma"].n == 0


def test_a_stream_has_comments_until_its_model_is_loaded():
    with several(service={"keep_alive_seconds": 0.01}) as server:
        loads = server.loads["gemma"]
        loads.may_load.clear()
        body = {"model": "gemma", "prompt": "hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        with (
            server.client() as client,
            client.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream,
        ):
            assert stream.status_code == 200
            lines = stream.iter_lines()
            assert next(lines) == ": loading gemma"
            assert answer(server.complete("qwen")) == alone("qwen")  # which answers meanwhile
            loads.may_load.set()
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert "".join(event["choices"][0]["text"] for event in events if event["choices"]) == alone("gemma")


@pytest.mark.parametrize(
    ("path", "word"),
    [("/v1/completions", "data: "), ("/v1/messages", "event: error"), ("/v1/responses", "event: error")],
)
def test_a_stream_ends_with_an_error_if_its_model_cannot_be_loaded(path: str, word: str):
    with several(service={"keep_alive_seconds": 0.0}) as server:
        server.loads["gemma"].fails = True
        messages = [{"role": "user", "content": "a"}]
        bodies = {"/v1/completions": {"prompt": "a"}, "/v1/messages": {"messages": messages, "max_tokens": 1}}
        reply = server.post(path, {"model": "gemma", "stream": True, **bodies.get(path, {"input": "a"})})
    if reply.status_code == 200:  # the load failed after the stream had begun
        assert word in reply.text
    assert "a tensor" in reply.text


def test_a_model_that_cannot_be_loaded_is_named_and_the_others_go_on():
    with several() as server:
        server.loads["gemma"].fails = True
        reply = server.complete("gemma")
        assert code(reply) == (503, "model_not_loaded")
        assert "model 'gemma' cannot be loaded: hf: expected a tensor" in reply.json()["error"]["message"]
        assert str(FILES["gemma"].parent) not in reply.text  # clients must not learn the server's paths
        assert 0 < int(reply.headers["Retry-After"]) <= RETRY_SECONDS
        assert "model gemma cannot be loaded" in server.notes[-1]
        (card,) = [card for card in HTTP.get(server.url + "/v1/models").json()["data"] if card["id"] == "gemma"]
        assert card["state"] == "failed"
        assert "a tensor" in card["reason"]
        assert answer(server.complete("qwen")) == alone("qwen")
        server.loads["gemma"].fails = False
        assert code(server.complete("gemma")) == (503, "model_not_loaded")  # not tried again at once
        server.later(RETRY_SECONDS + 1)
        assert answer(server.complete("gemma")) == alone("gemma")


@pytest.mark.slow
def test_an_idle_model_is_unloaded_by_the_clock():
    with several(idle_seconds=600.0) as server:
        answer(server.complete("gemma"))
        server.later(599)
        answer(server.complete("qwen"))
        server.later(2)
        server.wait_for_state("gemma", "on disk")
        assert server.state("qwen") == "loaded"
        assert HTTP.get(server.url + "/ready").status_code == 200
        server.later(600)
        server.wait_for_state("qwen", "on disk")
        assert answer(server.complete(None)) == alone("qwen")
        assert [note for note in server.notes if "unloaded" in note] == [
            "Model gemma has been unloaded",
            "Model qwen has been unloaded",
        ]


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_answers_is_not_idle(stream: bool):
    with several("qwen", idle_seconds=10.0) as server, ThreadPoolExecutor(1) as clients:
        go = hold(server, "qwen")
        first = clients.submit(server.complete, "qwen", stream=stream)
        wait_for(lambda: server.models.default.n_using == 1)
        server.now += 100
        end = server.server.n_ticks + 3
        wait_for(lambda: server.server.n_ticks >= end)
        assert server.state("qwen") == "loaded"
        go()
        reply = first.result()
        assert reply.text.endswith("[DONE]\n\n") if stream else answer(reply) == alone("qwen")


def test_a_client_leaves_while_its_model_is_loaded():
    with several() as server:
        loads = server.loads["gemma"]
        loads.may_load.clear()
        with server.client() as client, pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json={"model": "gemma", "prompt": "a"}, timeout=0.2)
        gemma = list(server.models)[1]
        wait_for(lambda: not gemma.waiting)
        loads.may_load.set()
        server.wait_for_state("gemma", "loaded")
        assert gemma.n_using == 0
        assert answer(server.complete("gemma")) == alone("gemma")


@pytest.mark.slow
def test_too_many_requests_cannot_wait_for_a_model():
    with several(queue=2) as server, ThreadPoolExecutor(2) as clients:
        server.loads["gemma"].may_load.clear()
        waiting = [clients.submit(server.complete, "gemma") for _ in range(2)]
        gemma = list(server.models)[1]
        wait_for(lambda: len(gemma.waiting) == 2)
        assert code(server.complete("gemma")) == (429, "rate_limit_exceeded")
        server.loads["gemma"].may_load.set()
        assert {answer(one.result()) for one in waiting} == {alone("gemma")}


def test_a_client_leaves_while_its_model_waits_for_memory():
    """The model that would be unloaded for it takes requests again."""
    with several(memory=memory_for_one()) as server, ThreadPoolExecutor(2) as clients:
        go = hold(server, "qwen")
        first = clients.submit(server.complete, "qwen")
        wait_for(lambda: server.models.default.n_using == 1)
        with server.client() as client, pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json={"model": "gemma", "prompt": "a"}, timeout=0.2)
        wait_for(lambda: not server.models.default.is_held)
        late = clients.submit(server.complete, "qwen", "a")
        wait_for(lambda: server.models.default.n_using == 2)
        go()
        assert (answer(first.result()), answer(late.result())) == (alone("qwen"), alone("qwen", "a"))
        assert (server.loads["gemma"].n, server.state("gemma")) == (0, "on disk")


def test_a_server_that_stops_refuses_those_who_wait_for_a_model():
    with several() as server, ThreadPoolExecutor(1) as clients:
        server.loads["gemma"].may_load.clear()
        waiting = clients.submit(server.complete, "gemma")
        gemma = list(server.models)[1]
        wait_for(lambda: bool(gemma.waiting))
        server.server.handle_exit(2, None)  # Ctrl-C
        assert code(waiting.result()) == (503, "closing")


@pytest.mark.slow
def test_an_engine_thread_that_dies_ends_its_own_model_alone():
    with several() as server:
        scheduler = server.loads["qwen"].schedulers[-1]

        def die() -> None:
            raise SystemError("a bug")

        scheduler.step = die
        assert server.complete("qwen").status_code == 503
        server.wait_for_state("qwen", "failed")
        assert answer(server.complete("gemma")) == alone("gemma")
        assert code(server.complete("qwen")) == (503, "model_not_loaded")
        server.later(RETRY_SECONDS + 1)
        assert answer(server.complete("qwen")) == alone("qwen")


@pytest.mark.slow
def test_an_unloaded_model_leaves_nothing_behind():
    with several(memory=memory_for_one()) as server:
        engine = weakref.ref(server.loads["qwen"].engines.pop())
        pool = weakref.ref(server.loads["qwen"].schedulers.pop().pool)
        engines = [thread for thread in threading.enumerate() if thread.name == "engine"]
        answer(server.complete("gemma"))
        assert server.state("qwen") == "on disk"
        gc.collect()
        assert (engine(), pool()) == (None, None)
        assert not engines[-1].is_alive()


@pytest.mark.slow
def test_memory_does_not_grow_over_200_loads():
    from tests.load.loads import run

    grown, n_threads = run(200)
    assert grown < 4
    assert n_threads < 16


def test_metrics_have_the_name_of_the_model(both: Several):
    answer(both.complete("qwen"))
    answer(both.complete("gemma"))
    text = HTTP.get(both.url + "/metrics").text
    for name in FILES:
        assert f'\nmlx_engine:model_loaded{{model_name="{name}"}} 1\n' in text
        assert f'\nmlx_engine:request_success_total{{model_name="{name}",finished_reason="length"}} ' in text
        assert f'\nmlx_engine:time_to_first_token_seconds_bucket{{model_name="{name}",le="0.001"}} ' in text
    families = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(families) == len(set(families))
    assert text.count("# TYPE mlx_engine:http_errors_total") == 1
    assert "http_errors_total{model_name" not in text


def test_the_document_and_readiness_know_all_models(both: Several):
    document = HTTP.get(both.url + "/openapi.json").json()
    assert document["components"]["schemas"]["ChatRequest"]["properties"]["model"]["anyOf"][0]["enum"] == list(FILES)
    assert "/ready" in document["paths"]
    assert HTTP.get(both.url + "/ready").json()["status"] == "ok"
    assert HTTP.get(both.url + "/health").json() == {"status": "ok"}
    assert HTTP.get(both.url + "/tokenizer_info?model=gemma").status_code == 200
    assert code(HTTP.get(both.url + "/tokenizer_info?model=x")) == (404, "model_not_found")


def test_steps_of_models_alternate_and_prompts_are_short_beside_an_answer():
    """A thread that holds the cores again and again lets another one in after its step."""
    cores, order, go = Cores(), list[str](), threading.Barrier(2)

    def run(name: str) -> None:
        go.wait(PATIENCE)
        for _ in range(50):
            with cores.turn():
                order.append(name)

    threads = [threading.Thread(target=run, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert sorted(order) == ["a"] * 50 + ["b"] * 50
    with mlx_engine.load(FILES["qwen"], "simd") as engine:
        first, second = engine.scheduler(kv_memory=1 << 20), engine.scheduler(kv_memory=1 << 20, shared_budget=3)
        answering = engine.request("hello", mlx_engine.options.Options(4, ignore_eos=True))
        first.submit(answering)
        second.submit(engine.request([1] * 20, mlx_engine.options.Options(1)))
        cores.step(first)
        assert cores.step(second).n_prefill == 3
        while first.has_work:
            cores.step(first)
        assert cores.step(second).n_prefill == 17


@pytest.mark.slow
def test_the_openai_client_chooses_models(both: Several):
    openai = pytest.importorskip("openai")
    how: dict[str, Any] = {"base_url": both.url + "/v1", "api_key": "x", "_strict_response_validation": True}
    with openai.OpenAI(**how, max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["qwen", "gemma"]
        assert client.models.retrieve("gemma").state in ("loaded", "on disk")
        reply = client.chat.completions.create(model="qwen", messages=[{"role": "user", "content": "hi"}], max_tokens=3)
        assert reply.model == "qwen"
        other = client.completions.create(model="gemma", prompt="hello", max_tokens=8, temperature=0)
        assert other.model == "gemma"
        with pytest.raises(openai.NotFoundError, match="no model 'gpt-9'"):
            client.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "hi"}])


def test_models_of_a_folder_and_their_names(tmp_path: Path):
    for name in ("a.gguf", "org/repo/b-00001-of-00002.gguf", "org/repo/b-00002-of-00002.gguf", "mmproj-a.gguf"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").touch()
    found = ModelsOptions(models_dir=tmp_path).found()
    assert [spec.name for spec in found] == ["a", "folder", "org/repo/b-00001-of-00002"]
    specs = specs_of([f"first={tmp_path / 'a.gguf'}"], AddressOptions(alias=["gpt=folder", "x"]), found)
    assert [(spec.name, spec.aliases) for spec in specs] == [
        ("first", ("x",)),
        ("folder", ("gpt",)),
        ("org/repo/b-00001-of-00002", ()),
    ]
    assert specs_of(["builtin"], AddressOptions(alias=["a=b"]))[0].aliases == ("a=b",)  # as before
    for given, alias in (
        (["builtin", "builtin"], None),
        (["builtin", "x=builtin"], ["a=b"]),
        (["builtin", "x=builtin"], ["x"]),
        (["builtin", "x=builtin"], ["a", "a=x"]),
    ):
        with pytest.raises(OptionError, match=r"two models|no model 'b'|'[xa]' is a name of the model '(x|builtin)'"):
            specs_of(given, AddressOptions(alias=alias))
    own = specs_of(["builtin", "x=builtin"], AddressOptions(alias=["x=x", "builtin"]))  # an alias of itself is none
    assert [Service(Worker(no_model), spec.name, spec.aliases).models for spec in own] == [["builtin"], ["x"]]


def no_model() -> NoReturn:
    raise AssertionError


def test_files_that_appear_are_served_and_those_that_are_gone_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The models of the command itself: their descriptions, their memory, and a folder that changes."""
    monkeypatch.setattr(serve, "collect_garbage_again", lambda: None)  # it is for a process of its own
    shutil.copy(FILES["qwen"], tmp_path / "first.gguf")
    loading = Loading("simd", CapacityOptions(slots=1, kv_memory="1MB"), {})
    options = ModelsOptions(models_dir=tmp_path)

    async def run() -> None:
        models = served_models(options, loading, AddressOptions(), "127.0.0.1")
        (card,) = await models.cards()
        size = FILES["qwen"].stat().st_size
        assert (card["id"], card["state"], card["size"]) == ("first", "on disk", size)
        assert (card["architecture"], card["weights"]) == ("qwen3", "Q8_0")
        with pytest.raises(ApiError):
            models.find("second")
        (tmp_path / "second.gguf").write_bytes(b"no model")
        second = models.find("second")
        card = await models.card("second")
        assert card["state"] == "failed"
        assert "second.gguf" in str(card["reason"])
        assert str(tmp_path) not in str(card["reason"])
        (tmp_path / "second.gguf").unlink()
        assert [card["id"] for card in await models.cards()] == ["first"]
        shutil.copy(FILES["qwen"], tmp_path / "third.gguf")
        third = models.find("third")
        shown = models.snapshots(third)
        ended = asyncio.ensure_future(anext(shown, None))
        await asyncio.sleep(0)
        (tmp_path / "third.gguf").unlink()
        with pytest.raises(ApiError, match="no model 'third'"):  # not one that cannot be loaded
            models.find("third")
        assert await asyncio.wait_for(ended, PATIENCE) is None
        with models.used(models.default) as use:
            assert await use.within(PATIENCE)
            taken, needed = models.default.nbytes, loading.open(str(tmp_path / "first.gguf")).need
            assert needed.total - needed.kv < taken <= needed.total
        shutil.rmtree(tmp_path)  # a model in memory is served without its file
        assert [card["id"] for card in await models.cards()] == ["first"]
        assert models.find("first").is_ready
        assert second.n_loads == third.n_loads == 0
        await models.stop()

    asyncio.run(run())
