"""Replies and streams of /v1/chat/completions and /v1/completions, and `Reply`, the base class for all APIs.

The key `mlx_engine` of a reply has the receipt: digests, the seed and times, to compare and reproduce answers. The
receipt can also name the cause of a cache miss, so that clients can change their prompts to reuse more of the cache.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlx_engine.cache.prefix import SHOWN
from mlx_engine.conversation.answer import AnswerReader, delta_of, message_of
from mlx_engine.conversation.events import Event
from mlx_engine.loop.logprobs import TokenLogprobs, digest
from mlx_engine.loop.output import Output
from mlx_engine.loop.request import Request
from mlx_engine.loop.speculation import speculation_of
from mlx_engine.serve.call import Call, Progress
from mlx_engine.serve.errors import ApiError, new_id
from mlx_engine.serve.prometheus import since
from mlx_engine.serve.sse import DONE, comment, event
from mlx_engine.tokenizer import Tokenizer

Json = dict[str, object]


class Reply(ABC):
    """The reply to an HTTP call, as a whole or as the events of a stream.

    Args:
        call: the requests of the HTTP call, and their outputs.
        model: the name of the model.
        fingerprint: the version and backend that computed the answer.
        types: the types of activations, and of keys and values, with which the answer was computed.
        ignored: the names of the parts of the request that the server ignores.
        explains_cache: whether the receipt says why no more tokens were cached, see `explained`.
        bandwidth: function that returns the memory bandwidth in bytes per second, or None if it is unknown.
        clock: function that returns the time in seconds; the times in `call` must be from the same clock.
    """

    prefix: str

    def __init__(
        self,
        call: Call,
        tokenizer: Tokenizer,
        *,
        model: str,
        fingerprint: str,
        types: Mapping[str, str],
        ignored: Sequence[str] = (),
        explains_cache: bool = True,
        bandwidth: Callable[[], float | None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._call, self._tokenizer, self._ignored, self._types = call, tokenizer, ignored, types
        self._explains_cache, self._bandwidth, self._clock = explains_cache, bandwidth, clock
        self._model, self._fingerprint, self._created = model, fingerprint, int(time.time())
        self.id = new_id(self.prefix)

    @abstractmethod
    def whole(self) -> Json:
        """Return the whole reply. All answers must have ended."""

    @abstractmethod
    def begin(self) -> bytes:
        """Return the beginning of a stream, which is sent before prefill."""

    @abstractmethod
    def heartbeat(self) -> bytes:
        """Return the data that keeps a stream alive while there is no new text."""

    @abstractmethod
    def news(self) -> bytes:
        """Return the events with the text and tokens that have arrived since `news` was last called."""

    @abstractmethod
    def end(self) -> bytes:
        """Return the last events of a stream, including those that `news` has not returned."""

    @abstractmethod
    def failure(self, error: ApiError) -> bytes:
        """Return the last events of a stream whose call has failed."""

    @property
    def n_prompt(self) -> int:
        """The number of tokens of all prompts."""
        return sum(len(request.prompt_ids) for request in self._call.requests)

    @property
    def n_cached(self) -> int:
        """The number of tokens of all prompts that were taken from the prefix cache."""
        return sum(request.n_cached for request in self._call.requests)

    @property
    def n_proposed(self) -> int:
        """The number of proposed tokens (see loop/speculation.py) that forward passes have run."""
        return sum(request.n_proposed for request in self._call.requests)

    @property
    def n_accepted(self) -> int:
        """The number of proposed tokens that were accepted, because sampling chose the same tokens."""
        return sum(request.n_accepted for request in self._call.requests)

    @property
    def n_generated(self) -> int:
        """The number of tokens of all answers, including end-of-text tokens."""
        return sum(progress.n_tokens for _, progress in self._call.outputs)

    def receipt(self) -> Json:
        """Return the receipt: digests of the answers, the types and the seed that reproduce them, times, cache use.

        `digests` has, for each answer, a digest of its tokens and log-probabilities; `digest` is the first of these.
        `timings` and `cache` are objects, or lists if there are several prompts.
        """
        call = self._call
        digests = [
            digest(output.token_ids, [token.logprob for token in output.logprobs or ()]) for output, _ in call.outputs
        ]
        about = {"received": call.received, "tokenized": call.tokenized, "written": self._clock()}
        times = [timings(request, **about, bandwidth=self._bandwidth()) for request in call.requests]
        cache = [
            explained(request, self._tokenizer) if self._explains_cache else {"cached_tokens": request.n_cached}
            for request in call.requests
        ]
        return {
            "digest": digests[0],
            "digests": digests,
            **self._types,
            "seed": call.requests[0].options.sampling.seed,
            "timings": times[0] if len(times) == 1 else times,
            "cache": cache[0] if len(cache) == 1 else cache,
            **({"ignored": list(self._ignored)} if self._ignored else {}),
            **({"speculation": speculation_of([one.drafters for one in call.requests])} if self.n_proposed else {}),
            **self._constraint(),
        }

    def _constraint(self) -> Json:
        """Return the key `constraint`, an object with the constraint's digest and `allowed`; {} without a constraint.

        `allowed` has a list for each answer. For each token of the answer, the list has the sum of the probabilities of
        all tokens that the constraint allows at this position.
        """
        constraint = self._call.requests[0].options.constraint
        if constraint is None:
            return {}
        allowed = [[token.allowed for token in output.logprobs or ()] for output, _ in self._call.outputs]
        return {"constraint": {"digest": constraint.digest, "allowed": allowed}}


class Choices(Reply):
    """A reply of /v1/chat/completions or /v1/completions: a list of choices, one per answer.

    Args:
        n_logprobs: the number of most likely tokens to list for each token; None leaves out log-probabilities.
        n_prompt_logprobs: how many of the most likely tokens `prompt_logprobs` (vLLM's key) lists for each token of a
            prompt; None leaves out `prompt_logprobs`.
        includes_usage: whether the last chunk of a stream has the counts of tokens in `usage`. If so, `usage` is null
            in all other chunks.
    """

    kind: str
    chunk_kind: str

    def __init__(
        self,
        call: Call,
        tokenizer: Tokenizer,
        *,
        n_logprobs: int | None = None,
        n_prompt_logprobs: int | None = None,
        includes_usage: bool = False,
        **about: Any,
    ) -> None:
        super().__init__(call, tokenizer, **about)
        self._n_logprobs, self._n_prompt_logprobs, self._includes_usage = n_logprobs, n_prompt_logprobs, includes_usage
        self._usage: Json = {"usage": None} if includes_usage else {}
        self._head: Json = {
            "id": self.id,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
        }
        self._sent = [Progress() for _ in call.outputs]
        self._owners = [request for request in call.requests for _ in request.outputs]

    def begin(self) -> bytes:
        """Return a comment with the phase of the call, such as "queued" or "decode"."""
        return comment(self._call.phase)

    def heartbeat(self) -> bytes:
        return comment(self._call.phase)

    def news(self) -> bytes:
        return b"".join(map(event, self.chunks()))

    def end(self) -> bytes:
        chunks = self.chunks()
        if self._includes_usage:
            chunks.append({**self._chunk({}), "choices": [], "usage": self.usage()})
        chunks[-1]["mlx_engine"] = self.receipt()
        return b"".join(map(event, chunks)) + DONE

    def failure(self, error: ApiError) -> bytes:
        return b"".join(map(event, [*self.chunks(), error.body()]))

    def whole(self) -> Json:
        choices = [
            self._choice(
                i, "".join(output.pieces[: progress.n_pieces]), self._tokens(output, Progress(), progress), progress
            )
            for i, (output, progress) in enumerate(self._call.outputs)
        ]
        found = {**self._head, "object": self.kind, "choices": choices, "usage": self.usage()}
        return {**found, "mlx_engine": self.receipt()}

    def chunks(self) -> list[Json]:
        """Return the chunks of the text and tokens that have arrived since `chunks` was last called."""
        found: list[Json] = []
        for i, (output, progress) in enumerate(self._call.outputs):
            sent, self._sent[i] = self._sent[i], progress
            if progress == sent:
                continue
            if sent.n_tokens == 0:
                found += map(self._chunk, self._opening(i))
            text = "".join(output.pieces[sent.n_pieces : progress.n_pieces])
            tokens = self._tokens(output, sent, progress)
            if text or tokens:
                delta = self._delta(i, text, tokens)
                found += [] if delta is None else [self._chunk(delta)]
            if progress.finish_reason is not None:
                found += map(self._chunk, self._closing(i, progress.finish_reason))
        return found

    def usage(self) -> Json:
        """Return the counts of tokens, including end-of-text tokens. A prompt with several answers counts once."""
        right, wrong = self.n_accepted, self.n_proposed - self.n_accepted
        proposed = {"accepted_prediction_tokens": right, "rejected_prediction_tokens": wrong}
        return {
            "prompt_tokens": self.n_prompt,
            "completion_tokens": self.n_generated,
            "total_tokens": self.n_prompt + self.n_generated,
            "prompt_tokens_details": {"cached_tokens": self.n_cached},
            **({"completion_tokens_details": proposed} if self.n_proposed else {}),
        }

    def _chunk(self, choice: Json) -> Json:
        return {**self._head, "object": self.chunk_kind, "choices": [choice], **self._usage}

    def _tokens(self, output: Output, after: Progress, until: Progress) -> Sequence[TokenLogprobs] | None:
        """Return the log-probabilities of the tokens that an output had at `until`, but not yet at `after`.

        An end-of-text or stop token is left out, because its text is not part of the answer.
        """
        if self._n_logprobs is None or output.logprobs is None:
            return None
        is_hidden = until.finish_reason == "stop" and output.has_end_token
        return output.logprobs[after.n_tokens : until.n_tokens - is_hidden]

    def _ending(self, i: int, reason: str | None) -> Json:
        """Return the keys `finish_reason` and `stop_reason` of an answer.

        `stop_reason` is the request's stop string or stop token id that ended the answer, else None, as in vLLM.
        """
        output, _ = self._call.outputs[i]
        return {"finish_reason": reason, "stop_reason": output.stop if reason == "stop" else None}

    def _prompt_logprobs(self, request: Request) -> Json:
        """Return the key `prompt_logprobs` with its value; {} if the request does not ask for the key."""
        n, tokens = self._n_prompt_logprobs, request.prompt_logprobs
        return {} if n is None or tokens is None else {"prompt_logprobs": prompt_logprobs(self._tokenizer, tokens, n)}

    @abstractmethod
    def _choice(self, i: int, text: str, tokens: Sequence[TokenLogprobs] | None, progress: Progress) -> Json:
        """Return a choice of the whole reply."""

    @abstractmethod
    def _opening(self, i: int) -> list[Json]:
        """Return the choice of each chunk that begins an answer; [] if there are no such chunks."""

    @abstractmethod
    def _delta(self, i: int, text: str, tokens: Sequence[TokenLogprobs] | None) -> Json | None:
        """Return the choice of a chunk with new text.

        Return None if the text is held back, because it may begin a tool call, or a marker of reasoning.
        """

    @abstractmethod
    def _closing(self, i: int, reason: str) -> list[Json]:
        """Return the choice of each chunk that ends an answer."""


class ChatReply(Choices):
    """The reply of /v1/chat/completions. The answers may call `tools`."""

    prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(
        self, call: Call, tokenizer: Tokenizer, *, tools: Sequence[Mapping[str, Any]] = (), **about: Any
    ) -> None:
        super().__init__(call, tokenizer, **about)
        self._tools = tools
        self._readers = [self._reader(i) for i in range(len(call.outputs))]

    def heartbeat(self) -> bytes:
        """Return a comment with the phase, and a chunk without content, because some agents ignore comments."""
        return super().heartbeat() + event(self._chunk(self._with_delta(0, {})))

    def _reader(self, i: int) -> AnswerReader:
        return AnswerReader.after(self._tokenizer, self._owners[i].prompt_ids, self._tools)

    def whole(self) -> Json:
        return {**super().whole(), **self._prompt_logprobs(self._call.requests[0])}

    def _choice(self, i: int, text: str, tokens: Sequence[TokenLogprobs] | None, progress: Progress) -> Json:
        self._readers[i] = self._reader(i)
        found = message_of([*self._read(i, text), *self._finish(i)])
        return {
            "index": i,
            "message": {"role": "assistant", "content": None, "refusal": None, **found},
            "logprobs": self._logprobs(tokens),
            **self._ending(i, progress.finish_reason),
        }

    def _opening(self, i: int) -> list[Json]:
        return [self._with_delta(i, {"role": "assistant", "content": ""})]

    def _delta(self, i: int, text: str, tokens: Sequence[TokenLogprobs] | None) -> Json | None:
        events = self._read(i, text)
        if not events and tokens is None:
            return None
        return {**self._with_delta(i, delta_of(events) or {"content": ""}), "logprobs": self._logprobs(tokens)}

    def _closing(self, i: int, reason: str) -> list[Json]:
        rest = self._finish(i)
        last = [self._with_delta(i, delta_of(rest) or {"content": ""})] if rest else []
        return [*last, {**self._with_delta(i, {}), **self._ending(i, reason)}]

    def _read(self, i: int, text: str) -> list[Event]:
        return self._readers[i].add(text, self._call.outputs[i][0].marks)

    def _finish(self, i: int) -> list[Event]:
        return self._readers[i].finish(is_cut=self._call.outputs[i][1].finish_reason != "stop")

    def _ending(self, i: int, reason: str | None) -> Json:
        found, reader = super()._ending(i, reason), self._readers[i]
        # A call that a stop string or token has cut off is not counted, because clients must not run it.
        n_calls = reader.n_calls if found["stop_reason"] is None else reader.n_ended
        return {**found, "finish_reason": "tool_calls"} if reason == "stop" and n_calls else found

    def _with_delta(self, i: int, delta: Json) -> Json:
        return {"index": i, "delta": delta, "logprobs": None, "finish_reason": None}

    def _logprobs(self, tokens: Sequence[TokenLogprobs] | None) -> Json | None:
        return None if tokens is None else chat_logprobs(self._tokenizer, tokens)


class CompletionReply(Choices):
    """The reply of /v1/completions.

    Args:
        echoes: for each choice the text of its prompt, with which the choice's text begins (the parameter `echo`);
            empty without `echo`.
        is_scored: whether the log-probabilities of a choice begin with those of its prompt.
    """

    prefix, kind, chunk_kind = "cmpl-", "text_completion", "text_completion"

    def __init__(
        self, call: Call, tokenizer: Tokenizer, *, echoes: Sequence[str] = (), is_scored: bool = False, **about: Any
    ) -> None:
        super().__init__(call, tokenizer, **about)
        self._echoes, self._is_scored = echoes or [""] * len(call.outputs), is_scored
        self._offsets = [0] * len(call.outputs)

    def _choice(self, i: int, text: str, tokens: Sequence[TokenLogprobs] | None, progress: Progress) -> Json:
        found = self._text(i, self._echoes[i] + text, tokens, len(self._echoes[i]))
        if self._is_scored:
            before, after = self._echo_logprobs(i), found["logprobs"]
            found["logprobs"] = {name: [*before[name], *after[name]] for name in before}
        return {**found, **self._ending(i, progress.finish_reason), **self._prompt_logprobs(self._owners[i])}

    def _opening(self, i: int) -> list[Json]:
        self._offsets[i] = len(self._echoes[i])
        if self._is_scored:
            return [{**self._text(i, self._echoes[i], None, 0), "logprobs": self._echo_logprobs(i)}]
        return [self._text(i, self._echoes[i], None, 0)] if self._echoes[i] else []

    def _tokens(self, output: Output, after: Progress, until: Progress) -> Sequence[TokenLogprobs] | None:
        """Return the log-probabilities as the base class does; if `is_scored`, include an end-of-text token.

        Clients that score prompts ask for one new token, and drop the last entry. If an end-of-text token had no entry,
        they would drop the entry of the prompt's last token.
        """
        if self._is_scored:
            return (output.logprobs or [])[after.n_tokens : until.n_tokens]
        return super()._tokens(output, after, until)

    def _echo_logprobs(self, i: int) -> dict[str, list[Any]]:
        """Return the value of `logprobs` for the prompt of a choice. The first token has no log-probability."""
        request, n = self._owners[i], self._n_logprobs or 0
        tokens = [replace(token, top=token.top[:n]) for token in request.prompt_logprobs or ()]
        found = completion_logprobs(self._tokenizer, tokens, 0)
        return {
            "tokens": [_token_text(self._tokenizer, request.prompt_ids[0]), *found["tokens"]],
            "token_logprobs": [None, *found["token_logprobs"]],
            "top_logprobs": [None, *found["top_logprobs"]],
            "text_offset": prompt_offsets(self._tokenizer, request.prompt_ids, self._echoes[i]),
        }

    def _delta(self, i: int, text: str, tokens: Sequence[TokenLogprobs] | None) -> Json:
        choice = self._text(i, text, tokens, self._offsets[i])
        self._offsets[i] += sum(len(_token_text(self._tokenizer, token.token_id)) for token in tokens or ())
        return choice

    def _closing(self, i: int, reason: str) -> list[Json]:
        return [{**self._text(i, "", None, 0), **self._ending(i, reason)}]

    def _text(self, i: int, text: str, tokens: Sequence[TokenLogprobs] | None, offset: int) -> dict[str, Any]:
        shown = None if tokens is None else completion_logprobs(self._tokenizer, tokens, offset)
        return {"index": i, "text": text, "logprobs": shown, "finish_reason": None}


def echoes_of(requests: Sequence[Request], prompts: Sequence[object], tokenizer: Tokenizer) -> list[str]:
    """Return the text of each answer's prompt. If the prompt was given as token ids, decode them."""
    texts = [
        prompt if isinstance(prompt, str) else tokenizer.decode(request.prompt_ids)
        for request, prompt in zip(requests, prompts, strict=True)
    ]
    return [text for request, text in zip(requests, texts, strict=True) for _ in request.outputs]


def timings(
    request: Request, *, received: float, tokenized: float, written: float, bandwidth: float | None = None
) -> dict[str, object]:
    """Return the times and counts of a request whose answers have ended.

    The times are in seconds of the scheduler's clock. At `received`, the server had read the body, and the model was
    loaded. At `tokenized`, all prompts had been encoded. At `written`, the receipt is made. `bandwidth` is the memory
    bandwidth in bytes per second; None if it is unknown.

    The periods tokenize_ms, queue_ms, prompt_ms, predicted_ms and write_ms follow each other and add up to total_ms.

    Keys:
        tokenize_ms: milliseconds to wait for a turn (the permission to parse, see `limits.Turns`), parse the HTTP
            request, render the chat template, and encode all prompts of the HTTP request.
        queue_ms: from the end of encoding until the request had a slot.
        prompt_ms: from the slot to the first token. This is prefill; its passes may also run tokens of other requests.
        predicted_ms: from the first token to the last.
        write_ms: from the last token to this receipt; in a stream, this includes sending the text before the receipt.
        total_ms: from `received` to this receipt.
        cache_n: tokens of the prompt that were taken from the prefix cache.
        disk_n: how many of these were read from files.
        prompt_n: tokens of the prompt that were computed.
        prompt_per_second: prompt_n per second of prompt_ms.
        predicted_n: tokens of all answers.
        predicted_per_second: tokens per second of predicted_ms. The first token of each answer is not counted; null if
            no answer has a second token.
        steps: forward passes that ran tokens of this request.
        rows_per_step: the mean number of tokens, of all requests, in each of these passes.
        bytes_read: bytes of weights, keys and values that these passes read, computed from the sizes of the arrays.
        bandwidth_share: bytes per second that the passes after the first token read, divided by the memory bandwidth.
            Null if there were no such passes, or if the bandwidth is unknown. The bandwidth is measured when the model
            is first loaded; if the machine was busy then, the share can exceed 1.
        preemptions: how often an answer lost its pages and was computed again.
    """
    times = request.times
    n_computed = len(request.prompt_ids) - request.n_cached
    n_tokens = sum(len(output.token_ids) for output in request.outputs)
    prefill, decode = since(times.admitted, times.first_token), since(times.first_token, times.ended)
    rate = _rate(request.decode_bytes, request.decode_seconds)
    return {
        "tokenize_ms": _ms(tokenized - received),
        "queue_ms": _ms(since(tokenized, times.admitted)),
        "prompt_ms": _ms(prefill),
        "predicted_ms": _ms(decode),
        "write_ms": _ms(since(times.ended, written)),
        "total_ms": _ms(written - received),
        "cache_n": request.n_cached,
        "disk_n": request.n_from_disk,
        "prompt_n": n_computed,
        "prompt_per_second": _rate(n_computed, prefill),
        "predicted_n": n_tokens,
        "predicted_per_second": _rate(n_tokens - len(request.outputs), decode),
        "steps": request.n_steps,
        "rows_per_step": _rate(request.n_rows, request.n_steps),
        "bytes_read": round(request.n_bytes),
        "bandwidth_share": None if rate is None or bandwidth is None else rate / bandwidth,
        "preemptions": request.n_preemptions,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _rate(n: float, per: float | None) -> float | None:
    return n / per if per and n > 0 else None


def explained(request: Request, tokenizer: Tokenizer) -> dict[str, object]:
    """Return how many tokens of a prompt were cached, and why no more. The result can reveal other clients' prompts.

    The request must have been admitted.

    Keys:
        cached_tokens: tokens of the prompt that were not computed again. agreeing_tokens: how many first tokens of the
        prompt are also the first tokens of an earlier prompt with its answer. cause: why no more tokens were cached;
        null if the whole prompt was cached, or the cache had no text that continues the cached tokens. "disabled":
        there is no prefix cache. "first_use": no earlier request began with the same token. "differs": the cache
        continues with another token, because the history was edited or the template differs. "retokenized": the cache
        continues with the same text in other tokens. "evicted": the next token was cached before, and was evicted.
        "window": the keys and values that sliding-window layers need were evicted. "state": the model has recurrent
        states, which are cached only for a shorter prefix. "memory": the last cached tokens are in a page that must be
        copied, and no page was free for the copy. position: the index of the first token that differs; null unless the
        cause is "differs" or "retokenized". found, expected: the token id at this position, and the text of at most 8
        tokens from there: `found` in the prompt, `expected` in the cache.
    """
    match = request.match
    known: dict[str, object] = {"cached_tokens": request.n_cached, "agreeing_tokens": match.agreeing if match else 0}
    nothing: dict[str, object] = {"position": None, "found": None, "expected": None}
    if match is None:
        return {**known, "cause": "disabled", **nothing}
    if match.agreeing == 0 and match.end in ("new", "differs"):
        return {**known, "cause": "first_use", **nothing}
    if match.end != "differs":
        return {**known, "cause": None if match.end in ("whole", "new") else match.end, **nothing}
    found = request.prompt_ids[match.agreeing : match.agreeing + SHOWN]
    # Both texts are cut off after `SHOWN` tokens, so they count as the same if one is a prefix of the other.
    a, b = _text_bytes(tokenizer, found), _text_bytes(tokenizer, match.expected)
    is_same = a.startswith(b) or b.startswith(a)
    return {
        **known,
        "cause": "retokenized" if is_same else "differs",
        "position": match.agreeing,
        "found": _token_shown(tokenizer, found),
        "expected": _token_shown(tokenizer, match.expected),
    }


def _token_shown(tokenizer: Tokenizer, ids: Sequence[int]) -> dict[str, object]:
    return {"token_id": ids[0], "text": _text_bytes(tokenizer, ids).decode("utf-8", "replace")}


def _text_bytes(tokenizer: Tokenizer, ids: Sequence[int]) -> bytes:
    return b"".join(map(tokenizer.token_bytes, ids))


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenLogprobs]) -> dict[str, object]:
    """Return the value of `logprobs` of a choice of /v1/chat/completions."""
    content = [
        {
            **_described(tokenizer, token.token_id, token.logprob),
            "top_logprobs": [_described(tokenizer, token_id, logprob) for token_id, logprob in token.top],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenLogprobs], offset: int) -> dict[str, list[Any]]:
    """Return the value of `logprobs` of a choice of /v1/completions; `offset` characters are before the first token."""
    texts, offsets = [_token_text(tokenizer, token.token_id) for token in tokens], []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [token.logprob for token in tokens],
        # Tokens that are parts of characters may have equal texts; the most likely token of each text is listed.
        "top_logprobs": [{_token_text(tokenizer, i): value for i, value in reversed(token.top)} for token in tokens],
        "text_offset": offsets,
    }


