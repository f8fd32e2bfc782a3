"""The command `serve`: answer HTTP requests in the form of OpenAI's API."""

from __future__ import annotations

import gc
import ipaddress
import json
import re
import shlex
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_engine.commands.console import notice, progress_bar, reports_errors
from mlx_engine.commands.generate import choose_backend
from mlx_engine.commands.groups import takes_groups
from mlx_engine.commands.options import Backend, ComputeOptions, Model
from mlx_engine.commands.values import size
from mlx_engine.errors import EngineError, OptionError, require

if TYPE_CHECKING:
    from mlx_engine.engine import Engine
    from mlx_engine.schedule import Scheduler
    from mlx_engine.serve.journal import Journal
    from mlx_engine.serve.service import Service

SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)
# Python's own defaults: new objects, and collections of the younger generation, between two collections.
GARBAGE_THRESHOLD = (700, 10, 10)
POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


@dataclass(frozen=True)
class AddressOptions:
    """Where the server listens, and who may use it."""

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
    cors: Annotated[
        list[str] | None,
        typer.Option(
            "--cors",
            metavar="ORIGIN",
            help="Let web pages of this origin use the API, such as https://example.org; may be given several times.",
        ),
    ] = None
    name: Annotated[
        str | None,
        typer.Option("--name", help="Name of the model in the API.", show_default="from the file or hub id"),
    ] = None

    def url(self, listener: socket.socket) -> str:
        """Return the server's address for a client on this machine."""
        host, port = listener.getsockname()[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def warnings(self, host: str) -> list[str]:
        """Return a warning if others can reach the server and need no key; `host` is the address as numbers."""
        if self.api_key is not None or is_local(host):
            return []
        return [f"warning: anyone who can reach {self.host} can use this server; --api-key KEY restricts it"]


@dataclass(frozen=True)
class CapacityOptions:
    """How much the server does at the same time."""

    slots: Annotated[int, typer.Option("--slots", help="Generate at most N answers at the same time.", min=1)] = 4
    kv_memory: Annotated[
        str | None,
        typer.Option(
            "--kv-memory",
            metavar="SIZE",
            help="Memory for keys and values, such as 2GiB.",
            show_default="half of what is free, at most a full context per slot",
        ),
    ] = None
    queue: Annotated[
        int, typer.Option("--queue", help="Let at most N answers wait for a slot; more are refused (429).", min=0)
    ] = 64
    no_prefix_cache: Annotated[
        bool, typer.Option("--no-prefix-cache", help="Compute every prompt from its first token.")
    ] = False
    max_body: Annotated[str, typer.Option("--max-body", metavar="SIZE", help="Refuse larger requests (413).")] = "4MiB"
    grace: Annotated[
        float, typer.Option("--grace", help="Seconds that running answers get to end when the server stops.", min=0)
    ] = 30.0


@reports_errors
@takes_groups
def serve(
    *,
    model: Model = "builtin",
    backend: Backend = "auto",
    address: AddressOptions,
    capacity: CapacityOptions,
    compute: ComputeOptions,
    journal: Annotated[
        Path | None,
        typer.Option("--journal", help="Append a line per request to this file; `replay` runs them again."),
    ] = None,
) -> None:
    """Answer HTTP requests in the form of OpenAI's API, many at the same time. Ctrl-C stops the server."""
    import asyncio  # takes 20 ms, which no other command should pay

    from mlx_engine.engine import load
    from mlx_engine.schedule.traffic import Traffic
    from mlx_engine.serve.roofline import Roofline
    from mlx_engine.serve.server import Server, listen
    from mlx_engine.serve.status import Monitor
    from mlx_engine.serve.worker import Worker

    kv_memory = None if capacity.kv_memory is None else bytes_of("--kv-memory", capacity.kv_memory)
    max_body, conversion = bytes_of("--max-body", capacity.max_body), compute.conversion()
    require(address.api_key != "", option="--api-key", expected="at least one character", found="")
    used = choose_backend(backend, strict=False)
    changes = {"jit": not compute.no_jit, **conversion.options()}
    opened, listener = opened_journal(journal), listen(address.host, address.port)
    warnings, url = address.warnings(listener.getsockname()[0]), address.url(listener)

    traffic: list[Traffic] = []

    def make() -> tuple[Engine, Scheduler]:
        with progress_bar("loading") as progress:
            engine = load(model, used, threads=compute.threads, progress=progress, **changes)
        scheduler = engine.scheduler(
            slots=capacity.slots, kv_memory=kv_memory, prefix_cache=not capacity.no_prefix_cache
        )
        for line in [*loaded(engine, model, scheduler), *warnings]:
            notice(line)
        _ = engine.tokenizer  # built now, so that the first request need not wait
        traffic.append(Traffic.of(engine.model, scheduler.pool))
        map_memory(engine, scheduler)
        collect_garbage_again()
        return engine, scheduler

    async def run() -> BaseException | None:
        from mlx_engine.serve.app import create_app
        from mlx_engine.serve.service import Service

        # Users of other machines must not read each other's prompts, on the page or in explanations of cache misses.
        is_own = is_local(listener.getsockname()[0])
        limits: list[Roofline] = []
        monitor = Monitor(
            roofline=lambda: limits[0] if limits else None,
            text_of=(lambda ids: decoded(worker.engine, ids)) if is_own else None,
        )
        worker = Worker(make, queue=capacity.queue, snapshot=monitor.after)
        name = served_name(model) if address.name is None else address.name
        service = Service(
            worker,
            name,
            api_key=address.api_key,
            max_body=max_body,
            origins=tuple(address.cors or ()),
            shows_expected=is_own,
        )

        def measure(engine: Engine) -> None:
            from mlx_engine.bench.bandwidth import read_bandwidth

            service.bandwidth = read_bandwidth(engine)
            if service.bandwidth is not None:
                limits.extend(Roofline(service.bandwidth, read.weights, read.kv) for read in traffic)

        worker.on_ready = lambda: ready(service, opened, (model, changes), usage(worker.engine, address, url))
        worker.measure = measure
        await Server(create_app(service), worker, grace=capacity.grace).serve([listener])
        return worker.fault

    fault = asyncio.run(run())
    if isinstance(fault, EngineError):
        raise fault
    if fault is not None:  # the fault itself could be a SystemExit, whose exit code may be 0
        raise RuntimeError("the engine thread has died") from fault


def decoded(engine: Engine | None, ids: Sequence[int]) -> str:
    """Return the text of token ids, for the page."""
    return "" if engine is None else engine.tokenizer.decode(ids)


def map_memory(engine: Engine, scheduler: Scheduler) -> None:
    """Write one token to the pool. The system maps memory at the first write to it, in huge pages.

    For 10 GiB of keys and values of a 0.6B model that is 0.9 GiB, and took the first request 0.2 s.
    """
    from mlx_engine.cache import New
    from mlx_engine.decode.step import forward_logits

    kv = scheduler.pool.sequence()
    with engine.backend.session():
        engine.backend.wait(forward_logits(engine.model, New([0], kv)))
    kv.close()


def collect_garbage_again() -> None:
    """Undo for a long run what `main` sets for short ones; what has been loaded is never looked through again.

    An exception and its traceback refer to each other. With the threshold of `main`, 10,000 requests took 110 MiB.
    """
    gc.freeze()
    gc.set_threshold(*GARBAGE_THRESHOLD)


def bytes_of(option: str, text: str) -> int:
    """Parse a size: 2GiB (or 2G) is 2 * 1024**3 bytes, 2GB is 2 * 1000**3.

    Raises:
        OptionError: the text is no size.
    """
    match = SIZE.fullmatch(text.strip())
    if match is None:
        raise OptionError(option=option, expected="a size such as 2GiB, 500MB or 1000000", found=text)
    is_decimal = text.strip().upper().endswith("B") and not match[3]
    return int(float(match[1]) * (1000 if is_decimal else 1024) ** POWERS[match[2].upper()])


def is_local(host: str) -> bool:
    """Return whether an address, given as numbers, can be reached from this machine alone."""
    return ipaddress.ip_address(host).is_loopback


def served_name(source: str) -> str:
    """Return the name of a model in the API: a hub id or "builtin" as it is, the name of a file without .gguf."""
    path = Path(source)
    return path.name.removesuffix(".gguf") if path.exists() or source.endswith(".gguf") else source


def loaded(engine: Engine, source: str, scheduler: Scheduler) -> list[str]:
    """Return the lines about the loaded model and the memory for keys and values."""
    pool, slots = scheduler.pool, scheduler.slots
    context = engine.config.context_length
    return [
        f"Model: {source}, {engine.architecture}, on backend {engine.backend.name} ({engine.backend.device})",
        *engine.notes,
        f"Keys and values: {pool.n_tokens:,} tokens in {size(pool.nbytes)}, shared by {slots} "
        f"{'slot' if slots == 1 else 'slots'}; the model's context is {context:,} tokens",
    ]


def opened_journal(path: Path | None) -> Journal | None:
    """Return the journal that the user has asked for.

    Raises:
        OptionError: the file cannot be written.
    """
    from mlx_engine.serve.journal import Journal

    require(str(path) != "-", option="--journal", expected="a file", found="-")
    return None if path is None else Journal(path, warn=notice)


def ready(service: Service, journal: Journal | None, model: tuple[str, dict[str, Any]], lines: Sequence[str]) -> None:
    """Begin the journal, and print lines. Called when the model has been loaded.

    Args:
        service: the server.
        journal: the journal, if there is one.
        model: where the model was loaded from, and the options of `load` that change its numbers.
        lines: what to print.
    """
    from mlx_engine.checkpoint.identity import identity
    from mlx_engine.serve.entry import ModelId
    from mlx_engine.serve.recorder import Recorder

    if journal is not None:
        engine, (source, options) = service.engine, model
        # A file is found again from any folder.
        where = str(Path(source).resolve()) if Path(source).exists() else source
        about = ModelId(service.model, where, identity(engine.path), options)
        service.recorder = Recorder(journal, about, backend=engine.backend.name, slots=service.worker.slots)
    print_lines(lines)


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
    return [f"Listening on {url} (Ctrl-C stops the server)", f"Try: {shlex.join(words)}"]


def print_lines(lines: Sequence[str]) -> None:
    """Print lines on stderr."""
    for line in lines:
        notice(line)
