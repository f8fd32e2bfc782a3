"""Plan a model on several machines without running it: the part of each rank (process), and the expected tokens/s.

`ModelParts` has the parts of a model (each layer, the embedding tables and the head), with their bytes and arithmetic
operations, computed from the shapes and types of the weights. `pipeline` and `tensor` divide the parts among the ranks.
`Timing` computes the time of a pass from memory bandwidth, arithmetic rate and links. A run with `--shard pipeline`
uses the same parts to choose its split (the number of layers of each rank).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from itertools import accumulate
from typing import Any, Literal, NamedTuple, TypeAlias

from mlx_engine.backends.experts import Experts, share_missed, share_read
from mlx_engine.backends.parameters import Linear
from mlx_engine.backends.sampling import packs
from mlx_engine.cache import CacheLayer, KVLayer
from mlx_engine.cache.pool import LONGEST_PASS, pool_nbytes, state_of
from mlx_engine.errors import OptionError
from mlx_engine.models.layer import Attention, GatedAndMixture, LatentAttention, Layer, RowNorms, SharedAttention
from mlx_engine.weights.outline import ACTIVATIONS, Outline, Outlined

# Attributes of a model that do not belong to its embedding tables.
NOT_TABLES = ("config", "layers", "program", "output", "output_norm", "_backend")


# ---- the parts of a model ----


@dataclass(frozen=True)
class Pass:
    """A forward pass: `n_tokens` new tokens in each of `n_sequences` sequences, after `depth` earlier tokens.

    Logits are computed for the last token of each sequence.
    """

    n_sequences: int
    n_tokens: int
    depth: int


@dataclass(frozen=True)
class Work:
    """Bytes that a pass reads, and its floating-point operations."""

    nbytes: float
    flops: float

    def __add__(self, other: Work) -> Work:
        return Work(self.nbytes + other.nbytes, self.flops + other.flops)

    def __sub__(self, other: Work) -> Work:
        return Work(self.nbytes - other.nbytes, self.flops - other.flops)


@dataclass(frozen=True, eq=False)
class Part:
    """A part of a model: one layer, the embedding tables, or the head.

    Attributes:
        arrays: all arrays of the part.
        tables: the arrays of which a pass reads only a few rows.
        read: bytes of the matrices that every pass reads.
        experts: bytes of the experts' matrices.
        expert_share: the share of the experts that one token uses.
        multiplied: multiplications with weights per token, counting only the experts that the token uses.
        scored: multiplications of attention per pair of a new token and a token that it attends to.
        attended: describes the KV cache that the attention reads; None for a layer without attention.
        kept: describes the layer's own cache (keys and values, or a state); None if the layer shares the KV cache of
            another layer.
        exchanges: with tensor parallelism, the number of exchanges between ranks in this layer, each of an array as
            large as the hidden states. There are two (after attention and after the FFN), one more if the layer has
            experts beside a dense FFN, and two more (for queries and keys) if norms run over all heads.
        is_head: whether the part is the head, which computes only the last token of each sequence.
    """

    arrays: tuple[Outline, ...] = ()
    tables: tuple[Outline, ...] = ()
    read: float = 0.0
    experts: float = 0.0
    expert_share: float = 1.0
    multiplied: float = 0.0
    scored: float = 0.0
    attended: KVLayer | None = None
    kept: CacheLayer | None = None
    exchanges: int = 0
    is_head: bool = False

    def without_tables(self) -> Part:
        """Return the part without its tables, for a rank that reads rows of the tables from the file."""
        return replace(self, arrays=tuple(array for array in self.arrays if array not in self.tables), tables=())

    def work(self, of: Pass) -> Work:
        """Return the part's work in a pass."""
        n_tokens = of.n_sequences * of.n_tokens
        computed = of.n_sequences if self.is_head else n_tokens
        # `visible` is the average number of tokens that a query attends to: all earlier and half of the new tokens.
        # `n_read` is the number of tokens of a sequence whose keys and values the pass reads.
        visible, n_read = of.depth + (of.n_tokens + 1) / 2, float(of.depth + of.n_tokens)
        kv = 0.0
        if self.attended is not None:
            window = abs(self.attended.window or math.inf)
            visible, n_read = min(visible, window), min(n_read, window - 1 + of.n_tokens)
            kv = self.attended.token_nbytes * n_read * of.n_sequences
        if self.kept is not None and (state := state_of(self.kept)) is not None:
            kv += 2.0 * state.nbytes * of.n_sequences  # read, and written
        nbytes = self.read + self.experts * share_read(self.expert_share, n_tokens) + kv
        return Work(nbytes, 2.0 * (self.multiplied * computed + self.scored * visible * n_tokens))


