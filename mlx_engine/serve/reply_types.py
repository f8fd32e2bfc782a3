"""The types of replies, with every key.

`openapi.py` makes the schemas of replies from these types, and the tests check that replies match them.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Reply(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A JSON object that has no keys except the fields of its class."""


class CachedTokens(Reply):
    """The number of prompt tokens that were taken from the prefix cache."""

    cached_tokens: int


class PredictedTokens(Reply):
    """Counts of proposed tokens: accepted and rejected ones. Rejected tokens are not in the answer."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Reply):
    """Counts of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: PredictedTokens | msgspec.UnsetType = msgspec.UNSET


class Timings(Reply):
    """The times and counts of a request; `replies.timings` describes the keys."""

    tokenize_ms: float
    queue_ms: float | None
    prompt_ms: float | None
    predicted_ms: float | None
    write_ms: float | None
    total_ms: float | None
    cache_n: int
    disk_n: int
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
    """A token id, and the text of this token and of the next few tokens."""

    token_id: int
    text: str


Cause = Literal["disabled", "first_use", "differs", "retokenized", "evicted", "window", "state", "memory"]


class Reuse(CachedTokens):
    """The number of cached tokens.

    With --explain-cache, the other keys say why no more tokens were cached; `replies.explained` describes these keys.
    """

    agreeing_tokens: int | msgspec.UnsetType = msgspec.UNSET
    cause: Cause | msgspec.UnsetType | None = msgspec.UNSET
    position: int | msgspec.UnsetType | None = msgspec.UNSET
    found: ShownTokens | msgspec.UnsetType | None = msgspec.UNSET
    expected: ShownTokens | msgspec.UnsetType | None = msgspec.UNSET


class ConstraintReceipt(Reply):
    """The constraint's SHA-256, and for each token of each answer the total probability of all allowed tokens."""

    digest: str
    allowed: list[list[float]]


# The types of activations, and of keys and values, that the answers were computed with.
Activations = Literal["f32", "i16", "f16", "bf16"]
KVType = Literal["f32", "f16", "bf16", "q8_0"]


class ProposedTokens(Reply):
    """How many proposed tokens of one drafter were run in forward passes, and how many of these were accepted."""

    proposed: int
    accepted: int


class SpeculationReceipt(Reply):
    """How many proposed tokens were run in forward passes, and how many of these were accepted.

    A drafter is a source of proposed tokens: "lookup", "draft" or "mtp". `drafter` is the name of the drafter, or
    several names joined by "+"; `drafters` maps each name to its counts. `proposed` and `accepted` are the sums.
    """

    drafter: str
    proposed: int
    accepted: int
    drafters: dict[str, ProposedTokens]


class Receipt(Reply):
    """The receipt, an extension of the API: digests of the answers, the seed, times, and use of the cache."""

    digest: str
    digests: list[str]
    activations: Activations
    kv_type: KVType
    seed: int
    timings: Timings | list[Timings]
    cache: Reuse | list[Reuse]
    ignored: list[str] | msgspec.UnsetType = msgspec.UNSET
    constraint: ConstraintReceipt | msgspec.UnsetType = msgspec.UNSET
    speculation: SpeculationReceipt | msgspec.UnsetType = msgspec.UNSET


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


class CalledFunction(Reply):
    """The function of a call, and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(Reply):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(Reply):
    """The message of an answer. If the model marks its reasoning, the reasoning is in `reasoning_content`.

    `content` is null if the answer has tool calls and no text.
    """

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


# vLLM's field: the request's stop string or stop token id that ended the answer; null if the answer ended otherwise.
StopReason = str | int | None


class ChatChoice(Reply):
    """An answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: StopReason


class Head(Reply):
    """The fields that all replies and stream events of /v1/chat/completions and /v1/completions have."""

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


class FunctionDelta(Reply, omit_defaults=True):
    """The new part of a tool call: the name of the function, or further text of the arguments."""

    name: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str | msgspec.UnsetType = msgspec.UNSET


class CallDelta(Reply, omit_defaults=True):
    """The new part of a tool call. The first part of a call has the call's id and the function's name."""

    index: int
    function: FunctionDelta
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: Literal["function"] | msgspec.UnsetType = msgspec.UNSET


class Delta(Reply, omit_defaults=True):
    """The new part of a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallDelta] | msgspec.UnsetType = msgspec.UNSET


class ChunkChoice(Reply):
    """The new part of an answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    stop_reason: StopReason | msgspec.UnsetType = msgspec.UNSET


