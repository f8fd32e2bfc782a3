"""Rotary embedding settings of a model, and the frequencies that they give."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mlx_engine.backends.parameters import Rope


@dataclass(frozen=True)
class Rotation:
    """The rotary embedding settings of a model.

    Attributes:
        theta: the base of the frequencies `theta ** (-2j / head_dim)`.
        rule: "default"; "linear", positions are divided by `factor`; or "llama3".
        factor: the rule's factor.
        low: for "llama3": frequencies with fewer rotations over the training context are divided by `factor`.
        high: for "llama3": frequencies with more rotations over the training context are unchanged.
        context: for "llama3": length of the training context in tokens.
    """

    theta: float
    rule: str = "default"
    factor: float = 1.0
    low: float = 1.0
    high: float = 1.0
    context: int = 1

    def for_heads(self, head_dim: int) -> Rope:
        """Return the frequencies for this head dim."""
        plain = Rope.plain(head_dim, self.theta)
        if self.rule == "llama3":
            return llama3(plain, factor=self.factor, low=self.low, high=self.high, context=self.context)
        return scaled(plain, self.factor)

    def divisors(self, head_dim: int) -> tuple[float, ...]:
        """Return the number by which the rule divides each frequency."""
        plain, rope = Rope.plain(head_dim, self.theta), self.for_heads(head_dim)
        return tuple(f / slow for f, slow in zip(plain.frequencies, rope.frequencies, strict=True))


def scaled(rope: Rope, factor: float) -> Rope:
    """Return linear scaling: all frequencies divided by `factor`."""
    return Rope(tuple(f / factor for f in rope.frequencies))


def llama3(rope: Rope, *, factor: float, low: float, high: float, context: int) -> Rope:
    """Return llama3 scaling: frequencies with fewer than `low` rotations over the context are divided by `factor`.

    `context` is the length of the training context. Frequencies with more than `high` rotations are unchanged; between
    the two, scaling is interpolated. Source: "The Llama 3 Herd of Models", arXiv 2407.21783, and Hugging Face
    transformers, modeling_rope_utils.
    """

    def slowed(f: float) -> float:
        turns = context * f / (2 * math.pi)
        kept = min(1.0, max(0.0, (turns - low) / (high - low)))
        return kept * f + (1 - kept) * f / factor

    return Rope(tuple(slowed(f) for f in rope.frequencies))
