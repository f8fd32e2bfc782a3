"""The command `serve`: answer HTTP requests in the forms of OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import gc
import ipaddress
import json
import shlex
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_engine.commands.console import notice, progress_bar, reports_errors
from mlx_engine.commands.options.groups import RARE, takes_groups
from mlx_engine.commands.options.model import (
    SUGGESTED,
    AdapterPaths,
    Backend,
    ComputeOptions,
    Draft,
    PrefixOptions,
    Speculate,
    choose_backend,
)
from mlx_engine.commands.options.shard import ShardOptions, follow
from mlx_engine.commands.values import bytes_of, seconds_of
from mlx_engine.errors import EngineError, OptionError, size
from mlx_engine.options import AUTO_SPECULATION, option

if TYPE_CHECKING:
    from mlx_engine.engine import CheckedCheckpoint, Engine
    from mlx_engine.loop.scheduler import Scheduler
    from mlx_engine.serve.journal import Journal, Recorder
    from mlx_engine.serve.registry import Models, ServedModel
    from mlx_engine.serve.service import Service
    from mlx_engine.serve.worker import Cores, Worker
    from mlx_engine.weights.outline import Need

# The default thresholds of garbage collection in CPython 3.10 to 3.12 (see `gc.set_threshold`).
GARBAGE_THRESHOLD = (700, 10, 10)

NO_PREFIXES = PrefixOptions()
# Maps each address that means all networks to the address by which clients on this machine reach the server.
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True)
class AddressOptions:
    """Address. Where the server listens, and who may use it."""

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 is every network.")
    port: int = option(8080, "Port to listen on; 0 takes a free one.", least=0, most=65535)
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            envvar="MLX_ENGINE_API_KEY",
            help="Key that requests must send; /, /health, /ready and /openapi.json need none.",
            show_default="no key",
            show_envvar=True,
        ),
    ] = None
    allow_host: list[str] | None = option(
        None,
        "Accept requests to this host name; may be given several times. localhost, 127.0.0.1, [::1] and --host are "
        "always accepted. Without this option, a server that other machines can reach accepts every host name.",
        metavar="NAME",
        is_rare=True,
    )
    cors: list[str] | None = option(
        None,
        "Let web pages of this origin use the API, such as https://example.org; may be given several times.",
        metavar="ORIGIN",
        is_rare=True,
    )
    name: str | None = option(None, "Name of the first model in the API.", unset="from the file or hub id")
    alias: list[str] | None = option(
        None,
        "A further name, such as claude-sonnet-4-5, of the first model or of the model after `=`; may be given several "
        "times.",
        metavar="NAME[=MODEL]",
    )
    any_model: bool = option(False, "Answer requests for unknown model names with the first model.")

    def check(self) -> None:
        """Raise OptionError if the key is empty or cannot be sent in a header, or a host is invalid."""
        from mlx_engine.serve.origins import host_name  # not at the top, because this imports Starlette

        key = self.api_key
        sound = key is None or (key != "" and key.isascii() and key.isprintable() and key == key.strip())
        if not sound:  # the message must not reveal the key
            message = "--api-key must be printable ASCII, not empty and without spaces at its ends"
            raise OptionError(message, option="--api-key", found=f"{len(key or '')} characters")
        for name in self.allow_host or ():
            if host_name(name) is None:
                message = f"--allow-host must be a host name or an IP address, without scheme and port, not {name!r}"
                raise OptionError(message, option="--allow-host", found=name)

    def hosts(self, host: str) -> frozenset[str] | None:
        """Return the host names that the header Host may have, or None for all; `host` is the server's IP address."""
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
        """Return the line that says where the chat page is; `url` is the server's address on this machine."""
        others = " (elsewhere, with this machine's name or address)" if self.host in EVERYWHERE else ""
        return f"Chat in a browser: {url}/{others}{' (the page asks for the key)' if self.api_key is not None else ''}"

    def warnings(self, host: str) -> list[str]:
        """Return a warning if other machines can reach the server without a key; `host` is the server's IP address."""
        if self.api_key is not None or is_local(host):
            return []
        pages = "" if self.allow_host else ", and so can web pages that they open (--allow-host NAME excludes these)"
        return [f"warning: anyone who can reach {self.host} can use this server{pages}; --api-key KEY restricts this"]


