"""Constraints over HTTP: parameters, errors, receipts, reasoning first, journals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import mlx_engine
from mlx_engine import Constraint
from mlx_engine.checkpoint.gguf import open_gguf
from mlx_engine.checkpoint.gguf_writer import write_gguf
from mlx_engine.engine import Prompt
from mlx_engine.loop.constraint import Matcher
from mlx_engine.options import Options
from mlx_engine.tokenizer.chat_prompt import ChatPrompt
from tests.serve.served import MICRO, Served, events
from tests.serve.shapes import Chat, checked
from tests.serve.test_journal import entries, journaled, replay

PERSON = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["age"],
    "additionalProperties": False,
}


def asked(schema: dict[str, Any], strict: bool = True) -> dict[str, Any]:
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": strict}}
    }


ALLOWED: list[tuple[dict[str, Any], Any]] = [
    (asked(PERSON), lambda text: 0 <= json.loads(text)["age"] <= 99),
    (asked(PERSON, strict=False), lambda text: list(json.loads(text)) == ["age"]),
    ({"guided_json": PERSON}, lambda text: list(json.loads(text)) == ["age"]),
    ({"guided_json": json.dumps(PERSON)}, lambda text: list(json.loads(text)) == ["age"]),
    ({"structured_outputs": {"json": PERSON}}, lambda text: list(json.loads(text)) == ["age"]),
    ({"guided_regex": "[0-9]{3}"}, lambda text: len(text) == 3 and text.isdigit()),
    ({"structured_outputs": {"regex": "[0-9]{3}"}}, lambda text: len(text) == 3 and text.isdigit()),
    ({"guided_choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, lambda text: text in ("yes", "no")),
    ({"guided_grammar": 'start: "a" "b"*'}, lambda text: text.rstrip("b") == "a"),
    ({"structured_outputs": {"grammar": 'start: "x"'}}, lambda text: text == "x"),
]  # fmt: skip


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("parameters", "holds"), ALLOWED, ids=lambda value: json.dumps(value) if isinstance(value, dict) else ""
)
def test_an_answer_is_what_the_request_allows(server: Served, parameters: dict[str, Any], holds: Any):
    response = server.chat("hello", **parameters, ignore_eos=None, max_tokens=30, seed=1)
    assert response.status_code == 200, response.text
    reply = checked(response.json(), Chat)
    assert reply.choices[0].finish_reason == "stop" or "guided_grammar" in parameters
    assert holds(reply.choices[0].message.content)


def test_completions_and_streams_are_constrained_and_the_receipt_says_how(server: Served):
    body = {
        "prompt": ["a", "b"],
        "max_tokens": 20,
        "guided_choice": ["yes", "no", "never"],
        "temperature": 2,
        "seed": 3,
    }
    whole = server.post("/v1/completions", {**body, "n": 2}).json()
    texts = [choice["text"] for choice in whole["choices"]]
    assert len(texts) == 4
    assert set(texts) <= {"yes", "no", "never"}
    receipt = whole["mlx_engine"]["constraint"]
    assert receipt["digest"] == Constraint.choice(["yes", "no", "never"]).digest
    assert [len(values) > 0 for values in receipt["allowed"]] == [True] * 4
    assert all(0 < value < 1 for values in receipt["allowed"] for value in values)
    chunks = events(server.post("/v1/completions", {**body, "stream": True}).content)[:-1]
    streamed = ["".join(c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == i) for i in (0, 1)]
    assert streamed == [texts[0], texts[2]]


def test_json_object_is_any_object(server: Served):
    for parameters in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}):
        reply = server.chat("hello", **parameters, ignore_eos=None, max_tokens=6).json()
        assert reply["choices"][0]["message"]["content"].startswith("{")
    free = server.chat("hello", response_format={"type": "text"}).json()
    assert free["choices"][0]["message"]["content"] == server.chat("hello").json()["choices"][0]["message"]["content"]
    assert "constraint" not in free["mlx_engine"]


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (asked({"not": {}}), "response_format", "$.not"),
    (asked({"type": "string", "format": "color"}), "response_format", "$.format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "json_schema"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
    ({"guided_json": "{"}, "guided_json", "valid JSON"),
    ({"guided_regex": "[a"}, "guided_regex", "unclosed character class"),
    ({"structured_outputs": {"grammar": "start: a"}}, "structured_outputs.grammar", "unknown name"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least one text"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice", "both constrain"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "both constrain"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "cannot be combined"),
    (asked({"$ref": "#"}), "response_format", "it allows no text"),
    ({"guided_grammar": "start: start"}, "guided_grammar", "it allows no text"),
]  # fmt: skip


@pytest.mark.parametrize(("parameters", "param", "said"), REFUSED, ids=lambda value: json.dumps(value)[:60])
def test_a_constraint_that_is_none_is_refused_by_its_parameter(
    server: Served, parameters: dict[str, Any], param: str, said: str
):
    response = server.chat("hello", **{"ignore_eos": None, **parameters})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert said in error["message"]


def test_a_constraint_that_fails_in_the_middle_is_an_error_of_the_request(server: Served):
    response = server.chat("hello", guided_regex=".*" * 500, ignore_eos=None, max_tokens=4)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "invalid_value"
    assert error["message"] == "constraint: lexer error: too many expressions constructed"


def test_what_a_schema_that_is_not_strict_cannot_have_is_left_out_and_named(server: Served):
    schema = {**PERSON, "not": {"required": ["name"]}, "dependentRequired": {"age": ["name"]}}
    reply = server.chat("hello", **asked(schema, strict=False), ignore_eos=None, max_tokens=30).json()
    assert list(json.loads(reply["choices"][0]["message"]["content"])) == ["age"]
    assert reply["mlx_engine"]["ignored"] == ["response_format: $.not", "response_format: $.dependentRequired"]


TEMPLATE = "{{ messages[-1].content }}{% if enable_thinking %}<think>{% endif %}{# </think> #}"


def test_reasoning_comes_first_and_is_free(tmp_path: Path):
    path, constraint = tmp_path / "thinks.gguf", Constraint.choice(["yes"])
    with open_gguf(MICRO) as file:
        metadata = {**file.typed_metadata(), "tokenizer.chat_template": TEMPLATE}
        write_gguf(path, metadata, [file.weight(name) for name in file.tensors])
    engine = mlx_engine.load(path, "simd")

    def matcher(prompt: Prompt) -> Matcher:
        found = engine.request(prompt, Options.of(constraint=constraint)).matcher
        assert found is not None
        return found

    def message(**variables: bool) -> ChatPrompt:
        return ChatPrompt([{"role": "user", "content": "hello"}], variables=variables)

    free = matcher(message(enable_thinking=True))
    assert free.mask().sum() == len(free.mask()) - len(engine.tokenizer.eog_ids)
    for i in engine.tokenizer.encode("so</think>yes"):
        assert free.mask()[i]
        free.advance(i)
    assert free.is_complete
    first = engine.tokenizer.encode("<think>", special=True)[0]
    assert matcher(message()).mask()[first]  # the model may begin to reason
    assert not matcher("hello<think>").mask()[first]  # a text is no message
    (told,) = (engine.request(message(), Options.of(constraint=constraint)).options.constraint,)
    assert told == constraint.after_reasoning()


def test_a_journal_has_the_constraint_and_a_replay_agrees(tmp_path: Path):
    path = tmp_path / "journal.jsonl"
    with journaled(path) as server:
        server.chat("hello", **asked(PERSON), ignore_eos=None, max_tokens=30, seed=4, temperature=1)
        server.chat("hello", guided_choice=["yes", "no"], ignore_eos=None, max_tokens=8, n=2, temperature=1)
    written = [entry.run_options().constraint for entry in entries(path)]
    assert written == [
        Constraint.json_schema(PERSON).after_reasoning(),
        Constraint.choice(["yes", "no"]).after_reasoning(),
    ]
    assert "slots 3: 2 of 2 requests agree" in replay(path, "--slots", "1,3").stdout