@dataclass(frozen=True, eq=False)
class ModelParts:
    """The parts of a model, or the slices of these parts that one rank of tensor parallelism has.

    Attributes:
        tables: embedding tables, and the other arrays that the model uses before the first layer.
        layers: one part per layer.
        head: the norm and the matrix of the head; the matrix of a tied head is the embedding table of `tables`.
        left: bytes of embedding tables that stay in the file; a pass reads a few of their rows.
        total: bytes of the weights that a process with all these parts holds in memory, without `left`.
        hidden: floats per token that one layer passes to the next.
        vocab_size: number of logits.
        widest: rows plus columns of the matrix in which this sum is largest, without the head and the embedding tables;
            bounds the memory of activations.
        cuts: the indices of layers that may be the first layer of a rank after rank 0.
    """

    tables: Part
    layers: tuple[Part, ...]
    head: Part
    left: int
    total: int
    hidden: int
    vocab_size: int
    widest: int
    cuts: frozenset[int]


def model_parts(outlined: Outlined) -> ModelParts:
    """Return the parts of a model whose weights are `Outline` objects (shapes and types without data)."""
    model: Any = outlined.model
    layers: Sequence[Layer] = model.layers
    own = iter(model.kv_layers)
    shared = [layer.mix.layer if isinstance(layer.mix, SharedAttention) else None for layer in layers]
    kept = [next(own) if source is None else None for source in shared]
    attended = [kept[i if source is None else source] for i, source in enumerate(shared)]
    tables = [value for name, value in vars(model).items() if name not in NOT_TABLES]
    cfg, sizes = model.config, outlined.sizes
    return ModelParts(
        tables=_part(tables, tables=tuple(value for value in tables if isinstance(value, Outline))),
        layers=tuple(_layer(*each) for each in zip(layers, kept, attended, strict=True)),
        head=_part([model.output, model.output_norm], is_head=True),
        left=sizes.left_nbytes,
        total=sizes.nbytes,
        hidden=model.width,
        vocab_size=cfg.vocab_size,
        widest=max((sum(shape) for shape in sizes.shapes if shape[0] != cfg.vocab_size), default=0),
        cuts=frozenset(c for c in range(1, len(layers)) if all(source is None or source >= c for source in shared[c:])),
    )


def held(parts: Sequence[Part]) -> int:
    """Return the bytes of parts; an array that several parts share counts once."""
    return sum({id(array): array.nbytes for part in parts for array in part.arrays}.values())


def _layer(layer: Layer, kept: CacheLayer | None, attended: CacheLayer | None) -> Part:
    kv = attended if isinstance(attended, KVLayer) else None
    queries = layer.mix.q.weight.shape[0] if isinstance(layer.mix, Attention | SharedAttention) else 0
    if isinstance(layer.mix, LatentAttention):
        queries = layer.mix.v_b.n_experts * layer.mix.head_dim
    norms_rows = isinstance(layer.mix, Attention) and isinstance(layer.mix.norms, RowNorms)
    exchanges = 2 + isinstance(layer.ffn, GatedAndMixture) + 2 * norms_rows
    return _part([layer], kept=kept, attended=kv, scored=2 * queries, exchanges=exchanges)


