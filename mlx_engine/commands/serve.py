"""The command `serve`: answer HTTP requests in the form of OpenAI's API."""

from __future__ import annotations

import gc
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_engine.checkpoint.hub_names import hub_name
from mlx_engine.commands.console import notice, progress_bar, reports_errors
from mlx_engine.commands.generate import choose_backend
from mlx_engine.commands.options.groups import takes_groups
from mlx_engine.commands.options.model import SUGGESTED, Backend, EngineOptions, Model
from mlx_engine.commands.options.shard import ShardOptions, follow
from mlx_engine.commands.serve_journal import opened_journal, recorder_of
from mlx_engine.commands.serve_options import AddressOptions, CapacityOptions
from mlx_engine.errors import EngineError, size

if TYPE_CHECKING:
    from mlx_engine.engine import Engine
    from mlx_engine.schedule import Scheduler
    from mlx_engine.serve.service import Service

# Python's own defaults: new objects, and collections of the younger generation, between two collections.
GARBAGE_THRESHOLD = (700, 10, 10)


@reports_errors
@takes_groups
def serve(
    *,
    model: Model = "builtin",
    backend: Backend = "auto",
    address: AddressOptions,
    capacity: CapacityOptions,
    compute: EngineOptions,
    sharing: ShardOptions,
    suggested: Annotated[
        bool, typer.Option("--suggested", help=SUGGESTED + " Otherwise OpenAI's defaults hold.")
    ] = False,
    journal: Annotated[
        Path | None,
        typer.Option("--journal", help="Append a line per request to this file; `replay` runs them again."),
    ] = None,
) -> None:
    """Answer HTTP requests in the form of OpenAI's API, many at the same time. Ctrl-C stops the server."""
    address.check()
    capacity.check()
    options = compute.changes()
    used = choose_backend(backend, strict=False)
    how = {**compute.machine(), **options}
    with sharing.joined() as shard:
        if shard is not None and not shard.is_leader:
            follow(model, used, shard, how)
            return
        answer_requests(model, used, address, capacity, {**how, "shard": shard}, options, journal, suggested=suggested)


def answer_requests(
    model: str,
    backend: str,
    address: AddressOptions,
    capacity: CapacityOptions,
    how: Mapping[str, Any],
    options: Mapping[str, Any],
    journal: Path | None,
    *,
    suggested: bool,
) -> None:
    """Serve until a signal ends the server.

    Args:
        model: the model's source.
        backend: the name of the backend.
        address: where the server listens.
        capacity: how much it takes.
        how: keyword arguments of `open_source`.
        options: those of them that change results, for the journal.
        journal: the file of the journal.
        suggested: whether the sampling that the model's files suggest is used.
    """
    import asyncio  # takes 20 ms, which no other command should pay

    from mlx_engine.serve.server import ConnectionLimit, Server, listen, most_connections, raise_descriptor_limit

    raise_descriptor_limit()
    opened, listener = opened_journal(journal), listen(address.host, address.port)
    host, url = listener.getsockname()[0], address.url(listener)
    make = partial(load_engine, model, backend, capacity, how, address.warnings(host), suggested=suggested)

    async def run() -> BaseException | None:
        from mlx_engine.serve.app import create_app

        service = new_service(make, model, address, capacity, host)

        def ready() -> None:
            if suggested and service.engine is not None:
                service.sampling, lines = suggestions(service.engine)
                for line in lines:
                    notice(line)
            service.recorder = recorder_of(service, opened, model, options) if opened else None
            for line in usage(service.engine, address, url):
                notice(line)

        service.worker.on_ready = ready
        limit = ConnectionLimit(most_connections())
        await Server(create_app(service), service.worker, grace=capacity.grace, limit=limit).serve([listener])
        return service.worker.fault

    fault = asyncio.run(run())
    if isinstance(fault, EngineError):
        raise fault
    if fault is not None:  # the fault itself could be a SystemExit, whose exit code may be 0
        raise RuntimeError("the engine thread has died") from fault


def load_engine(
    source: str,
    backend: str,
    capacity: CapacityOptions,
    options: Mapping[str, Any],
    warnings: Sequence[str],
    *,
    suggested: bool = False,
) -> tuple[Engine, Scheduler]:
    """Load the model, and make its scheduler. Called in the engine thread.

    With `suggested`, the sampling that the model's files suggest is checked before the weights are loaded.
    """
    from mlx_engine.commands.options.suggested import checked
    from mlx_engine.engine import Engine, open_source
    from mlx_engine.schedule.memory import map_pages

    with progress_bar("opening") as progress:
        opened = open_source(source, backend, progress=progress, **options)
    _ = opened.prompts.tokenizer.most_bytes  # built first: it may be missing, and the first request need not wait
    if suggested:
        checked(opened.path, opened.checkpoint.metadata)
    opened.check_memory(kv=capacity.kv_bytes)
    with progress_bar("loading") as progress:
        engine = Engine(opened, progress)
    scheduler = engine.scheduler(
        slots=capacity.slots,
        kv_memory=kv_memory(engine, capacity),
        prefix_cache=not capacity.no_prefix_cache,
        whole_pages=not capacity.explain_cache,
    )
    for line in [*loaded(engine, source, scheduler, capacity.context_len), *warnings]:
        notice(line)
    map_pages(engine.model, scheduler.pool)
    collect_garbage_again()
    return engine, scheduler


