"""The command `serve`: answer HTTP requests in the form of OpenAI's API."""

from __future__ import annotations

import gc
import ipaddress
import json
import shlex
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_engine.commands.console import notice, progress_bar, reports_errors
from mlx_engine.commands.options.groups import RARE, takes_groups
from mlx_engine.commands.options.model import (
    SUGGESTED,
    Backend,
    ComputeOptions,
    Model,
    PrefixOptions,
    Speculate,
    choose_backend,
)
from mlx_engine.commands.options.shard import ShardOptions, follow
from mlx_engine.commands.values import bytes_of
from mlx_engine.errors import EngineError, OptionError, size
from mlx_engine.options import OFF

if TYPE_CHECKING:
    from mlx_engine.engine import Engine
    from mlx_engine.loop.scheduler import Scheduler
    from mlx_engine.serve.journal import Journal, Recorder
    from mlx_engine.serve.service import Service

# Python's own thresholds of garbage collection, by generation: new objects, and collections of the younger generation.
GARBAGE_THRESHOLD = (700, 10, 10)


NO_PREFIXES = PrefixOptions()
# Addresses that stand for all networks of this machine, and the address for clients on this machine.
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True)
class AddressOptions:
    """Address. Where the server listens, and who may use it."""

    host: Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0 is every network.")] = "127.0.0.1"
    port: Annotated[int, typer.Option("--port", help="Port to listen on; 0 takes a free one.", min=0, max=65535)] = 8080
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            envvar="MLX_ENGINE_API_KEY",
            help="Key that requests must send; /, /health and /openapi.json need none.",
            show_default="no key",
            show_envvar=True,
        ),
    ] = None
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host",
            metavar="NAME",
            help="Serve requests to this host name, too; may be given several times. Without it, a server on this "
            "machine alone has the names localhost, 127.0.0.1, [::1] and --host; on other addresses, every name.",
        ),
        RARE,
    ] = None
    cors: Annotated[
        list[str] | None,
        typer.Option(
            "--cors",
            metavar="ORIGIN",
            help="Let web pages of this origin use the API, such as https://example.org; may be given several times.",
        ),
        RARE,
    ] = None
    name: Annotated[
        str | None,
        typer.Option("--name", help="Name of the model in the API.", show_default="from the file or hub id"),
    ] = None
    alias: Annotated[
        list[str] | None,
        typer.Option(
            "--alias",
            metavar="NAME",
            help="Answer requests for this model name, too, such as claude-sonnet-4-5; may be given several times.",
        ),
    ] = None
    any_model: Annotated[
        bool, typer.Option("--any-model", help="Answer requests for every model name with this model.")
    ] = False

    def check(self) -> None:
        """Check the key and the hosts.

        Raises:
            OptionError: the key is empty or a header cannot carry it, or a host is none.
        """
        from mlx_engine.serve.origins import host_name  # takes the time of importing Starlette

        key = self.api_key
        sound = key is None or (key != "" and key.isascii() and key.isprintable() and key == key.strip())
        if not sound:  # a key is not printed
            message = "--api-key must be printable ASCII, not empty and without spaces at its ends"
            raise OptionError(message, option="--api-key", found=f"{len(key or '')} characters")
        for name in self.allow_host or ():
            if host_name(name) is None:
                message = f"--allow-host must be a host name or an IP address, without scheme and port, not {name!r}"
                raise OptionError(message, option="--allow-host", found=name)

    def hosts(self, host: str) -> frozenset[str] | None:
        """Return the hosts that clients may name, or None for any; `host` is the address as numbers."""
        from mlx_engine.serve.origins import LOOPBACK, host_names

        if not is_local(host) and not self.allow_host:
            return None
        return host_names((*LOOPBACK, host, self.host, *(self.allow_host or ())))

    def url(self, listener: socket.socket) -> str:
        """Return the server's address for a client on this machine."""
        host, port = listener.getsockname()[:2]
        host = EVERYWHERE.get(host, host)
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def page(self, url: str) -> str:
        """Return the line about the chat page; `url` is the server's address on this machine."""
        others = ", on other machines with this one's name or address" if self.host in EVERYWHERE else ""
        return f"Chat in a browser: {url}/{others}{' (it asks for the key)' if self.api_key is not None else ''}"

    def warnings(self, host: str) -> list[str]:
        """Return a warning if others can reach the server and need no key; `host` is the address as numbers."""
        if self.api_key is not None or is_local(host):
            return []
        pages = "" if self.allow_host else ", and web pages that they open; --allow-host NAME keeps these out"
        return [f"warning: anyone who can reach {self.host} can use this server (--api-key KEY restricts it){pages}"]


