"""The result of `Engine.chat` (an answer split into text, reasoning and tool calls), and the option `tool_choice`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeAlias

from mlx_engine.conversation.answer import AnswerReader, message_of
from mlx_engine.conversation.functions import ToolCall
from mlx_engine.conversation.tools import ToolChoice
from mlx_engine.errors import OptionError, listed, shown
from mlx_engine.loop.stream import Generation, Stream, drained

if TYPE_CHECKING:
    from mlx_engine.tokenizer.tokenizer import Tokenizer

Choice: TypeAlias = "str | Mapping[str, Any]"

CHOICES = ("auto", "none", "required")


@dataclass(frozen=True, repr=False)
class Answer(Generation):
    """An answer to a conversation. `text` is the answer without reasoning and tool calls.

    Attributes:
        reasoning: the reasoning; "" if the answer has none.
        message: the whole answer as a message of OpenAI's API, to be appended to the conversation.
    """

    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    message: dict[str, Any] = field(default_factory=dict)


def answer_of(stream: Stream, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]]) -> Answer:
    """Run a stream to its end, and return its answer. `tools` are the tools of the conversation."""
    generation = drained(stream)
    reader = AnswerReader.after(tokenizer, generation.prompt_ids, tools)
    events = reader.add(generation.text, stream.request.output.marks)
    found = message_of([*events, *reader.finish(is_cut=generation.finish_reason != "stop")])
    values = {each.name: getattr(generation, each.name) for each in fields(Generation)}
    return Answer(
        **{**values, "text": found["content"] or ""},
        reasoning=found.get("reasoning_content", ""),
        tool_calls=[ToolCall.of(call) for call in found.get("tool_calls", ())],
        message={"role": "assistant", **found},
    )


def tool_choice_of(given: Choice, tools: Sequence[Mapping[str, Any]], *, is_parallel: bool) -> ToolChoice:
    """Return the parsed `tool_choice`.

    Args:
        given: a word of `CHOICES`, the name of a tool, or the form of OpenAI:
            {"type": "function", "function": {"name": ...}}.
        tools: the tools of the conversation, in the form of OpenAI's API.
        is_parallel: whether one answer may have several calls.

    Raises:
        OptionError: `given` is no word of `CHOICES`, and does not name a tool in `tools`.
    """
    names = [tool["function"]["name"] for tool in tools]
    if isinstance(given, str) and given not in CHOICES:
        given = {"type": "function", "function": {"name": given}}
    function = given.get("function") if isinstance(given, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if given not in CHOICES and name not in names:
        expected = f"{listed(CHOICES)}, or the name of a tool"
        raise OptionError(
            f"tool_choice must be {expected}, not {shown(name or given)}", option="tool_choice", found=given
        )
    return ToolChoice.of(given, is_parallel=is_parallel)
