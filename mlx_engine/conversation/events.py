"""The events of an answer: reasoning, text and tool calls, in the order in which the model generates them.

`AnswerReader` parses a model's text into these events, and every API makes its replies and streams from them.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias


class ReasoningDelta(NamedTuple):
    """More text of the reasoning before or between the parts of an answer."""

    text: str


class TextDelta(NamedTuple):
    """More text of the answer."""

    text: str


class CallBegin(NamedTuple):
    """A tool call begins.

    Attributes:
        call: the number of the call in the answer, from 0.
        id: the id of the call, unique over all answers.
        name: the name of the tool.
    """

    call: int
    id: str
    name: str


class ArgumentsDelta(NamedTuple):
    """More JSON text of the arguments of a call. All deltas of a call together are one JSON object.

    Two cases are different: a call that was cut off has no `CallEnd`, and its arguments may be incomplete; if the model
    writes arguments in a wrong syntax, the rest of them is passed on unchanged.
    """

    call: int
    text: str


class CallEnd(NamedTuple):
    """The arguments of a call are complete."""

    call: int


Event: TypeAlias = "ReasoningDelta | TextDelta | CallBegin | ArgumentsDelta | CallEnd"
