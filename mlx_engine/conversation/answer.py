"""Parse the text of an answer, while it is generated, into events: reasoning, text, tool calls.

`AnswerReader` interprets a response template (`formats.py`), which describes how a model writes reasoning and calls.
The parser consists of generators that yield when they need more text, so the events do not depend on how the text is
cut into pieces.

An answer consists of parts: reasoning, text and calls. Outside of arguments, text is held back only while it may belong
to a delimiter, to the head of a call (the text before the arguments), or to the white space between two parts, which is
dropped. The event `CallBegin` is emitted when the call's name is known and its arguments begin. If the head of a call
does not parse, it is emitted as text, unchanged.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Generator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from mlx_engine.conversation.calls import CallReader, Cursor
from mlx_engine.conversation.delimiters import MARK, TAIL, Delimiter
from mlx_engine.conversation.events import ArgumentsDelta, CallBegin, Event, ReasoningDelta, TextDelta
from mlx_engine.conversation.formats import AnswerFormat, Region, answer_format

if TYPE_CHECKING:
    from mlx_engine.tokenizer.tokenizer import Tokenizer

SEMICOLON = Delimiter(";")


class AnswerReader:
    """Parses the pieces of an answer's text into events.

    Between the `CallBegin` and the `CallEnd` of a call, all events are `ArgumentsDelta` of this call.
    """

    def __init__(
        self, form: AnswerFormat, tools: Sequence[Mapping[str, Any]] = (), *, is_thinking: bool = False
    ) -> None:
        self._format, self._tools, self._is_thinking = form, tools, is_thinking
        self._cursor, self._n_read = Cursor(), 0
        self._events: list[Event] = []
        self._reading: Generator[None, None, None] | None = None
        # The state of the current part: whether it is reasoning, whether white space at its beginning is dropped, the
        # white space that is held back, and whether a call without an opening delimiter may begin here.
        self._is_reasoning, self._trims, self._space, self._may_be_bare = False, False, "", True

    @classmethod
    def after(
        cls, tokenizer: Tokenizer, prompt_ids: Sequence[int], tools: Sequence[Mapping[str, Any]] = ()
    ) -> AnswerReader:
        """Return the reader of the answer to a prompt.

        If the prompt ends with the opening marker of the reasoning, the answer begins inside the reasoning.
        `tools` are in the form of OpenAI's API; their schemas give the types of the arguments. Without tools, calls are
        not parsed.
        """
        form = answer_format(tokenizer, reads_calls=bool(tools))
        is_thinking = False
        if form.opening:
            is_thinking = tokenizer.decode(prompt_ids[-TAIL:]).rstrip().endswith(form.opening.rstrip())
        return cls(form, tools, is_thinking=is_thinking)

    def add(self, text: str, marks: Sequence[int] | None = None) -> list[Event]:
        """Add text, and return the events that no later text can change.

        `marks` are the character indices in the answer at which control tokens begin, ascending (`Output.marks`). Text
        that spells a control token is a delimiter only at these indices. If `marks` is None, it is always a delimiter.
        """
        if self._reading is None:
            self._form = self._format.plain if marks is None else self._format.marked
            self._calls = CallReader(self._cursor, self._format, self._form.calls, self._tools, self._events)
            self._reading = self._read()
        self._cursor.text += self._marked(text, marks or ())
        self._n_read += len(text)
        return self._resumed()

    def finish(self, *, is_cut: bool = False) -> list[Event]:
        """End the answer, and return the events of the text that was held back.

        `is_cut`: whether the token limit or the timeout ended the answer.
        """
        found = [] if self._reading else self.add("")
        self._cursor.is_end, self._cursor.is_cut = True, is_cut
        return found + self._resumed()

    @property
    def is_thinking(self) -> bool:
        """Whether the prompt ends with the opening marker of the reasoning."""
        return self._is_thinking

    @property
    def n_calls(self) -> int:
        """The number of calls so far."""
        return self._calls.n_calls if self._reading else 0

    @property
    def n_ended(self) -> int:
        """The number of calls whose arguments are complete."""
        return self._calls.n_ended if self._reading else 0

    def _marked(self, text: str, marks: Sequence[int]) -> str:
        first, last = bisect_left(marks, self._n_read), bisect_left(marks, self._n_read + len(text))
        cuts = [mark - self._n_read for mark in marks[first:last]]
        return MARK.join(text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True))

    def _resumed(self) -> list[Event]:
        assert self._reading is not None  # noqa: S101 - for mypy
        next(self._reading, None)
        found = _joined(self._events)
        self._events.clear()
        return found

    def _read(self) -> Generator[None, None, None]:
        form, calls, region = self._form, self._form.calls, None
        if self._is_thinking:
            region = next((each for each in (*form.first, *form.regions) if each.is_reasoning), None)
            self._begin_part(is_reasoning=region is not None)
        elif form.first:
            region = yield from self._first(form.first)
        while True:
            may_be_bare = calls is not None and calls.is_bare and self._may_be_bare and not self._is_reasoning
            if may_be_bare and (yield from self._bare_call()):
                self._begin_part(is_reasoning=False)
                continue
            close = region.close if region else None
            match = yield from self._until([close, calls and calls.open, *(each.open for each in form.regions)])
            if match is None:
                return
            if calls and calls.open and match.re is calls.open.full:
                if (yield from self._call(match)):
                    region = None
                    self._begin_part(is_reasoning=False)
                continue
            self._cursor.at = match.end()
            is_closed = close is not None and match.re is close.full
            region = None if is_closed else next(each for each in form.regions if each.open.full is match.re)
            self._begin_part(is_reasoning=region is not None and region.is_reasoning)

    def _first(self, regions: Sequence[Region]) -> Generator[None, None, Region | None]:
        """Parse an opening marker of reasoning at the start of an answer. Return its region, or None."""
        spaces = yield from self._cursor.spaces()
        for region in regions:
            match = yield from self._cursor.here(region.open)
            if match:
                self._cursor.at = match.end()
                self._begin_part(is_reasoning=True)
                return region
        self._emit_text(spaces)
        return None

    def _call(self, match: re.Match[str]) -> Generator[None, None, bool]:
        """Parse the calls after an opening delimiter. Without a call, emit the delimiter as text and return False."""
        groups = {key: value.replace(MARK, "") for key, value in match.groupdict().items() if value}
        name = next((value for key, value in groups.items() if key.startswith(("name", "known"))), None)
        is_call = "known" not in groups or (groups["known"] in self._calls.tools and not self._is_reasoning)
        self._cursor.at = match.end()
        if is_call and (yield from self._calls.read(name, has_opening=True, before=self._drop_space)):
            return True
        self._emit_text(match[0])
        return False

    def _bare_call(self) -> Generator[None, None, bool]:
        """Parse a call without an opening delimiter, and return whether there is one."""
        cursor, self._may_be_bare = self._cursor, False
        cursor.is_kept, at = True, cursor.at
        yield from cursor.spaces()
        if self._calls.n_calls and (yield from cursor.here(SEMICOLON)):
            cursor.at += 1
            yield from cursor.spaces()
        is_object = (yield from cursor.next()) == "{"
        if is_object and (yield from self._calls.read(None, has_opening=False, before=self._drop_space)):
            return True
        cursor.at, cursor.is_kept = at, False
        return False

    def _until(self, delimiters: Sequence[Delimiter | None]) -> Generator[None, None, re.Match[str] | None]:
        """Emit the text before the next delimiter; return the delimiter's match, or None at the end of the answer."""
        match = yield from self._cursor.find([each for each in delimiters if each], self._emit_text)
        if match is None and not self._is_reasoning and not self._trims and self._space:
            self._events.append(TextDelta(self._space))
        return match

    def _begin_part(self, *, is_reasoning: bool) -> None:
        self._is_reasoning, self._trims, self._space, self._may_be_bare = is_reasoning, True, "", True

    def _drop_space(self) -> None:
        self._space = ""

    def _emit_text(self, text: str) -> None:
        """Emit text of the current part. White space at its end is held back: it is dropped if another part follows."""
        text = self._space + text.replace(MARK, "")
        if self._trims:
            text = text.lstrip()
        may_end = self._is_reasoning or self._form.calls or self._form.regions
        said = text.rstrip() if may_end else text
        self._space = text[len(said) :]
        if said:
            self._trims = False
            self._events.append(ReasoningDelta(said) if self._is_reasoning else TextDelta(said))


