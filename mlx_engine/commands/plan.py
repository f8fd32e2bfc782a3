"""The command `plan`: estimate memory, link traffic and speed of a model that several machines share.

The model is not run, and the machines need not exist: options describe them. Without --bandwidth, the memory bandwidth
of this machine is measured; without --compute, its FLOP/s in matrix products. The results are used for all machines.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mlx_engine.commands.console import FAILED, reports_errors
from mlx_engine.commands.options.groups import takes_groups
from mlx_engine.commands.options.model import Backend, LoadOptions, Model
from mlx_engine.commands.values import POWERS, bytes_of, columns, experts_text, plain, print_json
from mlx_engine.errors import OptionError, SourceError, shown, size
from mlx_engine.options import option

if TYPE_CHECKING:
    from mlx_engine.backends import base
    from mlx_engine.checkpoint.model_files import Checkpoint
    from mlx_engine.distributed.plan import Asked, Host, Link, Messages, ShardKind, Summary
    from mlx_engine.weights.outline import Outlined


@dataclass(frozen=True)
class HostOptions:
    """The machines."""

    hosts: str = option("2x16GB", "The machines and their memory: 4x16GB, or 16GB,64GB.", metavar="HOSTS")
    usable: float = option(
        75.0, "How much of a machine's memory the model may take.", metavar="PERCENT", least=1, most=100
    )
    bandwidth: str | None = option(
        None,
        "Memory bandwidth of a machine, such as 120GB/s: one value for all machines, or one per machine.",
        metavar="RATE",
        unset="measured here",
    )
    compute: str | None = option(
        None,
        "Arithmetic rate of products of a machine, such as 3TFLOP/s: one value for all machines, or one per machine.",
        metavar="RATE",
        unset="measured here",
    )
    ranks_per_host: int = option(1, "Processes on each machine; they share its memory.", least=1)
    cores: int | None = option(None, "Cores of each machine, which its ranks share.", unset="enough", least=1)

    @property
    def measured(self) -> tuple[str, ...]:
        """The names of the rates that are measured on this machine, because no option gives them."""
        given = {"bandwidth": self.bandwidth, "compute": self.compute}
        return tuple(name for name, value in given.items() if value is None)

    @property
    def n_ranks(self) -> int:
        """Number of ranks (processes that share the model) on all machines."""
        return len(memories_of("--hosts", self.hosts)) * self.ranks_per_host

    def check(self) -> None:
        """Raise OptionError if a value is invalid."""
        n = len(memories_of("--hosts", self.hosts))
        if self.bandwidth is not None:
            each_host("--bandwidth", self.bandwidth, n, bandwidth_of)
        if self.compute is not None:
            each_host("--compute", self.compute, n, compute_of)

    def ranks(self, backend: base.Backend, outline: Outlined) -> list[Host]:
        """Return a `Host` for each rank; raise OptionError if a value is invalid, or cannot be measured here."""
        from mlx_engine.distributed.plan import Host

        memories = memories_of("--hosts", self.hosts)
        n, threads = len(memories), int(getattr(backend, "threads", 1) or 1)
        reads = (
            [measured_bandwidth(backend, threads)] * n
            if self.bandwidth is None
            else each_host("--bandwidth", self.bandwidth, n, bandwidth_of)
        )
        computes = (
            [measured_compute(backend, outline)] * n
            if self.compute is None
            else each_host("--compute", self.compute, n, compute_of)
        )
        usable = [int(memory * self.usable / 100) // self.ranks_per_host for memory in memories]
        return [
            Host(memory, read, compute, self.cores, self.ranks_per_host, threads)
            for memory, read, compute in zip(usable, reads, computes, strict=True)
            for _ in range(self.ranks_per_host)
        ]


@dataclass(frozen=True)
class LinkOptions:
    """The links between neighbours."""

    link: str = option("1Gbit/s", "Rate of the links between neighbours, such as 10Gbit/s.", metavar="RATE")
    latency: str = option("0.2ms", "Time from one machine to the next, half of what ping prints.", metavar="TIME")
    overhead: str = option("0.1ms", "Time that the ring's software takes for a message.", metavar="TIME")

    def link_of(self) -> Link:
        """Return the link; raise OptionError if a value is invalid."""
        from mlx_engine.distributed.plan import Link

        return Link(
            bits_of("--link", self.link),
            seconds_of("--latency", self.latency),
            seconds_of("--overhead", self.overhead),
        )


@dataclass(frozen=True)
class WorkOptions:
    """The workload."""

    context: int | None = option(None, "Tokens of each conversation.", unset="the model's, at most 4,096", least=1)
    prompt: int | None = option(
        None,
        "Tokens of the prompt whose rate is estimated.",
        flags=("--prompt", "-p"),
        unset="512, at most the context",
        least=1,
    )
    slots: int | None = option(None, "Conversations at the same time.", unset="as many as ranks", least=1)
    top_k: int = option(
        1, "How many of a token's logits are sent: 1 if greedy, K with top-k, 0 for all, as `serve` does.", least=0
    )

    def asked(self, longest: int, n_ranks: int) -> Asked:
        """Return the workload; raise OptionError if --context exceeds `longest`, or --prompt exceeds the context.

        `longest` is the model's context in tokens.
        """
        from mlx_engine.bench.outlook import USUAL_CONTEXT
        from mlx_engine.cache.pool import LONGEST_PASS as CHUNK
        from mlx_engine.distributed.plan import Asked

        context = min(longest, USUAL_CONTEXT) if self.context is None else self.context
        if context > longest:
            message = f"--context must be at most {longest:,} tokens, the model's context"
            raise OptionError(message, option="--context", found=context)
        prompt = min(CHUNK, context) if self.prompt is None else self.prompt
        if prompt > context:
            message = f"--prompt must be at most {context:,} tokens, the value of --context"
            raise OptionError(message, option="--prompt", found=prompt)
        return Asked(context, self.slots or n_ranks, prompt, self.top_k or None)


def measured_bandwidth(backend: base.Backend, threads: int) -> float:
    """Return this machine's memory bandwidth in bytes per second; raise OptionError if it is unknown."""
    from mlx_engine.bench.outlook import machine_bandwidth

    found = machine_bandwidth(1 if backend.name in ("scalar", "simd") else threads)
    if found is None:
        raise OptionError(
            "--bandwidth is needed, such as 120GB/s: the memory bandwidth of this machine cannot be measured",
            option="--bandwidth",
        )
    return found


