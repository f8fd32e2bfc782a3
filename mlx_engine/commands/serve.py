"""The command `serve`: answer HTTP requests in the form of OpenAI's API."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
import shlex
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_engine.commands.console import notice, progress_bar, reports_errors
from mlx_engine.commands.generate import choose_backend
from mlx_engine.commands.groups import takes_groups
from mlx_engine.commands.options import Backend, ComputeOptions, Model
from mlx_engine.commands.values import size
from mlx_engine.errors import OptionError, require

if TYPE_CHECKING:
    from mlx_engine.engine import Engine
    from mlx_engine.schedule import Scheduler

SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)
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
        if self.api_key is not None or ipaddress.ip_address(host).is_loopback:
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
) -> None:
    """Answer HTTP requests in the form of OpenAI's API, many at the same time. Ctrl-C stops the server."""
    from mlx_engine.engine import load
    from mlx_engine.serve.server import Server, listen
    from mlx_engine.serve.status import Monitor
    from mlx_engine.serve.worker import Worker

    kv_memory = None if capacity.kv_memory is None else bytes_of("--kv-memory", capacity.kv_memory)
    max_body, conversion = bytes_of("--max-body", capacity.max_body), compute.conversion()
    require(address.api_key != "", option="--api-key", expected="at least one character", found="")
    used = choose_backend(backend, strict=False)
    listener = listen(address.host, address.port)

    def make() -> tuple[Engine, Scheduler]:
        with progress_bar("loading") as progress:
            how = {"threads": compute.threads, "jit": not compute.no_jit, **conversion.options()}
            engine = load(model, used, progress=progress, **how)
        scheduler = engine.scheduler(
            slots=capacity.slots, kv_memory=kv_memory, prefix_cache=not capacity.no_prefix_cache
        )
        for line in [*loaded(engine, model, scheduler), *address.warnings(listener.getsockname()[0])]:
            notice(line)
        _ = engine.tokenizer  # built now, so that the first request need not wait
        return engine, scheduler

    async def run() -> BaseException | None:
        from mlx_engine.serve.app import create_app
        from mlx_engine.serve.service import Service

        worker = Worker(make, queue=capacity.queue, snapshot=Monitor().after)
        name = served_name(model) if address.name is None else address.name
        service = Service(worker, name, api_key=address.api_key, max_body=max_body, origins=tuple(address.cors or ()))
        worker.on_ready = lambda: print_lines(usage(worker.engine, address, listener))
        await Server(create_app(service), worker, grace=capacity.grace).serve([listener])
        return worker.fault

    fault = asyncio.run(run())
    if fault is not None:
        raise fault


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


def usage(engine: Engine | None, address: AddressOptions, listener: socket.socket) -> list[str]:
    """Return the lines about the address, with a command that works."""
    url = address.url(listener)
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
