"""POST /v1/completions, /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.serve.served import HTTP, Served, events, micro
from tests.serve.shapes import Completion, checked


def complete(server: Served, prompt: object, **parameters: Any) -> Any:
    response = server.post("/v1/completions", body(prompt, **parameters))
    assert response.status_code == 200, response.text
    return response.json()


def body(prompt: object, **parameters: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True, **parameters}


def alone(prompt: Any) -> str:
    return micro().generate(prompt, 6, ignore_eos=True).text


def test_reply_has_the_shape_of_the_api(server: Served):
    reply = checked(complete(server, "hello"), Completion)
    assert reply.id.startswith("cmpl-")
    assert reply.choices[0].text == alone("hello")
    assert reply.choices[0].finish_reason == "length"


def test_the_default_length_is_that_of_the_api(server: Served):
    assert complete(server, "hello", max_tokens=None)["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("prompt", ["hello", [71, 68, 75], ["hello", "you there"], [[71, 68], [75]]])
def test_every_form_of_a_prompt(server: Served, prompt: Any):
    prompts = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    reply = complete(server, prompt)
    assert [choice["text"] for choice in reply["choices"]] == [alone(one) for one in prompts]
    assert [choice["index"] for choice in reply["choices"]] == list(range(len(prompts)))
    assert reply["usage"]["prompt_tokens"] == sum(len(micro().prompt_ids(one)) for one in prompts)
    assert isinstance(reply["mlx_engine"]["timings"], list) == (len(prompts) > 1)
    echoed = complete(server, prompt, echo=True)
    before = [one if isinstance(one, str) else micro().tokenizer.decode(one) for one in prompts]
    assert [choice["text"] for choice in echoed["choices"]] == [
        a + alone(b) for a, b in zip(before, prompts, strict=True)
    ]


def test_choices_of_several_prompts_lie_side_by_side(server: Served):
    reply = complete(server, ["hello", "you"], n=2, seed=4, temperature=1)
    one = [complete(server, prompt, n=2, seed=4, temperature=1)["choices"] for prompt in ("hello", "you")]
    assert [c["text"] for c in reply["choices"]] == [c["text"] for choices in one for c in choices]


def test_stream_is_the_reply_in_pieces(server: Served):
    whole = complete(server, ["hello", "you"], echo=True)
    response = server.post("/v1/completions", body(["hello", "you"], echo=True, stream=True))
    *chunks, last = events(response.content)
    assert last == "[DONE]"
    texts, reasons = ["", ""], [[], []]
    for chunk in chunks:
        (choice,) = checked(chunk, Completion).choices
        texts[choice.index] += choice.text
        reasons[choice.index].append(choice.finish_reason)
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert all(found[-1] == "length" and set(found[:-1]) == {None} for found in reasons)
    assert chunks[-1]["mlx_engine"]["digests"] == whole["mlx_engine"]["digests"]


@pytest.mark.parametrize("n", [1, 2])
def test_no_tokens_are_an_empty_answer_after_the_prompt_has_been_read(server: Served, n: int):
    asked = {"prompt": ["hello", "you there"], "max_tokens": 0, "n": n, "logprobs": 2 if n == 2 else None}
    reply = complete(server, asked.pop("prompt"), **asked)
    assert [choice["text"] for choice in reply["choices"]] == [""] * 2 * n
    assert {choice["finish_reason"] for choice in reply["choices"]} == {"length"}
    n_prompt = sum(len(micro().prompt_ids(one)) for one in ("hello", "you there"))
    assert reply["usage"]["prompt_tokens"] == reply["usage"]["total_tokens"] == n_prompt
    assert reply["usage"]["completion_tokens"] == 0
    assert [times["predicted_n"] for times in reply["mlx_engine"]["timings"]] == [0, 0]
    again = complete(server, "hello", max_tokens=0)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == len(micro().prompt_ids("hello")) - 1


def test_no_tokens_with_an_echo_and_as_a_stream(server: Served):
    assert complete(server, "hello", max_tokens=0, echo=True)["choices"][0]["text"] == "hello"
    *chunks, last = events(server.post("/v1/completions", body("hello", max_tokens=0, echo=True, stream=True)).content)
    choices = [checked(chunk, Completion).choices[0] for chunk in chunks]
    assert [(choice.text, choice.finish_reason) for choice in choices] == [("hello", None), ("", "length")]
    assert last == "[DONE]"


def test_a_top_p_of_0_takes_the_most_likely_token(server: Served):
    for seed in range(3):
        assert complete(server, "hello", temperature=1.9, top_p=0, seed=seed)["choices"][0]["text"] == alone("hello")


def test_log_probabilities_in_the_old_shape(server: Served):
    (choice,) = checked(complete(server, "hello", logprobs=2), Completion).choices
    found = choice.logprobs
    assert found is not None
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == 6
    assert found.text_offset[0] == 0
    assert [b - a for a, b in zip(found.text_offset, found.text_offset[1:], strict=False)] == [
        len(token) for token in found.tokens[:-1]
    ]
    assert all(max(top.values()) == value for top, value in zip(found.top_logprobs, found.token_logprobs, strict=True))
    streamed = events(server.post("/v1/completions", body("hello", logprobs=2, stream=True)).content)[:-1]
    shown = [chunk["choices"][0]["logprobs"] for chunk in streamed if chunk["choices"][0]["logprobs"]]
    assert [offset for chunk in shown for offset in chunk["text_offset"]] == found.text_offset
    assert [value for chunk in shown for value in chunk["token_logprobs"]] == found.token_logprobs


def test_tokenize_and_back(server: Served):
    text = "hello <|im_end|> \u00e9"
    plain = server.post("/tokenize", {"content": text}).json()
    most = micro().config.context_length
    assert plain == {"tokens": micro().tokenizer.encode(text), "count": len(plain["tokens"]), "max_model_len": most}
    special = server.post("/tokenize", {"content": text, "special": True}).json()["tokens"]
    assert special == micro().tokenizer.encode(text, special=True) != plain["tokens"]
    assert server.post("/detokenize", {"tokens": plain["tokens"]}).json() == {"content": text, "prompt": text}
    assert server.post("/detokenize", {"tokens": [10**6]}).json()["error"]["param"] == "tokens"


def scored(prompt: Any, n: int) -> list[float]:
    """The log-probabilities of the prompt's tokens after the first, of a run alone."""
    return [token.logprob for token in micro().generate(prompt, 0, prompt_logprobs=n).prompt_logprobs or ()]


