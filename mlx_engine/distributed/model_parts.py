"""What each layer, the embedding tables and the head of a model hold, read and multiply, from its outline."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from mlx_engine.backends.experts import Experts, share_read
from mlx_engine.backends.parameters import Linear
from mlx_engine.cache import CacheLayer, KVLayer, StateLayer
from mlx_engine.models.layer import Attention, GatedAndMixture, Layer, RowNorms, SharedAttention
from mlx_engine.weights.outline import Outline, Outlined

# Attributes of a model that are neither embedding tables nor what computes them.
NOT_TABLES = ("config", "layers", "program", "output", "output_norm", "_backend")


@dataclass(frozen=True)
class Pass:
    """A forward pass: `n_tokens` new tokens of each of `n_sequences` sequences, after `depth` tokens.

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
    """A layer of a model, its embedding tables, or its head.

    Attributes:
        arrays: all arrays that it holds.
        tables: those of `arrays` of which a pass reads a few rows.
        read: bytes of the matrices that every pass reads.
        experts: bytes of experts.
        expert_share: the share of the experts that one token uses.
        multiplied: weights that one token is multiplied with; of experts, the share that it uses.
        scored: multiplications of attention per query and visible token.
        attended: the keys and values that its attention reads; None for a state or no attention.
        kept: what the layer keeps of a sequence; None for a layer that shares the keys and values of another.
        exchanges: messages of the size of hidden states that tensor parallelism sends to every other rank: the sums
            after attention and FFN, one more for experts beside a dense FFN, and queries and keys that are normed as a
            whole.
        is_head: whether only the last token of a sequence is computed.
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
        """Return the part on a rank that reads rows of its tables from the file."""
        return replace(self, arrays=tuple(array for array in self.arrays if array not in self.tables), tables=())

    def work(self, of: Pass) -> Work:
        """Return the work of a pass."""
        n_tokens = of.n_sequences * of.n_tokens
        computed = of.n_sequences if self.is_head else n_tokens
        # A query attends to the tokens before it and to itself: on average to half of the new ones.
        seen, at_once = of.depth + (of.n_tokens + 1) / 2, float(of.depth + of.n_tokens)
        kv = 0.0
        if self.attended is not None:
            window = self.attended.window or math.inf
            seen, at_once = min(seen, window), min(at_once, window - 1 + of.n_tokens)
            kv = self.attended.token_nbytes * at_once * of.n_sequences
        if isinstance(self.kept, StateLayer):
            kv = 2.0 * self.kept.nbytes * of.n_sequences  # read, and written
        nbytes = self.read + self.experts * share_read(self.expert_share, n_tokens) + kv
        return Work(nbytes, 2.0 * (self.multiplied * computed + self.scored * seen * n_tokens))


@dataclass(frozen=True, eq=False)
class ModelParts:
    """A model as a row of parts, or what one rank of tensor parallelism has of it.

    Attributes:
        tables: embedding tables, and what computes the hidden states before the first layer.
        layers: one part per layer.
        head: the norm and the matrix of the head; a tied head is an array of the tables.
        left: bytes of embedding tables that stay in the file, of which a pass reads a few rows.
        total: bytes of all weights.
        hidden: floats per token that go from layer to layer.
        vocab_size: number of logits.
        widest: the most rows and columns of a matrix in sum, without the head.
        cuts: the indices of layers that may be the first of a rank.
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
    """Return the parts of a model whose weights are outlines."""
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
        left=sizes.n_left,
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
    norms_rows = isinstance(layer.mix, Attention) and isinstance(layer.mix.norms, RowNorms)
    exchanges = 2 + isinstance(layer.ffn, GatedAndMixture) + 2 * norms_rows
    return _part([layer], kept=kept, attended=kv, scored=2 * queries, exchanges=exchanges)


def _part(values: Sequence[Any], **given: Any) -> Part:
    mixtures = [found for value in values for found in _found(value, Experts)]
    linears = {id(linear.weight): linear for value in values for linear in _found(value, Linear)}
    of_experts = {
        id(linear.weight)
        for mixture in mixtures
        for matrices in (mixture.gate, mixture.up, mixture.down)
        for linear in matrices.weights
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
    """Yield all values of a type in a dataclass or list."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _found(item, kind)
    elif is_dataclass(value):
        for f in fields(value):
            yield from _found(getattr(value, f.name), kind)
