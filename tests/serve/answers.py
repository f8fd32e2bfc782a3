"""Answers of hand-made events, for the tests of the APIs: what a model with tools would write."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import mlx_engine
from mlx_engine.checkpoint.gguf import open_gguf
from mlx_engine.checkpoint.gguf_writer import write_gguf
from mlx_engine.conversation.events import ArgumentsDelta, CallBegin, CallEnd, Event, ReasoningDelta, TextDelta
from mlx_engine.serve import reading
from tests.serve.served import MICRO, Served

# A template that reads tools, and writes calls as many models do.
TEMPLATE = """
{%- for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}
{% endfor %}assistant: """

ANSWER: Sequence[Event] = (
    ReasoningDelta("I need "),
    ReasoningDelta("the list."),
    TextDelta("Let me"),
    TextDelta(" look."),
    CallBegin(0, "call_a", "list"),
    ArgumentsDelta(0, '{"path": '),
    ArgumentsDelta(0, '"/", "n": 3}'),
    CallEnd(0),
    CallBegin(1, "call_b", "web__get"),
    ArgumentsDelta(1, "{}"),
    CallEnd(1),
)
"""Reasoning, text and two calls."""


class Script:
    """A reader that gives an event for each piece of text, and the rest at the end, whatever the text is."""

    def __init__(self, script: Sequence[Event]) -> None:
        self._rest: Iterator[Event] = iter(script)

    def add(self, text: str, marks: object = None) -> list[Event]:
        return [event for event in (next(self._rest, None),) if event is not None]

    def finish(self, *, is_cut: bool = False) -> list[Event]:
        return list(self._rest)


def use(monkeypatch: pytest.MonkeyPatch, script: Sequence[Event]) -> list[Any]:
    """Let every answer be these events; return a list to which the tools of each answer are added."""
    given: list[Any] = []

    class Reader:
        @staticmethod
        def after(tokenizer: Any, prompt_ids: Any, tools: Any = ()) -> Script:
            given.append(tools)
            return Script(script)

    monkeypatch.setattr(reading, "AnswerReader", Reader)
    return given


def events(raw: bytes) -> list[Any]:
    """Parse the bytes of a stream of named events strictly: return their data."""
    assert raw.endswith(b"\n\n")
    found = []
    for block in raw.decode().removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


@contextmanager
def toolsmith(folder: Path) -> Iterator[Served]:
    """Serve the micro model with a template that reads tools; `folder` takes its file."""
    path = folder / "tools.gguf"
    with open_gguf(MICRO) as file:
        metadata = {**file.typed_metadata(), "tokenizer.chat_template": TEMPLATE}
        write_gguf(path, metadata, [file.weight(name) for name in file.tensors])
    scheduler = {"slots": 2, "kv_memory": 4 << 20, "prefix_cache": True, "budget": 64}
    found = Served(mlx_engine.load(path, "parallel", threads=1), queue=4, scheduler=scheduler, model="tools")
    found.start()
    try:
        yield found
    finally:
        found.stop()
