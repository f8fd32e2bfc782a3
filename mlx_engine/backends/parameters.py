"""The parameters of operations: norms, linear layers, rotary embeddings. Their arrays are the backend's own.

`name` is the stem of the GGUF tensor ("blk.0.attn_q"), so that errors and taps can name the tensor in the file.
Parameters are compared by identity, so that a backend can use them as keys of a dictionary of compiled blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, NamedTuple, TypeAlias

from mlx_engine.kernels.cached import cached_property

# A backend's own type of array: nested Python lists, np.ndarray or mx.array. Implementations of operations use it in
# place of `Array`, and so do parameters and KV views, which only backends read.
Native: TypeAlias = Any


class Array:
    """A backend's array, as an opaque type for models, cache and loop, which never read its contents.

    The class has no members and no instances. It makes `x.shape`, `x[0]` and `x + y` above the backends a type error.
    """


class LazyToken:
    """A chosen token of a lazy backend, whose id has not been computed yet. Like `Array`, without members."""


# A token id. Operations accept both forms; `Backend.token_id` waits for the id and returns the int.
Token: TypeAlias = int | LazyToken

# "gelu" is its tanh form, "gelu_erf" the form with the error function, "relu2" the square of ReLU.
Activation: TypeAlias = Literal["silu", "gelu", "gelu_erf", "relu2"]
# How gate and up of an expert are combined: `activation(gate) * up`, or the operation `clamped_swiglu`.
Gating: TypeAlias = Activation | Literal["clamped_swiglu"]

# The constants of the gating "clamped_swiglu", from gpt-oss.
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


class LowRank(NamedTuple):
    """The low-rank products of all adapters of a linear layer, side by side: see `weights/adapters.py`.

    Attributes:
        a: (M, K).
        b: (N, M).
    """

    a: Linear
    b: Linear


@dataclass(frozen=True, eq=False)
class Linear:
    """`x @ weight.T + bias`: `weight` is an (N, K) matrix, prepared by `Backend.prepare`; bias is (N,) or None.

    Attributes:
        is_partial: whether the product is a partial sum, to be added over all ranks, because this rank has only some
            columns.
        lora: the matrices of LoRA adapters (`weights/adapters.py`); None without adapters.
    """

    name: str
    weight: Native
    bias: Native | None = None
    is_partial: bool = False
    lora: LowRank | None = None


@dataclass(frozen=True, eq=False)
class Scores:
    """The scores of attention: `score = scale * (query . key)`, with an optional soft cap.

    Attributes:
        scale: factor of the dot products.
        softcap: each score becomes `softcap * tanh(score / softcap)`; None for no soft cap.
        sinks: (H,) one additional logit for each query head. It counts in the maximum and the divisor of the softmax
            and has no value. None for no sinks. Prepared by `Backend.prepare`.
    """

    scale: float
    softcap: float | None = None
    sinks: Native | None = None


class Growth(NamedTuple):
    """Llama 4's attention scaling: queries at position p are multiplied by `1 + beta * ln(1 + (p + first) // length)`.

    Attributes:
        first: the number of the first position: 0, or 1.
    """

    beta: float
    length: int
    first: int = 0

    def at(self, position: int) -> float:
        """Return the factor of queries at a position."""
        return 1 + self.beta * math.log(1 + (position + self.first) // self.length)


@dataclass(frozen=True, eq=False)
class Rope:
    """Rotary position embedding: pair j of a head is rotated by `position * frequencies[j]` radians.

    The pairs are (j, j + head_dim/2), the layout of GGUF's "neox" models. Every scaling rule (linear, llama3, YaRN,
    LongRoPE, dynamic NTK) only changes frequencies and lengths, so backends have no code for scaling. A pair that is
    not rotated has the frequency 0.

    Attributes:
        lengths: a factor for each pair, by which its cosine and sine are multiplied; None for 1.
        growth: a factor of queries that depends on the position; keys have no such factor.
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
        """The rotation of keys: this rotation without `growth`."""
        return self if self.growth is None else replace(self, growth=None)


@dataclass(frozen=True, eq=False)
class Convolution:
    """A causal convolution of each channel over a sequence; weight (W, C), oldest token first; bias (C,)."""

    name: str
    weight: Native
    bias: Native | None = None


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
        are_neighbors: whether the value heads of a key head are adjacent: value head h reads key head h // (H / G)
            instead of h % G.
    """

    name: str
    rate: Native
    dt_bias: Native
    n_key_heads: int
    key_dim: int
    n_value_heads: int
    value_dim: int
    are_neighbors: bool = False

    def key_head(self, head: int) -> int:
        """Return the key head of a value head."""
        return head * self.n_key_heads // self.n_value_heads if self.are_neighbors else head % self.n_key_heads


@dataclass(frozen=True, eq=False)
class DeltaNet:
    """A gated delta network.

    Attributes:
        projections: to queries, keys and values; to the output gate; to beta; to the time step.
        conv: the convolution of queries, keys and values.
        rule: the delta rule.
        norm: the norm of each head's output, before the gate.
        state: the shapes of the convolution's last inputs, (W - 1, C), and of the delta rule's matrices, (H, E, P).
    """

    projections: tuple[Linear, Linear, Linear, Linear]
    conv: Convolution
    rule: DeltaRule
    norm: RMSNorm
    state: tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class StateSpace:
    """The state space of Mamba2 (SSD): a matrix (N, P) per head that each token decays, adds to and reads.

    Source: "Transformers are SSMs", arXiv 2405.21060.

    Attributes:
        rate: (H,) logarithms of the decay per unit of time, which are negative.
        dt_bias: (H,) added to the time step before softplus.
        skip: (H,) factors of the input that is added to the output.
        n_heads: H.
        head_dim: P.
        n_groups: G, a divisor of H; H / G adjacent heads read the same B and C.
        state_dim: N.
    """

    name: str
    rate: Native
    dt_bias: Native
    skip: Native
    n_heads: int
    head_dim: int
    n_groups: int
    state_dim: int


@dataclass(frozen=True, eq=False)
class Mamba2:
    """A Mamba2 mixer.

    Attributes:
        projection: to the gate (H*P), to the convolution's channels (C), and to the time step (H), in this order.
        conv: the convolution of the input (H*P), B (G*N) and C (G*N).
        space: the state space.
        norm: the RMS norm (H*P,) of the gated output; None for no norm.
        norm_groups: the number of groups of columns; each group is normed separately.
        state: the shapes of the convolution's last inputs, (W - 1, C), and of the matrices, (H, N, P).
        scales: factors of the gate and of the time step after their projection.
    """

    projection: Linear
    conv: Convolution
    space: StateSpace
    norm: RMSNorm | None
    norm_groups: int
    state: tuple[tuple[int, ...], tuple[int, ...]]
    scales: tuple[float, float] = (1.0, 1.0)
