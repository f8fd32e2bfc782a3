"""The parameters of operations: norms, linear layers, rotary embeddings. Their arrays are the backend's own.

`name` is the stem of the GGUF tensor ("blk.0.attn_q"), so that errors and taps can name the tensor in the file.
Parameters are compared by identity, so that a backend can use them as keys of a dictionary of compiled blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from mlx_engine.backends.experts import Experts

# A backend's own type: nested Python lists, np.ndarray or mx.array. The implementations of operations have this type in
# place of `Array`, and so do parameters and KV views, which only backends read.
Native: TypeAlias = Any


class Array:
    """A backend's array, as models, cache and decode see it: they pass it on and never read its contents.

    The class has no members and no instances. It makes `x.shape`, `x[0]` and `x + y` above the backends a type error.
    """


class LazyToken:
    """A chosen token of a lazy backend, whose id has not been computed yet. Like `Array`, without members."""


# A token id. Operations accept both forms; `Backend.token_id` waits for the id and returns the int.
Token: TypeAlias = int | LazyToken

Activation: TypeAlias = Literal["silu", "gelu"]
# How an expert's gate and up become one: `activation(gate) * up`, or the operation of this name.
Gating: TypeAlias = Activation | Literal["clamped_swiglu"]

# The numbers of the gating "clamped_swiglu", as gpt-oss has them.
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0


@dataclass(frozen=True, eq=False)
class RMSNorm:
    """`weight * x / sqrt(mean(x**2) + eps)` over the last axis; `weight` is one-dimensional."""

    name: str
    weight: Native
    eps: float


@dataclass(frozen=True, eq=False)
class LayerNorm:
    """`weight * (x - mean) / sqrt(var + eps) + bias` over the last axis."""

    name: str
    weight: Native
    bias: Native
    eps: float


Norm: TypeAlias = RMSNorm | LayerNorm

# The norms of query and key heads; None where heads are not normed.
HeadNorms: TypeAlias = tuple[RMSNorm, RMSNorm] | None


@dataclass(frozen=True, eq=False)
class Linear:
    """`x @ weight.T + bias`: `weight` is an (N, K) matrix, prepared by `Backend.prepare`; bias is (N,) or None.

    Attributes:
        is_partial: whether the product is a part of a sum over all ranks: this rank has some of the columns.
    """

    name: str
    weight: Native
    bias: Native | None = None
    is_partial: bool = False


@dataclass(frozen=True, eq=False)
class Scores:
    """The scores of attention: `score = scale * (query . key)`, and then a soft cap, if there is one.

    Attributes:
        scale: factor of the dot products.
        softcap: each score becomes `softcap * tanh(score / softcap)`; None for no soft cap.
        sinks: (H,) one more logit for each query head, in the maximum and the divisor of the softmax, without a value;
            None for no sinks. The vector is prepared by `Backend.prepare`.
    """

    scale: float
    softcap: float | None = None
    sinks: Native | None = None


@dataclass(frozen=True, eq=False)
class PerLayer:
    """A layer's own input h (T, I): the layer adds `norm(projection(gelu(gate(x)) * h))`, as in Gemma 4.

    Attributes:
        hidden_size: D. The definition of the layers reads (T, D + L*I): the hidden states, and then the inputs of all
            layers.
        columns: the first column of h, and the column after its last, in the inputs of all layers.
        gate: (P, D).
        projection: (D, I).
        norm: the norm after the projection.
    """

    hidden_size: int
    columns: tuple[int, int]
    gate: Linear
    projection: Linear
    norm: RMSNorm


class Columns(NamedTuple):
    """The columns [first, last) of `of`: those of a projection that this rank uses.

    Attributes:
        are_all_here: whether this rank computes all columns, so that it needs none of other ranks.
    """

    first: int
    last: int
    of: int
    are_all_here: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Layer:
    """The parameters of a transformer layer, under their GGUF names; None if the architecture has no such part.

    Attributes:
        mixer: what the layer has in place of attention; None for attention, which has attn_q, attn_k and attn_v.
        attn_gate: a projection whose sigmoid is multiplied with the output of attention.
        norms_rows: whether attn_q_norm and attn_k_norm norm whole projections (H*E and G*E values), not single heads.
        own_columns: of queries and of keys, the columns that this rank uses, if not all and `norms_rows` is set.
        window: number of latest tokens that a token attends to, itself included; None for all tokens.
        scores: the scale of the attention scores, their soft cap and sinks; None if the layer has a mixer.
        attn_output: the projection of the output of attention or of the mixer.
        experts: a mixture of experts in place of the dense FFN (`ffn_gate`, `ffn_up`, `ffn_down`), or beside it.
        pre_ffw_norm_2: the norm before experts that lie beside a dense FFN.
        post_ffw_norm_1: the norm after a dense FFN beside which experts lie; `post_ffw_norm` is that of the sum.
        head_dim: E of this layer; None for the model's.
        n_kv_heads: G of this layer; None for the model's.
        attn_v: None if keys are projected and values are the same projection, without the norm and rope of keys.
        attn_v_norm: norm of value heads.
        shares: index of the layer whose keys and values this layer attends to; None for its own. It must be the last
            layer with the same window that has its own, because layers may write to one store (`Stores.are_kept`).
        per_layer: the input of this layer alone, added after the FFN.
        output_scale: factor of the hidden states after the layer.
    """

    attn_norm: Norm | None = None
    mixer: Mixer | None = None
    attn_q: Linear | None = None
    attn_k: Linear | None = None
    attn_v: Linear | None = None
    attn_gate: Linear | None = None
    attn_q_norm: RMSNorm | None = None
    attn_k_norm: RMSNorm | None = None
    attn_v_norm: RMSNorm | None = None
    norms_rows: bool = False
    own_columns: tuple[Columns, Columns] | None = None
    rope: Rope | None = None
    window: int | None = None
    scores: Scores | None = None
    attn_output: Linear
    post_attention_norm: Norm | None = None
    ffn_norm: Norm | None = None
    ffn_gate: Linear | None = None
    ffn_up: Linear | None = None
    activation: Activation
    ffn_down: Linear | None = None
    post_ffw_norm: Norm | None = None
    experts: Experts | None = None
    pre_ffw_norm_2: Norm | None = None
    post_ffw_norm_1: Norm | None = None
    head_dim: int | None = None
    n_kv_heads: int | None = None
    shares: int | None = None
    per_layer: PerLayer | None = None
    output_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.mixer is not None:
            if any((self.attn_q, self.attn_k, self.attn_v, self.scores)):
                raise ValueError(f"{self.attn_output.name}: expected either a mixer, or projections to q, k and v")
        elif self.attn_q is None or self.scores is None:
            raise ValueError(f"{self.attn_output.name}: expected a mixer, or a projection to queries and scores")
        elif (self.shares is None) != (self.attn_k is not None) or (self.shares is not None and not self.attn_q_norm):
            raise ValueError(
                f"{self.attn_output.name}: expected a projection to keys, or the layer whose keys are shared and a "
                "norm of queries"
            )
        has_k_norm = self.attn_k_norm is not None or (self.shares is not None and self.attn_q_norm is not None)
        if (self.attn_q_norm is not None) != has_k_norm or (self.attn_q_norm and self.rope is None):
            raise ValueError(f"{self.attn_output.name}: expected norms of both queries and keys, and a rope after them")
        if self.experts is not None and self.ffn_norm is None:
            raise ValueError(f"{self.attn_output.name}: expected a norm before the experts")
        beside = {norm is not None for norm in (self.pre_ffw_norm_2, self.post_ffw_norm_1)}
        in_place = self.experts is not None and beside != {True}
        if {self.ffn_up is None, self.ffn_down is None} != {in_place}:
            raise ValueError(f"{self.attn_output.name}: expected ffn_up and ffn_down, or experts in place of both")
        if len(beside) > 1 or (beside == {True} and (self.experts is None or self.post_ffw_norm is None)):
            raise ValueError(f"{self.attn_output.name}: expected all norms of experts beside a dense FFN, or none")
        if self.norms_rows and (self.attn_norm or not self.attn_q_norm):
            raise ValueError(f"{self.attn_output.name}: expected norms of whole projections, and no norm before them")

    @property
    def attention(self) -> list[Linear]:
        """Return the projections to q, k, v and the gate, as far as the layer has them."""
        found = (self.attn_q, self.attn_k, self.attn_v, self.attn_gate)
        return [linear for linear in found if linear is not None]

    @property
    def head_norms(self) -> HeadNorms:
        """Return the norms of query and key heads; None if heads are not normed."""
        q, k = self.attn_q_norm, self.attn_k_norm
        return None if q is None or k is None or self.norms_rows else (q, k)

    @property
    def up_down(self) -> tuple[Linear, Linear]:
        """Return the up and down projections of a dense FFN."""
        if self.ffn_up is None or self.ffn_down is None:
            raise ValueError(f"{self.attn_output.name}: expected a dense FFN, found a mixture of experts")
        return self.ffn_up, self.ffn_down


@dataclass(frozen=True, kw_only=True, eq=False)
class LlamaLayer(Layer):
    """A layer of the Llama family: rotary embedding, and a gated FFN with SiLU."""

    rope: Rope
    ffn_gate: Linear
    activation: Activation = "silu"


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertLayer(Layer):
    """A layer of the Llama family with a mixture of experts in place of the FFN."""

    rope: Rope
    experts: Experts
    activation: Activation = "silu"


class Growth(NamedTuple):
    """Llama 4's attention scaling: queries at position p are multiplied by `1 + beta * ln(1 + p // length)`."""

    beta: float
    length: int

    def at(self, position: int) -> float:
        """Return the factor of queries at a position."""
        return 1 + self.beta * math.log(1 + position // self.length)


@dataclass(frozen=True, eq=False)
class Rope:
    """Rotary position embedding: pair j of a head is rotated by `position * frequencies[j]` radians.

    The pairs are (j, j + head_dim/2), the layout of GGUF's "neox" models. Every scaling rule (linear, llama3, YaRN,
    LongRoPE, dynamic NTK) only changes frequencies and lengths, so backends have no code for scaling. A pair that is
    not rotated has the frequency 0.

    Attributes:
        lengths: factor of each pair: its cosine and sine are multiplied by it; None for 1.
        growth: factor of queries that depends on the position; keys do not have it.
    """

    frequencies: tuple[float, ...]
    lengths: tuple[float, ...] | None = None
    growth: Growth | None = None

    @classmethod
    @cache
    def none(cls, head_dim: int) -> Rope:
        """Return the rotation that changes nothing."""
        return cls((0.0,) * (head_dim // 2))

    @classmethod
    def plain(cls, head_dim: int, theta: float, factor: float = 1.0) -> Rope:
        """Return frequencies `theta ** (-2j / head_dim) / factor` for j < head_dim / 2 ("linear" scaling by factor)."""
        return cls(tuple(theta ** (-2 * j / head_dim) / factor for j in range(head_dim // 2)))

    @cached_property
    def keys(self) -> Rope:
        """The rotation of keys: the same, without growth."""
        return self if self.growth is None else replace(self, growth=None)


@dataclass(frozen=True, eq=False)
class Convolution:
    """A causal convolution over a sequence, each channel for itself; weight (W, C), oldest token first."""

    name: str
    weight: Native


@dataclass(frozen=True, eq=False)
class DeltaRule:
    """The gated delta rule: a matrix (E, P) per value head that each token decays, corrects and reads.

    Source: "Gated Delta Networks", arXiv 2412.06464.

    Attributes:
        rate: (H,) logarithms of the decay per unit of time, which are negative.
        dt_bias: (H,) added to the time step before softplus.
        n_key_heads: G.
        key_dim: E.
        n_value_heads: H, a multiple of G.
        value_dim: P.
    """

    name: str
    rate: Native
    dt_bias: Native
    n_key_heads: int
    key_dim: int
    n_value_heads: int
    value_dim: int


@dataclass(frozen=True, eq=False)
class ShortConv:
    """A gated short convolution.

    Attributes:
        projections: to the gate of the input, the gate of the output, and the input, (C, D) each.
        conv: the convolution.
        state: the shape of its last inputs, (W - 1, C).
    """

    projections: tuple[Linear, Linear, Linear]
    conv: Convolution
    state: tuple[tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class DeltaNet:
    """A gated delta network.

    Attributes:
        projections: to queries, keys and values; to the output gate; to the strength of a correction; to the time step.
        conv: of queries, keys and values.
        rule: the delta rule.
        norm: of each head's output, before the gate.
        state: the shapes of the convolution's last inputs, (W - 1, C), and of the delta rule's matrices, (H, E, P).
    """

    projections: tuple[Linear, Linear, Linear, Linear]
    conv: Convolution
    rule: DeltaRule
    norm: RMSNorm
    state: tuple[tuple[int, ...], tuple[int, ...]]


# What a layer may have in place of attention.
Mixer: TypeAlias = ShortConv | DeltaNet