@dataclass(frozen=True)
class CapacityOptions:
    """Capacity. How much the server does at the same time."""

    slots: int = option(4, "Generate at most N answers at the same time.", least=1)
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
    kv_memory: str | None = option(
        None,
        "Memory for keys and values, such as 2GiB.",
        metavar="SIZE",
        unset="half of the free memory, at most a full context (or --context-len) per slot",
    )
    queue: int = option(64, "Let at most N answers wait for a slot; more are refused (429).", least=0)
    no_prefix_cache: bool = option(False, "Compute every prompt from its first token, without cached prefixes.")
    explain_cache: bool = option(
        False,
        "Reuse prefixes of any length, not only multiples of 64 tokens; show in replies and on the chat page what is "
        "cached. Only for a server with a single user: clients learn about each other's prompts.",
        is_rare=True,
    )
    max_body: str = option("4MiB", "Refuse larger requests (413).", metavar="SIZE", is_rare=True)
    grace: float = option(30.0, "Seconds that running answers get to end when the server stops.", least=0, is_rare=True)

    def check(self) -> None:
        """Raise OptionError if a size is invalid."""
        _ = self.kv_bytes, self.max_body_bytes

    @property
    def kv_bytes(self) -> int | None:
        """The bytes of --kv-memory; None if it is not given."""
        return None if self.kv_memory is None else bytes_of("--kv-memory", self.kv_memory)

    @property
    def max_body_bytes(self) -> int:
        """The largest body of a request in bytes."""
        return bytes_of("--max-body", self.max_body)


@dataclass(frozen=True)
class ModelsOptions:
    """Model and backend. Which models there are, and how long they stay in memory."""

    model: Annotated[
        list[str] | None,
        typer.Option(
            *("--model", "-m"),
            metavar="[NAME=]MODEL",
            help="GGUF file, Hugging Face folder, hub id org/repo[:FILE or :TYPE] such as org/repo:Q4_K_M, builtin, or "
            "shape:NAME (random weights). May be given several times: each request names its model. The first model is "
            "loaded at the start, every other model at the first request for it.",
            show_default="builtin",
        ),
    ] = None
    models_dir: Annotated[
        Path | None,
        typer.Option(
            "--models-dir",
            metavar="DIR",
            file_okay=False,
            help="Serve the GGUF files and Hugging Face folders in this folder, too, up to two folders down.",
        ),
    ] = None
    idle_unload: str | None = option(
        None,
        "Unload a model that has had no request for this time, such as 10m; its next request loads it again.",
        metavar="TIME",
        unset="never",
    )
    models_memory: str | None = option(
        None,
        "Memory for all loaded models; if a model needs more, the least recently used models are unloaded.",
        metavar="SIZE",
        unset="the memory that is free at the start",
        is_rare=True,
    )

    def check(self) -> None:
        """Raise OptionError if a time or a size is invalid, or if --models-dir is not a folder."""
        _ = self.idle_seconds, self.memory
        if self.models_dir is not None and not self.models_dir.is_dir():
            message = f"--models-dir {self.models_dir}: there is no such folder; give one that has models"
            raise OptionError(message, option="--models-dir", found=str(self.models_dir))

    @property
    def idle_seconds(self) -> float | None:
        """Seconds without a request after which a model is unloaded; None for never."""
        return None if self.idle_unload is None else seconds_of("--idle-unload", self.idle_unload)

    @property
    def memory(self) -> int | None:
        """Bytes for all loaded models; None for the memory that is free at the start."""
        return None if self.models_memory is None else bytes_of("--models-memory", self.models_memory)

    @property
    def is_alone(self) -> bool:
        """Whether the server has a single model, which is never unloaded."""
        return len(self.model or ()) < 2 and self.models_dir is None and self.idle_unload is None

    @property
    def source(self) -> str:
        """The source (path, hub id, `shape:NAME` or "builtin") of the server's only model."""
        return specs_of(self.model or ["builtin"], AddressOptions())[0].source

    def found(self) -> list[ModelSpec]:
        """Return the models that --models-dir has now, sorted by name.

        A model is a GGUF file, the first part of a split GGUF file, or a folder with config.json. Its name is its path
        in --models-dir, without .gguf. Files whose names begin with mmproj are left out.
        """
        if self.models_dir is None:
            return []
        from mlx_engine.checkpoint.gguf import part_names

        found = {}
        for depth in ("", "*/", "*/*/"):
            for path in self.models_dir.glob(f"{depth}*.gguf"):
                if part_names(path.name)[0] == path.name and not path.name.startswith("mmproj"):
                    found[str(path.relative_to(self.models_dir)).removesuffix(".gguf")] = path
            for path in self.models_dir.glob(f"{depth}*/config.json") if depth != "*/*/" else ():
                found[str(path.parent.relative_to(self.models_dir))] = path.parent
        return [ModelSpec(name, str(path)) for name, path in sorted(found.items())]