def _part(values: Sequence[Any], **given: Any) -> Part:
    mixtures = [found for value in values for found in _found(value, Experts)]
    linears = {id(linear.weight): linear for value in values for linear in _found(value, Linear)}
    of_experts = {
        id(linear.weight) for mixture in mixtures for matrices in mixture.matrices for linear in matrices.weights
    }
    share = mixtures[0].share if mixtures else 1.0
    arrays = {id(array): array for value in values for array in _found(value, Outline)}
    return Part(
        arrays=tuple(arrays.values()),
        read=sum(linear.weight.nbytes for key, linear in linears.items() if key not in of_experts),
        experts=sum(linears[key].weight.nbytes for key in of_experts),
        expert_share=share,
        multiplied=sum(
            math.prod(linear.weight.shape) * (share if key in of_experts else 1) for key, linear in linears.items()
        ),
        **given,
    )


def _found(value: Any, kind: type) -> Iterator[Any]:
    """Yield all values of the type `kind` in nested dataclasses, lists and tuples."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _found(item, kind)
    elif is_dataclass(value):
        for f in fields(value):
            yield from _found(getattr(value, f.name), kind)


# ---- runs of layers ----


class _Best(NamedTuple):
    """A split: the ranks' largest cost, the sum of their squared costs (prefers even splits), their first layers."""

    largest: float
    squares: float
    starts: tuple[int, ...]


NONE = _Best(math.inf, math.inf, ())


def balanced(
    n_layers: int, n_ranks: int, cuts: Collection[int], cost: Callable[[int, int, int], float]
) -> list[int] | None:
    """Return the split with the smallest maximum of the ranks' costs; None if this maximum is infinite for all splits.

    A split is the number of layers of each rank.

    Args:
        n_layers: number of layers, at least one per rank.
        n_ranks: number of ranks.
        cuts: the indices of layers that may be the first layer of a rank after rank 0.
        cost: a function of (rank, first layer, the layer after the last); infinite if these layers do not fit.
    """
    best = {0: _Best(0.0, 0.0, ())}
    for rank in range(n_ranks):
        ends = [n_layers] if rank == n_ranks - 1 else sorted(cuts)
        best = {
            end: min(
                (_longer(best[start], cost(rank, start, end), start) for start in best if start < end), default=NONE
            )
            for end in ends
        }
    found = best.get(n_layers, NONE)
    if math.isinf(found.largest):
        return None
    return [end - start for start, end in zip(found.starts, (*found.starts[1:], n_layers), strict=True)]


def _longer(before: _Best, cost: float, start: int) -> _Best:
    return _Best(max(before.largest, cost), before.squares + cost * cost, (*before.starts, start))


# ---- machines and links ----

BITS = 8
# The time slice of the Linux scheduler in seconds, approximately. A waiting thread runs after at most this time.
SLICE = 3e-3


@dataclass(frozen=True)
class Host:
    """A machine.

    Attributes:
        memory: bytes of this machine that one rank may take.
        bandwidth: bytes per second that a rank reads while no other rank runs.
        compute: floating-point operations per second of a rank while no other rank runs.
        cores: cores of the machine; None if each rank has enough cores.
        ranks: ranks on this machine.
        threads: threads of each rank.
        together: the factor by which a rank's work takes longer while other ranks on the machine share the bandwidth.
    """

    memory: int
    bandwidth: float
    compute: float
    cores: int | None = None
    ranks: int = 1
    threads: int = 1
    together: float = 1.0

    @property
    def crowding(self) -> float:
        """Factor by which a rank's work takes longer while all ranks compute, because they share memory and cores."""
        together = self.together if self.ranks > 1 else 1.0
        return together * (1.0 if self.cores is None else max(1.0, self.threads * self.ranks / self.cores))

    @property
    def delay(self) -> float:
        """Expected seconds from a message's arrival until the rank reads it; 0 if every rank has a core.

        With fewer cores, another rank that polls its sockets may occupy the core until its time slice ends.
        """
        return 0.0 if self.cores is None else SLICE / 2 * max(0.0, 1 - self.cores / self.ranks)

    def seconds(self, work: Work) -> float:
        """Return the time of a rank's work while no other rank runs.

        The time is sqrt(r^2 + a^2), for r = bytes / bandwidth and a = operations / compute, because reading and
        arithmetic overlap in part. Measured passes of 1 to 8 requests on one core were within 7 % of this time;
        max(r, a) was up to a quarter too short.
        """
        return math.hypot(work.nbytes / self.bandwidth, work.flops / self.compute)

    def among_waiting(self, work: Work) -> float:
        """Return the time of a rank's work while the other ranks wait for messages.

        A waiting rank uses a core, too, because MLX's ring polls its sockets. When the message that a rank waits for
        arrives, the operating system runs this rank for one time slice; then the waiting ranks get their share.
        """
        seconds = self.seconds(work)
        share = 1.0 if self.cores is None else max(1.0, (self.threads + self.ranks - 1) / self.cores)
        return seconds + max(0.0, seconds - SLICE) * (share - 1)