def measured_compute(backend: base.Backend, outline: Outlined) -> float:
    """Return the FLOP/s of a matrix product, measured with the weight type that takes the most bytes in the model.

    Raise OptionError for the backend scalar, whose rate is not measured.
    """
    from mlx_engine.bench.roofline import product_rate

    if backend.name == "scalar":
        raise OptionError("--compute is needed with the backend scalar, such as 300GFLOP/s", option="--compute")
    types: Any = outline.sizes.types
    return product_rate(backend, max(types, key=lambda type_: types[type_]))


@reports_errors
@takes_groups
def plan(
    *,
    model: Model = "builtin",
    hosts: HostOptions,
    links: LinkOptions,
    backend: Backend = "auto",
    shard: str = option("pipeline", "pipeline: each rank has some layers. tensor: a slice of every matrix."),
    split: str | None = option(None, "Layers of each rank of a pipeline.", metavar="N,N", unset="by speed"),
    work: WorkOptions,
    load: LoadOptions,
    json: bool = option(False, "Print one JSON object."),
) -> None:
    """Estimate the placement of layers on several machines, link traffic and tokens/s.

    The model is not run or downloaded, and no weights are read. MODEL may also be a config.json, or a folder with
    only a config.json. Exit code 1: the model does not fit.
    """
    kind = shard_of(shard)
    if split is not None and shard != "pipeline":
        raise OptionError("--split needs --shard pipeline", option="--split", found=shard)
    hosts.check()
    link = links.link_of()
    found = planned(model, backend, load, hosts, work, link, shard=kind, split=split)
    if json:
        print_json(found.facts())
    else:
        print_plan(found)
    raise typer.Exit(0 if found.fits else FAILED)


