"""The parameters of a mixture of experts: a router, and expert FFNs, of which each token uses a few.

`Residents` chooses the experts that stay in memory if not all of them fit.

Axis letters: X experts of a layer, C experts that each token chooses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from mlx_engine.backends.parameters import Activation, Gating, Linear, Native, RMSNorm

# How the router's logits of a token become scores of experts: a softmax over all logits, or the sigmoid of each.
Scoring: TypeAlias = Literal["softmax", "sigmoid"]


@dataclass(frozen=True)
class Routing:
    """The rule that computes a token's experts and their weights from the router's logits (X,).

    The C experts with the largest `score + bias` are chosen; among equal sums, those with the lowest index. The weight
    of a chosen expert is its score, without the bias.

    Attributes:
        n_used: C, the number of experts that each token uses.
        normalize: whether the weights of a token's experts are divided by their sum plus `sum_eps`.
        scales: (X,) a factor of each expert's weight, applied last; None for 1. Prepared by `Backend.prepare`.
        bias: (X,) added to the scores only to choose experts; None for 0. Prepared by `Backend.prepare`.
        groups: (n, k) if the experts are divided into n groups, and a token's experts are chosen only from its k best
            groups. A group ranks by the sum of the two largest `score + bias` of its experts; among equal groups, the
            first one ranks higher. None for no groups.
        weighs_inputs: whether the weight of an expert multiplies the expert's input instead of its output.

    Raises:
        ValueError: `weighs_inputs` is true, and `n_used` is not 1.
    """

    n_used: int
    normalize: bool
    scales: Native | None = None
    scoring: Scoring = "softmax"
    bias: Native | None = None
    groups: tuple[int, int] | None = None
    sum_eps: float = 0.0
    weighs_inputs: bool = False

    def __post_init__(self) -> None:
        if self.weighs_inputs and self.n_used != 1:
            raise ValueError(f"weighs_inputs: expected one expert per token, found {self.n_used}")

    @property
    def ranks_logits(self) -> bool:
        """Whether the experts with the largest logits are chosen. Without bias and groups, softmax keeps the order."""
        return self.scoring == "softmax" and self.bias is None and self.groups is None


@dataclass(frozen=True, eq=False)
class ExpertLinear:
    """One linear layer (gate, up or down) of all experts: X matrices of the same shape (N, K).

    Attributes:
        name: the name of the GGUF tensor without ".weight" ("blk.0.ffn_gate_exps").
        weights: the result of `Backend.stack`.
        shape: (N, K).
        nbytes: bytes of all matrices.
        is_partial: whether this rank (process) has only some columns of each matrix, so that products must be summed
            over all ranks.
    """

    name: str
    weights: Native
    shape: tuple[int, int]
    nbytes: int
    n_experts: int
    is_partial: bool = False


@dataclass(frozen=True, eq=False)
class SharedExpert:
    """An FFN that every token uses, `sigmoid(weight(h)) * down(activation(gate(h)) * up(h))`.

    Attributes:
        weight: a linear layer with one output, whose sigmoid is a factor of the result; None for the factor 1.
        gate: the gate projection; None for an FFN without a gate, `down(activation(up(h)))`.
    """

    weight: Linear | None
    gate: Linear | None
    up: Linear
    down: Linear
    activation: Activation = "silu"

    @property
    def linears(self) -> tuple[Linear, ...]:
        """All linear layers."""
        return tuple(of for of in (self.weight, self.gate, self.up, self.down) if of is not None)


@dataclass(frozen=True, eq=False)
class Experts:
    """A mixture of experts. Each expert is an FFN: `down(activation(gate(h)) * up(h))`.

    With the activation "clamped_swiglu", an expert is `down(clamped_swiglu(gate(h), up(h)))`.

    Attributes:
        router: the linear layer that computes the logits (X,).
        gate: the gate projections; None for experts without a gate, `down(activation(up(h)))`.
        shared: an expert that every token uses, and whose output is added to the weighted sum; None for none.
        router_norm: the norm of the router's input; None if the router reads the same normed input as the experts.
        post_norm: a norm of the sum of all experts' outputs, including that of `shared`; None for no norm.
    """

    name: str
    router: Linear
    routing: Routing
    gate: ExpertLinear | None
    up: ExpertLinear
    down: ExpertLinear
    activation: Gating = "silu"
    shared: SharedExpert | None = None
    router_norm: RMSNorm | None = None
    post_norm: RMSNorm | None = None

    @property
    def n_experts(self) -> int:
        """X."""
        return self.up.n_experts

    @property
    def matrices(self) -> tuple[ExpertLinear, ...]:
        """The gate layers (unless `gate` is None), the up layers and the down layers."""
        return (self.up, self.down) if self.gate is None else (self.gate, self.up, self.down)

    @property
    def nbytes(self) -> int:
        """The bytes of the X experts' matrices, without the router and the shared expert."""
        return sum(linear.nbytes for linear in self.matrices)

    @property
    def dense(self) -> tuple[Linear, ...]:
        """The linear layers that every token uses: the router, and the layers of the shared expert."""
        return (self.router, *(self.shared.linears if self.shared else ()))

    @property
    def share(self) -> float:
        """The share of the experts that one token uses, C / X."""
        return self.routing.n_used / self.n_experts


