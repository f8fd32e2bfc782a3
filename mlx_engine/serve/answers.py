"""Shared by the replies of /v1/responses and /v1/messages: the parts of an answer, and the stream of their events."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mlx_engine.conversation.answer import AnswerReader
from mlx_engine.conversation.events import ArgumentsDelta, CallBegin, CallEnd, Event, ReasoningDelta
from mlx_engine.loop.output import FinishReason
from mlx_engine.serve.call import Call, Progress
from mlx_engine.serve.replies import Reply
from mlx_engine.tokenizer import Tokenizer


@dataclass
class Part:
    """A part of an answer.

    Attributes:
        kind: the meaning of the text: reasoning, the answer, or the arguments of a call as JSON.
        index: the number of the part in the answer.
        call_id: the id of a call.
        name: the name of the tool of a call.
        texts: the pieces of the text, in order.
        is_complete: whether the part has ended without being cut off.
    """

    kind: Literal["reasoning", "text", "call"]
    index: int
    call_id: str = ""
    name: str = ""
    texts: list[str] = field(default_factory=list)
    is_complete: bool = False

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.texts)


class PartsReply(Reply):
    """The reply with one answer, which is a list of parts.

    Args:
        tools: the tools that the answer may call, in the form of chat.
    """

    def __init__(
        self, call: Call, tokenizer: Tokenizer, *, tools: Sequence[Mapping[str, Any]] = (), **about: Any
    ) -> None:
        super().__init__(call, tokenizer, **about)
        self.parts: list[Part] = []
        self._reader = AnswerReader.after(tokenizer, call.requests[0].prompt_ids, tools)
        self._read, self._is_open, self._calls = Progress(), False, dict[int, Part]()

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the answer has ended."""
        return self._call.outputs[0][1].finish_reason

    @property
    def is_cut(self) -> bool:
        """Whether the token limit or the time has cut the answer off."""
        return self.finish_reason not in (None, "stop")

    @property
    def has_calls(self) -> bool:
        """Whether the answer has a complete call."""
        return any(part.kind == "call" and part.is_complete for part in self.parts)

    @property
    def stop(self) -> str | None:
        """The stop string of the request that has ended the answer."""
        stop = self._call.outputs[0][0].stop
        return stop if isinstance(stop, str) else None

    def news(self) -> bytes:
        """Return the events since the last call."""
        output, progress = self._call.outputs[0]
        before, self._read = self._read, progress
        found = self._reader.add("".join(output.pieces[before.n_pieces : progress.n_pieces]), output.marks)
        data = b"".join(map(self._take, found))
        if progress.finish_reason is not None and before.finish_reason is None:
            data += b"".join(map(self._take, self._reader.finish(is_cut=self.is_cut)))
            # A call that is still open has been cut off by a stop of the request, if the request has ended the answer.
            is_half = self._is_open and self.parts[-1].kind == "call" and output.stop is not None
            data += self._close(is_complete=not (self.is_cut or is_half))
        return data

    @abstractmethod
    def opened(self, part: Part) -> bytes:
        """Return the events for the beginning of a part."""

    @abstractmethod
    def added(self, part: Part, text: str) -> bytes:
        """Return the event for new text of a part."""

    @abstractmethod
    def closed(self, part: Part) -> bytes:
        """Return the events for the end of a part."""

    def _take(self, event: Event) -> bytes:
        if isinstance(event, CallBegin):
            part = Part("call", len(self.parts), event.id, event.name)
            self._calls[event.call] = part
            return self._open(part)
        if isinstance(event, ArgumentsDelta):
            return self._add(self._calls[event.call], event.text)
        if isinstance(event, CallEnd):
            return self._close(is_complete=True)
        kind: Literal["reasoning", "text"] = "reasoning" if isinstance(event, ReasoningDelta) else "text"
        if self._is_open and self.parts[-1].kind == kind:
            return self._add(self.parts[-1], event.text)
        part = Part(kind, len(self.parts))
        return self._open(part) + self._add(part, event.text)

    def _open(self, part: Part) -> bytes:
        data = self._close(is_complete=True)
        self.parts.append(part)
        self._is_open = True
        return data + self.opened(part)

    def _add(self, part: Part, text: str) -> bytes:
        part.texts.append(text)
        return self.added(part, text)

    def _close(self, *, is_complete: bool) -> bytes:
        if not self._is_open:
            return b""
        self._is_open, part = False, self.parts[-1]
        part.is_complete = is_complete
        return self.closed(part)
