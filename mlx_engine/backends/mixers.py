"""The parameters of layers that mix tokens through a state in place of attention: short convolutions, gated delta nets.

C is the number of channels of a convolution and W its width in tokens. A delta net has G key heads of E floats and H
value heads of P floats; value head h reads key head h % G.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from mlx_engine.backends.parameters import Linear, Native, RMSNorm


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