# For each share of the experts in memory (`_HELD`), the share of a token's experts that was missing (`_MISSED`):
# Qwen3-30B-A3B in runs of 256 tokens, with an LRU cache that was empty at first (github.com/kekzl/imp/pull/1374).
_HELD, _MISSED = (0, 0.0625, 0.19, 0.38, 0.635, 1), (1, 0.634, 0.259, 0.106, 0.038, 0)


def share_missed(share: float) -> float:
    """Return the share of a token's experts that is read from the file if `share` of the experts are in memory.

    This is an estimate from one model: in other models, successive tokens may have fewer or more experts in common.
    """
    return float(np.interp(share, _HELD, _MISSED))


def share_read(share: float, n_tokens: int) -> float:
    """Return the share of a layer's experts that a pass reads, if each token uses `share` of them.

    For several tokens, this is the expected value if they choose independently.
    """
    return 1 - (1 - share) ** n_tokens


# The factor by which each pass multiplies the counts of earlier choices. Measured with the choices of
# `benchmarks/experts.py` and 59 of 128 experts in memory: of a token's 8 experts, 1.12 are missing on average with this
# factor, 1.07 with factors from 0.99 to 1, and 1.59 with an LRU cache. This smaller factor is used because it follows a
# change of the topic sooner.
DECAY = 0.98


class Residents:
    """The experts of a layer that are in memory, each in a slot, and for every expert a count of its choices.

    Each pass multiplies the earlier counts by `DECAY`.

    Attributes:
        slots: (X,) the slot of each expert; -1 for an expert that is not in memory.
    """

    def __init__(self, n_experts: int, n_slots: int) -> None:
        self.slots, self.n_slots = np.full(n_experts, -1), n_slots
        self._rates = np.zeros(n_experts)

    def count(self, n_chosen: np.ndarray) -> None:
        """Add the number of tokens of a pass that have chosen each expert, (X,), to the counts."""
        self._rates = DECAY * self._rates + n_chosen

    def free_slot(self) -> int | None:
        """Return a slot without an expert; None if every slot has an expert."""
        free = np.setdiff1d(np.arange(self.n_slots), self.slots)
        return int(free[0]) if len(free) else None

    def coldest(self, kept: np.ndarray) -> int | None:
        """Return the least often chosen expert in memory that is not in the mask `kept` (X,); None if there is none."""
        candidates = np.flatnonzero((self.slots >= 0) & ~kept)
        return int(candidates[self._rates[candidates].argmin()]) if len(candidates) else None

    def coldest_slots(self, n: int) -> list[int]:
        """Return the slots of the n experts in memory that were chosen least often."""
        held = np.flatnonzero(self.slots >= 0)
        return [int(slot) for slot in self.slots[held[self._rates[held].argsort()[:n]]]]
