"""OpenAI's API /v1/responses, without stored responses: its requests, replies and streams.

The items of a request become messages of a chat, and the parts of an answer become items. Agents routinely send tools
that run only on OpenAI's servers, and items about these tools. The server ignores both, and names them in the reply.
Agents also send a token limit that exceeds the context. The server reduces this limit to the tokens that fit.
"""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec

from mlx_engine.conversation.tools import ToolChoice
from mlx_engine.serve.call import Call
from mlx_engine.serve.errors import ApiError, new_id
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
from mlx_engine.tokenizer import Tokenizer
from mlx_engine.tokenizer.chat_prompt import ChatPrompt

# The prefix of the field `encrypted_content` of a reasoning item. The rest of the field is the reasoning in base64, not
# encrypted. Replies have the field because some clients send back no other field of a reasoning item.
OWN_REASONING = "mlx_engine:"
ENCRYPTED = "reasoning.encrypted_content"

ROLES = ("user", "assistant", "system", "developer")

# Maps each kind of `Part` of an answer to the middle of the names of its events. For example,
# `response.reasoning_text.delta` has new text of the reasoning, and `response.reasoning_text.done` its whole text.
EVENTS = {"reasoning": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}

# Parameters that clients send and that have no effect here; the reply lists them as ignored.
IGNORED = ("context_management", "max_tool_calls", "moderation", "prompt_cache_options", "prompt_cache_retention")
# Maps each refused parameter to the reason.
REFUSED = {
    "previous_response_id": "this server stores no responses: send the whole conversation as input",
    "conversation": "this server stores no conversations: send the whole conversation as input",
    "prompt": "this server stores no prompts: send its text as input",
    "background": "this server stores no responses: leave it out, and read the stream",
    "top_logprobs": "log-probabilities are available on /v1/chat/completions",
}
# Maps some parameters of REFUSED to a value that is accepted because it has no effect.
HARMLESS: Mapping[str, object] = {"background": False, "top_logprobs": 0}


