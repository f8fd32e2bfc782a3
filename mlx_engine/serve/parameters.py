"""The requests of the API: their parameters and types, and how they become options of the engine.

A parameter that nobody knows is refused by its name. `noops.py` has the parameters that are known and not implemented.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from mlx_engine.decode.logprobs import MOST_ALTERNATIVES
from mlx_engine.serve import noops
from mlx_engine.serve.errors import ApiError, cut
from mlx_engine.tokenizer.chat_prompt import ROLES, ChatPrompt

# The default of OpenAI's /v1/completions.
COMPLETION_TOKENS = 16

# A key of logit_bias. Others would have the same number twice, or too many digits for Python.
TOKEN_ID = "0|[1-9][0-9]{0,9}"

SEEDS = range(-(1 << 63), 1 << 64)

PLACE = re.compile(r"(.*?) - at `\$\.?(.*)`", re.DOTALL)
FIELD = re.compile(r"Object (contains unknown|missing required) field `(.*)`", re.DOTALL)

R = TypeVar("R", bound="Parameters")


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options of a stream. Obfuscation pads chunks against observers of their sizes; it is never added."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Parameters(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The parameters that both kinds of requests have. None is the default of each."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None

    @property
    def n_choices(self) -> int:
        """The number of answers to each prompt."""
        return 1 if self.n is None else self.n

    @property
    def prompts(self) -> Sequence[Any]:
        """The prompts, each with `n_choices` answers."""
        raise NotImplementedError

    @property
    def n_answers(self) -> int:
        """The number of answers to all prompts."""
        return len(self.prompts) * self.n_choices

    def forget_prompt(self) -> None:
        """Drop the prompts when they have become tokens: parsed, they take several times the memory of their JSON."""
        raise NotImplementedError

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk that has the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def options(self, defaults: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return keyword arguments of `Options.of`, without max_tokens and logprobs.

        `defaults` replace those of the API. Without a seed, one is drawn: the reply reports it, so that every answer
        can be repeated.

        Raises:
            ApiError: a value is outside of what the API allows.
        """
        _require(self.seed is None or self.seed in SEEDS, "seed", "a 64-bit integer", self.seed)
        # OpenAI's seeds may be negative. Other servers write "no limit" as 0 or -1.
        given = {
            "seed": secrets.randbits(63) if self.seed is None else self.seed % (1 << 64),
            "temperature": self.temperature,
            "top_k": None if self.top_k in (0, -1) else self.top_k,
            "logit_bias": _bias(self.logit_bias),
            "stop": self.stop,
        }
        same = ("top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "ignore_eos")
        given |= {name: getattr(self, name) for name in same}
        given = {name: value for name, value in given.items() if value is not None}
        others = {name: value for name, value in (defaults or {}).items() if getattr(self, name) is None}
        return {"temperature": 1.0, **others, **given}

    def check(self, slots: int) -> None:
        """Check what depends on several parameters or on the server's slots.

        Raises:
            ApiError: a value is invalid.
        """
        expected = f"1 to {slots}, the number of slots of this server"
        _require(1 <= self.n_choices <= slots, "n", expected, self.n)
        # -1 has a meaning in `Options` alone: here None is "as many as fit".
        for name in ("max_tokens", "max_completion_tokens"):
            n = getattr(self, name, None)
            _require(n is None or n >= 0, name, "a whole number >= 0, or none at all", n)
        without_stream = self.stream_options is not None and not self.stream
        _require(not without_stream, "stream_options", "stream to be true if stream_options are given", self.stream)


class ChatRequest(Parameters, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def n_logprobs(self) -> int | None:
        """The number of alternatives to list for each token; None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def limit(self) -> int | None:
        """The largest number of new tokens; None for as many as fit."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def prompts(self) -> list[ChatPrompt]:
        """The conversation, as the only prompt."""
        return [ChatPrompt(self.messages, variables=self.chat_template_kwargs or {})]

    def forget_prompt(self) -> None:
        """Drop the messages."""
        self.messages, self.chat_template_kwargs = [], None

    def check(self, slots: int) -> None:
        """Check the parameters. The engine checks the messages, except their roles, which it would accept as given."""
        super().check(slots)
        both = self.max_tokens is not None and self.max_completion_tokens is not None
        is_one = not both or self.max_tokens == self.max_completion_tokens
        _require(is_one, "max_tokens", "the value of max_completion_tokens, or none", self.max_tokens)
        _require_alternatives("top_logprobs", self.top_logprobs)
        alone = bool(self.top_logprobs) and not self.logprobs
        _require(not alone, "top_logprobs", "logprobs to be true if top_logprobs is given", self.logprobs)
        _require(len(self.messages) > 0, "messages", "at least one message", "none")
        for i, message in enumerate(self.messages):
            role = message.get("role")
            _require(role in ROLES, f"messages[{i}].role", " or ".join(ROLES), role)


class CompletionRequest(Parameters, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None

    @property
    def n_logprobs(self) -> int | None:
        """The number of alternatives to list for each token; None for no log-probabilities."""
        return self.logprobs

    @property
    def limit(self) -> int:
        """The largest number of new tokens."""
        return COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def prompts(self) -> list[Any]:
        """The prompts, each a text or token ids."""
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if is_one else list(self.prompt)

    def forget_prompt(self) -> None:
        """Drop the prompts."""
        self.prompt = ""

    def check(self, slots: int) -> None:
        """Check the parameters."""
        super().check(slots)
        _require_alternatives("logprobs", self.logprobs)
        scored = bool(self.echo) and self.logprobs is not None
        _require(not scored, "logprobs", "no echo: log-probabilities of a prompt are not implemented", "echo: true")
        kinds = {type(item) for item in self.prompt} if isinstance(self.prompt, list) else {str}
        expected = "a text, a list of texts, a list of token ids, or a list of such lists"
        _require(len(kinds) == 1, "prompt", expected, "an empty list" if not kinds else "a list of different things")


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /tokenize. With `special`, control tokens that are spelled in the text become their ids."""

    content: str
    special: bool = False


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /detokenize."""

    tokens: list[int]


def chat_request(body: bytes) -> ChatRequest:
    """Parse and check the body of a chat request; raise ApiError if it is invalid."""
    return parse(body, ChatRequest, noops.CHAT)


def completion_request(body: bytes) -> CompletionRequest:
    """Parse and check the body of a completion request; raise ApiError if it is invalid."""
    return parse(body, CompletionRequest, noops.COMPLETIONS)


# Parameters with data of the client, which templates read.
AS_IS = ("messages", "chat_template_kwargs")

S = TypeVar("S", bound=msgspec.Struct)


def parse(body: bytes, kind: type[S], known: Mapping[str, noops.Schema] | None = None) -> S:
    """Return a body as a struct.

    Args:
        body: JSON.
        kind: the struct.
        known: parameters that are not implemented, see `noops.py`.

    Raises:
        ApiError: the body is not JSON, or a parameter is unknown, missing or of a wrong type.
    """
    try:
        data = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        message = f"the body: expected a JSON object, found {error or 'nothing'}; send JSON in UTF-8"
        raise ApiError(400, message, code="invalid_json") from None
    if not isinstance(data, dict):
        message = f"the body: expected a JSON object, found {type(data).__name__}; send an object with the parameters"
        raise ApiError(400, message, code="invalid_json")
    try:
        given = noops.without_noops(data, known or {})
        try:
            return msgspec.convert(given, kind)
        except msgspec.ValidationError:  # whole numbers with a point are rare, and looking for them takes time
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
        return ApiError(
            400, f"{name}: missing; this parameter is required", param=name, code="missing_required_parameter"
        )
    message = f"{name}: this server has no such parameter; leave it out, or check its spelling"
    return ApiError(400, message, param=name, code="unknown_parameter")


def _bias(given: Mapping[str, float] | None) -> dict[int, float] | None:
    if given is None:
        return None
    wrong = next((key for key in given if re.fullmatch(TOKEN_ID, key) is None), None)
    _require(wrong is None, "logit_bias", "token ids as keys, such as 17", wrong)
    return {int(key): value for key, value in given.items()}


def _require_alternatives(param: str, n: int | None) -> None:
    _require(n is None or 0 <= n <= MOST_ALTERNATIVES, param, f"0 to {MOST_ALTERNATIVES}", n)


def _require(holds: bool, param: str, expected: str, found: object) -> None:
    if not holds:
        raise ApiError(400, f"{param}: expected {expected}, found {found!r:.80}", param=param, code="invalid_value")
