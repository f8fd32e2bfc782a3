"""The digests of a request that has a scheduler without a prefix cache to itself."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import mlx_engine
from mlx_engine.decode.logprobs import digest
from mlx_engine.options import Options
from mlx_engine.schedule import Scheduler

# Parameters of the API that are no options of the engine.
OTHERS = {"messages", "prompt", "max_tokens", "n", "stream"}


def digests(body: dict[str, Any]) -> list[str]:
    """Return the digest of each answer to a request, which runs alone."""
    return _digests(json.dumps({**body, "stream": False}, sort_keys=True))


@cache
def _digests(text: str) -> list[str]:
    body: dict[str, Any] = json.loads(text)
    options = Options.of(
        body["max_tokens"], logprobs=0, **{name: value for name, value in body.items() if name not in OTHERS}
    )
    n = body.get("n", 1)
    request = engine().request(body["messages"] if "messages" in body else body["prompt"], options, n=n)
    scheduler = _scheduler(n)
    scheduler.submit(request)
    while scheduler.has_work:
        scheduler.step()
    if request.error is not None:
        raise request.error
    return [digest(one.token_ids, [token.logprob for token in one.logprobs or ()]) for one in request.outputs]


@cache
def engine() -> mlx_engine.Engine:
    return mlx_engine.load("builtin", threads=1)


@cache
def _scheduler(slots: int) -> Scheduler:
    return engine().scheduler(slots=slots, prefix_cache=False, kv_memory=32 << 20)