class ChatCompletionChunk(Head):
    """An event of a stream of /v1/chat/completions. The last event before "[DONE]" has the receipt."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]
    usage: Usage | None = None
    mlx_engine: Receipt | None = None


class TextLogprobs(Reply):
    """Log-probabilities of the tokens of an answer of /v1/completions. With `echo`, the prompt's tokens come first.

    The first token of the prompt has null in place of a log-probability.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class RankedLogprob(Reply):
    """A token of a prompt, or a token that is likely at the same position."""

    logprob: float
    rank: int
    decoded_token: str


# One element per token of a prompt. The element maps the ids of this token, and of likely tokens at the same position,
# to their `RankedLogprob`; the first element is None.
PromptLogprobs = list[dict[str, RankedLogprob] | None]


class TextChoice(Reply):
    """An answer of /v1/completions; in a stream, the new part of an answer."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    stop_reason: StopReason | msgspec.UnsetType = msgspec.UNSET


class TextCompletion(Head):
    """The reply of /v1/completions, or an event of its stream. The last event before "[DONE]" has the receipt."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: Usage | None = None
    mlx_engine: Receipt | None = None


class Model(Reply):
    """A model, with the fields of OpenAI's and Anthropic's APIs, and more fields.

    Attributes:
        alias_of: the model's own name, if this entry is an alias.
        reason: why the model could not be loaded, why its files could not be read, or why its engine thread has died.
        max_model_len: the context length in tokens; vLLM has the same key.
        size: bytes of the model's files.
        weights: the type of most of the weights.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    type: Literal["model"]
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    state: Literal["loaded", "loading", "unloading", "on disk", "failed", "closing", "dead"]
    alias_of: str | msgspec.UnsetType = msgspec.UNSET
    reason: str | msgspec.UnsetType = msgspec.UNSET
    max_model_len: int | msgspec.UnsetType = msgspec.UNSET
    activations: str | msgspec.UnsetType = msgspec.UNSET
    kv_type: str | msgspec.UnsetType = msgspec.UNSET
    size: int | msgspec.UnsetType = msgspec.UNSET
    architecture: str | msgspec.UnsetType = msgspec.UNSET
    weights: str | msgspec.UnsetType = msgspec.UNSET
    n_parameters: int | msgspec.UnsetType = msgspec.UNSET


class ModelList(Reply):
    """The reply of /v1/models. All models are on one page, so `has_more` is false."""

    object: Literal["list"]
    data: list[Model]
    has_more: Literal[False]
    first_id: str
    last_id: str


class Tokens(Reply):
    """The reply of /tokenize."""

    tokens: list[int]
    count: int
    max_model_len: int


class Text(Reply):
    """The reply of /detokenize: the text, both as `content` (llama.cpp's key) and as `prompt` (vLLM's key)."""

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


class PromptUsage(Reply):
    """Counts of tokens of a request that generates no tokens."""

    prompt_tokens: int
    total_tokens: int


class VectorReceipt(Reply):
    """The receipt of vectors or scores. `digest` is the SHA-256 of the float32 vectors, or of the float32 scores.

    The digest covers the scores of all documents in the order of the request, including those that `top_n` leaves out.
    """

    digest: str
    activations: Activations
    kv_type: KVType


class Embedding(Reply):
    """The vector of a text: numbers, or little-endian float32 as base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(Reply):
    """The reply of /v1/embeddings."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: PromptUsage
    mlx_engine: VectorReceipt


class RankedText(Reply):
    """The text of a document."""

    text: str


class RankedDocument(Reply):
    """A document: its index in the request, and its relevance from 0 to 1."""

    index: int
    relevance_score: float
    document: RankedText | msgspec.UnsetType = msgspec.UNSET


class Ranking(Reply):
    """The reply of /v1/rerank: the most relevant document first."""

    id: str
    object: Literal["list"]
    model: str
    results: list[RankedDocument]
    usage: PromptUsage
    mlx_engine: VectorReceipt


class Health(Reply):
    """The reply of /health."""

    status: Literal["ok", "loading", "closing", "stalled", "dead"]


class Readiness(Reply):
    """The reply of /ready. If models can be unloaded, `models` maps the name of each model to its state."""

    status: Literal["ok", "loading", "closing", "stalled", "dead", "failed"]
    models: dict[str, str] | msgspec.UnsetType = msgspec.UNSET


class Error(Reply):
    """The error message, and the parameter that is wrong."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorReply(Reply):
    """The reply to a request that failed."""

    error: Error


# ---- /v1/messages ----


class ThinkingBlock(Reply, tag_field="type", tag="thinking"):
    """Reasoning. All blocks have the same signature, which the server never checks."""

    thinking: str
    signature: str


class TextBlock(Reply, tag_field="type", tag="text"):
    """Text of the answer."""

    text: str
    citations: None


