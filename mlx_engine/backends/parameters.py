"""The parameters of operations: norms, linear layers, rotary embeddings and others, with arrays of the backend.

A parameter's `name` is the name of its GGUF tensor without ".weight" ("blk.0.attn_q"), so that errors and taps
(`observed.py`) can name the tensor in the file. Parameters are compared by identity, so that a backend can use them as
dictionary keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, NamedTuple, TypeAlias

from mlx_engine.kernels.cached import cached_property

# A backend's own type of array: nested Python lists, np.ndarray or mx.array. Backends, parameters and KV views use this
# type. Elsewhere, the same arrays have the opaque type `Array`.
Native: TypeAlias = Any


class Array:
    """A backend's array, as an opaque type for models, cache and loop: mypy rejects `x.shape`, `x[0]` and `x + y`."""


class LazyToken:
    """A chosen token of a lazy backend, whose id has not been computed yet. It is opaque, like `Array`."""


# Operations accept a token as an id or as a `LazyToken`; `Backend.token_id` waits for the id and returns it.
Token: TypeAlias = int | LazyToken

# "gelu" is the tanh form of GELU, "gelu_erf" the form with the error function, "relu2" the square of ReLU.
Activation: TypeAlias = Literal["silu", "gelu", "gelu_erf", "relu2"]
# How an expert combines the outputs of its gate and up projections: `activation(gate) * up`, or `clamped_swiglu`.
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

# The norms of the query heads and of the key heads; None if heads are not normed.
HeadNorms: TypeAlias = tuple[RMSNorm, RMSNorm] | None


class LowRank(NamedTuple):
    """The LoRA matrices of all adapters of a linear layer, concatenated: see `weights/adapters.py`.

    Attributes:
        a: has the matrix (M, K), where M is the sum of the LoRA ranks of all adapters, plus padding.
        b: has the matrix (N, M).
    """

    a: Linear
    b: Linear


@dataclass(frozen=True, eq=False)
class Linear:
    """`x @ weight.T + bias`: `weight` is an (N, K) matrix, prepared by `Backend.prepare`; `bias` is (N,) or None.

    Attributes:
        is_partial: whether this process has only some columns of the matrix. The product is then a partial sum, which
            must be added over all processes that share the model.
        lora: the matrices of the adapters; None without adapters.
    """

    name: str
    weight: Native
    bias: Native | None = None
    is_partial: bool = False
    lora: LowRank | None = None


@dataclass(frozen=True, eq=False)
class Scores:
    """How attention computes its scores: `score = scale * (query . key)`, optionally with a soft cap and sinks.

    Attributes:
        softcap: if given, each score becomes `softcap * tanh(score / softcap)`.
        sinks: (H,) one additional score for each query head, or None; prepared by `Backend.prepare`. A sink counts in
            the maximum and the divisor of the softmax, but has no value vector.
    """

    scale: float
    softcap: float | None = None
    sinks: Native | None = None


class Growth(NamedTuple):
    """Llama 4's attention scaling: queries at position p are multiplied by `1 + beta * ln(1 + (p + first) // length)`.

    Attributes:
        length: the number of successive positions with the same factor.
        first: the number of the first position in the formula, 0 or 1.
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
    LongRoPE, dynamic NTK) only changes `frequencies` and `lengths`, so backends have no code for scaling. The frequency
    of a pair that is not rotated is 0.

    Attributes:
        lengths: for each pair, a factor of its cosine and sine; None if all factors are 1.
        growth: a factor, which depends on the position, for queries but not for keys; None if it is always 1.
    """

    frequencies: tuple[float, ...]
    lengths: tuple[float, ...] | None = None
    growth: Growth | None = None

    @classmethod
    @cache
    def none(cls, head_dim: int) -> Rope:
        """Return a rotation that changes nothing: all frequencies are 0."""
        return cls((0.0,) * (head_dim // 2))

    @classmethod
    def plain(cls, head_dim: int, theta: float, factor: float = 1.0) -> Rope:
        """Return a `Rope` with frequencies `theta ** (-2j / head_dim) / factor`; `factor` is for "linear" scaling."""
        return cls(tuple(theta ** (-2 * j / head_dim) / factor for j in range(head_dim // 2)))

    @cached_property
    def keys(self) -> Rope:
        """The rotary embedding of keys, which has no `growth`."""
        return self if self.growth is None else replace(self, growth=None)


@dataclass(frozen=True, eq=False)
class Convolution:
    """A causal convolution over the tokens of a sequence, separate for each of C channels.

    `weight` is (W, C), with a row for each of the last W tokens, oldest first; `bias` is (C,) or None.
    """

    name: str
    weight: Native
    bias: Native | None = None


@dataclass(frozen=True, eq=False)
class DeltaRule:
    """The gated delta rule of linear attention: each value head has a matrix (E, P) as its state.

    Each token multiplies the state by a decay, corrects it, and reads it: `Primitives.delta_rule` has the formula.
    `n_key_heads` is G, `key_dim` E, `n_value_heads` H (a multiple of G), and `value_dim` P. Source: "Gated Delta
    Networks", arXiv 2412.06464.

    Attributes:
        rate: (H,) the logarithm of the decay for a time step of 1; below 0.
        dt_bias: (H,) added to the time step before softplus.
        are_neighbors: whether the value heads of one key head are adjacent. If so, value head h reads key head
            h // (H / G), otherwise key head h % G.
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
    """A token mixer (in place of attention) with the gated delta rule, as in Qwen3-Next.

    Attributes:
        projections: four linear layers. The first computes queries, keys and values, the second the output gate, the
            third beta, the last the time step.
        conv: the convolution of queries, keys and values.
        norm: the norm of each head's output, before the gate.
        state: the shapes of the two arrays of the layer's state: the convolution's last inputs, (W - 1, C), and the
            delta rule's matrices, (H, E, P).
    """

    projections: tuple[Linear, Linear, Linear, Linear]
    conv: Convolution
    rule: DeltaRule
    norm: RMSNorm
    state: tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class StateSpace:
    """The state space of Mamba2 (SSD): each head has a matrix (N, P) as its state.

    Each token multiplies the state by a decay, adds to it, and reads it: `Primitives.state_space` has the formula, in
    which B and C are the vectors (N,) that write and read the state. `n_heads` is H, `head_dim` P, `state_dim` N, and
    `n_groups` is G, a divisor of H; H / G adjacent heads have the same B and C. Source: "Transformers are SSMs", arXiv
    2405.21060.

    Attributes:
        rate: (H,) the logarithm of the decay for a time step of 1; below 0.
        dt_bias: (H,) added to the time step before softplus.
        skip: (H,) the factor by which each head's input is multiplied before it is added to the head's output.
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
    """A token mixer (in place of attention) with a Mamba2 state space.

    Attributes:
        projection: a linear layer to the gate (H*P columns), the input of `conv` (H*P + 2*G*N columns) and the time
            step (H columns), in this order.
        conv: the convolution of the state space's input (H*P channels), B (G*N) and C (G*N).
        norm: the RMS norm of the gated output, with a weight (H*P,); None if the output is not normed.
        norm_groups: the number of column groups that `norm` norms separately.
        state: the shapes of the two arrays of the layer's state: the convolution's last inputs, (W - 1, channels), and
            the matrices, (H, N, P).
        scales: the factors by which the projected gate and the projected time step are multiplied.
    """

    projection: Linear
    conv: Convolution
    space: StateSpace
    norm: RMSNorm | None
    norm_groups: int
    state: tuple[tuple[int, ...], tuple[int, ...]]
    scales: tuple[float, float] = (1.0, 1.0)
