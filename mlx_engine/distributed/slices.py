"""Which rows or columns of which matrix each rank holds, when a model runs on several ranks by tensors.

Projections to queries, keys, values, gate and up are cut by rows (outputs), the projections after them by columns
(inputs), on borders of the blocks of the stored type. So each rank computes whole heads and whole columns of the FFN
from whole hidden states, and its products of the output and down projections are parts of a sum over all ranks. The
head is cut by rows. Each expert is cut as a dense FFN is, so that all ranks have the same work whichever experts a
token chooses, and no code for absent experts is needed. Norms, routers and small projections are on every rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mlx_engine.distributed.deals import Deal, Heads, OfHeads, Pieces, Ranges, Vocabulary, by_blocks
from mlx_engine.errors import NotShardableError
from mlx_engine.quant.types import F32, GGMLType
from mlx_engine.weights.model import Planned
from mlx_engine.weights.plan import Tensor

ROWS, COLUMNS = 0, 1
# What is cut, by the name of the tensor without its layer and ending: the deal of its axis, and the axis.
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
# What every rank holds whole, beside norms.
WHOLE = {
    *("ffn_gate_inp", "ffn_gate_inp_shexp", "ffn_down_exps_scale", "layer_output_scale", "inp_gate", "proj"),
    *("position_embd", "rope_freqs", "rope_factors_long", "rope_factors_short"),
    *("per_layer_token_embd", "per_layer_model_proj"),
}
# The matrix whose columns are cut by blocks, by the deal.
LAST = {
    "ffn": "ffn_down", "experts": "ffn_down_exps", "shared expert": "ffn_down_shexp",
    "channels": "shortconv.out_proj",
}  # fmt: skip
# The largest number of ranks that a refusal proposes.
MOST_RANKS = 64
_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>.+?)(?:\.\d+)?(?:\.(?:weight|bias))?")


class Name(NamedTuple):
    """A tensor's layer, or None, and its name without layer, expert and ending."""

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
    """How a tensor is cut: along which axis, by which deal. The tensor of COLUMNS gives parts of a sum."""

    axis: int
    deal: Deal


@dataclass(frozen=True)
class Slices:
    """How the tensors of a model are cut; a tensor that is not named is whole on every rank.

    Attributes:
        where: the file, for messages.
        cuts: how each tensor is cut, by name.
    """

    where: str
    cuts: Mapping[str, Cut] = field(default_factory=dict)

    @classmethod
    def of(cls, planned: Planned) -> Slices:
        """Return how the tensors of a planned model are cut. No weight is read.

        Raises:
            NotShardableError: it is not known how a tensor would be cut.
        """
        where, found = planned.checkpoint.where, dict[str, Cut]()
        deals = _Deals(planned)
        for name in planned.tensors:
            layer, part = Name.of(name)
            if part in CUT:
                kind, axis = CUT[part]
                found[name] = Cut(axis, deals.of(layer, kind))
            elif part not in WHOLE and "norm" not in part:
                raise NotShardableError(
                    where=where, name=name, expected="a tensor that is known to be cut by rows or columns, or whole",
                    found="another", hint="run the model on one machine, or by layers with --shard pipeline",
                )  # fmt: skip
        return cls(where, found)

    def check(self, size: int) -> None:
        """Check that the model can be cut for `size` ranks.

        Raises:
            NotShardableError: a matrix cannot; the error names it, its sizes, and numbers of ranks that would do.
        """
        for name, cut in sorted(self.cuts.items(), key=lambda found: found[1].axis != COLUMNS):
            if cut.deal.fits(size):
                continue
            deals = {id(cut.deal): cut.deal for cut in self.cuts.values()}.values()
            sizes = [n for n in range(2, MOST_RANKS + 1) if all(deal.fits(n) for deal in deals)]
            would = f"{', '.join(map(str, sizes))} would do" if sizes else "no other number would do"
            raise NotShardableError(
                where=self.where, name=name, expected=f"sizes that {size} ranks can share", found=str(cut.deal),
                hint=f"{would}; --shard pipeline cuts between layers",
            )  # fmt: skip

    def ranges(self, name: str, rank: int, size: int) -> tuple[int, Ranges] | None:
        """Return the axis and the ranges of a tensor that a rank holds; None if it holds all of it."""
        cut = self.cuts.get(name)
        return None if cut is None or self.is_bias_of_sum(name) else (cut.axis, cut.deal.ranges(rank, size))

    def is_partial(self, linear: str) -> bool:
        """Return whether the products of a linear layer, such as "blk.0.ffn_down", are parts of a sum."""
        return CUT.get(Name.of(linear).part, ("", ROWS))[1] == COLUMNS

    def is_bias_of_sum(self, name: str) -> bool:
        """Return whether a tensor is the bias of such a layer: one rank alone adds it."""
        return name.endswith(".bias") and self.is_partial(name)