@pytest.mark.some(3)
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
@pytest.mark.parametrize("prompt", ["hello y\u00f6u", [71, 68, 75], ["hello", "you there"], [[71, 68], [75]]])
def test_an_echo_with_log_probabilities_scores_the_prompt(server: Served, prompt: Any, max_tokens: int):
    prompts = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    reply = msgspec.convert(complete(server, prompt, echo=True, logprobs=2, max_tokens=max_tokens), Completion)
    for one, choice in zip(prompts, reply.choices, strict=True):
        found, ids = choice.logprobs, micro().prompt_ids(one)
        assert found is not None
        assert found.token_logprobs[0] is None
        assert found.top_logprobs[0] is None
        assert found.token_logprobs[1 : len(ids)] == scored(one, 2)
        assert {len(of) for of in (found.tokens, found.token_logprobs, found.top_logprobs, found.text_offset)} == {
            len(ids) + max_tokens
        }
        ends = [*found.text_offset[1:], len(choice.text)]
        parts = [choice.text[a:b] for a, b in zip(found.text_offset, ends, strict=True)]
        assert "".join(parts) == choice.text
        assert all(token == part for token, part in zip(found.tokens, parts, strict=True) if "\ufffd" not in token)
        tokens = micro().generate(one, 0, prompt_logprobs=2).prompt_logprobs or []
        most = [max((top or {}).values()) for top in found.top_logprobs[1 : len(ids)]]
        assert most == [token.top[0][1] for token in tokens]


def test_a_streamed_echo_is_scored_like_a_whole_one(server: Served):
    whole = complete(server, "hello", echo=True, logprobs=1)["choices"][0]["logprobs"]
    chunks = events(server.post("/v1/completions", body("hello", echo=True, logprobs=1, stream=True)).content)[:-1]
    shown = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    for name, values in whole.items():
        assert [value for chunk in shown for value in chunk[name]] == values


def test_the_last_entry_after_an_echo_is_an_end_of_text_token_too(server: Served):
    end = min(micro().tokenizer.eog_ids)
    asked = {"echo": True, "logprobs": 1, "max_tokens": 1, "ignore_eos": False, "logit_bias": {str(end): 100}}
    found = complete(server, [71, 68, 75], **asked)["choices"][0]["logprobs"]
    assert found["token_logprobs"][1:-1] == scored([71, 68, 75], 1)
    assert found["tokens"][-1] == micro().tokenizer.token_bytes(end).decode()


def test_a_scored_prompt_is_not_taken_from_the_prefix_cache_and_may_stay_in_it(server: Served):
    ids = [9, 8, 7, 6, 5, 4, 3, 2, 1, 80, 81, 82]
    first = complete(server, ids, echo=True, logprobs=1)
    again = complete(server, ids, echo=True, logprobs=1)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["choices"] == first["choices"]
    assert complete(server, ids)["usage"]["prompt_tokens_details"]["cached_tokens"] == len(ids) - 1


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_prompt_logprobs_in_the_form_of_vllm(server: Served, path: str):
    given: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hello"}
    reply = server.post(path, {**given, "max_tokens": 2, "prompt_logprobs": 1}).json()
    found = reply["prompt_logprobs"] if "chat" in path else reply["choices"][0]["prompt_logprobs"]
    ids = micro().chat_prompt(given["messages"]) if "chat" in path else micro().prompt_ids("hello")
    tokens = micro().generate(ids, 0, prompt_logprobs=1).prompt_logprobs or []
    assert found[0] is None
    assert [entry[str(token.token_id)]["logprob"] for entry, token in zip(found[1:], tokens, strict=True)] == [
        token.logprob for token in tokens
    ]
    for entry, token in zip(found[1:], tokens, strict=True):
        assert entry[str(token.top[0][0])]["rank"] == 1
        assert entry[str(token.token_id)]["rank"] == token.rank
    refused = server.post(path, {**given, "prompt_logprobs": 1, "stream": True}).json()["error"]
    assert refused["param"] == "prompt_logprobs"


def test_the_tokenizer_in_the_form_of_vllm(server: Served):
    text, tokenizer = "hello <|im_end|>", micro().tokenizer
    found = server.post("/tokenize", {"prompt": text, "add_special_tokens": False, "model": "micro"}).json()
    assert found["tokens"] == tokenizer.encode(text, special=True)
    assert server.post("/detokenize", {"tokens": found["tokens"]}).json()["prompt"] == text
    info = HTTP.get(server.url + "/tokenizer_info").json()
    assert info["eos_token"] == tokenizer.token(tokenizer.eos_id or 0)
    assert info["model_max_length"] == found["max_model_len"] == micro().config.context_length
    assert server.post("/tokenize", {}).json()["error"]["param"] == "content"
    assert server.post("/tokenize", {"content": "a", "prompt": "b"}).json()["error"]["param"] == "prompt"
