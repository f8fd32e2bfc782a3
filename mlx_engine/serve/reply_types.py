"""What replies look like: every key, with its type. `openapi.py` publishes these types, and the tests check replies."""

from __future__ import annotations

from typing import Literal

import msgspec


class Reply(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A JSON object without other keys."""


class CachedTokens(Reply):
    """Tokens of prompts that were taken from the prefix cache."""

    cached_tokens: int


class Usage(Reply):
    """Counts of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class Timings(Reply):
    """Where the time of a request went; `replies.timings` describes the keys."""

    tokenize_ms: float
    queue_ms: float | None
    prompt_ms: float | None
    predicted_ms: float | None
    write_ms: float | None
    total_ms: float | None
    cache_n: int
    prompt_n: int
    prompt_per_second: float | None
    predicted_n: int
    predicted_per_second: float | None
    steps: int
    rows_per_step: float | None
    bytes_read: int
    bandwidth_share: float | None
    preemptions: int


class ShownTokens(Reply):
    """A token, and the text of some tokens from it on."""

    token_id: int
    text: str


Cause = Literal["disabled", "first_use", "differs", "retokenized", "evicted", "window", "state", "memory"]


class Reuse(CachedTokens):
    """What was reused of a prompt's keys and values; with --explain-cache also why not more (`replies.explained`)."""

    agreeing_tokens: int | msgspec.UnsetType = msgspec.UNSET
    cause: Cause | msgspec.UnsetType | None = msgspec.UNSET
    position: int | msgspec.UnsetType | None = msgspec.UNSET
    found: ShownTokens | msgspec.UnsetType | None = msgspec.UNSET
    expected: ShownTokens | msgspec.UnsetType | None = msgspec.UNSET


class Receipt(Reply):
    """What no other API has: digests of the answers, the seed that repeats them, the times, and what was reused."""

    digest: str
    digests: list[str]
    seed: int
    timings: Timings | list[Timings]
    cache: Reuse | list[Reuse]


class Alternative(Reply):
    """A token, its log-probability and its bytes."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Alternative):
    """A token of an answer, and the most likely tokens in its place."""

    top_logprobs: list[Alternative]


class ChatLogprobs(Reply):
    """Log-probabilities of the tokens of an answer."""

    content: list[TokenLogprob]
    refusal: None


class AnswerMessage(Reply):
    """The message of an answer. Models with think markers have their reasoning in a field of its own."""

    role: Literal["assistant"]
    content: str
    refusal: None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(Reply):
    """An answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]


class Head(Reply):
    """What all replies and chunks begin with."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class ChatCompletion(Head):
    """The reply of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    mlx_engine: Receipt
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class Delta(Reply, omit_defaults=True):
    """What is new of a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None


class ChunkChoice(Reply):
    """What is new of an answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class ChatCompletionChunk(Head):
    """An event of a stream of /v1/chat/completions. The last one has the receipt."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]
    usage: Usage | None = None
    mlx_engine: Receipt | None = None


class TextLogprobs(Reply):
    """Log-probabilities of the tokens of an answer of /v1/completions, after those of an echo.

    The first token of an echo has none.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class RankedLogprob(Reply):
    """A token of a prompt, or one that is likely in its place."""

    logprob: float
    rank: int
    decoded_token: str


# Of each token of a prompt, by ids; the first has none.
PromptLogprobs = list[dict[str, RankedLogprob] | None]


class TextChoice(Reply):
    """An answer of /v1/completions, or what is new of it."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class TextCompletion(Head):
    """The reply of /v1/completions, or an event of its stream. The last event has the receipt."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: Usage | None = None
    mlx_engine: Receipt | None = None


class Model(Reply):
    """A model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(Reply):
    """The reply of /v1/models."""

    object: Literal["list"]
    data: list[Model]


class Tokens(Reply):
    """The reply of /tokenize."""

    tokens: list[int]
    count: int
    max_model_len: int


class Text(Reply):
    """The reply of /detokenize: the text, by llama.cpp's name and by vLLM's."""

    content: str
    prompt: str


class TokenizerInfo(Reply):
    """The reply of /tokenizer_info."""

    bos_token: str | None
    eos_token: str | None
    add_bos_token: bool
    chat_template: str | None
    vocab_size: int
    model_max_length: int


class Health(Reply):
    """The reply of /health."""

    status: Literal["ok", "loading", "closing", "stalled", "dead"]


class Error(Reply):
    """What is wrong, and with which parameter."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorReply(Reply):
    """The reply to a request that failed."""

    error: Error