def shard_of(text: str) -> ShardKind:
    """Return the value of --shard; raise OptionError if it is unknown."""
    kinds: dict[str, ShardKind] = {"pipeline": "pipeline", "tensor": "tensor"}
    if text not in kinds:
        message = f"--shard: unknown kind {shown(text)}; choose {' or '.join(kinds)}"
        raise OptionError(message, option="--shard", found=text)
    return kinds[text]


def planned(
    model: str, backend: str, load: LoadOptions, hosts: HostOptions, work: WorkOptions, link: Link, *,
    shard: ShardKind, split: str | None,
) -> Summary:  # fmt: skip
    """Return the plan of a model; raise EngineError if the model cannot be loaded, or an option is invalid."""
    from mlx_engine.backends import auto, create_backend, types_of
    from mlx_engine.cache.pool import LONGEST_PASS as CHUNK
    from mlx_engine.distributed.pipeline import parsed
    from mlx_engine.distributed.plan import Summary, model_parts
    from mlx_engine.distributed.tensor import sliced
    from mlx_engine.observe import log
    from mlx_engine.weights.model import plan_model
    from mlx_engine.weights.outline import expansions, outlined

    checkpoint = opened(model, load)
    name = auto() if backend == "auto" else backend
    made = create_backend(name, threads=load.threads, **load.types())
    whole = plan_model(checkpoint, load.conversion())
    outline = outlined(whole, made)
    asked = work.asked(int(whole.config.context_length), hosts.n_ranks)
    for line in expansions(outline, name):
        log.warn(line)
    machines = hosts.ranks(made, outline)
    n_slices = len(machines) if shard == "tensor" else 0
    slices = [whole, *(sliced(whole, rank, n_slices) for rank in range(n_slices))]
    of_slices = [model_parts(outlined(each, made)) for each in slices]
    layers = None if split is None else parsed(split)
    about = {"where": checkpoint.where, "architecture": checkpoint.architecture, "backend": name}
    about |= types_of(made)
    return Summary.of(of_slices, machines, link, asked, shard, layers, chunk=CHUNK, measured=hosts.measured, **about)


def opened(model: str, load: LoadOptions) -> Checkpoint:
    """Return a model's checkpoint. `model` may be a config.json, without weights.

    Raises:
        SourceError: the model is not on this machine.
        EngineError: the model cannot be opened, or its weights are converted on load, so their sizes are not known yet.
    """
    from mlx_engine.checkpoint.sources import is_cached, resolve
    from mlx_engine.weights.model import allow, open_model
    from mlx_engine.weights.outline import is_config_alone, open_config

    if is_cached(model) is False:
        raise SourceError(
            f"{model}: not on this machine, and `plan` downloads nothing; download the model's config.json and name it"
        )
    path = resolve(model)
    if is_config_alone(Path(path)):
        found = open_config(path)
        return allow(found, load.allow_settings) if load.allow_settings else found
    found = open_model(path, load.allow_settings)
    if found.is_converted:
        raise OptionError(
            f"--model: the quantised layers of {found.where} are converted when they are read, so their sizes are not "
            "known before; name the original model's config.json, with --quant q4_0 for example",
            option="--model",
            found=found.where,
        )
    return found


def print_plan(found: Summary) -> None:
    """Print the part of each rank, the traffic of the links, and the rates or the missing memory."""
    print("\n".join(columns(list(head_rows(found)), "<<")))
    print()
    print("\n".join(columns(list(rank_rows(found)), "<<>>>>>")))
    print()
    print("\n".join(columns([*message_rows(found), *rate_rows(found)], "<<")))