class _Deals:
    """The deals of a model, each made once."""

    def __init__(self, planned: Planned) -> None:
        self._planned, self._config = planned, planned.config
        # Not `functools.cache` of a method, which would refer to itself and keep the file's metadata.
        self._made: dict[tuple[int | None, str], Deal] = {}
        self._matrices: dict[Name, list[str]] = {}  # those of all experts of a layer have one key
        for name in planned.tensors:
            if name.endswith(".weight"):
                self._matrices.setdefault(Name.of(name), []).append(name)
        # One block size for all layers: layers that share keys and values must be cut alike.
        outputs = [names for of, names in self._matrices.items() if of.part == "attn_output"]
        self._attention = self._block(name for names in outputs for name in names)

    def of(self, layer: int | None, kind: str) -> Deal:
        """Return the deal of a kind of axis in a layer; None is the head."""
        if (layer, kind) not in self._made:
            self._made[layer, kind] = self._new(layer, kind)
        return self._made[layer, kind]

    def _new(self, layer: int | None, kind: str) -> Deal:
        tensors = self._planned.tensors
        if layer is None:
            return Vocabulary(self._config.vocab_size)
        if kind in ("queries", "keys", "values", "sinks"):
            return self._heads(layer, kind)
        if kind.startswith("delta"):
            return self._delta(layer, kind)
        names = self._matrices[Name(layer, LAST[kind])]
        return by_blocks(tensors[names[0]].shape[1], self._block(names))

    def _heads(self, layer: int, kind: str) -> Deal:
        of = self._config.of_layer(layer)
        n_heads = self._planned.tensors[f"blk.{layer}.attn_q.weight"].shape[0] // of.head_dim
        norm = self._planned.tensors.get(f"blk.{layer}.attn_q_norm.weight")
        of_rows = norm is not None and norm.shape != (of.head_dim,)
        heads = Heads(n_heads, of.n_kv_heads, of.head_dim, self._attention, equal=of_rows)
        width, of_kv = 1 if kind == "sinks" else of.head_dim, kind in ("keys", "values")
        return OfHeads(heads, width, are_keys=of_kv, are_normed=of_rows and kind == "keys")

    def _delta(self, layer: int, kind: str) -> Deal:
        """Return a deal by key heads: value head h reads key head h % n_key_heads, so they lie in as many sections."""
        of = self._config
        heads = _together(of.value_dim, self._block([f"blk.{layer}.ssm_out.weight"]))
        n = 0 if of.n_key_heads % heads else of.n_key_heads // heads
        keys, values = heads * of.key_dim, (heads * of.value_dim,) * (of.n_value_heads // of.n_key_heads)
        widths = {
            "delta heads": (heads,) * len(values),
            "delta values": values,
            "delta channels": (keys, keys, *values),
        }
        return Pieces(n, widths[kind], f"{of.n_key_heads} key heads of the delta rule, {heads} in a block of columns")

    def _block(self, names: Iterable[str]) -> int:
        """Return on which multiples of columns all of these matrices can be cut."""
        return math.lcm(*{type_.block_size for name in names for type_ in self._types(name)})

    def _types(self, name: str) -> tuple[GGMLType, ...]:
        """Return the type of a matrix in the file, and the type to which it is converted."""
        planned, tensor = self._planned, self._planned.tensors[name]
        stored = _stored_type(planned, tensor)
        return stored, planned.conversion.type_of(name.removesuffix(".weight"), tensor.shape, stored)[0]


def _together(width: int, block: int) -> int:
    """Return how many heads of this width fill whole blocks."""
    return block // math.gcd(block, width)


def _stored_type(planned: Planned, tensor: Tensor) -> GGMLType:
    stored: Any = tensor.stored(planned.checkpoint.naming)
    return F32 if stored.is_shifted else planned.checkpoint.weight(stored.name).type
