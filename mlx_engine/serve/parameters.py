"""The requests of the API: their parameters and types, and how they become options of the engine.

`mlx_engine.options` declares which engine options are request parameters, with their types. A constraint of the answer
can be given under OpenAI's name (`response_format`) or under vLLM's names (`structured_outputs`, `guided_json`, ...).

An unknown parameter is refused. A parameter that is not implemented is accepted only with a value that has no effect.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

import msgspec

from mlx_engine.constraint import Constraint, without_unsupported
from mlx_engine.conversation.tools import ToolChoice
from mlx_engine.errors import OptionError, listed
from mlx_engine.options import MOST_ALTERNATIVES, declared
from mlx_engine.serve.errors import ApiError, cut
from mlx_engine.serve.reading import thinking_variables
from mlx_engine.tokenizer.chat_prompt import ROLES, ChatPrompt

Schema = Mapping[str, Any]

ANY: Schema = {}


def _one_of(*values: object) -> Schema:
    return {"enum": [*values, None]}


# LABELS and the NOOPS_OF_ tables map each parameter that is not implemented to a JSON Schema of its accepted values,
# which have no effect. `openapi.py` publishes the schemas. LABELS has names and hints that do not affect answers.
LABELS = {
    "user": ANY,
    "metadata": ANY,
    "safety_identifier": ANY,
    "prompt_cache_key": ANY,
    "prompt_cache_retention": ANY,
    "prompt_cache_options": ANY,
    "service_tier": _one_of("auto", "default"),
    "store": _one_of(False),
}

NOOPS_OF_CHAT: Mapping[str, Schema] = {
    **LABELS,
    "audio": _one_of(),
    "function_call": _one_of("none", "auto"),
    "functions": _one_of([]),
    "modalities": _one_of(["text"]),
    "moderation": _one_of(),
    "verbosity": _one_of("medium"),
    "web_search_options": _one_of(),
}

NOOPS_OF_COMPLETIONS: Mapping[str, Schema] = {
    **LABELS,
    "best_of": _one_of(1),
    "suffix": _one_of(""),
}

# For /v1/embeddings and /v1/rerank.
NOOPS_OF_TEXTS: Mapping[str, Schema] = {"user": ANY}


def without_noops(data: Mapping[str, Any], known: Mapping[str, Schema]) -> dict[str, Any]:
    """Return the parameters that are not in `known`.

    Raises:
        ApiError: a parameter in `known` has a value that its schema does not accept.
    """
    for name, schema in known.items():
        if not _changes_nothing(data.get(name), schema):
            message = f"{name}: this server does not implement this value of the parameter; leave it out"
            raise ApiError(400, message, param=name, code="unsupported_parameter")
    return {name: value for name, value in data.items() if name not in known}


def _changes_nothing(value: object, schema: Schema) -> bool:
    # In JSON, unlike Python, true is not equal to 1.
    return "enum" not in schema or any(value == one and type(value) is type(one) for one in schema["enum"])


# The default of max_tokens in OpenAI's /v1/completions.
COMPLETION_TOKENS = 16

# Matches a key of logit_bias. Leading zeros do not match, so that no id occurs twice. Keys of more than ten digits do
# not match, because `int` raises ValueError for thousands of digits.
TOKEN_ID = "0|[1-9][0-9]{0,9}"

SEEDS = range(-(1 << 63), 1 << 64)

# Match msgspec's error messages: a message with the place of the error, and a message about a field.
PLACE = re.compile(r"(.*?) - at `\$\.?(.*)`", re.DOTALL)
FIELD = re.compile(r"Object (contains unknown|missing required) field `(.*)`", re.DOTALL)


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options of a stream. `include_obfuscation` has no effect: this server adds no padding to hide chunk sizes."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


# Maps the name of each engine option that is a request parameter to its declaration.
DECLARED = {f.name: about for f, about in declared() if about.parameter is not None}

if TYPE_CHECKING:
    RunParameters = msgspec.Struct
else:
    RunParameters = msgspec.defstruct(
        "RunParameters",
        [(name, about.parameter | None, None) for name, about in DECLARED.items()],
        kw_only=True,
        forbid_unknown_fields=True,
    )


class Function(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A function that the model may call, with a JSON Schema of its arguments."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    """A tool of a chat."""

    type: Literal["function"]
    function: Function

    def shown(self) -> dict[str, Any]:
        """Return the tool in the form that chat templates read.

        Absent keys get empty values, because some templates read every key. The key `strict` is left out unless it is
        true.
        """
        about = self.function
        schema = about.parameters or {"type": "object", "properties": {}}
        function = {"name": about.name, "description": about.description or "", "parameters": schema}
        return {"type": "function", "function": function | ({"strict": True} if about.strict else {})}


class FunctionName(msgspec.Struct, forbid_unknown_fields=True):
    """The name of a function."""

    name: str


class NamedTool(msgspec.Struct, forbid_unknown_fields=True):
    """The choice of one tool."""

    type: Literal["function"]
    function: FunctionName


class PredictedText(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a predicted output."""

    type: Literal["text"]
    text: str


