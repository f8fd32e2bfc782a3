"""Anthropic's API /v1/messages: its requests, replies, streams and errors.

A request is converted to the messages and tools of a chat; the parts of an answer are converted to content blocks.
Agents routinely send beta fields, tools that run only on Anthropic's servers, and a token limit that exceeds the
context. The server ignores these fields and tools, and names them in the reply. It reduces the limit to what fits into
the context and the KV cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec

from mlx_engine.conversation.dialect import without_noise
from mlx_engine.conversation.tools import ToolChoice
from mlx_engine.serve.errors import ApiError, messages_error
from mlx_engine.serve.parameters import Asked, Body, JsonSchema, Reading, ResponseFormat, asked_format, parse
from mlx_engine.serve.reading import (
    Chat,
    Json,
    Part,
    PartsReply,
    function_tool,
    objects,
    text_in,
    thinking_variables,
    wrong,
)
from mlx_engine.serve.sse import named_event
from mlx_engine.tokenizer.chat_prompt import ChatPrompt

# The signature of every reasoning block. It is never checked, but some clients send back only blocks with a signature.
SIGNATURE = "mlx_engine"

ROLES = ("user", "assistant", "system")

# Parameters that clients send and this server ignores; the reply names them.
IGNORED = (
    "betas",
    "container",
    "context_management",
    "diagnostics",
    "fallbacks",
    "inference_geo",
    "mcp_servers",
    "service_tier",
    "speed",
    "user_profile_id",
    "workspace_id",
)


class Choice(msgspec.Struct):
    """The choice of tools: "none" hides the tools, "any" requires a call, "tool" requires a call of the tool `name`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    """Thinking is off if this parameter is missing or `type` is "disabled", else on.

    If the chat template has no switch for thinking, this parameter has no effect.
    """

    type: Literal["enabled", "adaptive", "disabled", "between_tools"]


class OutputFormat(msgspec.Struct):
    """The JSON Schema of the answer."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct):
    """The effort of thinking, which only some templates support, and the JSON Schema of the answer."""

    effort: str | None = None
    format: OutputFormat | None = None


class MessagesRequest(Body, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/messages."""

    limit_is_bound: ClassVar[bool] = True

    messages: list[dict[str, Any]]
    max_tokens: int
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    stop_sequences: list[str] | None = None
    metadata: dict[str, Any] | None = None
    cache_control: Any = None  # no effect: the prefix cache is automatic
    betas: Any = None
    container: Any = None
    context_management: Any = None
    diagnostics: Any = None
    fallbacks: Any = None
    inference_geo: Any = None
    mcp_servers: Any = None
    service_tier: Any = None
    speed: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None

    @property
    def n_messages(self) -> int:
        return len(self.messages)

    @property
    def limit(self) -> int:
        return self.max_tokens

    def read(self, template: str | None) -> Reading:
        chat = Chat()
        for name in IGNORED:
            if getattr(self, name) is not None:
                chat.ignore(name)
        if self.system is not None:
            _read_system(chat, self.system)
        for i, message in enumerate(self.messages):
            _read_message(chat, message, f"messages[{i}]")
        if not chat.messages:
            raise wrong("messages", "must have at least one block", self.messages)
        begun = chat.begun_answer() if self.messages[-1].get("role") == "assistant" else ""
        given = self.tool_choice or Choice("auto")
        tools = [] if given.type == "none" else _tools(chat, self.tools or ())
        effort = None if self.output_config is None else self.output_config.effort
        is_on = self.thinking is not None and self.thinking.type != "disabled"
        variables, ignored = thinking_variables(template, is_on, effort, "output_config.effort")
        chat.ignored += ignored
        prompt = ChatPrompt(chat.messages, tools, variables=variables)
        choice = ToolChoice(
            is_required=given.type in ("any", "tool"),
            name=given.name if given.type == "tool" else None,
            is_parallel=given.disable_parallel_tool_use is not True,
        )
        return Reading([prompt], chat.ignored, {"tools": tools}, choice, begun, "messages")

    def asked(self) -> Asked:
        form = None if self.output_config is None else self.output_config.format
        if form is None:
            return Asked()
        schema = JsonSchema(name="output", schema=form.schema, strict=True)
        return asked_format(ResponseFormat(type="json_schema", json_schema=schema), "output_config.format")

    def forget_prompt(self) -> None:
        self.messages, self.system, self.tools = [], None, None

    def options(self, defaults: Mapping[str, Any] | None = None) -> dict[str, Any]:
        found = super().options(defaults)
        return found if self.stop_sequences is None else {**found, "stop": self.stop_sequences}

    def check(self, slots: int) -> None:
        """Check the request, except the content of the messages, which `read` checks."""
        if self.max_tokens < 0:
            raise wrong("max_tokens", "must be at least 0", self.max_tokens)
        if (stop := getattr(self, "stop", None)) is not None:
            raise wrong("stop", "must be null (this API has stop_sequences instead)", stop)
        if not self.messages:
            raise wrong("messages", "must have at least one message", self.messages)
        if self.tool_choice is not None and self.tool_choice.type == "tool" and self.tool_choice.name is None:
            raise wrong("tool_choice.name", "must be the name of a tool", None)