def kv_memory(engine: Engine, capacity: CapacityOptions) -> int | None:
    """Return the bytes for keys and values: without --kv-memory, at most what --context-len takes in every slot."""
    from mlx_engine.cache.size import pool_nbytes
    from mlx_engine.schedule.memory import spare_bytes

    if capacity.kv_memory is not None or capacity.context_len is None:
        return capacity.kv_bytes
    n_tokens = capacity.slots * min(capacity.context_len, engine.config.context_length)
    return min(spare_bytes(engine.model), pool_nbytes(engine.model.kv_layers, n_tokens, capacity.slots))


def new_service(
    make: Callable[[], tuple[Engine, Scheduler]],
    source: str,
    address: AddressOptions,
    capacity: CapacityOptions,
    host: str,
) -> Service:
    """Return the service, whose worker is not started yet; `host` is the address that it listens on, as numbers."""
    from mlx_engine.bench.bandwidth import read_bandwidth
    from mlx_engine.serve.service import Service
    from mlx_engine.serve.status import Monitor
    from mlx_engine.serve.worker import Worker

    def decoded(ids: Sequence[int]) -> str:
        return "" if worker.engine is None else worker.engine.tokenizer.decode(ids)

    def measure(engine: Engine) -> None:
        service.bandwidth = read_bandwidth(engine)

    monitor = Monitor(bandwidth=lambda: service.bandwidth, text_of=decoded)
    worker = Worker(make, queue=capacity.queue, snapshot=monitor.after, measure=measure)
    service = Service(
        worker,
        served_name(source) if address.name is None else address.name,
        api_key=address.api_key,
        max_body=capacity.max_body_bytes,
        hosts=address.hosts(host),
        origins=tuple(address.cors or ()),
        context_len=capacity.context_len,
        explains_cache=capacity.explain_cache,
    )
    return service


def suggestions(engine: Engine) -> tuple[Mapping[str, Any], list[str]]:
    """Return the sampling that the model's files suggest, and a line about it.

    Raises:
        SourceError, FormatError, OptionError: a file cannot be read, or suggests what is not possible.
    """
    from mlx_engine.commands.options.suggested import checked, named

    found = checked(engine.path)
    text = named(found.values) or "nothing"
    return found.values, [f"Sampling where a request leaves it out, from {Path(found.where).name}: {text}"]


def collect_garbage_again() -> None:
    """Undo for a long run what `main` sets for short ones; what has been loaded is never looked through again.

    An exception and its traceback refer to each other. With the threshold of `main`, 10,000 requests took 110 MiB.
    """
    gc.freeze()
    gc.set_threshold(*GARBAGE_THRESHOLD)


def served_name(source: str) -> str:
    """Return the name of a model in the API: a hub id or "builtin" as it is, the name of a file without .gguf.

    The name says nothing about where the file lies.
    """
    path = Path(source)
    if not path.exists():
        source = str(hub_name(source) or source)  # an address becomes a hub id
        path = Path(source)
    is_file = path.exists() or path.is_absolute() or source.endswith(".gguf")
    return path.resolve().name.removesuffix(".gguf") if is_file else source


def loaded(engine: Engine, source: str, scheduler: Scheduler, context_len: int | None) -> list[str]:
    """Return the lines about the loaded model and the memory for keys and values."""
    from mlx_engine.commands.diagnostics import notes
    from mlx_engine.weights.model import Staged

    pool, slots = scheduler.pool, scheduler.slots
    context = engine.config.context_length
    least = f"; rank {engine.model.room()[1]} has the least memory for them" if isinstance(engine.model, Staged) else ""
    limit = "" if context_len is None else f"; a request may have {min(context_len, context):,} of them"
    return [
        f"Model: {source}, {engine.architecture}, on backend {engine.backend.name} ({engine.backend.device})",
        *notes(engine),
        f"Keys and values: {pool.n_tokens:,} tokens in {size(pool.nbytes)}, shared by {slots} "
        f"{'slot' if slots == 1 else 'slots'}; the model's context is {context:,} tokens{limit}{least}",
    ]


def usage(engine: Engine | None, address: AddressOptions, url: str) -> list[str]:
    """Return the lines about the address, with a command that works."""
    has_template = engine is not None and engine.tokenizer.chat_template is not None
    route = "/v1/chat/completions" if has_template else "/v1/completions"
    text = "Tell me a story."
    body = {"messages": [{"role": "user", "content": text}]} if has_template else {"prompt": text, "max_tokens": 100}
    headers = ["Content-Type: application/json"]
    if address.api_key is not None:
        headers.append("Authorization: Bearer KEY")
    words = ["curl", url + route, *(word for header in headers for word in ("-H", header)), "-d", json.dumps(body)]
    return [f"Listening on {url} (Ctrl-C stops the server)", address.page(url), f"Try: {shlex.join(words)}"]