def _joined(events: Sequence[Event]) -> list[Event]:
    """Return the events, with adjacent deltas of the same type and call joined."""
    found: list[Event] = []
    for _, group in groupby(events, key=lambda event: (type(event), getattr(event, "call", None))):
        some: list[Any] = list(group)
        is_delta = isinstance(some[0], TextDelta | ReasoningDelta | ArgumentsDelta)
        found += [some[0]._replace(text="".join(event.text for event in some))] if is_delta else some
    return found


def message_of(events: Sequence[Event]) -> dict[str, Any]:
    """Return the content, the reasoning and the calls of a whole answer, as keys of a message of OpenAI's API.

    The content is None if the answer has calls but no text. The keys of absent reasoning and calls are left out.
    """
    found: dict[str, Any] = {"content": "", **delta_of(events)}
    for call in found.get("tool_calls", ()):
        del call["index"]
    return {**found, "content": None} if "tool_calls" in found and not found["content"] else found


def delta_of(events: Sequence[Event]) -> dict[str, Any]:
    """Return events as the delta of a message in OpenAI's API: added reasoning and content, new or longer calls."""
    texts: dict[str, str] = {}
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        if isinstance(event, CallBegin):
            function = {"name": event.name, "arguments": ""}
            calls[event.call] = {"index": event.call, "id": event.id, "type": "function", "function": function}
        elif isinstance(event, ArgumentsDelta):
            call = calls.setdefault(event.call, {"index": event.call, "function": {"arguments": ""}})
            call["function"]["arguments"] += event.text
        elif isinstance(event, TextDelta | ReasoningDelta):
            name = "content" if isinstance(event, TextDelta) else "reasoning_content"
            texts[name] = texts.get(name, "") + event.text
    return {**texts, "tool_calls": list(calls.values())} if calls else {**texts}
