"""What the words of a model carry: a norm, a linear layer, a rotation, each with its backend's own arrays.

`name` is the stem of the GGUF tensor ("blk.0.attn_q"), so that an error or a debugging tap can point at the file. They
are compared by identity, so that a backend can keep what it makes of them in a dictionary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

# An array of whichever type suits the backend: nested Python lists, np.ndarray, mx.array. Code above the
# seam passes it on and never looks inside.
Array: TypeAlias = Any

# A token's id: a whole number, or on a lazy backend what it chose and has not computed yet. `Backend.token_id` makes
# the one of the other; as an input both do.
Token: TypeAlias = Any

Activation: TypeAlias = Literal["silu", "gelu"]


@dataclass(frozen=True, eq=False)
class RMSNorm:
    """`gain * x / sqrt(mean(x**2) + eps)` over the last axis; gain has that axis's length."""

    name: str
    gain: Array
    eps: float


@dataclass(frozen=True, eq=False)
class LayerNorm:
    """`gain * (x - mean) / sqrt(var + eps) + bias` over the last axis."""

    name: str
    gain: Array
    bias: Array
    eps: float


Norm: TypeAlias = RMSNorm | LayerNorm


@dataclass(frozen=True, eq=False)
class Linear:
    """`x @ weight.T + bias`: weight is what `Backend.prepare` made of an (N, K) matrix, bias is (N,) or None."""

    name: str
    weight: Array
    bias: Array | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Layer:
    """The parameters of a transformer layer, under their GGUF names; None is what an architecture does not have.

    Attributes:
        window: how many of the latest tokens a token attends to, itself included; None is all of them.
    """

    attn_norm: Norm
    attn_q: Linear
    attn_k: Linear
    attn_v: Linear
    attn_q_norm: RMSNorm | None = None
    attn_k_norm: RMSNorm | None = None
    rope: Rope | None = None
    window: int | None = None
    attn_output: Linear
    post_attention_norm: Norm | None = None
    ffn_norm: Norm
    ffn_gate: Linear | None = None
    ffn_up: Linear
    activation: Activation
    ffn_down: Linear
    post_ffw_norm: Norm | None = None

    def __post_init__(self) -> None:
        if (self.attn_q_norm is None) != (self.attn_k_norm is None) or (self.attn_q_norm and self.rope is None):
            raise ValueError(f"{self.attn_q.name}: expected norms of queries and keys, and a rotation behind them")

    @property
    def head_norms(self) -> tuple[RMSNorm, RMSNorm] | None:
        """Those of queries and keys, if they are normed."""
        q, k = self.attn_q_norm, self.attn_k_norm
        return None if q is None or k is None else (q, k)


@dataclass(frozen=True, kw_only=True, eq=False)
class LlamaLayer(Layer):
    """A layer as Llama has it: heads are rotated, and the feed-forward network has a gate."""

    rope: Rope
    ffn_gate: Linear
    activation: Activation = "silu"


@dataclass(frozen=True, eq=False)
class Rope:
    """Rotary position embedding: pair j of a head turns by `position * frequencies[j]` radians.

    The pairs are (j, j + head_dim/2), the layout of GGUF's "neox" models. Every scaling rule (linear, llama-3,
    YaRN) is a change of these frequencies, so no backend knows about scaling.
    """

    frequencies: tuple[float, ...]

    @classmethod
    def plain(cls, head_dim: int, theta: float, factor: float = 1.0) -> Rope:
        """Frequencies `theta ** (-2j / head_dim) / factor` for j < head_dim / 2; a factor is "linear" scaling."""
        return cls(tuple(theta ** (-2 * j / head_dim) / factor for j in range(head_dim // 2)))
