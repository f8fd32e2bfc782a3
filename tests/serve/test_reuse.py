"""`mlx_engine.cache` of a reply: how much of a prompt was cached, and why not more."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest

import mlx_engine
from mlx_engine.cache.prefix import End, Match
from mlx_engine.options import Options
from mlx_engine.serve.replies import explained
from tests.golden.goldens import DATA
from tests.serve.served import HTTP, Served, chat_body, events, micro, served


def completed(server: Any, prompt: object, **parameters: Any) -> Any:
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True, **parameters}
    response = server.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_reply_says_where_the_prompt_left_the_cache():
    ids = list(range(40, 60))
    with served() as server:
        first = completed(server, ids)["mlx_engine"]["cache"]
        assert (first["cached_tokens"], first["cause"], first["position"]) == (0, "first_use", None)
        assert completed(server, [1, 2])["mlx_engine"]["cache"]["cause"] == "first_use"
        again = completed(server, ids)["mlx_engine"]["cache"]
        assert (again["cached_tokens"], again["cause"]) == (19, None)
        shorter = completed(server, ids[:9])["mlx_engine"]["cache"]
        assert (shorter["cached_tokens"], shorter["cause"]) == (8, None)
        other = completed(server, [*ids[:11], 99, 98, 97])
        found = other["mlx_engine"]["cache"]
        assert found["cached_tokens"] == other["usage"]["prompt_tokens_details"]["cached_tokens"] == 11
        assert (found["cause"], found["position"], found["agreeing_tokens"]) == ("differs", 11, 11)
        text = micro().tokenizer.decode
        assert found["found"] == {"token_id": 99, "text": text([99, 98, 97])}
        assert found["expected"] == {"token_id": ids[11], "text": text(ids[11:19])}


def test_a_chat_that_goes_on_has_missed_nothing_and_an_edited_one_has():
    with served() as server:
        first = server.chat("the first question").json()
        answer = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
        question = {"role": "user", "content": "the first question"}
        body = chat_body(messages=[question, answer, {"role": "user", "content": "more"}], stream=True)
        last = events(server.post("/v1/chat/completions", body).content)[-2]["mlx_engine"]["cache"]
        assert (last["cause"], last["cached_tokens"]) == (None, first["usage"]["total_tokens"] - 1)
        body["messages"][0] = {"role": "user", "content": "the first QUESTION"}
        edited = events(server.post("/v1/chat/completions", body).content)[-2]["mlx_engine"]["cache"]
        assert edited["cause"] == "differs"
        assert "QUESTION"[:1] in edited["found"]["text"]
        assert "question"[:1] in edited["expected"]["text"]
        # An answer that the server has not generated: the same text, in the tokens of the tokenizer.
        assert edited["cached_tokens"] == edited["position"] < last["cached_tokens"]


def test_several_prompts_have_a_list():
    with served() as server:
        found = completed(server, [[5, 6, 7], [5, 6, 9]])["mlx_engine"]["cache"]
        assert [one["cached_tokens"] for one in found] == [0, 0]
        assert [one["cached_tokens"] for one in completed(server, [[5, 6, 7], [5, 6, 9]])["mlx_engine"]["cache"]] == [
            2,
            2,
        ]


SECONDS = re.compile(r".*(_seconds|_ms|_per_second|bandwidth_share).*")


def seen(server: Served, guess: list[int]) -> dict[str, Any]:
    """Return all that a client can see when it sends a guess, except times, digests and the answer."""
    reply = completed(server, guess, max_tokens=1)
    receipt = reply["mlx_engine"]
    timings = {name: value for name, value in receipt["timings"].items() if not SECONDS.fullmatch(name)}
    metrics = [line for line in HTTP.get(server.url + "/metrics").text.splitlines() if not SECONDS.fullmatch(line)]
    with HTTP.stream("GET", server.url + "/events") as events:
        line = next(line for line in events.iter_lines() if line.startswith("data: ") and '"running":[]' in line)
    status = json.loads(line.removeprefix("data: "))
    status["steps"] = [step[:2] for step in status["steps"]]
    return {"usage": reply["usage"], "cache": receipt["cache"], "timings": timings, "metrics": metrics, "page": status}


def test_a_client_cannot_see_how_many_tokens_of_a_page_another_prompt_shares():
    """Prompts would be guessed token by token: by the reply, by counts of pages and rows, or by the page's tree."""
    rng = random.Random(0)
    prompt = [rng.randrange(3, 500) for _ in range(150)]
    shown = []
    for agreeing in (64, 65, 100, 127):
        guess = [*prompt[:agreeing], *[prompt[agreeing] + 1] * (127 - agreeing)]
        with served(explains_cache=False) as server:
            completed(server, prompt)
            shown.append(seen(server, guess))
    assert shown[0]["cache"] == {"cached_tokens": 64}
    assert shown[0]["usage"]["prompt_tokens_details"] == {"cached_tokens": 64}
    assert "mlx_engine:prefix_cache_hits_total 64" in shown[0]["metrics"]
    assert (shown[0]["page"]["prefix"]["nodes"], shown[0]["page"]["prefix"]["cached_tokens"]) == (None, 64)
    assert [one for one in shown if one != shown[0]] == []


def test_a_prompt_has_the_same_digest_after_a_hit_of_whole_pages():
    prompt = list(range(3, 203))
    with served(explains_cache=False) as server:
        replies = [completed(server, prompt, max_tokens=20) for _ in range(2)]
    assert [reply["mlx_engine"]["cache"]["cached_tokens"] for reply in replies] == [0, 192]
    assert len({reply["mlx_engine"]["digest"] for reply in replies}) == 1


def test_without_a_cache():
    with served(prefix_cache=False) as server:
        assert completed(server, [5, 6, 7])["mlx_engine"]["cache"]["cause"] == "disabled"


@pytest.mark.parametrize("end", ["evicted", "window", "memory"])
def test_tokens_that_were_cached_and_could_not_be_used(end: End):
    request = micro().request([1, 2, 3, 4], Options())
    request.match, request.n_cached = Match(1, 3, [], (9,), end), 1
    found = explained(request, micro().tokenizer)
    assert (found["cached_tokens"], found["agreeing_tokens"], found["cause"]) == (1, 3, end)


def test_the_same_text_in_other_tokens():
    tokenizer = micro().tokenizer
    whole = next(i for i in range(200, 400) if tokenizer.token_bytes(i).isalpha() and len(tokenizer.token_bytes(i)) > 1)
    letters = [i for letter in tokenizer.decode([whole]) for i in tokenizer.encode(letter)]
    request = micro().request([3, *letters, 4], Options())
    request.match = Match(1, 1, [], (whole, letters[0]), "differs")
    assert len(letters) > 1
    assert explained(request, tokenizer)["cause"] == "differs"
    request.match = Match(1, 1, [], (whole, 4), "differs")
    assert explained(request, tokenizer)["cause"] == "retokenized"


def test_a_window_is_named():
    engine = mlx_engine.load(DATA / "gemma3-micro" / "hf", "parallel", threads=1)
    window = min(w for w in engine.config.windows if w is not None)
    scheduler = engine.scheduler(slots=1, kv_memory=8 << 20)
    ids = [7 + i % 50 for i in range(4 * window + 200)]
    for prompt in (ids, [*ids[: window + 70], 3, 4]):
        request = engine.request(prompt, Options.of(1))
        scheduler.submit(request)
        while scheduler.has_work:
            scheduler.step()
    found = explained(request, micro().tokenizer)
    assert (found["agreeing_tokens"], found["cause"]) == (window + 70, "window")
    assert found["cached_tokens"] < window + 70