class ToolUseBlock(Reply, tag_field="type", tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: dict[str, Any]


Block = ThinkingBlock | TextBlock | ToolUseBlock


class MessageUsage(Reply):
    """Counts of tokens. `input_tokens` excludes the cached tokens, which are in `cache_read_input_tokens`."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class Ending(Reply):
    """The reason why an answer ended."""

    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None


class Message(Ending):
    """The reply of /v1/messages. In the first event of a stream, `content` is still empty."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Block]
    usage: MessageUsage
    mlx_engine: Receipt | msgspec.UnsetType = msgspec.UNSET


class MessageError(Reply):
    """The type and the message of an error."""

    type: str
    message: str


class MessagesErrorReply(Reply):
    """The reply of /v1/messages to a request that failed; if a stream has begun, an event of the stream."""

    type: Literal["error"]
    error: MessageError
    request_id: str


class MessagesEvent(Reply, kw_only=True):
    """An event of a stream of /v1/messages. `type` says which other keys the event has."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "ping",
    ]
    message: Message | msgspec.UnsetType = msgspec.UNSET
    index: int | msgspec.UnsetType = msgspec.UNSET
    content_block: Block | msgspec.UnsetType = msgspec.UNSET
    delta: dict[str, str | None] | msgspec.UnsetType = msgspec.UNSET
    usage: MessageUsage | msgspec.UnsetType = msgspec.UNSET
    mlx_engine: Receipt | msgspec.UnsetType = msgspec.UNSET


class Count(Reply):
    """The reply of /v1/messages/count_tokens."""

    input_tokens: int


# ---- /v1/responses ----

Status = Literal["in_progress", "completed", "incomplete"]


class ReasoningText(Reply, tag_field="type", tag="reasoning_text"):
    """Text of the reasoning."""

    text: str


class OutputText(Reply, tag_field="type", tag="output_text"):
    """Text of the answer."""

    text: str
    annotations: list[str]
    logprobs: list[str]


class ReasoningItem(Reply, tag_field="type", tag="reasoning"):
    """Reasoning. If the request asks for `encrypted_content`, this key has the text in base64, not encrypted."""

    id: str
    status: Status
    summary: list[str]
    content: list[ReasoningText]
    encrypted_content: str | msgspec.UnsetType = msgspec.UNSET


class MessageItem(Reply, tag_field="type", tag="message"):
    """The message of the answer."""

    id: str
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class FunctionCallItem(Reply, tag_field="type", tag="function_call"):
    """A call of a tool, with its arguments as JSON text."""

    id: str
    status: Status
    call_id: str
    name: str
    arguments: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET


Item = ReasoningItem | MessageItem | FunctionCallItem


class InputDetails(Reply):
    """The number of prompt tokens that were taken from the prefix cache. `cache_write_tokens` is always 0."""

    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(Reply):
    """The number of tokens of the reasoning. To count them, the server encodes the text again."""

    reasoning_tokens: int


class ResponseUsage(Reply):
    """Counts of tokens."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseError(Reply):
    """The error of a failed response."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class Response(Reply, kw_only=True):
    """The reply of /v1/responses. It repeats parameters of the request, such as `instructions`."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    error: ResponseError | None
    incomplete_details: dict[str, str] | None
    model: str
    output: list[Item]
    previous_response_id: None
    temperature: float
    top_p: float
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    reasoning: dict[str, str | None]
    store: Literal[False]
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    truncation: Literal["disabled"]
    completed_at: int | msgspec.UnsetType = msgspec.UNSET
    usage: ResponseUsage | msgspec.UnsetType = msgspec.UNSET
    prompt_cache_key: str | msgspec.UnsetType = msgspec.UNSET
    safety_identifier: str | msgspec.UnsetType = msgspec.UNSET
    user: str | msgspec.UnsetType = msgspec.UNSET
    mlx_engine: Receipt | msgspec.UnsetType = msgspec.UNSET


class ResponsesEvent(Reply, kw_only=True):
    """An event of a stream of /v1/responses. `type` says which other keys the event has."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    sequence_number: int
    response: Response | msgspec.UnsetType = msgspec.UNSET
    output_index: int | msgspec.UnsetType = msgspec.UNSET
    content_index: int | msgspec.UnsetType = msgspec.UNSET
    item_id: str | msgspec.UnsetType = msgspec.UNSET
    item: Item | msgspec.UnsetType = msgspec.UNSET
    part: ReasoningText | OutputText | msgspec.UnsetType = msgspec.UNSET
    delta: str | msgspec.UnsetType = msgspec.UNSET
    text: str | msgspec.UnsetType = msgspec.UNSET
    logprobs: list[str] | msgspec.UnsetType = msgspec.UNSET
    name: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str | msgspec.UnsetType = msgspec.UNSET
