"""The times, rows and bytes of a step, recorded with the requests that took part in it."""

from __future__ import annotations

from mlx_engine.decode.passes import Step
from mlx_engine.schedule.answer import answer_of
from mlx_engine.schedule.traffic import Traffic


def account(step: Step, traffic: Traffic | None) -> float:
    """Record a step whose tokens are not in the outputs yet, and return the bytes it read: 0 without `traffic`."""
    nbytes = traffic.nbytes(step.parts) if traffic and step.parts else 0.0
    _account_requests(step, nbytes)
    n_rows = step.n_rows
    for part in step.parts:
        answer = answer_of(part)
        request = answer.request
        request.n_prefilled = max(request.n_prefilled, min(len(request.prompt_ids), answer.kv.length))
        answer.seconds += step.seconds
        answer.share += step.seconds * part.n / n_rows
    sampling = None if step.sampling is None or not step.chosen else step.sampling / len(step.chosen)
    for part, _ in step.chosen:
        answer = answer_of(part)
        if answer.index == 0:
            answer.request.metrics.record_pass(answer.seconds, share=answer.share, sampling=sampling)
        answer.seconds = answer.share = 0.0
    return nbytes


def _account_requests(step: Step, nbytes: float) -> None:
    """Record a step once with each of its requests, however many of its answers took part."""
    n_rows = step.n_rows
    for request in dict.fromkeys(answer_of(part).request for part in step.parts):
        request.n_steps += 1
        request.n_rows += n_rows
        request.n_bytes += nbytes
        if request.times.first_token is not None:
            request.decode_bytes += nbytes
            request.decode_seconds += step.seconds
