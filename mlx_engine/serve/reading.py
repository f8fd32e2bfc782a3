"""For /v1/responses and /v1/messages: read a request as messages and tools, and write an answer as events.

Chat completions use only `thinking_variables`. A parameter `at` is the place of a value in the request, for error
messages. The content of a message and an answer are lists of *parts*; each part has a type, such as text.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mlx_engine.conversation.answer import AnswerReader
from mlx_engine.conversation.events import ArgumentsDelta, CallBegin, CallEnd, Event, ReasoningDelta
from mlx_engine.serve.call import Call, Progress
from mlx_engine.serve.errors import ApiError
from mlx_engine.serve.replies import Reply
from mlx_engine.tokenizer import Tokenizer
from mlx_engine.tokenizer.chat_prompt import SWITCHES, reads

Json = dict[str, Any]

# Maps each type of text part to the key of its text.
TEXTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "reasoning_text": "text",
}
# The types of parts that are refused, because the server reads only text.
MEDIA = ("image", "input_image", "image_url", "document", "input_file", "file", "input_audio", "video")

# Maps the effort in a request to the effort for chat templates; all other efforts become "high".
EFFORTS = {"none": "low", "minimal": "low", "low": "low", "medium": "medium"}


class Chat:
    """The messages of a chat, built part by part. A *turn* is a message of the assistant: reasoning, text and calls.

    Attributes:
        messages: the messages, as `ChatPrompt` takes them.
        ignored: the names of the parameters and parts in the request that the server ignores, each once.
    """

    def __init__(self) -> None:
        self.messages: list[Json] = []
        self.ignored: list[str] = []
        self._is_open = False  # whether the last message is a turn that may be continued

    def say(self, role: str, text: str) -> None:
        """Add a message of the system, the developer or the user."""
        self._is_open = False
        self.messages.append({"role": role, "content": text})

    def give_result(self, call_id: str, text: str) -> None:
        """Add the result of a tool call."""
        self._is_open = False
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def think(self, text: str) -> None:
        """Add reasoning to the assistant's turn. If the turn has text and no calls, begin a new turn first."""
        turn = self._turn()
        if turn["content"] and "tool_calls" not in turn:
            turn = self._turn(is_new=True)
        turn["reasoning_content"] = turn.get("reasoning_content", "") + text

    def answer(self, text: str, *, continues: bool = True) -> None:
        """Add text to the assistant's turn. Unless `continues`, begin a new turn if the turn has text and no calls.

        Text after calls stays in the turn of the calls, because the results of the calls must follow this turn.
        """
        turn = self._turn()
        if turn["content"] and "tool_calls" not in turn and not continues:
            turn = self._turn(is_new=True)
        turn["content"] += text

    def call(self, call_id: str, name: str, arguments: str | Mapping[str, Any]) -> None:
        """Add a tool call to the assistant's turn."""
        function = {"name": name, "arguments": arguments}
        self._turn().setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})

    def end_turn(self) -> None:
        """End the assistant's turn: the next part of an answer begins a new turn."""
        self._is_open = False

    def begun_answer(self) -> str:
        """If the last message is an assistant's answer without reasoning and calls, remove it and return its text.

        Otherwise, or if the answer is the only message, change nothing and return "".
        """
        last = self.messages[-1]
        if len(self.messages) == 1 or last.keys() != {"role", "content"} or last["role"] != "assistant":
            return ""
        return str(self.messages.pop()["content"])

    def ignore(self, what: str) -> None:
        """Add a name to `ignored`."""
        if what not in self.ignored:
            self.ignored.append(what)

    def text(self, content: Any, at: str, between: str = "\n") -> str:
        """Return the text of `content`, which is a text or a list of parts; join the texts of parts with `between`.

        Raises:
            ApiError: the content has another form, or has an image, a document, sound or video.
        """
        if isinstance(content, str):
            return content
        if not isinstance(content, list):
            raise wrong(at, "must be a text or a list of objects", content)
        texts = []
        for i, part in enumerate(objects(content, at)):
            kind = text_in(part, "type", f"{at}[{i}]")
            if kind in MEDIA:
                message = f"{at}[{i}] is of type {kind}; this server reads only text: leave this part out"
                raise ApiError(400, message, param=f"{at}[{i}]", code="unsupported_content")
            if kind not in TEXTS:
                self.ignore(f"content of type {kind:.80}")
                continue
            texts.append(text_in(part, TEXTS[kind], f"{at}[{i}]"))
        return between.join(texts)

    def _turn(self, *, is_new: bool = False) -> Json:
        if is_new or not self._is_open:
            self.messages.append({"role": "assistant", "content": ""})
            self._is_open = True
        return self.messages[-1]