@dataclass(frozen=True)
class CapacityOptions:
    """Capacity. How much the server does at the same time."""

    slots: Annotated[int, typer.Option("--slots", help="Generate at most N answers at the same time.", min=1)] = 4
    context_len: Annotated[
        int | None,
        typer.Option(
            *("--context-len", "-c", "--ctx-size", "--context"),
            metavar="N",
            help="Limit the prompt and the answer of a request together to N tokens.",
            min=1,
            show_default="the model's",
        ),
    ] = None
    kv_memory: Annotated[
        str | None,
        typer.Option(
            "--kv-memory",
            metavar="SIZE",
            help="Memory for keys and values, such as 2GiB.",
            show_default="half of what is free, at most a full context, or --context-len, per slot",
        ),
    ] = None
    queue: Annotated[
        int, typer.Option("--queue", help="Let at most N answers wait for a slot; more are refused (429).", min=0)
    ] = 64
    no_prefix_cache: Annotated[
        bool, typer.Option("--no-prefix-cache", help="Compute every prompt from its first token.")
    ] = False
    explain_cache: Annotated[
        bool,
        typer.Option(
            "--explain-cache",
            help="Reuse prompts to the token, not in whole pages, and show in replies and on the page what is cached: "
            "for a server with a single user, because clients learn about each other's prompts.",
        ),
        RARE,
    ] = False
    max_body: Annotated[str, typer.Option("--max-body", metavar="SIZE", help="Refuse larger requests (413)."), RARE] = (
        "4MiB"
    )
    grace: Annotated[
        float,
        typer.Option("--grace", help="Seconds that running answers get to end when the server stops.", min=0),
        RARE,
    ] = 30.0

    def check(self) -> None:
        """Check the sizes; raise OptionError if one is no size."""
        _ = self.kv_bytes, self.max_body_bytes

    @property
    def kv_bytes(self) -> int | None:
        """Bytes for keys and values; None for what the machine can spare. Raise OptionError if it is no size."""
        return None if self.kv_memory is None else bytes_of("--kv-memory", self.kv_memory)

    @property
    def max_body_bytes(self) -> int:
        """The largest body in bytes. Raise OptionError if it is no size."""
        return bytes_of("--max-body", self.max_body)


@reports_errors
@takes_groups
def serve(
    *,
    model: Model = "builtin",
    backend: Backend = "auto",
    address: AddressOptions,
    capacity: CapacityOptions,
    prefixes: PrefixOptions,
    compute: ComputeOptions,
    speculate: Speculate = OFF,
    sharing: Annotated[ShardOptions, RARE],
    suggested: Annotated[
        bool,
        typer.Option("--suggested", help=SUGGESTED + " Otherwise OpenAI's defaults hold.", rich_help_panel="Answers"),
    ] = False,
    journal: Annotated[
        Path | None,
        typer.Option(
            "--journal",
            help="Append a line per request to this file; `replay` runs them again.",
            rich_help_panel="Answers",
        ),
    ] = None,
) -> None:
    """Serve the HTTP APIs of OpenAI and Anthropic, many requests at the same time. Ctrl-C stops the server."""
    address.check()
    capacity.check()
    prefixes.check()
    if capacity.no_prefix_cache and prefixes.prefix_dir is not None:
        raise OptionError("--prefix-dir cannot be combined with --no-prefix-cache", option="--prefix-dir")
    options = compute.changes(capacity.context_len)
    used = choose_backend(backend, strict=False)
    how = {**compute.machine(), **options, "speculate": speculate}
    with sharing.joined() as shard:
        if shard is not None and not shard.is_leader:
            follow(model, used, shard, how)
            return
        if shard is not None and prefixes.prefix_dir is not None:
            raise OptionError("--prefix-dir needs a model that this process has alone", option="--prefix-dir")
        how |= {"shard": shard}
        answer_requests(model, used, address, capacity, how, options, journal, prefixes, suggested=suggested)


