"""The events of an answer: reasoning, text and tool calls, in the order in which the model generates them.

`AnswerReader` parses a model's text into these events, and every API makes its replies and streams from them.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias


class ReasoningDelta(NamedTuple):
    """More text of the model's reasoning."""

    text: str


class TextDelta(NamedTuple):
    """More text of the answer."""

    text: str


class CallBegin(NamedTuple):
    """A tool call begins.

    `call` is the index of the call in the answer; `id` is unique over all answers; `name` is the tool's name.
    """

    call: int
    id: str
    name: str


class ArgumentsDelta(NamedTuple):
    """More JSON text of the arguments of a call.

    Joined, the deltas of a call are a JSON object, with two exceptions. A call that was cut off has no `CallEnd`, and
    its arguments may be incomplete. After a syntax error in the arguments, the text up to the end of the call is passed
    on unchanged.
    """

    call: int
    text: str


class CallEnd(NamedTuple):
    """The arguments of a call are complete."""

    call: int


Event: TypeAlias = "ReasoningDelta | TextDelta | CallBegin | ArgumentsDelta | CallEnd"
