"""The next turn of a conversation over HTTP: its ids depend on its own text alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.serve.served import Served, chat_body, events, micro, served

CHAT = "/v1/chat/completions"
# At this temperature an answer of the micro model is no text that the tokenizer would encode to the same ids.
HOT = {"temperature": 1.8, "max_tokens": 24}


def turns(question: str, answer: str, more: str = "And then?") -> list[dict[str, str]]:
    roles = ("user", "assistant", "user")
    return [{"role": role, "content": text} for role, text in zip(roles, (question, answer, more), strict=True)]


def asked(server: Served, messages: list[dict[str, str]], **parameters: Any) -> tuple[list[str], Any]:
    """Return the answers' texts and the usage and receipt, of a reply or of a stream."""
    response = server.post(CHAT, chat_body(messages=messages, **parameters))
    assert response.status_code == 200, response.text
    if not parameters.get("stream"):
        reply = response.json()
        return [choice["message"]["content"] for choice in reply["choices"]], reply
    texts = [""] * parameters.get("n", 1)
    *chunks, last = events(response.content)[:-1]
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
    return texts, last


def is_canonical(text: str, n_tokens: int) -> bool:
    return len(micro().tokenizer.encode(text)) == n_tokens


@pytest.mark.each_value
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_the_next_turn_reuses_an_answer_as_far_as_its_text_has_the_same_ids(server: Served, stream: bool, n: int):
    question = f"a question, stream {stream}, {n} answers"
    about = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    texts, first = asked(server, turns(question, "")[:1], seed=8, n=n, **HOT, **about)
    n_prompt = first["usage"]["prompt_tokens"]
    for text in texts:
        _, second = asked(server, turns(question, text), **about)
        cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert n_prompt <= cached < second["usage"]["prompt_tokens"]
        _, third = asked(server, turns(question, text), **about)
        assert third["usage"]["prompt_tokens_details"]["cached_tokens"] == third["usage"]["prompt_tokens"] - 1


@pytest.mark.slow
def test_clients_with_the_same_texts_do_not_change_each_others_answers():
    def conversation(server: Served, seed: int) -> list[str]:
        question, digests = turns("the same for all", "")[:1], []
        texts, first = asked(server, question, seed=seed, **HOT)
        digests.append(first["mlx_engine"]["digest"])
        _, second = asked(server, turns("the same for all", texts[0]), seed=seed, **HOT)
        return [*digests, second["mlx_engine"]["digest"]]

    seeds = [1, 1, 2, 3]
    with served() as server, ThreadPoolExecutor(4) as clients:
        together = list(clients.map(lambda seed: conversation(server, seed), seeds))
    alone = []
    for seed in seeds:
        with served(prefix_cache=False) as server:
            alone.append(conversation(server, seed))
    assert together == alone
    assert together[0] == together[1] != together[2]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_who_made_the_server_spell_a_text_in_other_tokens_changes_nobodys_answer(prefix_cache: bool):
    """One client gets an answer whose ids are not those of its text; another sends the same text."""
    question = turns("is it remembered?", "")[:1]
    with served(prefix_cache=prefix_cache) as server:
        texts, _ = asked(server, question, seed=8, **HOT)
        assert not is_canonical(texts[0], HOT["max_tokens"]), "then this tests nothing"
        both = turns("is it remembered?", texts[0])
        _, after = asked(server, both, seed=8, **HOT)
    with served(prefix_cache=prefix_cache) as fresh:
        _, alone = asked(fresh, both, seed=8, **HOT)
    assert after["mlx_engine"]["digest"] == alone["mlx_engine"]["digest"]
    assert after["usage"]["prompt_tokens"] == len(micro().chat_prompt(both))