class Prediction(msgspec.Struct, forbid_unknown_fields=True):
    """A text that the answer may repeat, such as a file before an edit. Speculation may propose tokens from it."""

    type: Literal["content"]
    content: str | list[PredictedText]


TOOL_CHOICES = ("none", "auto", "required")


class Reading(NamedTuple):
    """A request in the form that all APIs share."""

    prompts: Sequence[Any]  # each gets `Body.n_choices` answers
    ignored: Sequence[str] = ()  # the names of parameters and parts of the request that the server ignores
    about: Mapping[str, Any] = {}  # keyword arguments for making the `replies.Reply`
    choice: ToolChoice = ToolChoice()  # which tools of the prompt an answer must or may call
    begun: str = ""  # the given beginning of the answer, which generation continues
    begun_in: str = "continue_final_message"  # the parameter that has `begun`, for error messages


class Body(RunParameters, forbid_unknown_fields=True, kw_only=True):
    """The body of a request that generates text, in any API. The options in `DECLARED` are fields, None by default."""

    # Whether a token limit that exceeds the context or the KV cache is reduced instead of refused: clients of some APIs
    # always send the same large number.
    limit_is_bound: ClassVar[bool] = False

    model: str | None = None
    stream: bool | None = None

    @property
    def n_choices(self) -> int:
        """The number of answers to each prompt."""
        return 1

    @property
    def n_answers(self) -> int:
        """The number of answers to all prompts."""
        return 1

    @property
    def n_messages(self) -> int | None:
        """The number of messages of a conversation; None for other prompts."""
        return None

    @property
    def n_logprobs(self) -> int | None:
        """The number of alternatives to list for each token; None for no log-probabilities."""
        return None

    @property
    def limit(self) -> int | None:
        """The largest number of new tokens; None for as many as fit."""
        raise NotImplementedError

    @property
    def predicted(self) -> str | None:
        """A text that the answers may repeat; None if the request has no such text."""
        return None

    def asked(self) -> Asked:
        """Return the constraint of the answers; raise ApiError if it is invalid."""
        return Asked()

    def read(self, template: str | None) -> Reading:
        """Convert the request to a `Reading` for this chat template. Called in a thread, because it may take time."""
        raise NotImplementedError

    def forget_prompt(self) -> None:
        """Free the prompts after encoding, because parsed prompts take several times the memory of their JSON."""
        raise NotImplementedError

    def check(self, slots: int) -> None:
        """Check the rules that the types do not express; raise ApiError if a value is invalid."""
        raise NotImplementedError

    def options(self, defaults: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return keyword arguments of `Options.of`, without max_tokens and logprobs.

        `defaults` replace the defaults of the API. If the request has no seed, a random seed is chosen; the reply
        contains the seed, so that every answer can be reproduced.

        Raises:
            ApiError: a value is out of the API's range.
        """
        given: dict[str, Any] = {"temperature": 1.0, **(defaults or {}), "seed": secrets.randbits(63)}
        for name in DECLARED:
            value = getattr(self, name)
            if value is not None:
                given[name] = READ[name](value) if name in READ else value
        return given


class Parameters(Body, forbid_unknown_fields=True, kw_only=True):
    """The parameters that /v1/chat/completions and /v1/completions share."""

    max_tokens: int | None = None
    n: int | None = None
    prompt_logprobs: int | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @property
    def n_choices(self) -> int:
        return 1 if self.n is None else self.n

    def asked(self) -> Asked:
        return asked(self)

    @property
    def prompts(self) -> Sequence[Any]:
        """The prompts: one `ChatPrompt`, or one or more texts or lists of token ids."""
        raise NotImplementedError

    def read(self, template: str | None) -> Reading:
        includes_usage = self.stream_options is not None and bool(self.stream_options.include_usage)
        about = {"n_logprobs": self.n_logprobs, "n_prompt_logprobs": self.prompt_logprobs}
        return Reading(self.prompts, about={**about, "includes_usage": includes_usage})

    @property
    def n_scored(self) -> int | None:
        """The number of alternatives to list for each token of a prompt; None for no log-probabilities of prompts."""
        return self.prompt_logprobs

    def options(self, defaults: Mapping[str, Any] | None = None) -> dict[str, Any]:
        given = super().options(defaults)
        return given if self.n_scored is None else {**given, "prompt_logprobs": self.n_scored}

    @property
    def n_answers(self) -> int:
        return len(self.prompts) * self.n_choices

    def check(self, slots: int) -> None:
        _require(1 <= self.n_choices <= slots, "n", f"must be from 1 to {slots}, the slots of this server", self.n)
        # `Options` accepts -1 for "as many as fit", but the API uses None for this.
        for name in ("max_tokens", "max_completion_tokens"):
            n = getattr(self, name, None)
            _require(n is None or n >= 0, name, "must be at least 0", n)
        _require_alternatives("prompt_logprobs", self.prompt_logprobs)
        is_streamed = self.prompt_logprobs is not None and self.stream
        _require(not is_streamed, "prompt_logprobs", "are not available in a stream: leave out stream")
        _require(bool(self.stream) or self.stream_options is None, "stream_options", "needs stream: true")


# How much the model thinks, if its chat template reads an effort. If the template has a switch for thinking, "none"
# turns thinking off.
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class ChatRequest(Parameters, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    tools: list[Tool] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    continue_final_message: bool | None = None
    prediction: Prediction | None = None

    @property
    def predicted(self) -> str | None:
        if self.prediction is None:
            return None
        content = self.prediction.content
        return content if isinstance(content, str) else "".join(part.text for part in content)

    @property
    def n_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def n_messages(self) -> int:
        return len(self.messages)

    @property
    def prompts(self) -> list[ChatPrompt]:
        messages = self.messages[:-1] if self.continue_final_message else self.messages
        return [ChatPrompt(messages, self._tools(), variables=self.chat_template_kwargs or {})]

    def read(self, template: str | None) -> Reading:
        found = super().read(template)
        effort, ignored = thinking_variables(template, None, self.reasoning_effort, "reasoning_effort")
        (prompt,) = found.prompts
        found = found._replace(
            prompts=[replace(prompt, variables={**effort, **prompt.variables})],
            ignored=(*found.ignored, *ignored),
            about={**found.about, "tools": self._tools()},
            choice=self._tool_choice(),
        )
        if not self.continue_final_message:
            return found
        last, n = self.messages[-1], len(self.messages) - 1
        # Generation continues only the text of the last message, so the message's reasoning is reported as ignored.
        left_out = tuple(f"messages[{n}].{name}" for name in ("reasoning_content", "reasoning") if last.get(name))
        return found._replace(begun=last["content"], ignored=(*found.ignored, *left_out))

    def forget_prompt(self) -> None:
        self.messages, self.chat_template_kwargs, self.tools, self.prediction = [], None, None, None

    def _tools(self) -> list[dict[str, Any]]:
        """Return the tools of the prompt; [] if `tool_choice` is "none", so that the model cannot call a tool."""
        return [] if self.tool_choice == "none" else [tool.shown() for tool in self.tools or ()]

    def _tool_choice(self) -> ToolChoice:
        form = msgspec.to_builtins(self.tool_choice)
        return ToolChoice.of(form, is_parallel=self.parallel_tool_calls is not False)

    def check(self, slots: int) -> None:
        """Check the parameters, the roles of messages, and a message to continue. The engine checks other messages."""
        super().check(slots)
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        _require(len(limits) < 2, "max_tokens", "must be the same as max_completion_tokens", self.max_tokens)
        _require_alternatives("top_logprobs", self.top_logprobs)
        _require(bool(self.logprobs) or not self.top_logprobs, "top_logprobs", "needs logprobs: true")
        _require(len(self.messages) > 0, "messages", "must have at least one message")
        self._check_tools()
        if self.continue_final_message:
            last, text = self.messages[-1], self.messages[-1].get("content")
            sound = last.get("role") == "assistant" and not last.get("tool_calls") and len(self.messages) > 1
            sound = sound and isinstance(text, str) and bool(text)
            _require(sound, "continue_final_message", "needs a last message of the assistant with a text and no calls")
        for i, message in enumerate(self.messages):
            role = message.get("role")
            _require(role in ROLES, f"messages[{i}].role", f"must be {listed(ROLES)}", role)

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.tools or ()]
        given = self.tool_choice
        _require(len(set(names)) == len(names), "tools", "must have different names")
        if isinstance(given, str):
            _require(given in TOOL_CHOICES, "tool_choice", f"must be {listed(TOOL_CHOICES)}, or name a function", given)
        name = given.function.name if isinstance(given, NamedTool) else None
        _require(name is None or name in names, "tool_choice", "must name one of the tools", name)
        _require(bool(names) or given in (None, "none", "auto"), "tool_choice", "needs tools")


class CompletionRequest(Parameters, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None

    @property
    def n_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def is_scored(self) -> bool:
        """Whether `logprobs` in each choice of the reply also lists the prompt's tokens."""
        return bool(self.echo) and self.logprobs is not None

    @property
    def n_scored(self) -> int | None:
        """The larger of `prompt_logprobs` and, if `is_scored`, `logprobs`; None if neither is requested."""
        needs = [n for n in (self.prompt_logprobs, self.logprobs if self.is_scored else None) if n is not None]
        return max(needs, default=None)

    def read(self, template: str | None) -> Reading:
        found = super().read(template)
        return found._replace(about={**found.about, "is_scored": self.is_scored})

    @property
    def limit(self) -> int:
        return COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def prompts(self) -> list[Any]:
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if is_one else list(self.prompt)

    def forget_prompt(self) -> None:
        self.prompt = ""

    def check(self, slots: int) -> None:
        super().check(slots)
        _require_alternatives("logprobs", self.logprobs)
        kinds = {type(item) for item in self.prompt} if isinstance(self.prompt, list) else {str}
        rule = "must be a text, a list of texts, a list of token ids, or a list of such lists"
        _require(len(kinds) == 1, "prompt", f"{rule}, and is {'a mixture' if kinds else 'an empty list'}")


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /tokenize, in llama.cpp's form (`content`) or in vLLM's (`prompt`).

    A control token that is spelled in `prompt` becomes its id; in `content`, it does so only if `special` is true.
    A BOS token is added to `prompt` if the model's files ask for it, unless `add_special_tokens` is false.
    """

    content: str | None = None
    special: bool = False
    prompt: str | None = None
    add_special_tokens: bool = True
    model: str | None = None

    @property
    def text(self) -> str:
        """The text; raise ApiError if `content` and `prompt` are both missing or both given."""
        text = self.content if self.prompt is None else self.prompt
        if text is None:
            raise ApiError(400, "the parameter content is missing", param="content", code="missing_required_parameter")
        _require(self.content is None or self.prompt is None, "prompt", "cannot be combined with content")
        return text


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /detokenize."""

    tokens: list[int]
    model: str | None = None


# In these parameters, `parse` never converts floats such as 1.0 to ints, because templates or constraints read the
# values and may distinguish 1.0 from 1.
AS_IS = (
    *("messages", "chat_template_kwargs", "input", "system", "tools"),
    *("response_format", "structured_outputs", "guided_json"),
)

S = TypeVar("S", bound=msgspec.Struct)


def parse(body: bytes, kind: type[S], known: Mapping[str, Schema] | None = None) -> S:
    """Return a JSON body as a struct; `known` has the parameters that are not implemented, see `without_noops`.

    Raises:
        ApiError: the body is not JSON, or a parameter is unknown, missing, of a wrong type or not implemented.
    """
    try:
        data = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        message = f"the body is not JSON: {error or 'it is empty'}; send a JSON object in UTF-8"
        raise ApiError(400, message, code="invalid_json") from None
    if not isinstance(data, dict):
        message = f"the body must be a JSON object with the parameters, not {type(data).__name__}"
        raise ApiError(400, message, code="invalid_json")
    try:
        given = without_noops(data, known or {})
        try:
            return msgspec.convert(given, kind)
        except msgspec.ValidationError:
            # Floats such as 1.0 become ints only now, because such floats are rare and the conversion takes time.
            plain = {name: value if name in AS_IS else _whole(value) for name, value in given.items()}
            return msgspec.convert(plain, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise _explained(str(error)) from None


def _whole(value: Any) -> Any:
    """Return a value with its whole numbers as int: in JSON, 1.0 is the integer 1."""
    if isinstance(value, list):
        return [_whole(item) for item in value]
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _explained(text: str) -> ApiError:
    """Return the API error for a message of msgspec."""
    match = PLACE.fullmatch(text)
    what, place = (match[1], cut(match[2])) if match else (text, "")
    field = FIELD.fullmatch(what)
    if field is None:
        return ApiError(400, f"{place or 'the body'}: {what}", param=place or None, code="invalid_type")
    name = cut(f"{place}.{field[2]}" if place else field[2])
    if field[1].startswith("missing"):
        return ApiError(400, f"the parameter {name} is missing", param=name, code="missing_required_parameter")
    message = f"this server has no parameter {name}; leave it out, or check its spelling"
    return ApiError(400, message, param=name, code="unknown_parameter")


def _top_k(given: int) -> int | None:
    """Return None for 0 and -1, which mean "no limit" on other servers."""
    return None if given in (0, -1) else given


def _seed(given: int) -> int:
    """Convert a seed to a number >= 0, as the engine requires; OpenAI also allows negative seeds."""
    _require(given in SEEDS, "seed", "must be a 64-bit integer", given)
    return given % (1 << 64)


def _bias(given: Mapping[str, float]) -> dict[int, float]:
    """Return the biases with int keys, because keys in JSON are strings."""
    wrong = next((key for key in given if re.fullmatch(TOKEN_ID, key) is None), None)
    _require(wrong is None, "logit_bias", "must have token ids as keys, such as 17", wrong)
    return {int(key): value for key, value in given.items()}


# Maps the name of a parameter to the function that converts its value for the engine. Other values are not converted.
READ: Mapping[str, Callable[[Any], Any]] = {"top_k": _top_k, "seed": _seed, "logit_bias": _bias}


def _require_alternatives(param: str, n: int | None) -> None:
    _require(n is None or 0 <= n <= MOST_ALTERNATIVES, param, f"must be from 0 to {MOST_ALTERNATIVES}", n)


def _require(holds: bool, param: str, rule: str, found: object = None) -> None:
    """Raise ApiError unless `holds`. The message has the parameter, its rule, and `found` unless `found` is None."""
    if not holds:
        instead = "" if found is None else f", not {found!r:.80}"
        raise ApiError(400, f"{param} {rule}{instead}", param=param, code="invalid_value")


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A JSON Schema with a name. Unless `strict` is true, unsupported keywords are dropped and named in the reply."""

    name: str
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The format of an answer, in the form of OpenAI's API."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def is_text(self) -> bool:
        """Whether the format is text, which is no constraint."""
        return self.type == "text" and self.json_schema is None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A constraint under vLLM's names: JSON Schema, JSON object, regular expression, list of choices, Lark grammar."""

    json: str | dict[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class Asked(NamedTuple):
    """The constraint of a request."""

    constraint: Constraint | None = None
    param: str = ""  # the parameter that has the constraint
    ignored: tuple[str, ...] = ()  # the schema's keywords that were dropped, as "PARAMETER: PATH"


# Maps a kind of constraint, as vLLM's parameters name it, to the function that makes the constraint.
HOW: Mapping[str, Callable[[Any], Constraint]] = {
    "json": Constraint.json_schema,
    "regex": Constraint.regex,
    "choice": Constraint.choice,
    "grammar": Constraint.grammar,
}


def asked(given: Parameters) -> Asked:
    """Return the constraint of a request; raise ApiError for several constraints, or an invalid one."""
    form, outputs = given.response_format, given.structured_outputs or StructuredOutputs()
    ways: list[tuple[str, Callable[[Any], Constraint], Any]] = [
        ("structured_outputs.json_object", lambda _: Constraint.json_object(), outputs.json_object or None)
    ]
    for name, how in HOW.items():
        ways.append((f"structured_outputs.{name}", how, getattr(outputs, name)))
        ways.append((f"guided_{name}", how, getattr(given, f"guided_{name}")))
    found = [way for way in ways if way[2] is not None]
    params = [param for param, _, _ in found]
    if form is not None and not form.is_text:
        params.insert(0, "response_format")
    if len(params) > 1:
        message = f"{' and '.join(params)} both constrain the answer; give one of them"
        raise ApiError(400, message, param=params[1], code="invalid_value")
    if found:
        param, how, value = found[0]
        with named(param):
            return Asked(how(value), param)
    return Asked() if form is None else asked_format(form, "response_format")


def asked_format(form: ResponseFormat, param: str) -> Asked:
    """Return the constraint of a response format; raise ApiError if it is invalid. `param` names its parameter."""
    given = form.json_schema
    if form.is_text:
        return Asked()
    if (form.type == "json_schema") is not (given is not None):
        message = f"{param}: give json_schema, with a name and a schema, if type is json_schema, and only then"
        raise ApiError(400, message, param=f"{param}.json_schema", code="invalid_value")
    if given is None or given.schema is None:
        return Asked(Constraint.json_object(), param)
    with named(param):
        schema, left_out = (given.schema, ()) if given.strict else without_unsupported(given.schema)
        return Asked(Constraint.json_schema(schema), param, tuple(f"{param}: {path}" for path in left_out))


@contextmanager
def named(param: str) -> Iterator[None]:
    """In the `with` block, convert each OptionError about the constraint to an ApiError about `param`."""
    try:
        yield
    except OptionError as error:
        if error.option != "constraint" or not param:
            raise
        message = f"{param}: {str(error).removeprefix('constraint: ').removeprefix('constraint ')}"
        raise ApiError(400, message, param=param, code="invalid_value") from None