class CountRequest(MessagesRequest, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/messages/count_tokens, which needs no `max_tokens`."""

    max_tokens: int = 0


def messages_request(body: bytes) -> MessagesRequest:
    """Parse the body of a request; raise ApiError if it is invalid."""
    return parse(body, MessagesRequest)


def count_request(body: bytes) -> CountRequest:
    """Parse the body of a request to count tokens; raise ApiError if it is invalid."""
    return parse(body, CountRequest)


def _read_system(chat: Chat, system: str | Sequence[Json]) -> None:
    blocks = [system] if isinstance(system, str) else [[block] for block in system]
    texts = [without_noise(chat.text(block, f"system[{i}]")) for i, block in enumerate(blocks)]
    if text := "\n\n".join(text for text in texts if text):
        chat.say("system", text)


def _read_message(chat: Chat, message: Json, at: str) -> None:
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise wrong(f"{at}.role", f"must be {', '.join(ROLES)}", role)
    if role == "system":
        chat.say("system", chat.text(content, f"{at}.content"))
    elif role == "assistant":
        _read_answer(chat, content, f"{at}.content")
    else:
        _read_user(chat, content, f"{at}.content")


def _read_user(chat: Chat, content: Any, at: str) -> None:
    """Read a message of the user. Add its tool results before its text: they must directly follow the calls."""
    if not isinstance(content, list):
        chat.say("user", chat.text(content, at))
        return
    blocks, others = objects(content, at), []
    for i, block in enumerate(blocks):
        if text_in(block, "type", f"{at}[{i}]") != "tool_result":
            others.append(block)
            continue
        text = "" if block.get("content") is None else chat.text(block["content"], f"{at}[{i}].content")
        prefix = "Error: " if block.get("is_error") is True else ""
        chat.give_result(text_in(block, "tool_use_id", f"{at}[{i}]"), prefix + text)
    if others or not blocks:
        chat.say("user", chat.text(others, at))


def _read_answer(chat: Chat, content: Any, at: str) -> None:
    chat.end_turn()
    if not isinstance(content, list):
        chat.answer(chat.text(content, at))
        return
    for i, block in enumerate(objects(content, at)):
        where = f"{at}[{i}]"
        kind = text_in(block, "type", where)
        if kind == "thinking":
            chat.think(text_in(block, "thinking", where))
        elif kind == "tool_use":
            arguments = block.get("input")
            if not isinstance(arguments, dict):
                raise wrong(f"{where}.input", "must be an object", arguments)
            chat.call(text_in(block, "id", where), text_in(block, "name", where), arguments)
        else:
            chat.answer(chat.text([block], at))


def _tools(chat: Chat, tools: Sequence[Json]) -> list[Json]:
    """Return the tools in the form of /v1/chat/completions, without tools that run only on Anthropic's servers."""
    found: dict[str, Json] = {}
    for i, tool in enumerate(tools):
        at = f"tools[{i}]"
        if tool.get("type") is not None and text_in(tool, "type", at) != "custom":
            chat.ignore(f"tool {tool['type']:.80}")
            continue
        name = text_in(tool, "name", at)
        if name in found:
            raise wrong("tools", "must have different names", name)
        found[name] = function_tool(tool, at, name=name, schema="input_schema")
    return list(found.values())


class MessagesReply(PartsReply):
    """The reply of /v1/messages."""

    prefix = "msg_"

    def whole(self) -> Json:
        self.news()
        return {
            **self._message([self._block(part, part.text) for part in self.parts]),
            **self._ending(),
            "usage": self._usage(),
            "mlx_engine": self.receipt(),
        }

    def begin(self) -> bytes:
        """Return the event `message_start`. Its number of cached tokens is 0 if the request has no slot yet."""
        return named_event({"type": "message_start", "message": {**self._message([]), "usage": self._usage()}})

    def heartbeat(self) -> bytes:
        return named_event({"type": "ping"})

    def end(self) -> bytes:
        data = self.news()
        last = {"type": "message_delta", "delta": self._ending(), "usage": self._usage(), "mlx_engine": self.receipt()}
        return data + named_event(last) + named_event({"type": "message_stop"})

    def failure(self, error: ApiError) -> bytes:
        return self.news() + named_event(messages_error(error))

    def opened(self, part: Part) -> bytes:
        empty = self._block(part, "", signature="")
        return named_event({"type": "content_block_start", "index": part.index, "content_block": empty})

    def added(self, part: Part, text: str) -> bytes:
        delta = {
            "reasoning": {"type": "thinking_delta", "thinking": text},
            "text": {"type": "text_delta", "text": text},
            "call": {"type": "input_json_delta", "partial_json": text},
        }[part.kind]
        return self._delta(part, delta)

    def closed(self, part: Part) -> bytes:
        is_signed = part.kind == "reasoning"
        signature = self._delta(part, {"type": "signature_delta", "signature": SIGNATURE}) if is_signed else b""
        return signature + named_event({"type": "content_block_stop", "index": part.index})

    def _delta(self, part: Part, delta: Json) -> bytes:
        return named_event({"type": "content_block_delta", "index": part.index, "delta": delta})

    def _block(self, part: Part, text: str, *, signature: str = SIGNATURE) -> Json:
        if part.kind == "reasoning":
            return {"type": "thinking", "thinking": text, "signature": signature}
        if part.kind == "text":
            return {"type": "text", "text": text, "citations": None}
        return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": _object(text)}

    def _message(self, content: list[Json]) -> Json:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _ending(self) -> Json:
        if self.is_cut:
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if self.stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": self.stop}
        return {"stop_reason": "tool_use" if self.has_calls else "end_turn", "stop_sequence": None}

    def _usage(self) -> Json:
        """Return the numbers of tokens. In this API, `input_tokens` excludes the cached tokens of the prompt."""
        return {
            "input_tokens": self.n_prompt - self.n_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self.n_cached,
            "output_tokens": self.n_generated,
        }


def _object(text: str) -> Json:
    """Return the arguments of a call as the object that the API requires; {} if they are incomplete or wrong."""
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