@dataclass(frozen=True)
class Link:
    """A connection of two neighbours in the ring.

    Attributes:
        rate: bits per second in each direction.
        latency: seconds from the first byte's departure to its arrival.
        overhead: seconds that the ring's software takes for a message.
    """

    rate: float
    latency: float
    overhead: float = 0.0

    def occupied(self, nbytes: float) -> float:
        """Return the seconds for which a message keeps the link busy."""
        return nbytes * BITS / self.rate

    def seconds(self, nbytes: float) -> float:
        """Return the seconds of a message from the memory of one rank to the memory of its neighbour."""
        return self.latency + self.overhead + self.occupied(nbytes)


# ---- what each rank holds ----

FLOAT_BYTES = 4


@dataclass(frozen=True)
class Asked:
    """The workload of the machines.

    Attributes:
        context: tokens of each sequence in the cache.
        slots: number of sequences at the same time.
        prompt: tokens of the prompt whose time is estimated.
        best: the number of largest logits that sampling needs; None for all.
    """

    context: int
    slots: int
    prompt: int
    best: int | None = None


@dataclass(frozen=True)
class Rank:
    """The part of the model that one rank holds, and its memory.

    Attributes:
        host: its machine.
        first: the index of its first layer.
        layers: its layers; with tensor parallelism, its slices of all layers.
        tables: the part that embeds tokens; in a pipeline, None except on the first rank. Its embedding tables are in
            memory only if the rank also has the head; otherwise the rank reads single rows from the file.
        head: the head; in a pipeline, None except on the last rank.
        weights: bytes of its weights.
        kv_token: bytes of keys and values that one more token adds, as long as no attention window is full.
        kv: bytes of the pages of all sequences, and of their states.
        workspace: bytes of activations and logits.
    """

    host: Host
    first: int
    layers: tuple[Part, ...]
    tables: Part | None
    head: Part | None
    weights: int
    kv_token: int
    kv: int
    workspace: int

    @property
    def left(self) -> int:
        """Bytes of the host's memory that stay free; negative if the rank does not fit."""
        return self.host.memory - (self.weights + self.kv + self.workspace)

    def work(self, of: Pass) -> Work:
        """Return the rank's work in a pass."""
        return sum((part.work(of) for part in (self.tables, *self.layers, self.head) if part), Work(0.0, 0.0))


def pipeline(model: ModelParts, hosts: Sequence[Host], asked: Asked, split: Sequence[int] | None = None) -> list[Rank]:
    """Return the ranks of a pipeline. Each rank has consecutive layers.

    Without `split`, choose the split that fits into memory and whose slowest rank takes the least time per token. If no
    split fits, choose the one that minimises the largest ratio of needed memory to host memory.

    Raises:
        OptionError: the layers cannot be cut for this number of ranks; or `split` has the wrong number of ranks or
            layers, or separates layers that share keys and values.
    """
    n_layers = len(model.layers)
    most = len(model.cuts) + 1
    if len(hosts) > most:
        message = (
            f"--hosts: the model's {n_layers:,} layers can be cut for at most {most:,} ranks, not for {len(hosts):,}"
        )
        raise OptionError(message, option="--hosts", found=len(hosts))
    if split is not None:
        _check_split(model, hosts, split)
        return _cut(model, hosts, asked, split)
    runs = _Runs(model, asked)

    def seconds(rank: int, first: int, end: int) -> float:
        host = hosts[rank]
        return host.seconds(runs.work(first, end)) if runs.needed(first, end) <= host.memory else math.inf

    def fullness(rank: int, first: int, end: int) -> float:
        return runs.needed(first, end) / hosts[rank].memory

    found = balanced(n_layers, len(hosts), model.cuts, seconds) or balanced(n_layers, len(hosts), model.cuts, fullness)
    return _cut(model, hosts, asked, found or [])