class TextFormat(msgspec.Struct, omit_defaults=True):
    """The form of the answer: text, any JSON object, or JSON that a JSON Schema allows."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct):
    """The form of the answer, and its verbosity, which has no effect."""

    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(msgspec.Struct):
    """The effort of the reasoning, for chat templates that read it. `summary` has no effect."""

    effort: str | None = None
    summary: str | None = None


class ResponsesRequest(Body, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/responses."""

    limit_is_bound: ClassVar[bool] = True

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    truncation: str | None = None
    store: bool | None = None  # nothing is stored
    stream_options: dict[str, Any] | None = None  # asks for padding that hides the sizes of events; no effect
    client_metadata: Any = None
    service_tier: str | None = None
    context_management: Any = None
    max_tool_calls: Any = None
    moderation: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None
    top_logprobs: int | None = None

    @property
    def n_messages(self) -> int:
        """The number of items in `input`."""
        return 1 if isinstance(self.input, str) else len(self.input)

    @property
    def limit(self) -> int | None:
        return self.max_output_tokens

    def read(self, template: str | None) -> Reading:
        chat, tools = Chat(), Tools()
        for name in IGNORED:
            if getattr(self, name) is not None:
                chat.ignore(name)
        for name in self.include or ():
            if name != ENCRYPTED:
                chat.ignore(f"include {name:.80}")
        if self.truncation == "auto":
            chat.ignore("truncation auto")
        tools.read(chat, self.tools or ())
        if self.instructions:
            chat.say("system", self.instructions)
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        for i, item in enumerate(items):
            _read_item(chat, tools, item, f"input[{i}]")
        if not chat.messages:
            raise wrong("input", "must have at least one message", self.input)
        wanted = self._choice()
        given = [] if wanted == "none" else tools.of_chat
        choice = ToolChoice(
            is_required=wanted not in ("auto", "none"),
            name=None if isinstance(wanted, str) else tools.flat_name(None, wanted["name"]),
            is_parallel=self.parallel_tool_calls is not False,
        )
        effort = None if self.reasoning is None else self.reasoning.effort
        variables, ignored = thinking_variables(template, None, effort, "reasoning.effort")
        chat.ignored += ignored
        prompt = ChatPrompt(chat.messages, given, variables=variables)
        about: Json = {"tools": given, "names": tools.names, "echo": self._echo(tools.shown)}
        about["encrypts"] = ENCRYPTED in (self.include or ())
        return Reading([prompt], chat.ignored, about, choice)

    def asked(self) -> Asked:
        form = None if self.text is None else self.text.format
        if form is None or form.type == "text":
            return Asked()
        schema = JsonSchema(name=form.name or "answer", schema=form.schema, strict=form.strict)
        is_schema = form.type == "json_schema"
        return asked_format(ResponseFormat(type=form.type, json_schema=schema if is_schema else None), "text.format")

    def forget_prompt(self) -> None:
        self.input, self.tools = "", None

    def check(self, slots: int) -> None:
        """Raise ApiError if a parameter is refused or invalid.

        Three parameters are checked elsewhere: `input` and `tools` by `read`, `text` by `asked`.
        """
        for name, why in REFUSED.items():
            if getattr(self, name) not in (None, HARMLESS.get(name)):
                raise ApiError(400, f"{name}: {why}", param=name, code="unsupported_parameter")
        if "message.output_text.logprobs" in (self.include or ()):
            message = f"include: {REFUSED['top_logprobs']}"
            raise ApiError(400, message, param="include", code="unsupported_parameter")
        if self.max_output_tokens is not None and self.max_output_tokens < 0:
            raise wrong("max_output_tokens", "must be at least 0", self.max_output_tokens)
        if self.truncation not in (None, "auto", "disabled"):
            raise wrong("truncation", "must be auto or disabled", self.truncation)
        self._choice()

    def _choice(self) -> str | Json:
        """Return the checked `tool_choice`: "auto", "none", "required", or an object with the name of a function."""
        given = "auto" if self.tool_choice is None else self.tool_choice
        if isinstance(given, str):
            if given not in ("auto", "none", "required"):
                raise wrong("tool_choice", "must be auto, none, required or a function", given)
        elif given.get("type") != "function":
            raise wrong("tool_choice.type", "must be function", given.get("type"))
        else:
            text_in(given, "name", "tool_choice")
        return given

    def _echo(self, tools: Sequence[Json]) -> Json:
        """Return the parameters that the reply repeats; `tools` is `Tools.shown`."""
        labels = {name: getattr(self, name) for name in ("prompt_cache_key", "safety_identifier", "user")}
        reasoning, text = self.reasoning or Reasoning(), self.text or TextOptions()
        verbosity = {} if text.verbosity is None else {"verbosity": text.verbosity}
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
            "store": False,
            "text": {"format": msgspec.to_builtins(text.format or TextFormat("text")), **verbosity},
            "tool_choice": self.tool_choice or "auto",
            "tools": tools,
            "truncation": "disabled",
            **{name: label for name, label in labels.items() if label is not None},
        }


def responses_request(body: bytes) -> ResponsesRequest:
    """Parse the body of a request; raise ApiError if it is invalid."""
    return parse(body, ResponsesRequest)


