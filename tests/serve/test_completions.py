"""POST /v1/completions, /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serve.served import Served, events, micro
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
    assert plain == {"tokens": micro().tokenizer.encode(text), "count": len(plain["tokens"])}
    special = server.post("/tokenize", {"content": text, "special": True}).json()["tokens"]
    assert special == micro().tokenizer.encode(text, special=True) != plain["tokens"]
    assert server.post("/detokenize", {"tokens": plain["tokens"]}).json() == {"content": text}
    assert server.post("/detokenize", {"tokens": [10**6]}).json()["error"]["param"] == "tokens"
