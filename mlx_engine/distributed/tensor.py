"""Tensor parallelism: every rank (process) runs all layers of each pass with its slices of the matrices.

`models/layer.py` defines where the products of all ranks are added (`all_sum`) or concatenated (`all_columns`). A sum
is computed in rank order, so its bits depend on the number of ranks, but not on the batch.

Rank 0 announces each pass by a message (`leader.py`), and all ranks then exchange the same arrays in the same order.
Messages and arrays share connections, and only their order distinguishes them. So a rank finishes a pass before it
sends or receives the next message, also on lazy backends.

Projections to queries, keys, values, gate and up are cut by rows (outputs), and so is the head. The output and down
projections are cut by columns (inputs), between blocks of the weights' type. So each rank computes some heads and some
columns of the FFN's inner activations from the full hidden states. The rank's products of the output and down
projections are partial sums. Each expert is cut like a dense FFN, so that the ranks have equal work whichever experts
are chosen. Norms and the tensors in `WHOLE` are not cut: every rank holds them. Models with latent attention or Mamba2
are refused.

A partition divides an axis among the ranks: by heads, by blocks of the weights' type, or by rows of the vocabulary.
`CUT` has the kind of partition of each tensor. The tensors of a layer that have the same kind share one partition.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from mlx_engine.backends.batch import Batch
from mlx_engine.backends.parameters import Array, DeltaNet
from mlx_engine.cache import CacheLayer
from mlx_engine.distributed.group import Group
from mlx_engine.distributed.leader import END, FaultSearch, SharedModel, messages, nothing
from mlx_engine.distributed.messages import Message, StagePools
from mlx_engine.errors import NotShardableError
from mlx_engine.models.decoder import Decoder
from mlx_engine.models.layer import Attention, Columns, Layer, Mixer, RowNorms, ShortConv
from mlx_engine.quant.types import F32, GGMLType
from mlx_engine.quant.weight import Weight
from mlx_engine.weights.model import Planned

Ranges: TypeAlias = tuple[tuple[int, int], ...]

# The largest allowed share of a rank, relative to an even share: two ranks may divide 35 blocks into 17 and 18, but not
# 3 blocks into 1 and 2.
MOST_UNEVEN = 1.2


class Partition(ABC):
    """The division of an axis of a tensor among ranks. `str()` describes the axis, for error messages."""

    @abstractmethod
    def fits(self, size: int) -> bool:
        """Return whether the axis can be divided among `size` ranks."""

    @abstractmethod
    def ranges(self, rank: int, size: int) -> Ranges:
        """Return the ascending ranges [first, end) of a rank."""


def is_even(n: int, size: int) -> bool:
    """Return whether n pieces can be divided almost evenly among `size` ranks."""
    return n >= size and -(-n // size) * size <= MOST_UNEVEN * n


@dataclass(frozen=True)
class Pieces(Partition):
    """An axis of one or more sections; a rank gets the same range of pieces of every section.

    Each section has `n` pieces. `widths` has the width of a piece in each section, and `what` describes the axis.
    """

    n: int
    widths: tuple[int, ...]
    what: str

    def fits(self, size: int) -> bool:
        return is_even(self.n, size)

    def ranges(self, rank: int, size: int) -> Ranges:
        first, last, at, found = self.n * rank // size, self.n * (rank + 1) // size, 0, []
        for width in self.widths:
            found.append((at + first * width, at + last * width))
            at += self.n * width
        return tuple(found)

    def __str__(self) -> str:
        return self.what


@dataclass(frozen=True)
class Heads:
    """The heads of attention.

    If there are at least as many KV heads as ranks, each KV head and its query heads are on one rank. Otherwise several
    ranks have a copy of the same KV head, and divide its query heads.

    Attributes:
        n_heads: number of query heads.
        n_kv_heads: number of KV heads, a divisor of `n_heads`.
        head_dim: floats of a head.
        block: the output projections of all layers can be cut only between blocks of this many columns.
        equal: whether all ranks must have the same number of heads, because a norm reads the heads of all ranks.
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    block: int
    equal: bool = False

    @property
    def ratio(self) -> int:
        """The number of query heads of a KV head."""
        return self.n_heads // self.n_kv_heads

    def _pieces(self, size: int) -> tuple[int, int]:
        """Return the number of pieces, and the query heads of a piece; 0 pieces if the heads cannot be divided.

        A piece stays on one rank. It is the smallest number of adjacent query heads whose columns fill whole blocks. If
        there are at least as many KV heads as ranks, this number must also be a multiple of `ratio`.
        """
        heads = self.ratio if size <= self.n_kv_heads else 1
        heads *= self.block // math.gcd(self.block, heads * self.head_dim)
        return (0, heads) if self.n_heads % heads else (self.n_heads // heads, heads)

    def fits(self, size: int) -> bool:
        """Return whether the heads can be divided among `size` ranks."""
        n, _ = self._pieces(size)
        if size <= self.n_kv_heads:
            return is_even(n, size) and not (self.equal and n % size)
        return n > 0 and n % size == 0 and size % self.n_kv_heads == 0

    def queries(self, rank: int, size: int) -> tuple[int, int]:
        """Return the first query head of a rank, and the head after the rank's last one."""
        n, heads = self._pieces(size)
        return n * rank // size * heads, n * (rank + 1) // size * heads

    def keys(self, rank: int, size: int) -> tuple[int, int]:
        """Return the first KV head of a rank, and the head after the rank's last one."""
        first, last = self.queries(rank, size)
        return first // self.ratio, -(-last // self.ratio)

    def __str__(self) -> str:
        text = f"{self.n_heads} query heads and {self.n_kv_heads} KV heads of {self.head_dim}"
        return text if self.block == 1 else f"{text}, and columns in blocks of {self.block}"


@dataclass(frozen=True)
class OfHeads(Partition):
    """An axis of query heads, or of KV heads (keys or values) if `are_kv`; a head is `width` wide.

    `are_normed` is set for keys whose norm runs over all heads. If there are more ranks than KV heads, several
    ranks use copies of the same KV head, and a norm over all ranks would count each copy. So every rank then holds the
    keys of all heads.
    """

    heads: Heads
    width: int
    are_kv: bool = False
    are_normed: bool = False

    def fits(self, size: int) -> bool:
        return self.heads.fits(size)

    def ranges(self, rank: int, size: int) -> Ranges:
        first, last = (self.heads.keys if self.are_kv else self.heads.queries)(rank, size)
        if self.are_normed and size > self.heads.n_kv_heads:
            first, last = 0, self.heads.n_kv_heads
        return ((first * self.width, last * self.width),)

    def __str__(self) -> str:
        return str(self.heads)


@dataclass(frozen=True)
class Vocabulary(Partition):
    """The rows of the head, in equal ranges (the last one may be shorter), so that one gather collects the logits."""

    n: int

    def share(self, size: int) -> int:
        """Return the number of rows that every rank but the last has."""
        return -(-self.n // size)

    def fits(self, size: int) -> bool:
        return (size - 1) * self.share(size) < self.n

    def ranges(self, rank: int, size: int) -> Ranges:
        share = self.share(size)
        return ((rank * share, min((rank + 1) * share, self.n)),)

    def __str__(self) -> str:
        return f"{self.n} tokens"


ROWS, COLUMNS = 0, 1
# Maps the name of each tensor that is cut, without layer and suffix, to the kind of its partition and the cut axis.
CUT = {
    **dict.fromkeys(("attn_q", "attn_gate"), ("queries", ROWS)),
    "attn_k": ("keys", ROWS),
    "attn_v": ("values", ROWS),
    "attn_sinks": ("sinks", ROWS),
    "attn_output": ("queries", COLUMNS),
    **dict.fromkeys(("ffn_gate", "ffn_up"), ("ffn", ROWS)),
    "ffn_down": ("ffn", COLUMNS),
    **dict.fromkeys(("ffn_gate_exps", "ffn_up_exps"), ("experts", ROWS)),
    "ffn_down_exps": ("experts", COLUMNS),
    **dict.fromkeys(("ffn_gate_shexp", "ffn_up_shexp"), ("shared expert", ROWS)),
    "ffn_down_shexp": ("shared expert", COLUMNS),
    **{f"shortconv.{name}": ("channels", ROWS) for name in ("in_gate", "out_gate", "value", "conv")},
    "shortconv.out_proj": ("channels", COLUMNS),
    **dict.fromkeys(("attn_qkv", "ssm_conv1d"), ("delta channels", ROWS)),
    "delta_gate": ("delta values", ROWS),
    **dict.fromkeys(("ssm_beta", "ssm_alpha", "ssm_dt", "ssm_a"), ("delta heads", ROWS)),
    "ssm_out": ("delta values", COLUMNS),
    **dict.fromkeys(("output", "token_embd"), ("vocabulary", ROWS)),
}
# The tensors that are not cut, in addition to norms.
WHOLE = {
    "exp_probs_b", "ffn_gate_inp", "ffn_gate_inp_shexp", "ffn_down_exps_scale", "layer_output_scale", "inp_gate",
    "proj", "position_embd", "rope_freqs", "rope_factors_long", "rope_factors_short", "per_layer_token_embd",
    "per_layer_model_proj",
}  # fmt: skip
# Maps each kind of partition that divides blocks of columns to the matrix with these columns. The type of this matrix
# determines the size of the blocks.
LAST = {
    "ffn": "ffn_down", "experts": "ffn_down_exps", "shared expert": "ffn_down_shexp",
    "channels": "shortconv.out_proj",
}  # fmt: skip
# The largest number of ranks that an error proposes.
MOST_RANKS = 64
_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>.+?)(?:\.\d+)?(?:\.(?:weight|bias))?")


class Name(NamedTuple):
    """A tensor's layer (None outside of the layers), and its name without layer, expert and suffix."""

    layer: int | None
    part: str

    @classmethod
    def of(cls, name: str) -> Name:
        """Split the name of a tensor, or of a linear layer."""
        found = _NAME.fullmatch(name)
        if found is None:
            raise ValueError(f"expected the name of a tensor, found {name!r}")
        return cls(None if found["layer"] is None else int(found["layer"]), found["part"])


class Cut(NamedTuple):
    """The cut of a tensor: an axis (ROWS or COLUMNS) and its partition."""

    axis: int
    partition: Partition


@dataclass(frozen=True)
class Slices:
    """The cuts of a model's tensors. Every rank holds the whole of a tensor that has no cut.

    Attributes:
        where: the file, for messages.
        cuts: maps the name of each tensor with an entry in `CUT` to its cut. The map includes biases of layers whose
            products are partial sums, but `ranges` does not cut these biases.
    """

    where: str
    cuts: Mapping[str, Cut] = field(default_factory=dict)

    @classmethod
    def of(cls, planned: Planned) -> Slices:
        """Return how the tensors of a planned model are cut.

        Raises:
            NotShardableError: there is no rule for a tensor.
        """
        where, found = planned.checkpoint.where, dict[str, Cut]()
        partitions = _Partitions(planned)
        for name in planned.tensors:
            layer, part = Name.of(name)
            if part in CUT:
                kind, axis = CUT[part]
                found[name] = Cut(axis, partitions.of(layer, kind))
            elif part not in WHOLE and "norm" not in part:
                raise NotShardableError(
                    where=where, name=name, expected="a tensor with a rule how to cut it", found="none for this tensor",
                    hint="run the model on one machine, or by layers with --shard pipeline",
                )  # fmt: skip
        return cls(where, found)

    def check(self, size: int) -> None:
        """Check that the model can be cut for `size` ranks.

        Raises:
            NotShardableError: a matrix cannot be cut; the error names it, its sizes, and possible numbers of ranks.
        """
        for name, cut in sorted(self.cuts.items(), key=lambda found: found[1].axis != COLUMNS):
            if cut.partition.fits(size):
                continue
            partitions = {id(cut.partition): cut.partition for cut in self.cuts.values()}.values()
            sizes = [n for n in range(2, MOST_RANKS + 1) if all(partition.fits(n) for partition in partitions)]
            would = f"possible with {', '.join(map(str, sizes))} ranks" if sizes else "no number of ranks works"
            raise NotShardableError(
                where=self.where, name=name, expected=f"sizes that {size} ranks can share", found=str(cut.partition),
                hint=f"{would}; --shard pipeline cuts between layers",
            )  # fmt: skip

    def ranges(self, name: str, rank: int, size: int) -> tuple[int, Ranges] | None:
        """Return the axis and the ranges of a tensor that a rank holds; None if the tensor is not cut."""
        cut = self.cuts.get(name)
        return None if cut is None or self.is_bias_of_sum(name) else (cut.axis, cut.partition.ranges(rank, size))

    def is_partial(self, linear: str) -> bool:
        """Return whether the products of a linear layer, such as "blk.0.ffn_down", are partial sums."""
        return CUT.get(Name.of(linear).part, ("", ROWS))[1] == COLUMNS

    def is_bias_of_sum(self, name: str) -> bool:
        """Return whether a tensor is the bias of a layer whose products are partial sums. Only rank 0 has this bias."""
        return name.endswith(".bias") and self.is_partial(name)


class _Partitions:
    """The partitions of a model, each made once."""

    def __init__(self, planned: Planned) -> None:
        self._planned, self._config = planned, planned.config
        # A dict, because `functools.cache` on a method would keep this object, and the file's metadata, in memory.
        self._made: dict[tuple[int | None, str], Partition] = {}
        self._matrices: dict[Name, list[str]] = {}  # one key for the matrices of all experts of a layer
        for name in planned.tensors:
            if name.endswith(".weight"):
                self._matrices.setdefault(Name.of(name), []).append(name)
        # One block size for the attention of all layers: layers that share keys and values must be cut alike.
        outputs = [names for of, names in self._matrices.items() if of.part == "attn_output"]
        self._attention = self._block(name for names in outputs for name in names)

    def of(self, layer: int | None, kind: str) -> Partition:
        """Return the partition of a kind (see `CUT`) in a layer, or in the head if `layer` is None."""
        if (layer, kind) not in self._made:
            self._made[layer, kind] = self._new(layer, kind)
        return self._made[layer, kind]

    def _new(self, layer: int | None, kind: str) -> Partition:
        tensors = self._planned.tensors
        if layer is None:
            return Vocabulary(self._config.vocab_size)
        if kind in ("queries", "keys", "values", "sinks"):
            return self._heads(layer, kind)
        if kind.startswith("delta"):
            return self._delta(layer, kind)
        names = self._matrices[Name(layer, LAST[kind])]
        width, block = tensors[names[0]].shape[1], self._block(names)
        return Pieces(width // block, (block,), f"{width:,} columns in blocks of {block}")

    def _heads(self, layer: int, kind: str) -> Partition:
        of = self._config.of_layer(layer)
        n_heads = self._planned.tensors[f"blk.{layer}.attn_q.weight"].shape[0] // of.head_dim
        norm = self._planned.tensors.get(f"blk.{layer}.attn_q_norm.weight")
        of_rows = norm is not None and norm.shape != (of.head_dim,)
        heads = Heads(n_heads, of.n_kv_heads, of.head_dim, self._attention, equal=of_rows)
        width, of_kv = 1 if kind == "sinks" else of.head_dim, kind in ("keys", "values")
        return OfHeads(heads, width, are_kv=of_kv, are_normed=of_rows and kind == "keys")

    def _delta(self, layer: int, kind: str) -> Partition:
        """Return a partition of the delta rule: each rank gets some key heads, and all value heads that read them.

        If the config's `are_neighbors` is true, the value heads that read a key head are adjacent, and all value heads
        are one section (see `Pieces`). Otherwise value head h reads key head h % n_key_heads, and is in section
        h // n_key_heads.
        """
        of = self._config
        block = self._block([f"blk.{layer}.ssm_out.weight"])
        heads = block // math.gcd(block, of.value_dim)  # the smallest number of value heads that fill whole blocks
        n = 0 if of.n_key_heads % heads else of.n_key_heads // heads
        shared = of.n_value_heads // of.n_key_heads
        per_section = (heads * shared,) if of.are_neighbors else (heads,) * shared
        keys, values = heads * of.key_dim, tuple(n_heads * of.value_dim for n_heads in per_section)
        widths = {
            "delta heads": per_section,
            "delta values": values,
            "delta channels": (keys, keys, *values),
        }
        return Pieces(n, widths[kind], f"{of.n_key_heads} key heads of the delta rule in groups of {heads}")

    def _block(self, names: Iterable[str]) -> int:
        """Return the smallest number of columns at whose multiples all named matrices can be cut."""
        return math.lcm(*{type_.block_size for name in names for type_ in self._types(name)})

    def _types(self, name: str) -> tuple[GGMLType, ...]:
        """Return the type of a matrix in the file, and the type to which it is converted."""
        planned, tensor = self._planned, self._planned.tensors[name]
        found: Any = tensor.stored(planned.checkpoint.naming)
        stored = F32 if found.is_shifted else planned.checkpoint.weight(found.name).type
        return stored, planned.conversion.type_of(name.removesuffix(".weight"), tensor.shape, stored)[0]


def sliced(planned: Planned, rank: int, size: int) -> Planned:
    """Return a planned model that loads only the slices of one rank, for a backend whose `group` is set.

    Raises:
        NotShardableError: a matrix cannot be cut into `size` parts, or there is no rule for a tensor.
    """
    slices = Slices.of(planned)
    slices.check(size)
    return planned._replace(slices=RankSlices(planned, slices, rank, size))


@dataclass(frozen=True)
class RankSlices:
    """The slices of a model's tensors that one rank holds; implements `OwnSlices`."""

    planned: Planned
    slices: Slices
    rank: int
    size: int

    def own(self, name: str, weight: Weight) -> Weight:
        found = self.slices.ranges(name, self.rank, self.size)
        return weight if found is None else weight.cut(*found)

    def shape(self, name: str) -> tuple[int, ...]:
        shape, found = list(self.planned.tensors[name].shape), self.slices.ranges(name, self.rank, self.size)
        if found is not None:
            axis, ranges = found
            shape[axis] = sum(last - first for first, last in ranges)
        return tuple(shape)

    def is_partial(self, linear: str) -> bool:
        return self.slices.is_partial(linear)

    def has(self, name: str) -> bool:
        return self.rank == 0 or not self.slices.is_bias_of_sum(name)

    def layers(self, layers: Sequence[Layer]) -> Sequence[Layer]:
        return [layer.with_mixers(partial(self._mixer, i)) for i, layer in enumerate(layers)]

    def _columns(self, i: int, name: str, like: str) -> Columns:
        """Return the outputs of projection `name` that this rank uses: the range of `like` that it computes."""
        held, of = self.shape(f"blk.{i}.{name}.weight")[0], self.planned.tensors[f"blk.{i}.{name}.weight"].shape[0]
        found = self.slices.ranges(f"blk.{i}.{like}.weight", self.rank, self.size)
        ((first, last),) = ((0, of),) if found is None else found[1]
        return Columns(first, last, of, are_all_here=held == of)

    def _mixer(self, i: int, mixer: Mixer) -> Mixer:
        """Return a mixer with this rank's numbers of heads and channels, also in the shapes of recurrent states."""
        if isinstance(mixer, Attention):
            norms = mixer.norms
            if isinstance(norms, RowNorms):
                columns = self._columns(i, "attn_q", "attn_q"), self._columns(i, "attn_k", "attn_v")
                norms = replace(norms, columns=columns)
            n_values = self.shape(f"{mixer.v.name}.weight")[0]
            return replace(mixer, norms=norms, n_kv_heads=n_values // mixer.head_dim)
        if isinstance(mixer, ShortConv):
            ((taps, _),) = mixer.state
            return replace(mixer, state=((taps, self.shape(f"blk.{i}.shortconv.conv.weight")[0]),))
        if not isinstance(mixer, DeltaNet):
            return mixer
        n_values, channels = self.shape(f"blk.{i}.ssm_a")[0], self.shape(f"blk.{i}.ssm_conv1d.weight")[0]
        rule, ((taps, _), (_, *head)) = mixer.rule, mixer.state
        n_keys = n_values * rule.n_key_heads // rule.n_value_heads
        rule = replace(rule, n_key_heads=n_keys, n_value_heads=n_values)
        return DeltaNet(mixer.projections, mixer.conv, rule, mixer.norm, ((taps, channels), (n_values, *head)))


def follow_tensor(model: Decoder, group: Group, sleep: Callable[[], None] = nothing) -> None:
    """Run every pass with this rank's slices, until rank 0 ends the run. `sleep` waits until rank 0 has work again."""
    pools, search = StagePools(model.backend, model.kv_layers), FaultSearch(model, group)
    for message in messages(group, sleep, search):
        if END in message:
            break
        with model.backend.session():
            _run(search.model_of(message), pools, message)
    group.close()


def _run(model: Decoder, pools: StagePools, message: Message) -> Array | None:
    """Run a pass to its end. Return logits (R, V) of the R wanted tokens, or None if no token is wanted."""
    batch = pools.apply(message)
    batch.best = message["best"]
    logits = model.forward(batch)
    if logits is not None:
        model.backend.note("output", logits)
    model.backend.wait(batch.stores.arrays if logits is None else logits)
    return logits


class TensorParallel(SharedModel):
    """A model whose tensors several ranks share. All ranks run each pass together, so only one pass is in flight."""

    def __init__(self, model: Decoder, group: Group, wake: Callable[[], None] | None = None) -> None:
        super().__init__(model, group, wake)
        self._pools = StagePools(model.backend, model.kv_layers)

    @property
    def kv_layers(self) -> list[CacheLayer]:
        return self._model.kv_layers

    def submit(self, batch: Batch) -> Callable[[], Array] | None:
        with self.whole_pass():
            message = {**self.message(batch), "best": batch.best}
            self.tell(message)
            logits = _run(self._search.model_of(message), self._pools, message)
        return None if logits is None else lambda: logits
