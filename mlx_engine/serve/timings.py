"""The receipt of a request: where its time went. Names are llama.cpp's where the meaning is the same."""

from __future__ import annotations

from mlx_engine.loop.request import Request


def timings(
    request: Request, *, received: float, tokenized: float, written: float, bandwidth: float | None = None
) -> dict[str, object]:
    """Return the times and counts of a request whose answers have ended.

    The parts tokenize_ms, queue_ms, prompt_ms, predicted_ms and write_ms follow each other, and add up to total_ms.
    Keys, in milliseconds unless they are counts or rates:
        tokenize_ms: parsing the request, rendering the chat template and encoding; of all prompts of the reply.
        queue_ms: from then until the request had a slot.
        prompt_ms: from then to the first token: prefill, shared with other requests.
        predicted_ms: from the first token to the last.
        write_ms: from then to this receipt: the client had taken all text before, if the reply is a stream.
        total_ms: from the arrival of the HTTP request to this receipt.
        cache_n, prompt_n: tokens of the prompt that were taken from the prefix cache, and that were computed.
        prompt_per_second: prompt_n per second of prompt_ms.
        predicted_n: tokens of all answers.
        predicted_per_second: tokens after the first of each answer, per second of predicted_ms; null without any.
        steps: forward passes that took part in.
        rows_per_step: the mean number of tokens in them, of all requests.
        bytes_read: bytes of weights, keys and values that these passes read, counted from their sizes.
        bandwidth_share: bytes read per second of the passes after the first token, divided by the memory bandwidth
            that was measured when the server started; null if it is unknown. It is above 1 if the machine was
            busier then.
        preemptions: how often an answer lost its pages and was computed again.

    Args:
        request: the request.
        received: when the HTTP request arrived, in seconds of the clock of the scheduler; so are the other times.
        tokenized: when its prompts had become tokens.
        written: when the receipt is made.
        bandwidth: the memory bandwidth in bytes per second; None if it is unknown.
    """
    times = request.times
    n_computed = len(request.prompt_ids) - request.n_cached
    n_tokens = sum(len(output.token_ids) for output in request.outputs)
    prefill, decode = _seconds(times.admitted, times.first_token), _seconds(times.first_token, times.ended)
    rate = _rate(request.decode_bytes, request.decode_seconds)
    return {
        "tokenize_ms": _ms(tokenized - received),
        "queue_ms": _ms(_seconds(tokenized, times.admitted)),
        "prompt_ms": _ms(prefill),
        "predicted_ms": _ms(decode),
        "write_ms": _ms(_seconds(times.ended, written)),
        "total_ms": _ms(written - received),
        "cache_n": request.n_cached,
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


def _seconds(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _rate(n: float, per: float | None) -> float | None:
    return n / per if per and n > 0 else None