def prompt_offsets(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> list[int]:
    """Return, for each token of a prompt, the index of the character of `text` at which the token begins.

    A BOS token that the tokenizer has added has no characters. A token that begins inside a character has the index of
    this character.
    """
    stream, offsets, n = tokenizer.stream(), list[int](), 0
    is_added = ids[0] == tokenizer.bos_id and not text.startswith(_token_text(tokenizer, ids[0]))
    for i, token_id in enumerate(ids):
        offsets.append(min(n, len(text)))
        n += 0 if i == 0 and is_added else len(stream.add(token_id))
    return offsets


def prompt_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenLogprobs], n_top: int) -> list[object]:
    """Return vLLM's `prompt_logprobs`: log-probabilities of each prompt token, and of the `n_top` most likely tokens.

    Each entry is an object whose keys are token ids. The first token has no log-probability, so its entry is None.
    """
    found: list[object] = [None]
    for token in tokens:
        ranked = [(token.token_id, token.logprob, token.rank)]
        ranked += [(i, p, rank) for rank, (i, p) in enumerate(token.top[:n_top], start=1) if i != token.token_id]
        found.append(
            {str(i): {"logprob": p, "rank": rank, "decoded_token": _token_text(tokenizer, i)} for i, p, rank in ranked}
        )
    return found


def _described(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, object]:
    data = tokenizer.token_bytes(token_id)
    return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}


def _token_text(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")