@dataclass(frozen=True)
class ModelSpec:
    """A model of the command line: its name in requests, its source, and further names."""

    name: str
    source: str
    aliases: tuple[str, ...] = ()


def specs_of(given: Sequence[str], address: AddressOptions, found: Sequence[ModelSpec] = ()) -> list[ModelSpec]:
    """Return the models of a server: those `given` with --model, then the further models `found` in --models-dir.

    A value of --model is SOURCE or NAME=SOURCE. A path that exists is a source, even if it contains `=`.

    Raises:
        OptionError: two models have the same name or alias, or an alias is given to an unknown model.
    """
    specs = []
    for i, text in enumerate(given):
        name, equals, source = text.partition("=")
        if not (name and equals) or Path(text).expanduser().exists():
            name, source = served_name(text), text
        specs.append(ModelSpec(address.name if i == 0 and address.name is not None else name, source))
    known = {Path(spec.source).expanduser().resolve() for spec in specs}
    specs += [spec for spec in found if Path(spec.source).resolve() not in known]
    names = [spec.name for spec in specs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        message = f"--model: two models have the name {twice!r}; name one of them with -m NAME=MODEL"
        raise OptionError(message, option="--model", found=twice)
    return _with_aliases(specs, address.alias or ())


def _with_aliases(specs: Sequence[ModelSpec], aliases: Sequence[str]) -> list[ModelSpec]:
    """Return the models with their aliases. With one model, an alias may contain `=`."""
    names: dict[str, list[str]] = {spec.name: [] for spec in specs}
    for text in aliases:
        alias, equals, model = text.rpartition("=") if len(specs) > 1 else (text, "", "")
        alias, model = (alias, model) if equals else (text, specs[0].name)
        if model not in names:
            message = f"--alias {text}: there is no model {model!r}; there are {', '.join(names)}"
            raise OptionError(message, option="--alias", found=text)
        taken = next((name for name, of in names.items() if name != model and alias in (name, *of)), None)
        if taken is not None:
            message = f"--alias {text}: {alias!r} is a name of the model {taken!r} already; choose another one"
            raise OptionError(message, option="--alias", found=text)
        names[model].append(alias)
    return [replace(spec, aliases=tuple(names[spec.name])) for spec in specs]


@reports_errors
@takes_groups
def serve(
    *,
    models: ModelsOptions,
    backend: Backend = "auto",
    address: AddressOptions,
    capacity: CapacityOptions,
    prefixes: PrefixOptions,
    compute: ComputeOptions,
    speculate: Speculate = AUTO_SPECULATION,
    draft: Draft = None,
    adapter: AdapterPaths = None,
    sharing: Annotated[ShardOptions, RARE],
    suggested: Annotated[
        bool,
        typer.Option(
            "--suggested", help=SUGGESTED + " Without --suggested: OpenAI's defaults.", rich_help_panel="Answers"
        ),
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
    for group in (models, address, capacity, prefixes):
        group.check()
    if capacity.no_prefix_cache and prefixes.prefix_dir is not None:
        raise OptionError("--prefix-dir cannot be combined with --no-prefix-cache", option="--prefix-dir")
    if journal is not None and not models.is_alone:
        message = "--journal cannot be combined with several models, --models-dir or --idle-unload"
        raise OptionError(message, option="--journal")
    if adapter and (journal is not None or not models.is_alone):
        option = "--journal" if journal is not None else "--adapter"
        message = "--adapter cannot be combined with --journal, several models, --models-dir or --idle-unload"
        raise OptionError(message, option=option)
    options = compute.changes(capacity.context_len)
    from mlx_engine.weights.adapters import named

    used = choose_backend(backend, strict=False)
    how = {**compute.machine(), **options, "speculate": speculate, "draft": draft}
    how["adapters"] = named(adapter or ())
    with sharing.joined() as shard:
        if shard is not None and not models.is_alone:
            message = "--shard cannot be combined with several models, --models-dir or --idle-unload"
            raise OptionError(message, option="--shard")
        if shard is not None and not shard.is_leader:
            follow(models.source, used, shard, how)
            return
        if shard is not None and prefixes.prefix_dir is not None:
            raise OptionError("--prefix-dir cannot be combined with --shard", option="--prefix-dir")
        loading = Loading(used, capacity, {**how, "shard": shard}, prefixes, is_suggested=suggested)
        answer_requests(models, loading, address, options, journal)


@dataclass(frozen=True)
class Loading:
    """How the models of a server are loaded.

    Attributes:
        how: keyword arguments of `open_source`.
        is_suggested: whether the sampling that the model's files suggest is used.
        warnings: lines to print after the lines about a model.
    """

    backend: str
    capacity: CapacityOptions
    how: Mapping[str, Any]
    prefixes: PrefixOptions = NO_PREFIXES
    is_suggested: bool = False
    warnings: Sequence[str] = ()

    def open(self, source: str) -> OpenedModel:
        """Check a model's files, make its tokenizer and, with --suggested, check the suggested sampling.

        This is done before the weights are loaded, so that errors are reported early, and the first request does not
        wait for the tokenizer. Not called in the event loop's thread.
        """
        from mlx_engine.commands.options.suggested import checked
        from mlx_engine.engine import open_source

        with progress_bar("opening") as progress:
            opened = open_source(source, self.backend, progress=progress, **self.how)
        _ = opened.prompts.tokenizer.most_bytes
        if self.is_suggested:
            checked(opened.path, opened.checkpoint.metadata)
        return OpenedModel(source, opened, self)

    def describe(self, source: str) -> Mapping[str, object]:
        """Return the fields of /v1/models that describe a model's files.

        Return no fields for random weights (`shape:`), and for a model of the hub that has not been downloaded.
        """
        from mlx_engine.checkpoint.gguf import part_files
        from mlx_engine.checkpoint.sources import is_cached
        from mlx_engine.engine import open_source

        if source.startswith("shape:") or is_cached(source) is False:
            return {}
        opened = open_source(source, self.backend, **self.how)
        found = opened.planned.stored_types()
        context, path = int(opened.config.context_length), opened.path
        files = path.glob("*.safetensors") if path.is_dir() else part_files(path)
        return {
            "size": sum(file.stat().st_size for file in files),
            "architecture": opened.checkpoint.architecture,
            "weights": max(found, key=lambda name: found[name]),
            "n_parameters": opened.planned.n_parameters,
            "max_model_len": min(context, self.capacity.context_len or context),
        }


# Without --kv-memory, a model that is loaded beside others needs memory for the keys and values of this many tokens.
LEAST_TOKENS = 8192


@dataclass(frozen=True)
class OpenedModel:
    """A model whose files have been checked, and whose weights are not loaded."""

    source: str
    opened: CheckedCheckpoint
    loading: Loading

    @property
    def need(self) -> Need:
        """The least memory for weights, and for keys and values (--kv-memory bytes, or else LEAST_TOKENS tokens)."""
        from mlx_engine.cache.pool import pool_nbytes
        from mlx_engine.weights.outline import need_of, outlined

        outline, capacity = outlined(self.opened.planned, self.opened.made), self.loading.capacity
        layers, context = outline.model.kv_layers, int(self.opened.config.context_length)
        context = min(context, capacity.context_len or context)
        most = pool_nbytes(layers, capacity.slots * context, capacity.slots)
        least = pool_nbytes(layers, min(context, LEAST_TOKENS), capacity.slots)
        need = need_of(outline, kv=least if capacity.kv_bytes is None else min(capacity.kv_bytes, most))
        draft = self.opened.draft  # its keys and values get a share of the memory that is counted above
        return need if draft is None else need + need_of(outlined(draft.planned, self.opened.made), kv=0)

    def load(self, room: int | None = None) -> tuple[Engine, Scheduler]:
        """Load the model, and make its scheduler. Called in the engine thread.

        `room` is the bytes that other models leave for keys and values; None if there are no other models.
        """
        from mlx_engine.engine import Engine
        from mlx_engine.loop.memory import SPARE_SHARE

        # Without --kv-memory, keys and values get at most SPARE_SHARE times the memory that is free after loading. If
        # not all experts fit, `spare` bytes must stay free, so SPARE_SHARE * spare is enough for LEAST_TOKENS tokens.
        kv, has_experts = self.loading.capacity.kv_bytes, bool(getattr(self.opened.config, "n_experts", 0))
        self.opened.check_memory(kv=kv, spare=int(self.need.kv / SPARE_SHARE) if kv is None and has_experts else 0)
        with progress_bar("loading") as progress:
            engine = Engine(self.opened, progress)
        try:
            return engine, self._scheduler(engine, room)
        except BaseException:
            engine.close()
            raise

    def _scheduler(self, engine: Engine, room: int | None) -> Scheduler:
        from mlx_engine.loop.memory import map_pages

        loading, capacity = self.loading, self.loading.capacity
        loading.prefixes.use(engine)
        scheduler = engine.scheduler(
            slots=capacity.slots,
            kv_memory=kv_memory(engine, capacity, room),
            prefix_cache=not capacity.no_prefix_cache,
            whole_pages=not capacity.explain_cache,
        )
        for line in [*loaded(engine, self.source, scheduler, capacity.context_len), *loading.warnings]:
            notice(line)
        map_pages(engine.model, scheduler.pool)
        collect_garbage_again()
        return scheduler


def kv_memory(engine: Engine, capacity: CapacityOptions, room: int | None = None) -> int | None:
    """Return the bytes for keys and values; None lets the engine choose.

    With --kv-memory, return its size. With a single model and without --context-len, return None. Otherwise return the
    default of the engine, but at most the bytes of a full context (--context-len, or the model's) in every slot.

    With several models, `room` is the bytes that the other models leave. The result is then also at most the larger of
    SPARE_SHARE times `room`, and the bytes of LEAST_TOKENS tokens.
    """
    from mlx_engine.cache.pool import pool_nbytes
    from mlx_engine.loop.memory import SPARE_SHARE, spare_bytes

    if capacity.kv_memory is not None or (capacity.context_len is None and room is None):
        return capacity.kv_bytes
    context, layers, slots = int(engine.config.context_length), engine.model.kv_layers, capacity.slots
    context = min(capacity.context_len or context, context)
    most = min(spare_bytes(engine.model), pool_nbytes(layers, slots * context, slots))
    if room is None:
        return most
    return min(most, max(int(SPARE_SHARE * room), pool_nbytes(layers, min(context, LEAST_TOKENS), slots)))


def answer_requests(
    models: ModelsOptions,
    loading: Loading,
    address: AddressOptions,
    options: Mapping[str, Any],
    journal: Path | None,
) -> None:
    """Serve until a signal ends the server. The journal gets `options`, the arguments of `load` that change results."""
    import asyncio  # takes 20 ms, which no other command should pay

    from mlx_engine.serve.server import ConnectionLimit, Server, listen, most_connections, raise_descriptor_limit

    raise_descriptor_limit()
    opened, listener = opened_journal(journal), listen(address.host, address.port)
    host, url = listener.getsockname()[0], address.url(listener)
    loading = replace(loading, warnings=address.warnings(host))

    async def run() -> BaseException | None:
        from mlx_engine.serve.app import create_app

        served = served_models(models, loading, address, host)
        service = served.default.service

        def ready() -> None:
            if opened:
                service.recorder = recorder_of(service, opened, models.source, options)
            for line in usage(service.worker.engine, address, url, served):
                notice(line)

        served.on_started = ready
        limit = ConnectionLimit(most_connections())
        await Server(create_app(served), served, grace=loading.capacity.grace, limit=limit).serve([listener])
        return served.fault

    fault = asyncio.run(run())
    if isinstance(fault, EngineError):
        raise fault
    if fault is not None:  # not `raise fault`: a SystemExit could end the process with exit code 0
        raise RuntimeError("the engine thread has died") from fault


def served_models(models: ModelsOptions, loading: Loading, address: AddressOptions, host: str) -> Models:
    """Return the models of a server without loading them; `host` is the server's IP address."""
    from mlx_engine.serve.limits import Turns
    from mlx_engine.serve.registry import Models, ServedModel
    from mlx_engine.serve.worker import Cores, Worker

    cores, turns = Cores(), Turns()

    def served(spec: ModelSpec) -> ServedModel:
        def make() -> tuple[Engine, Scheduler]:
            return loading.open(spec.source).load()

        service = new_service(Worker(make), spec, address, loading.capacity, host)
        service.adapters = tuple(loading.how.get("adapters", ()))
        service.check_names()
        service.turns = turns  # shared by all models, because parsing any request stalls the one event loop
        new_worker = partial(worker_for, service, loading, cores)
        service.worker = new_worker(make)
        about = partial(loading.describe, spec.source)
        if models.is_alone:
            return ServedModel(service, describe=about)
        exists = Path(spec.source).exists if Path(spec.source).exists() else lambda: True
        return ServedModel(service, partial(loading.open, spec.source), new_worker, about, exists)

    given = models.model or ([] if models.models_dir else ["builtin"])
    specs = specs_of(given, address, models.found())
    if not specs:
        message = f"--models-dir {models.models_dir}: has no GGUF file and no folder with config.json; give -m MODEL"
        raise OptionError(message, option="--models-dir", found=str(models.models_dir))
    how: dict[str, Any] = {"memory": models.memory, "idle_seconds": models.idle_seconds, "notice": notice}
    if models.models_dir is not None:
        known = {spec.source for spec in specs}
        how["more"] = lambda names: [
            served(spec) for spec in models.found() if spec.name not in names and spec.source not in known
        ]
    return Models([served(spec) for spec in specs], is_loaded_at_start=bool(given), **how)


def new_service(
    worker: Worker, spec: ModelSpec, address: AddressOptions, capacity: CapacityOptions, host: str
) -> Service:
    """Return the service of a model; `host` is the server's IP address."""
    from mlx_engine.serve.service import Service

    return Service(
        worker,
        spec.name,
        aliases=spec.aliases,
        any_model=address.any_model,
        api_key=address.api_key,
        max_body=capacity.max_body_bytes,
        hosts=address.hosts(host),
        origins=tuple(address.cors or ()),
        context_len=capacity.context_len,
        explains_cache=capacity.explain_cache,
    )


def worker_for(
    service: Service, loading: Loading, cores: Cores, make: Callable[[], tuple[Engine, Scheduler]]
) -> Worker:
    """Return a worker whose engine thread loads a model with `make`. The workers of all models share `cores`."""
    from mlx_engine.bench.roofline import read_bandwidth
    from mlx_engine.serve.status import Monitor
    from mlx_engine.serve.worker import Worker

    def decoded(ids: Sequence[int]) -> str:
        engine = service.worker.engine
        return "" if engine is None else engine.tokenizer.decode(ids)

    def measure(engine: Engine) -> None:
        if service.bandwidth is None:
            service.bandwidth = read_bandwidth(engine)

    def ready() -> None:
        engine = service.worker.engine
        if loading.is_suggested and engine is not None:
            service.sampling, lines = suggestions(engine)
            for line in lines:
                notice(line)

    monitor = Monitor(bandwidth=lambda: service.bandwidth, text_of=decoded)
    how: dict[str, Any] = {"queue": loading.capacity.queue, "snapshot": monitor.after, "cores": cores}
    return Worker(make, on_ready=ready, measure=measure, **how)


def suggestions(engine: Engine) -> tuple[Mapping[str, Any], list[str]]:
    """Return the sampling that the model's files suggest, and a line about it; raise the errors of `checked`."""
    from mlx_engine.commands.options.suggested import checked, named

    found = checked(engine.path)
    text = named(found.values) or "nothing"
    return found.values, [f"Default sampling of requests, from {Path(found.where).name}: {text}"]


def collect_garbage_again() -> None:
    """Restore frequent garbage collection, which `commands.main` has made rare, and freeze all objects that exist now.

    An exception and its traceback refer to each other, so only a collection frees them. With the rare collections of
    `commands.main`, they took 110 MiB after 10,000 requests. Collections skip frozen objects: scanning the model and
    the tokenizer, for example, would take time.
    """
    gc.freeze()
    gc.set_threshold(*GARBAGE_THRESHOLD)


def served_name(source: str) -> str:
    """Return the name of a model in the API: its source or, if the source is a path, the file name without .gguf."""
    path = Path(source)
    if not path.exists():
        from mlx_engine.checkpoint.sources import hub_name

        source = str(hub_name(source) or source)  # a URL becomes a hub id
        path = Path(source)
    is_file = path.exists() or path.is_absolute() or source.endswith(".gguf")
    return path.resolve().name.removesuffix(".gguf") if is_file else source


def loaded(engine: Engine, source: str, scheduler: Scheduler, context_len: int | None) -> list[str]:
    """Return the lines about the loaded model and the memory for keys and values."""
    pool, slots = scheduler.pool, scheduler.slots
    context = engine.config.context_length
    _, rank = engine.model.kv_capacity()
    least = "" if rank is None else f"; rank {rank} has the least memory for keys and values"
    limit = "" if context_len is None else f"; a request may have at most {min(context_len, context):,}"
    return [
        f"Model: {source}, {engine.architecture}, on backend {engine.backend.description}",
        *engine.notes,
        *([f"Speculation: {engine.speculation.why}"] if engine.speculation.is_on else []),
        f"Keys and values: {pool.n_tokens:,} tokens in {size(pool.nbytes)}, shared by {slots} "
        f"{'slot' if slots == 1 else 'slots'}; the model's context is {context:,} tokens{limit}{least}",
    ]


def usage(engine: Engine | None, address: AddressOptions, url: str, models: Models | None = None) -> list[str]:
    """Return lines with the server's address and an example request; with several models, also their names."""
    has_template = engine is not None and engine.tokenizer.chat_template is not None
    route = "/v1/chat/completions" if has_template else "/v1/completions"
    text = "Tell me a story."
    body = {"messages": [{"role": "user", "content": text}]} if has_template else {"prompt": text, "max_tokens": 100}
    headers = ["Content-Type: application/json"]
    if address.api_key is not None:
        headers.append("Authorization: Bearer KEY")
    words = ["curl", url + route, *(word for header in headers for word in ("-H", header)), "-d", json.dumps(body)]
    names = [] if models is None or models.is_single else [f"Models: {', '.join(model.name for model in models)}"]
    return [*names, f"Listening on {url} (Ctrl-C stops the server)", address.page(url), f"Try: {shlex.join(words)}"]


def is_local(host: str) -> bool:
    """Return whether an IP address can be reached from this machine only."""
    return ipaddress.ip_address(host).is_loopback


def opened_journal(path: Path | None) -> Journal | None:
    """Return the journal, or None without --journal; raise OptionError if the path is "-" or cannot be written."""
    from mlx_engine.serve.journal import Journal

    if str(path) == "-":
        raise OptionError("--journal needs a file: stdout cannot be read again", option="--journal", found="-")
    return None if path is None else Journal(path, warn=notice)


def recorder_of(service: Service, journal: Journal, source: str, options: Mapping[str, Any]) -> Recorder:
    """Return the writer of the journal's lines. It records `source` and `options`, the arguments of `load`."""
    from mlx_engine.checkpoint.identity import identity
    from mlx_engine.serve.journal import ModelId, Recorder

    engine = service.engine
    # Record the absolute path of the model, so that `replay` finds the model from any folder.
    where = str(Path(source).resolve()) if Path(source).exists() else source
    kept = dict(options)
    if "context" in kept:  # --context-len may exceed the model's context; `load`, which `replay` calls, would refuse it
        kept["context"] = min(kept["context"], engine.config.context_length)
    about = ModelId(service.model, where, identity(engine.path), kept)
    return Recorder(journal, about, backend=engine.backend.name, slots=service.worker.slots)