def tensor(slices: Sequence[ModelParts], hosts: Sequence[Host], asked: Asked) -> list[Rank]:
    """Return the ranks of tensor parallelism. Each rank has a slice of the model."""
    every = range(len(slices[0].layers))
    return [
        _rank(model, host, asked, every, is_first=True, is_last=True) for model, host in zip(slices, hosts, strict=True)
    ]


def smallest(model: ModelParts, host: Host, asked: Asked) -> int | None:
    """Return how many ranks on hosts like `host` a pipeline needs to hold the model; None if no number is enough."""
    runs, ends, first, n = _Runs(model, asked), sorted({*model.cuts, len(model.layers)}), 0, 0
    while first < len(model.layers):
        # If each rank takes as many layers as fit, the number of ranks is smallest.
        fitting = [end for end in ends if end > first and runs.needed(first, end) <= host.memory]
        if not fitting:
            return None
        first, n = fitting[-1], n + 1
    return n


def _check_split(model: ModelParts, hosts: Sequence[Host], split: Sequence[int]) -> None:
    n_layers, text = len(model.layers), ",".join(map(str, split))
    if len(split) != len(hosts) or min(split) < 1 or sum(split) != n_layers:
        expected = f"{len(hosts):,} numbers of at least 1 that add up to the model's {n_layers:,} layers"
        message = f"--split: {text} must be {expected}"
        raise OptionError(message, option="--split", found=text)
    if not set(accumulate(split[:-1])) <= model.cuts:
        message = f"--split: {text} separates layers from the layer whose keys and values they share"
        raise OptionError(message, option="--split", found=text)


def _cut(model: ModelParts, hosts: Sequence[Host], asked: Asked, split: Sequence[int]) -> list[Rank]:
    return [
        _rank(model, host, asked, range(end - n, end), is_first=end == n, is_last=end == len(model.layers))
        for host, n, end in zip(hosts, split, accumulate(split), strict=True)
    ]


def _rank(model: ModelParts, host: Host, asked: Asked, layers: range, *, is_first: bool, is_last: bool) -> Rank:
    parts = model.layers[layers.start : layers.stop]
    head = model.head if is_last else None
    tables = None if not is_first else model.tables if is_last else model.tables.without_tables()
    kept = [part.kept for part in parts if part.kept is not None]
    return Rank(
        host=host,
        first=layers.start,
        layers=parts,
        tables=tables,
        head=head,
        weights=held([part for part in (tables, *parts, head) if part is not None]),
        kv_token=sum(layer.token_nbytes for layer in kept if isinstance(layer, KVLayer)),
        kv=pool_nbytes(kept, asked.context * asked.slots, asked.slots),
        workspace=_workspace(model, is_last=is_last),
    )


def _workspace(model: ModelParts, *, is_last: bool) -> int:
    return FLOAT_BYTES * (ACTIVATIONS * LONGEST_PASS * model.widest + (model.vocab_size if is_last else 0))


class _Runs:
    """Bytes and work of ranges of layers, computed from prefix sums because many ranges are compared."""

    def __init__(self, model: ModelParts, asked: Asked) -> None:
        token = Pass(1, 1, asked.context)
        kept = [[] if part.kept is None else [part.kept] for part in model.layers]
        each = [pool_nbytes(layer, asked.context * asked.slots, asked.slots) for layer in kept]
        sizes = [held([part]) + kv for part, kv in zip(model.layers, each, strict=True)]
        self._needed = list(accumulate(sizes, initial=0))
        self._work = list(accumulate((part.work(token) for part in model.layers), initial=Work(0.0, 0.0)))
        self._model, self._tables, self._head = model, model.tables.work(token), model.head.work(token)

    def needed(self, first: int, end: int) -> int:
        """Return the bytes that a rank with the layers [first, end) needs."""
        is_last = end == len(self._model.layers)
        tables = self._model.tables if is_last else self._model.tables.without_tables()
        around = [*([tables] if first == 0 else []), *([self._model.head] if is_last else [])]
        return self._needed[end] - self._needed[first] + held(around) + _workspace(self._model, is_last=is_last)

    def work(self, first: int, end: int) -> Work:
        """Return the work of a rank with the layers [first, end) in a pass of one token."""
        found = self._work[end] - self._work[first]
        found = found + self._tables if first == 0 else found
        return found + self._head if end == len(self._model.layers) else found


