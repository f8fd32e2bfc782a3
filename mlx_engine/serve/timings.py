"""The receipt of a request: where its time went. Names are llama.cpp's where the meaning is the same."""

from __future__ import annotations

from mlx_engine.schedule import Request


def timings(request: Request, *, received: float, tokenize_seconds: float, write_seconds: float) -> dict[str, object]:
    """Return the times and counts of a request whose answers have ended.

    Keys, in milliseconds unless they are counts or rates:
        tokenize_ms: rendering the chat template and encoding the prompt; of all prompts of the reply.
        queue_ms: from the end of this until the request had a slot.
        prompt_ms: from then to the first token: prefill, shared with other requests.
        predicted_ms: from the first token to the last.
        write_ms: waiting until the client had taken what was written; null if the reply is not a stream.
        total_ms: from the arrival of the HTTP request to the last token.
        cache_n, prompt_n: tokens of the prompt that were taken from the prefix cache, and that were computed.
        prompt_per_second: prompt_n per second of prompt_ms.
        predicted_n: tokens of all answers.
        predicted_per_second: tokens after the first of each answer, per second of predicted_ms; null without any.
        steps: forward passes that took part in.
        rows_per_step: the mean number of tokens in them, of all requests.
        preemptions: how often an answer lost its pages and was computed again.
    """
    times = request.times
    n_computed = len(request.prompt_ids) - request.n_cached
    n_tokens = sum(len(output.token_ids) for output in request.outputs)
    prefill, decode = _seconds(times.admitted, times.first_token), _seconds(times.first_token, times.ended)
    return {
        "tokenize_ms": tokenize_seconds * 1e3,
        "queue_ms": _ms(_seconds(times.submitted, times.admitted)),
        "prompt_ms": _ms(prefill),
        "predicted_ms": _ms(decode),
        "write_ms": write_seconds * 1e3 if write_seconds else None,
        "total_ms": _ms(_seconds(received, times.ended)),
        "cache_n": request.n_cached,
        "prompt_n": n_computed,
        "prompt_per_second": _rate(n_computed, prefill),
        "predicted_n": n_tokens,
        "predicted_per_second": _rate(n_tokens - len(request.outputs), decode),
        "steps": request.n_steps,
        "rows_per_step": _rate(request.n_rows, request.n_steps),
        "preemptions": request.n_preemptions,
    }


def _seconds(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _rate(n: int, per: float | None) -> float | None:
    return n / per if per and n > 0 else None
