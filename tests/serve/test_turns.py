"""The next turn of a conversation over HTTP: it continues with the ids that the model generated."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mlx_engine.serve.service import Service
from mlx_engine.tokenizer.history import History
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


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_the_next_turn_reuses_every_token_of_an_answer(server: Served, stream: bool, n: int):
    question = f"a question, stream {stream}, {n} answers"
    about = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    texts, first = asked(server, turns(question, "")[:1], seed=8, n=n, **HOT, **about)
    n_prompt, n_answers = first["usage"]["prompt_tokens"], first["usage"]["completion_tokens"]
    assert n_answers == n * HOT["max_tokens"]
    assert not any(is_canonical(text, HOT["max_tokens"]) for text in texts), "then this tests nothing"
    for text in texts:
        _, second = asked(server, turns(question, text), **about)
        cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        # The last token of an answer is chosen and never run.
        assert cached >= n_prompt + HOT["max_tokens"] - 1


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


def test_without_a_history_an_answer_does_not_depend_on_earlier_turns():
    """With one it does: the ids of the earlier answer are those that were generated, not those of its text."""
    question = turns("is it remembered?", "")[:1]
    with served() as remembering:
        texts, _ = asked(remembering, question, seed=8, **HOT)
        both = turns("is it remembered?", texts[0])
        _, with_history = asked(remembering, both, seed=8, **HOT)
    with served(keeps_history=False) as server:
        assert asked(server, question, seed=8, **HOT)[0] == texts
        _, after = asked(server, both, seed=8, **HOT)
    with served() as fresh:
        _, alone = asked(fresh, both, seed=8, **HOT)
    digests = [reply["mlx_engine"]["digest"] for reply in (after, alone, with_history)]
    assert digests[0] == digests[1] != digests[2]


def test_the_history_of_a_server_is_bounded(monkeypatch: pytest.MonkeyPatch):
    small = History(micro().tokenizer, max_entries=2)
    monkeypatch.setattr(Service, "history", small)
    with served() as server:
        for i in range(4):
            texts, first = asked(server, turns(f"{i}", "")[:1], seed=1, **HOT)
        assert len(small) == 2
        _, second = asked(server, turns("3", texts[0]))
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["total_tokens"] - 1