# ---- messages and rates ----

ShardKind: TypeAlias = Literal["pipeline", "tensor"]


@dataclass(frozen=True)
class Messages:
    """The messages of one pass that are sent one after another, so their times add up.

    Attributes:
        hidden, n_hidden: bytes of a message of hidden states, and the number of these messages.
        logits, n_logits: bytes of a message of logits, and the number of these messages.
        n_begin: with tensor parallelism, the number of short messages that announce the pass. Rank 0 sends the first,
            and each rank forwards it to the next.
    """

    hidden: int
    n_hidden: int
    logits: int
    n_logits: int
    n_begin: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all messages, without the short ones that announce the pass."""
        return self.hidden * self.n_hidden + self.logits * self.n_logits

    def seconds(self, link: Link) -> float:
        """Return the seconds of all messages in sequence."""
        begin = self.n_begin * link.seconds(0)
        return begin + self.n_hidden * link.seconds(self.hidden) + self.n_logits * link.seconds(self.logits)

    @property
    def n(self) -> int:
        """The number of all messages."""
        return self.n_begin + self.n_hidden + self.n_logits


@dataclass(frozen=True)
class Rates:
    """Expected tokens per second, and the parts of the time of a token.

    Attributes:
        decode: generated tokens per second of a single request.
        decode_all: generated tokens per second of all requests together, when every rank is busy.
        prefill: prompt tokens per second of a single prompt.
        prefill_all: prompt tokens per second of all prompts together. A pipeline runs as many of them at once as it has
            ranks, at most `Asked.slots`. With tensor parallelism, the same as `prefill`.
        compute_seconds: time of computation per generated token of a single request (`Timing.compute`).
        link_seconds: time of the messages per generated token of a single request.
    """

    decode: float
    decode_all: float
    prefill: float
    prefill_all: float
    compute_seconds: float
    link_seconds: float


@dataclass(frozen=True)
class Timing:
    """Computes the times of passes of a model on several ranks; `best` is `Asked.best`."""

    model: ModelParts
    ranks: Sequence[Rank]
    link: Link
    shard: ShardKind
    best: int | None = None

    def messages(self, of: Pass) -> Messages:
        """Return the messages of a pass on the critical path.

        In a pipeline, each rank sends hidden states to the next, and the last rank sends logits to rank 0. With tensor
        parallelism, each exchange of a layer (`Part.exchanges`) is a gather, which takes one step of the ring per other
        rank. The first gather ends only after rank 0's message about the pass has reached the last rank. If sampling
        needs only the largest logits, only these and their token ids are sent; but a pipeline sends all logits if they
        take fewer bytes.
        """
        others = len(self.ranks) - 1
        hidden = FLOAT_BYTES * self.model.hidden * of.n_sequences * of.n_tokens
        n_logits, pairs = self.model.vocab_size, 2 * (self.best or 0)
        if others == 0:
            return Messages(0, 0, 0, 0)
        if self.shard == "pipeline":
            n_logits = pairs if packs(self.best, n_logits) else n_logits
            return Messages(hidden, others, FLOAT_BYTES * n_logits * of.n_sequences, 1)
        exchanges = sum(layer.exchanges for layer in self.model.layers)
        n_logits = pairs or -(-n_logits // len(self.ranks))
        return Messages(hidden, exchanges * others, FLOAT_BYTES * n_logits * of.n_sequences, others, n_begin=others)

    def rates(self, asked: Asked, chunk: int) -> Rates:
        """Return the expected rates; a pass has at most `chunk` tokens of a prompt."""
        token = Pass(1, 1, asked.context)
        chunks = [Pass(1, min(chunk, asked.prompt - at), at) for at in range(0, asked.prompt, chunk)]
        n_parts = 1 if self.shard == "tensor" else min(len(self.ranks), asked.slots)
        part = Pass(-(-asked.slots // n_parts), 1, asked.context)
        return Rates(
            decode=1 / self.alone(token),
            decode_all=n_parts * part.n_sequences / self.turn(part, n_parts),
            prefill=asked.prompt / self.all_of(chunks),
            prefill_all=n_parts * asked.prompt / self.all_of([each for each in chunks for _ in range(n_parts)]),
            compute_seconds=self.compute(token),
            link_seconds=self.sent(token),
        )

    def alone(self, of: Pass) -> float:
        """Return the seconds of a pass while no other pass is in flight."""
        return self.compute(of) + self.sent(of)

    def sent(self, of: Pass) -> float:
        """Return the seconds of all messages of a pass, including the delays until they are read."""
        messages, delay = self.messages(of), max(rank.host.delay for rank in self.ranks)
        return messages.seconds(self.link) + messages.n * delay

    def compute(self, of: Pass) -> float:
        """Return the seconds of a pass without messages.

        In a pipeline, the times of the ranks add up; with tensor parallelism, all ranks compute at the same time.
        """
        if self.shard == "pipeline":
            return sum(rank.host.among_waiting(rank.work(of)) for rank in self.ranks)
        return max(rank.host.seconds(rank.work(of)) * rank.host.crowding for rank in self.ranks)

    def all_of(self, passes: Sequence[Pass]) -> float:
        """Return the seconds of several passes that do not wait for each other's results, such as parts of a prompt.

        In a pipeline, a rank begins a pass as soon as its hidden states have arrived and the rank's previous pass has
        ended.
        """
        if self.shard == "tensor" or len(passes) == 1:
            return sum(map(self.alone, passes))
        done, sent, now = [0.0] * len(self.ranks), [0.0] * len(self.ranks), 0.0
        for each in passes:
            now = 0.0
            for i, rank in enumerate(self.ranks):
                done[i] = max(now, done[i]) + rank.host.seconds(rank.work(each)) * rank.host.crowding
                leaves, nbytes = max(done[i], sent[i]), self.messages(each).hidden
                sent[i] = leaves + self.link.occupied(nbytes)
                now = leaves + self.link.seconds(nbytes)
        return done[-1] + self.link.seconds(self.messages(passes[-1]).logits) if len(self.ranks) > 1 else done[-1]

    def turn(self, of: Pass, n_parts: int) -> float:
        """Return the seconds in which `n_parts` passes like `of` run once through all ranks.

        For several passes, this is the longest of three times: one pass alone, all passes on the slowest rank, and the
        messages of all passes on one link.
        """
        if n_parts == 1:
            return self.alone(of)
        busiest = max(rank.host.seconds(rank.work(of)) * rank.host.crowding for rank in self.ranks)
        sent = self.messages(of)
        return max(self.alone(of), n_parts * busiest, n_parts * self.link.occupied(max(sent.hidden, sent.logits)))


# ---- the whole plan ----


@dataclass(frozen=True)
class Summary:
    """A plan.

    Attributes:
        about: model, architecture and backend.
        link: the properties of every link of the ring.
        per_token: the messages of the pass that computes one token of one answer.
        chunk: the most tokens of the prompt that one pass computes.
        per_chunk: the messages of a pass with `chunk` tokens.
        smallest: the result of the function `smallest` for the host of the last rank.
        measured: which of "bandwidth" and "compute" were measured on this machine.
    """

    about: dict[str, str]
    model: ModelParts
    ranks: Sequence[Rank]
    link: Link
    asked: Asked
    shard: ShardKind
    per_token: Messages
    chunk: int
    per_chunk: Messages
    rates: Rates
    smallest: int | None
    measured: tuple[str, ...]

    @classmethod
    def of(
        cls, slices: Sequence[ModelParts], hosts: Sequence[Host], link: Link, asked: Asked, shard: ShardKind,
        split: Sequence[int] | None = None, *, chunk: int, measured: tuple[str, ...] = (), **about: str,
    ) -> Summary:  # fmt: skip
        """Make the plan of a model on some machines.

        `slices` begins with the whole model. For tensor parallelism, each rank's slice of the model follows. `split`
        has the number of layers of each rank of a pipeline; if None, `pipeline` chooses the split. A pass has at
        most `chunk` tokens of a prompt.

        Raises:
            OptionError: the hosts or `split` do not fit the model (see `pipeline`).
        """
        model = slices[0]
        ranks = pipeline(model, hosts, asked, split) if shard == "pipeline" else tensor(slices[1:], hosts, asked)
        timing = Timing(model, ranks, link, shard, asked.best)
        return cls(
            about=about,
            model=model,
            ranks=ranks,
            link=link,
            asked=asked,
            shard=shard,
            per_token=timing.messages(Pass(1, 1, asked.context)),
            chunk=min(chunk, asked.prompt),
            per_chunk=timing.messages(Pass(1, min(chunk, asked.prompt), 0)),
            rates=timing.rates(asked, chunk),
            smallest=smallest(model, hosts[-1], asked),
            measured=measured,
        )

    @property
    def fits(self) -> bool:
        """Whether every rank has the memory that it needs."""
        return all(rank.left >= 0 for rank in self.ranks)

    @property
    def duplicated(self) -> int:
        """Bytes of weights that all ranks together hold beyond those that a single process would hold."""
        return max(0, sum(rank.weights for rank in self.ranks) - self.model.total)

    @property
    def weights(self) -> int:
        """Bytes of weights on all ranks, without `duplicated`."""
        return sum(rank.weights for rank in self.ranks) - self.duplicated

    @property
    def left(self) -> int:
        """Bytes of embedding tables that stay in the file."""
        return self.model.left + self.model.total - self.weights

    @property
    def experts(self) -> tuple[int, int, int]:
        """Bytes of all experts, of those in memory, and of those that one token is expected to read from the file.

        Experts are left in the file only if one rank has the whole model.
        """
        nbytes = round(sum(layer.experts for layer in self.model.layers))
        if len(self.ranks) > 1 or not nbytes:
            return nbytes, nbytes, 0
        held = max(0, min(nbytes, nbytes + self.ranks[0].left))
        chosen = sum(layer.experts * layer.expert_share for layer in self.model.layers)
        return nbytes, held, round(chosen * share_missed(held / nbytes))

    def facts(self) -> dict[str, Any]:
        """Return the plan as plain values."""
        return {
            **self.about,
            "shard": self.shard,
            "n_layers": len(self.model.layers),
            "weights_bytes": self.weights,
            "left_in_file_bytes": self.left,
            "duplicated_bytes": self.duplicated,
            **dict(zip(("experts_bytes", "experts_held_bytes", "experts_read_bytes"), self.experts, strict=True)),
            **asdict(self.asked),
            "fits": self.fits,
            "smallest_number_of_hosts": self.smallest,
            "measured_here": list(self.measured),
            "link": {
                "bits_per_second": self.link.rate,
                "latency_s": self.link.latency,
                "overhead_s": self.link.overhead,
            },
            "messages_per_token": {**asdict(self.per_token), "nbytes": self.per_token.nbytes},
            "chunk": self.chunk,
            "messages_per_chunk": {**asdict(self.per_chunk), "nbytes": self.per_chunk.nbytes},
            "rates": asdict(self.rates),
            "ranks": [_facts(rank) for rank in self.ranks],
        }


def _facts(rank: Rank) -> dict[str, Any]:
    return {
        "first_layer": rank.first,
        "n_layers": len(rank.layers),
        "has_tables": rank.tables is not None,
        "has_head": rank.head is not None,
        "weights_bytes": rank.weights,
        "kv_bytes_per_token": rank.kv_token,
        "kv_bytes": rank.kv,
        "workspace_bytes": rank.workspace,
        "usable_bytes": rank.host.memory,
        "left_bytes": rank.left,
        "bandwidth_bytes_per_second": rank.host.bandwidth,
        "compute_flops_per_second": rank.host.compute,
    }