def head_rows(found: Summary) -> Iterator[tuple[str, str]]:
    """Yield the rows about the model, the machines and the links."""
    from mlx_engine.quant.key_values import types_text

    about, host = found.about, found.ranks[0].host
    left = f" (and {size(found.left)} left in the file)" if found.left else ""
    rounded = types_text(about["activations"], about["kv_type"])
    yield "model", plain(about["where"])
    yield (
        "weights",
        f"{about['architecture']}, {len(found.model.layers):,} layers, {size(found.weights)} on "
        f"{about['backend']}{rounded}{left}",
    )
    if found.experts[0]:
        yield "experts", experts_text(*found.experts)
    same = len({rank.host for rank in found.ranks}) == 1
    speed = f"{host.bandwidth / 1e9:,.1f} GB/s of memory, {host.compute / 1e9:,.0f} GFLOP/s"
    how = f", {' and '.join(found.measured)} measured on this machine" if found.measured else ""
    yield "ranks", f"{len(found.ranks):,}, {'each' if same else 'the first'} with {speed}{how}"
    link = found.link
    yield (
        "links",
        f"{link.rate / 1e9:g} Gbit/s, {link.latency * 1e3:g} ms, and {link.overhead * 1e3:g} ms for the software of a "
        "message",
    )


def rank_rows(found: Summary) -> Iterator[tuple[str, ...]]:
    """Yield the table of the ranks; the first row is its header."""
    asked = found.asked
    conversations = f"{asked.slots:,} x {asked.context:,} tokens"
    yield "rank", "holds", "weights", "KV of a token", f"KV of {conversations}", "activations", "left"
    for i, rank in enumerate(found.ranks):
        last = rank.first + len(rank.layers) - 1
        layers = f"layer {last}" if last == rank.first else f"layers {rank.first} to {last}"
        parts = [layers if found.shard == "pipeline" else f"1/{len(found.ranks)} of all layers"]
        parts = [*(["tables"] if rank.tables else []), *parts, *(["head"] if rank.head else [])]
        left = size(rank.left) if rank.left >= 0 else f"lacks {size(-rank.left)}"
        yield (
            str(i),
            ", ".join(parts),
            size(rank.weights),
            size(rank.kv_token),
            size(rank.kv),
            size(rank.workspace),
            f"{left} of {size(rank.host.memory)}",
        )


def message_rows(found: Summary) -> Iterator[tuple[str, str]]:
    """Yield the rows about the traffic of the links."""
    if len(found.ranks) == 1:
        return
    if found.shard == "pipeline":
        yield "split", f"--split {','.join(str(len(rank.layers)) for rank in found.ranks)}"
    if found.duplicated:
        yield "twice", f"{size(found.duplicated)} of weights are stored on more than one rank"
    yield "a token", _sent(found.per_token, found.shard)
    yield "a chunk", f"{found.chunk:,} tokens of a prompt: {_sent(found.per_chunk, found.shard)}"


def _sent(of: Messages, shard: str) -> str:
    if shard == "pipeline":
        return f"{of.hidden:,} bytes over each border, {of.logits:,} bytes of logits from the last rank to the first"
    return (
        f"{of.nbytes:,} bytes over each link: {of.n_hidden:,} x {of.hidden:,} for the sums, "
        f"{of.n_logits:,} x {of.logits:,} for the logits"
    )


def rate_rows(found: Summary) -> Iterator[tuple[str, str]]:
    """Yield the rows of the rates or, if the model does not fit, of the missing memory."""
    if not found.fits:
        missing = sum(-rank.left for rank in found.ranks if rank.left < 0)
        yield "fits", f"no: {size(missing)} are missing; {_least(found.smallest)}"
        return
    rates, asked = found.rates, found.asked
    parts = f"{rates.compute_seconds * 1e3:,.1f} ms compute, {rates.link_seconds * 1e3:,.1f} ms links"
    yield "fits", f"yes; {_least(found.smallest)}"
    yield "decode", f"one request: about {_rate(rates.decode)} tokens/s after {asked.context:,} tokens ({parts})"
    if asked.slots > 1:
        yield "", f"{asked.slots:,} requests: about {_rate(rates.decode_all)} tokens/s in all"
    yield "prefill", f"one prompt of {asked.prompt:,} tokens: about {_rate(rates.prefill)} tokens/s"
    if asked.slots > 1 and rates.prefill_all > 1.005 * rates.prefill:
        yield "", f"several prompts: about {_rate(rates.prefill_all)} tokens/s in all"


