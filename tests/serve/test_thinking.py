"""Thinking over HTTP: `chat_template_kwargs`, and the reasoning in a field of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import mlx_engine
from mlx_engine.checkpoint.gguf import open_gguf
from mlx_engine.checkpoint.gguf_writer import write_gguf
from mlx_engine.conversation import delimiters
from mlx_engine.conversation.delimiters import ThinkMarkers
from mlx_engine.engine import Engine
from tests.serve.served import MICRO, Served, events
from tests.serve.shapes import Chat, Chunk, checked

TEMPLATE = "{{ messages[-1].content }}{% if enable_thinking is false %} quickly{% endif %}{{ mood }}:"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """The micro model, with a template that reads variables."""
    path: Path = tmp_path_factory.mktemp("model") / "thinks.gguf"
    with open_gguf(MICRO) as file:
        metadata = {**file.typed_metadata(), "tokenizer.chat_template": TEMPLATE}
        write_gguf(path, metadata, [file.weight(name) for name in file.tensors])
    return mlx_engine.load(path, "parallel", threads=1)


@pytest.fixture(scope="module")
def thinker(engine: Engine) -> Iterator[Served]:
    scheduler = {"slots": 1, "kv_memory": 4 << 20, "prefix_cache": True, "budget": 64}
    found = Served(engine, queue=4, scheduler=scheduler)
    found.start()
    yield found
    found.stop()


def test_variables_of_the_template_change_the_prompt(thinker: Served, engine: Engine):
    def n_prompt(**variables: object) -> int:
        return int(thinker.chat("hello", chat_template_kwargs=variables).json()["usage"]["prompt_tokens"])

    assert n_prompt() == n_prompt(enable_thinking=True) == len(engine.tokenizer.encode("hello:"))
    assert n_prompt(enable_thinking=False) == len(engine.tokenizer.encode("hello quickly:"))
    assert n_prompt(mood="!") == len(engine.tokenizer.encode("hello!:"))


@pytest.mark.parametrize("name", ["thinking", "enable_thinkin", "messages", "tools"])
def test_other_variables_are_refused_by_name(thinker: Served, name: str):
    response = thinker.chat(chat_template_kwargs={name: True})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "chat_template_kwargs"
    assert name in error["message"]


def test_the_reasoning_has_a_field_of_its_own(thinker: Served, engine: Engine, monkeypatch: pytest.MonkeyPatch):
    text = thinker.chat("hello", max_tokens=24).json()["choices"][0]["message"]["content"]
    text = text.lstrip()
    begin, end = text[:2], next(text[i : i + 3] for i in range(10, 90) if text[2:].find(text[i : i + 3]) == i - 2)
    monkeypatch.setattr(delimiters, "MARKERS", (ThinkMarkers(begin, end, "mood"),))
    thought, _, said = text[2:].partition(end)
    assert thought.strip()
    whole = checked(thinker.chat("hello", max_tokens=24).json(), Chat).choices[0].message
    assert (whole.reasoning_content, whole.content) == (thought.strip(), said.lstrip())
    stream = [each for each in events(thinker.chat("hello", max_tokens=24, stream=True).content) if each != "[DONE]"]
    deltas = [checked(chunk, Chunk).choices[0].delta for chunk in stream]
    assert "".join(delta.reasoning_content or "" for delta in deltas) == thought.strip()
    assert "".join(delta.content or "" for delta in deltas) == said.lstrip()


def test_a_model_without_markers_has_no_such_field(server: Served):
    assert "reasoning_content" not in server.chat().json()["choices"][0]["message"]


def test_an_answer_whose_template_begins_with_reasoning_is_not_continued(
    thinker: Served, engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("mlx_engine.serve.generation.AnswerReader.is_thinking", True)
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "and"}]
    error = thinker.chat(messages=messages, continue_final_message=True).json()["error"]
    assert error["param"] == "continue_final_message"
    assert "reasoning" in error["message"]