def objects(value: Any, at: str) -> Sequence[Json]:
    """Check that a value is a list of JSON objects, and return it; raise ApiError if it is not."""
    if not isinstance(value, list):
        raise wrong(at, "must be a list of objects", value)
    for i, item in enumerate(value):
        if not isinstance(item, dict):
            raise wrong(f"{at}[{i}]", "must be an object", item)
    return value


def text_in(value: Mapping[str, Any], key: str, at: str) -> str:
    """Return the value of a key; raise ApiError if it is not a text."""
    found = value.get(key)
    if not isinstance(found, str):
        raise wrong(f"{at}.{key}", "must be a text", found)
    return found


def wrong(at: str, rule: str, found: object) -> ApiError:
    """Return the error for a value: its place, what it must be, and what was found."""
    return ApiError(400, f"{at} {rule}, not {found!r:.80}", param=at, code="invalid_value")


def function_tool(tool: Mapping[str, Any], at: str, *, name: str, schema: str) -> Json:
    """Return a tool of another API in the form of /v1/chat/completions; raise ApiError if a value has a wrong type.

    `name` is the tool's name in the chat; `tool[schema]` is the JSON Schema of the arguments.
    """
    parameters = tool.get(schema)
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise wrong(f"{at}.{schema}", "must be a JSON Schema, an object", parameters)
    function: Json = {"name": name, "description": "", "parameters": parameters}
    if tool.get("description") is not None:
        function["description"] = text_in(tool, "description", at)
    if isinstance(tool.get("strict"), bool):
        function["strict"] = tool["strict"]
    return {"type": "function", "function": function}


def thinking_variables(
    template: str | None, is_on: bool | None, effort: str | None, param: str
) -> tuple[Json, list[str]]:
    """Return the chat template's variables for thinking (on or off, and the effort), and names of ignored parameters.

    Variables that the template does not read are left out. `param` is the name of the effort in the request. If an
    effort other than "medium" is given, and no variable expresses it, `param` is returned as ignored.
    """
    if effort == "none":
        is_on = False
    found: Json = {}
    name = next((name for name in SWITCHES if reads(template or "", name)), None)
    if name is not None and is_on is not None:
        found[name] = is_on
    if effort is not None and reads(template or "", "reasoning_effort"):
        found["reasoning_effort"] = EFFORTS.get(effort, "high")
    is_followed = "reasoning_effort" in found or (effort == "none" and bool(found))
    return found, [] if effort in (None, "medium") or is_followed else [param]


@dataclass
class Part:
    """A part of an answer: reasoning, text, or a tool call. The text of a tool call is its arguments as JSON.

    Attributes:
        index: the index of the part in the answer.
        name: the name of the called tool.
        texts: the pieces of the text, in order.
        is_complete: whether the part has ended and was not cut off.
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
    """A reply with one answer, in parts. `tools` has the tools that the answer may call, in OpenAI's form."""

    def __init__(
        self, call: Call, tokenizer: Tokenizer, *, tools: Sequence[Mapping[str, Any]] = (), **about: Any
    ) -> None:
        super().__init__(call, tokenizer, **about)
        self.parts: list[Part] = []
        self._reader = AnswerReader.after(tokenizer, call.requests[0].prompt_ids, tools)
        self._read, self._is_open, self._calls = Progress(), False, dict[int, Part]()

    @property
    def is_cut(self) -> bool:
        """Whether the token limit has cut off the answer."""
        return self._call.outputs[0][1].finish_reason not in (None, "stop")

    @property
    def has_calls(self) -> bool:
        """Whether the answer has a complete call."""
        return any(part.kind == "call" and part.is_complete for part in self.parts)

    @property
    def stop(self) -> str | None:
        """The request's stop string that ended the answer; None if no stop string has ended the answer."""
        stop = self._call.outputs[0][0].stop
        return stop if isinstance(stop, str) else None

    def news(self) -> bytes:
        """Return the events of the text that has arrived since `news` was last called."""
        output, progress = self._call.outputs[0]
        before, self._read = self._read, progress
        found = self._reader.add("".join(output.pieces[before.n_pieces : progress.n_pieces]), output.marks)
        data = b"".join(map(self._take, found))
        if progress.finish_reason is not None and before.finish_reason is None:
            data += b"".join(map(self._take, self._reader.finish(is_cut=self.is_cut)))
            # If a stop string or stop token of the request ended the answer within a call, the call is incomplete.
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