class Tools:
    """The tools of a request. Tools of a namespace get new names, because a chat has no namespaces.

    Attributes:
        of_chat: the tools in the form of /v1/chat/completions.
        names: maps each tool's name in the chat to the tool's namespace (or None) and name in the request.
        shown: the tools in the form in which a reply repeats them.
    """

    def __init__(self) -> None:
        self.of_chat: list[Json] = []
        self.names: dict[str, tuple[str | None, str]] = {}
        self.shown: list[Json] = []
        self._flat: dict[tuple[str | None, str], str] = {}

    def read(self, chat: Chat, tools: Sequence[Json]) -> None:
        """Read functions and namespaces, and ignore other tools. Raise ApiError if a tool has a wrong form."""
        for i, tool in enumerate(tools):
            at = f"tools[{i}]"
            kind = text_in(tool, "type", at)
            if kind == "function":
                found = self._add(tool, at, None, "")
                self.shown.append({"strict": None, **found["function"], "type": "function"})
            elif kind == "namespace":
                self._read_namespace(chat, tool, at)
            else:
                chat.ignore(f"tool {kind:.80}")

    def flat_name(self, namespace: str | None, name: str) -> str:
        """Return a tool's name in the chat, also for a tool that occurs only in a call in `input`."""
        return self._flat.get((namespace, name)) or _flat(namespace, name)

    def _read_namespace(self, chat: Chat, namespace: Json, at: str) -> None:
        name = text_in(namespace, "name", at)
        about = text_in(namespace, "description", at) if namespace.get("description") else ""
        for i, tool in enumerate(objects(namespace.get("tools"), f"{at}.tools")):
            kind = text_in(tool, "type", f"{at}.tools[{i}]")
            if kind != "function":
                chat.ignore(f"tool {kind:.80} of {name:.80}")
                continue
            # The description of the namespace is put before the description of its first tool. If this tool is not a
            # function, the description of the namespace is lost.
            self._add(tool, f"{at}.tools[{i}]", name, "" if i or not about else f"{name}: {about}\n\n")
        self.shown.append(namespace)

    def _add(self, tool: Json, at: str, namespace: str | None, before: str) -> Json:
        name = text_in(tool, "name", at)
        flat, n = _flat(namespace, name), 1
        while flat in self.names:
            n += 1
            flat = f"{_flat(namespace, name)}_{n}"
        found = function_tool(tool, at, name=flat, schema="parameters")
        found["function"]["description"] = before + found["function"]["description"]
        self.names[flat] = (namespace, name)
        self._flat.setdefault((namespace, name), flat)
        self.of_chat.append(found)
        return found


def _flat(namespace: str | None, name: str) -> str:
    return name if namespace is None else f"{namespace.rstrip('_')}__{name.lstrip('_')}"


def _read_item(chat: Chat, tools: Tools, item: Json, at: str) -> None:
    kind = text_in(item, "type", at) if "type" in item else "message"
    if kind == "message":
        role = item.get("role")
        if role not in ROLES:
            raise wrong(f"{at}.role", f"must be {', '.join(ROLES)}", role)
        between = "" if role == "assistant" else "\n"
        text = chat.text(item.get("content"), f"{at}.content", between)
        if role == "assistant":
            chat.answer(text, continues=False)
        else:
            chat.say(role, text)
    elif kind == "reasoning":
        if text := _reasoning(chat, item, at):
            chat.think(text)
    elif kind == "function_call":
        namespace = item.get("namespace")
        name = tools.flat_name(namespace if isinstance(namespace, str) else None, text_in(item, "name", at))
        chat.call(text_in(item, "call_id", at), name, text_in(item, "arguments", at))
    elif kind == "function_call_output":
        chat.give_result(text_in(item, "call_id", at), chat.text(item.get("output"), f"{at}.output"))
    elif kind == "item_reference":
        message = f"{at} refers to a stored item; this server stores nothing: send the item itself"
        raise ApiError(400, message, param=at, code="unsupported_content")
    else:
        chat.ignore(f"item {kind:.80}")