def _least(n: int | None) -> str:
    if n is None:
        return "no number of ranks with the last rank's memory is enough for a pipeline"
    return f"fewest ranks of a pipeline, each with the last rank's memory: {n:,}"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)([a-zA-Z]+)/s")
TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(s|ms|us|µs)")
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}
COUNTED = re.compile(r"(\d+)\s*[x*]\s*(.+)")
BITS_PER_BYTE = 8
MOST_HOSTS = 1024  # a larger number is a typing error


def memories_of(option: str, text: str) -> list[int]:
    """Parse the bytes of memory of each machine: "4x16GB" is four machines, "16GB,2x64GB" is three. GB is 1000**3.

    Raises:
        OptionError: the text is not a list of sizes, a size has no unit, or the number of machines is out of range.
    """
    found: list[int] = []
    for item in text.split(","):
        match = COUNTED.fullmatch(item.strip())
        n, memory = (int(match[1]), match[2]) if match else (1, item)
        if not 1 <= n <= MOST_HOSTS:
            raise OptionError(f"{option}: {item} must be 1 to {MOST_HOSTS:,} machines", option=option, found=item)
        if re.fullmatch(r"[\d.]+", memory.strip()):
            message = f"{option}: {item} has no unit; 4x16GB means 4 machines with 16 GB of memory each"
            raise OptionError(message, option=option, found=item)
        try:
            nbytes = bytes_of(option, memory)
        except OptionError:
            nbytes = 0
        if nbytes <= 0:
            message = f"{option}: {shown(text)} is no list of machines, such as 4x16GB or 16GB,64GB"
            raise OptionError(message, option=option, found=text)
        found += [nbytes] * n
    return found


# The next three functions raise OptionError if the text is not a rate with the right unit, or the rate is 0.


def bits_of(option: str, text: str) -> float:
    """Parse the rate of a link in bits per second: 10Gbit/s and 1.25GB/s are the same rate."""
    return _rate_of(option, text, "10Gbit/s or 1.25GB/s", {"bit": 1, "b": 1, "B": BITS_PER_BYTE})


def bandwidth_of(option: str, text: str) -> float:
    """Parse a memory bandwidth in bytes per second, such as 120GB/s."""
    return _rate_of(option, text, "120GB/s", {"B": 1})


def compute_of(option: str, text: str) -> float:
    """Parse floating-point operations per second, such as 300GFLOP/s."""
    return _rate_of(option, text, "300GFLOP/s or 3.5TFLOP/s", {"FLOP": 1, "FLOPs": 1})


def seconds_of(option: str, text: str) -> float:
    """Parse a time in seconds: 0.1ms, 200us, 1s, or 0. Raise OptionError if the text is not a time."""
    if text.strip() == "0":
        return 0.0
    match = TIME.fullmatch(text.strip())
    if match is None:
        message = f"{option}: {shown(text)} is no time, such as 0.1ms or 200us"
        raise OptionError(message, option=option, found=text)
    return float(match[1]) * SECONDS[match[2]]


def each_host(option: str, text: str, n: int, parse: Callable[[str, str], float]) -> list[float]:
    """Parse one value for all n machines, or n values separated by commas; return n values.

    Raises:
        OptionError: a value is invalid, or the number of values is neither 1 nor n.
    """
    values = [parse(option, item.strip()) for item in text.split(",")]
    if len(values) not in (1, n):
        message = f"{option} needs one value, or one for each of the {n:,} machines"
        raise OptionError(message, option=option, found=text)
    return values * n if len(values) == 1 else values


def _rate_of(option: str, text: str, examples: str, units: dict[str, int]) -> float:
    match = RATE.fullmatch(text.strip())
    if match is None or match[4] not in units or float(match[1]) == 0:
        message = f"{option}: {shown(text)} is no rate, such as {examples}"
        raise OptionError(message, option=option, found=text)
    factor: int = (1024 if match[3] else 1000) ** POWERS[match[2].upper()]
    return float(match[1]) * factor * units[match[4]]
