"""The rows of a measurement: every backend, or a server, with every number of clients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mlx_engine.backends import unavailable
from mlx_engine.bench.concurrency.load import Target
from mlx_engine.bench.concurrency.measure import Announce, Plan, Row, shared_prefix, throughput, warm_up
from mlx_engine.bench.concurrency.scheduled import Scheduled
from mlx_engine.bench.concurrency.served import Served
from mlx_engine.bench.origin import describe, digest, origin
from mlx_engine.bench.roofline import Limits
from mlx_engine.bench.run import Bench
from mlx_engine.checkpoint.sources import resolve
from mlx_engine.engine import Engine, open_source
from mlx_engine.errors import require
from mlx_engine.weights.allowed import open_model
from mlx_engine.weights.conversion import STORED, Conversion

if TYPE_CHECKING:
    from mlx_engine.distributed.shard import Shard


def engine_rows(
    model: str,
    backends: Sequence[str],
    plan: Plan,
    *,
    announce: Announce = lambda done, total, title: None,
    quant: Conversion = STORED,
    threads: int | None = None,
    jit: bool = True,
    allow_settings: Sequence[str] = (),
    allow_too_large: bool = False,
    overlap: bool = True,
    prefix_cache: bool = False,
    shard: Shard | None = None,
) -> Iterator[list[Row]]:
    """Yield all rows so far, after each round: one per backend and number of clients.

    `shard` has the ranks that share the model with this process, which is rank 0 of them.

    Raises:
        BackendUnavailableError: a name is not the name of a backend.
        OptionError: a prompt and its answer do not fit the model's context.
    """
    reasons = {name: unavailable(name) for name in backends}
    path = resolve(model)
    checkpoint = open_model(path, allow_settings)
    common = {**origin(), **describe(checkpoint), "model_sha256": digest(path), "quant": str(quant)}
    common |= {"jit": jit, "overlap": overlap, "kv": True, "prefix_cache": prefix_cache}
    found: list[Row] = []
    for name in backends:
        about = {**common, "backend": name, "threads": threads, "unavailable": reasons[name]}
        if reasons[name] is not None:
            found += [{**about, **plan.load.numbers, "concurrency": n} for n in plan.concurrency]
            yield found
            continue
        how = {"threads": threads, "jit": jit, "allow_settings": allow_settings, **quant.options()}
        opened = open_source(path, name, allow_too_large=allow_too_large, shard=shard, **how)
        context, longest = opened.config.context_length, plan.load.longest
        require(longest <= context, option=plan.load.name, expected=f"at most {context:,} tokens", found=longest)
        engine = Engine(opened)
        bench = Bench(engine, checkpoint, quant=quant, jit=jit)
        settings: dict[str, Any] = {"slots": max(plan.concurrency), "longest": longest, "overlap": overlap}
        try:
            target = Scheduled(engine, bench.sizes, prefix_cache=prefix_cache, **settings)
            rows: list[Row] = []
            for rows in target_rows(target, plan, bench.limits, announce):
                yield [*found, *({**about, **bench.about(), **row} for row in rows)]
            found += [{**about, **bench.about(), **row} for row in rows]
        finally:
            bench.close()


def server_rows(server: Served, plan: Plan, *, announce: Announce = lambda *report: None) -> Iterator[list[Row]]:
    """Yield all rows so far, after each round: one per number of clients of a server."""
    common = {**origin(), "model_name": server.model, "model_size": None, "model_n_params": None, "quant": "keep"}
    common |= {"backend": "HTTP", "url": server.url, "device": None, "threads": None, "unavailable": None, "kv": True}
    for rows in target_rows(server, plan, None, announce):
        yield [{**common, **row} for row in rows]


def target_rows(target: Target, plan: Plan, limits: Limits | None, announce: Announce) -> Iterator[list[Row]]:
    """Warm up, then yield the rows after each round: of a shared prefix if the load has one, else of throughput."""
    warm_up(target, plan)
    if plan.load.shared_prefix:
        yield from shared_prefix(target, plan, announce)
    else:
        yield from throughput(target, plan, limits, announce)