def _reasoning(chat: Chat, item: Json, at: str) -> str:
    """Return the text of a reasoning item; "" if the item has no text, or only text that another server encrypted."""
    if item.get("content") not in (None, []):
        return chat.text(item["content"], f"{at}.content", "")
    own = item.get("encrypted_content")
    if isinstance(own, str) and own.startswith(OWN_REASONING):
        try:
            return base64.b64decode(own.removeprefix(OWN_REASONING), validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            pass
    chat.ignore("item reasoning without its text")
    return ""


class ResponsesReply(PartsReply):
    """The reply of /v1/responses. Each `Part` of the answer is an output item.

    Args:
        names: see `Tools.names`.
        echo: the parameters of the request that the reply repeats.
        encrypts: whether the reply also has the reasoning in `encrypted_content`, as base64 (see OWN_REASONING).
    """

    prefix = "resp_"

    def __init__(
        self,
        call: Call,
        tokenizer: Tokenizer,
        *,
        names: Mapping[str, tuple[str | None, str]],
        echo: Json,
        encrypts: bool,
        **about: Any,
    ) -> None:
        super().__init__(call, tokenizer, **about)
        self._names, self._echo, self._encrypts = names, echo, encrypts
        self._ids: list[str] = []
        self._n_events = 0

    def whole(self) -> Json:
        self.news()
        return self._ended()

    def begin(self) -> bytes:
        return self._event("response.created", response=self._running()) + self.heartbeat()

    def heartbeat(self) -> bytes:
        """Return the event `response.in_progress`. Clients count it as activity, unlike an SSE comment."""
        return self._event("response.in_progress", response=self._running())

    def end(self) -> bytes:
        data, ended = self.news(), self._ended()
        return data + self._event(f"response.{ended['status']}", response=ended)

    def failure(self, error: ApiError) -> bytes:
        codes = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
        found = {"code": codes.get(error.status, "server_error"), "message": error.message}
        data = self.news()
        failed = {**self._response("failed", self._items()), "error": found, "usage": self._usage()}
        return data + self._event("response.failed", response=failed)

    def opened(self, part: Part) -> bytes:
        prefix = {"reasoning": "rs_", "text": "msg_", "call": "fc_"}[part.kind]
        self._ids.append(new_id(prefix))
        item = {**self._item(part), "status": "in_progress", **({} if part.kind == "call" else {"content": []})}
        data = self._event("response.output_item.added", output_index=part.index, item=item)
        if part.kind == "call":
            return data
        return data + self._event("response.content_part.added", **self._at(part), part=self._content(part))

    def added(self, part: Part, text: str) -> bytes:
        more: Json = {"logprobs": []} if part.kind == "text" else {}
        return self._event(f"response.{EVENTS[part.kind]}.delta", **self._at(part), delta=text, **more)

    def closed(self, part: Part) -> bytes:
        item, kind, at = self._item(part), f"response.{EVENTS[part.kind]}.done", self._at(part)
        if part.kind == "call":
            data = self._event(kind, **at, name=item["name"], arguments=part.text)
        else:
            data = self._event(kind, **at, text=part.text, **({"logprobs": []} if part.kind == "text" else {}))
            data += self._event("response.content_part.done", **at, part=self._content(part))
        return data + self._event("response.output_item.done", output_index=part.index, item=item)

    def _event(self, kind: str, **about: Any) -> bytes:
        n, self._n_events = self._n_events, self._n_events + 1
        return named_event({"type": kind, "sequence_number": n, **about})

    def _at(self, part: Part) -> Json:
        at = {"item_id": self._ids[part.index], "output_index": part.index}
        return at if part.kind == "call" else {**at, "content_index": 0}

    def _content(self, part: Part) -> Json:
        if part.kind == "reasoning":
            return {"type": "reasoning_text", "text": part.text}
        return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}

    def _item(self, part: Part) -> Json:
        head = {"id": self._ids[part.index], "status": "completed" if part.is_complete else "incomplete"}
        if part.kind == "text":
            return {**head, "type": "message", "role": "assistant", "content": [self._content(part)]}
        if part.kind == "reasoning":
            item = {**head, "type": "reasoning", "summary": [], "content": [self._content(part)]}
            own = OWN_REASONING + base64.b64encode(part.text.encode(errors="replace")).decode()
            return {**item, "encrypted_content": own} if self._encrypts else item
        namespace, name = self._names.get(part.name, (None, part.name))
        where = {} if namespace is None else {"namespace": namespace}
        function = {"call_id": part.call_id, "name": name, **where, "arguments": part.text}
        return {**head, "type": "function_call", **function}

    def _items(self) -> list[Json]:
        return [self._item(part) for part in self.parts]

    def _response(self, status: str, output: list[Json]) -> Json:
        sampling = self._call.requests[0].options.sampling
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": self._model,
            "output": output,
            "previous_response_id": None,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            **self._echo,
        }

    def _running(self) -> Json:
        return self._response("in_progress", [])

    def _ended(self) -> Json:
        found = self._response("incomplete" if self.is_cut else "completed", self._items())
        if self.is_cut:
            found["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            found["completed_at"] = int(time.time())
        return {**found, "usage": self._usage(), "mlx_engine": self.receipt()}

    def _usage(self) -> Json:
        thought = "".join(part.text for part in self.parts if part.kind == "reasoning")
        n_thought = len(self._tokenizer.encode(thought)) if thought else 0
        return {
            "input_tokens": self.n_prompt,
            "input_tokens_details": {"cached_tokens": self.n_cached, "cache_write_tokens": 0},
            "output_tokens": self.n_generated,
            "output_tokens_details": {"reasoning_tokens": min(n_thought, self.n_generated)},
            "total_tokens": self.n_prompt + self.n_generated,
        }