def answer_requests(
    model: str,
    backend: str,
    address: AddressOptions,
    capacity: CapacityOptions,
    how: Mapping[str, Any],
    options: Mapping[str, Any],
    journal: Path | None,
    prefixes: PrefixOptions = NO_PREFIXES,
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
        prefixes: where prefixes are kept on disk.
        suggested: whether the sampling that the model's files suggest is used.
    """
    import asyncio  # takes 20 ms, which no other command should pay

    from mlx_engine.serve.server import ConnectionLimit, Server, listen, most_connections, raise_descriptor_limit

    raise_descriptor_limit()
    opened, listener = opened_journal(journal), listen(address.host, address.port)
    host, url = listener.getsockname()[0], address.url(listener)
    make = partial(load_engine, model, backend, capacity, how, address.warnings(host), prefixes, suggested=suggested)

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
    prefixes: PrefixOptions = NO_PREFIXES,
    *,
    suggested: bool = False,
) -> tuple[Engine, Scheduler]:
    """Load the model, and make its scheduler. Called in the engine thread.

    With `suggested`, the sampling that the model's files suggest is checked before the weights are loaded.
    """
    from mlx_engine.commands.options.suggested import checked
    from mlx_engine.engine import Engine, open_source
    from mlx_engine.loop.memory import map_pages

    with progress_bar("opening") as progress:
        opened = open_source(source, backend, progress=progress, **options)
    _ = (
        opened.prompts.tokenizer.most_bytes
    )  # built first, because it may be missing, and so that the first request need not wait for it
    if suggested:
        checked(opened.path, opened.checkpoint.metadata)
    opened.check_memory(kv=capacity.kv_bytes)
    with progress_bar("loading") as progress:
        engine = Engine(opened, progress)
    prefixes.use(engine)
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
    from mlx_engine.loop.memory import spare_bytes

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
    from mlx_engine.bench.roofline import read_bandwidth
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
        aliases=tuple(address.alias or ()),
        any_model=address.any_model,
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

    The name does not reveal the folder of the file.
    """
    path = Path(source)
    if not path.exists():
        from mlx_engine.checkpoint.sources import hub_name

        source = str(hub_name(source) or source)  # an address becomes a hub id
        path = Path(source)
    is_file = path.exists() or path.is_absolute() or source.endswith(".gguf")
    return path.resolve().name.removesuffix(".gguf") if is_file else source


def loaded(engine: Engine, source: str, scheduler: Scheduler, context_len: int | None) -> list[str]:
    """Return the lines about the loaded model and the memory for keys and values."""
    pool, slots = scheduler.pool, scheduler.slots
    context = engine.config.context_length
    _, rank = engine.model.kv_capacity()
    least = "" if rank is None else f"; rank {rank} has the least memory for them"
    limit = "" if context_len is None else f"; a request may have {min(context_len, context):,} of them"
    return [
        f"Model: {source}, {engine.architecture}, on backend {engine.backend.description}",
        *engine.notes,
        *([f"Speculation: {engine.speculation.why}"] if engine.speculation.is_on else []),
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


def is_local(host: str) -> bool:
    """Return whether an address, given as numbers, can be reached from this machine alone."""
    return ipaddress.ip_address(host).is_loopback


def opened_journal(path: Path | None) -> Journal | None:
    """Return the journal that the user has asked for.

    Raises:
        OptionError: the file cannot be written.
    """
    from mlx_engine.serve.journal import Journal

    if str(path) == "-":
        raise OptionError("--journal needs a file: stdout cannot be read again", option="--journal", found="-")
    return None if path is None else Journal(path, warn=notice)


def recorder_of(service: Service, journal: Journal, source: str, options: Mapping[str, Any]) -> Recorder:
    """Return the writer of the journal's lines, for a server with a loaded model.

    Args:
        service: the server.
        journal: the open journal.
        source: where the model was loaded from.
        options: the options of `load` that change its numbers.
    """
    from mlx_engine.checkpoint.identity import identity
    from mlx_engine.serve.journal import ModelId, Recorder

    engine = service.engine
    # An absolute path, so that `replay` finds the file from any folder.
    where = str(Path(source).resolve()) if Path(source).exists() else source
    kept = dict(options)
    if "context" in kept:  # --context-len may be longer than the model's context, `load` refuses that
        kept["context"] = min(kept["context"], engine.config.context_length)
    about = ModelId(service.model, where, identity(engine.path), kept)
    return Recorder(journal, about, backend=engine.backend.name, slots=service.worker.slots)
