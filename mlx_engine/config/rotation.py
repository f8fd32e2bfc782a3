"""Rotary embedding settings of a model, and the frequencies that every scaling rule makes of them.

A rule only changes frequencies, and the length of the rotated pairs. LongRoPE and dynamic NTK depend on the length of
the sequence: transformers changes all frequencies in the middle of a long text. Here the choice is made once, when a
model is loaded (`Rotation.within`), so that a token's result does not depend on how many tokens follow it. Source of
the rules: Hugging Face transformers, modeling_rope_utils.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from mlx_engine.backends.parameters import Growth, Rope

Frequencies: TypeAlias = tuple[float, ...]


@dataclass(frozen=True)
class Rotation:
    """The rotary embedding settings of a model.

    Attributes:
        theta: the base of the frequencies `theta ** (-2j / n)` of the n rotated elements of a head.
        rule: a key of `RULES`.
        factor: the rule's factor.
        low: "llama3" and "yarn" divide frequencies with fewer rotations over the training context by `factor`.
        high: "llama3" and "yarn" leave frequencies with more rotations over the training context as they are.
        context: length of the training context in tokens, for all rules but "default" and "linear".
        attention_factor: factor of cosines and sines, for "yarn" and "longrope".
        truncate: for "yarn": whether the limits of slow and fast frequencies are rounded to whole pairs.
        short: for "longrope": divisor of each frequency up to the training context.
        long: for "longrope": divisor of each frequency in longer contexts.
        extent: length of the longest sequence, for "longrope" and "dynamic"; None is the training context.
        n_rotated: number of elements of a head that are rotated; None for all.
        part: for "proportional": the part of the pairs of a head that are rotated, which are the first ones.
        beta: Llama 4's attention scaling, with steps of `context` tokens; 0 is off.
    """

    theta: float
    rule: str = "default"
    factor: float = 1.0
    low: float = 1.0
    high: float = 1.0
    context: int = 1
    attention_factor: float = 1.0
    truncate: bool = True
    short: Frequencies = ()
    long: Frequencies = ()
    extent: int | None = None
    n_rotated: int | None = None
    part: float = 1.0
    beta: float = 0.0

    @property
    def is_long(self) -> bool:
        """Whether the model is loaded for longer sequences than the training context."""
        return self.extent is not None and self.extent > self.context

    def within(self, extent: int) -> Rotation:
        """Return the rotation for sequences of at most `extent` tokens, if the rule depends on their length."""
        return replace(self, extent=extent) if self.rule in BY_LENGTH else self

    def for_heads(self, head_dim: int) -> Rope:
        """Return frequencies and lengths for heads of this dim. Pairs after the rotated ones have the frequency 0."""
        n = self.n_rotated or head_dim
        frequencies, rest = RULES[self.rule](self, Rope.plain(n, self.theta).frequencies), (head_dim - n) // 2
        lengths = None if self.attention_factor == 1 else (self.attention_factor,) * (n // 2) + (1.0,) * rest
        growth = Growth(self.beta, self.context) if self.beta else None
        return Rope(frequencies + (0.0,) * rest, lengths, growth)

    def divisors(self, head_dim: int) -> tuple[float, ...]:
        """Return the number by which the rule divides each frequency."""
        plain, rope = Rope.plain(head_dim, self.theta), self.for_heads(head_dim)
        return tuple(f / slow for f, slow in zip(plain.frequencies, rope.frequencies, strict=True))


def scaled(r: Rotation, frequencies: Frequencies) -> Frequencies:
    """Return linear scaling: all frequencies divided by the factor."""
    return tuple(f / r.factor for f in frequencies)


def dynamic(r: Rotation, frequencies: Frequencies) -> Frequencies:
    """Return dynamic NTK scaling: a larger base for longer sequences; frequency 0 stays, the last is slowed most."""
    n = 2 * len(frequencies)
    if not r.is_long or r.extent is None or n == 2:
        return frequencies
    stretch = r.factor * r.extent / r.context - (r.factor - 1)
    return tuple(f * stretch ** (-2 * j / (n - 2)) for j, f in enumerate(frequencies))


def llama3(r: Rotation, frequencies: Frequencies) -> Frequencies:
    """Return llama3 scaling; the change from fast to slow frequencies is linear in the number of rotations.

    Source: "The Llama 3 Herd of Models", arXiv 2407.21783, and Hugging Face transformers.
    """

    def slowed(f: float) -> float:
        rotations = r.context * f / (2 * math.pi)
        kept = min(1.0, max(0.0, (rotations - r.low) / (r.high - r.low)))
        return kept * f + (1 - kept) * f / r.factor

    return tuple(map(slowed, frequencies))


def yarn(r: Rotation, frequencies: Frequencies) -> Frequencies:
    """Return YaRN scaling; the change from fast to slow frequencies is linear in the index of the pair.

    Source: "YaRN: Efficient Context Window Extension", arXiv 2309.00071.
    """
    n = 2 * len(frequencies)

    def pair(rotations: float) -> float:
        """Return the index of the pair with this many rotations over the training context."""
        at = n * math.log(r.context / (rotations * 2 * math.pi)) / (2 * math.log(r.theta))
        return min(max(at, 0.0), n - 1.0)

    first, last = pair(r.high), pair(r.low)
    if r.truncate:
        first, last = float(math.floor(first)), float(math.ceil(last))
    width = last - first or 0.001  # two limits in one pair: a step

    def slowed(j: int, f: float) -> float:
        slow = min(1.0, max(0.0, (j - first) / width))
        return f / r.factor * slow + f * (1 - slow)

    return tuple(slowed(j, f) for j, f in enumerate(frequencies))


def longrope(r: Rotation, frequencies: Frequencies) -> Frequencies:
    """Return LongRoPE scaling: each frequency has a divisor. Source: arXiv 2402.13753."""
    divisors = r.long if r.is_long else r.short
    return tuple(f / divisor for f, divisor in zip(frequencies, divisors, strict=True))


def proportional(r: Rotation, frequencies: Frequencies) -> Frequencies:
    """Return the first frequencies divided by the factor; the other pairs are not rotated. Source: Gemma 4."""
    n = int(r.part * len(frequencies))
    return tuple(f / r.factor for f in frequencies[:n]) + (0.0,) * (len(frequencies) - n)


RULES: Mapping[str, Callable[[Rotation, Frequencies], Frequencies]] = {
    "default": lambda r, frequencies: frequencies,
    "linear": scaled,
    "dynamic": dynamic,
    "llama3": llama3,
    "yarn": yarn,
    "longrope": longrope,
    "proportional": proportional,
}
# The rules that depend on the length of the sequence.
BY_LENGTH = ("dynamic", "longrope")


def yarn_attention(factor: float, times: float = 1.0) -> float:
    """Return YaRN's factor of cosines and sines: it makes up for the flatter softmax over a longer context."""
    return 0.1 * times * math.log(factor) + 1 if factor > 1 else 1.0


def longrope_attention(factor: float, context: int) -> float:
    """Return LongRoPE's factor of cosines and sines, for a context that is `factor` times the training context."""
    return math.sqrt(1 + math.log(factor) / math.log(context)) if factor > 1 and context > 1 else 1.0
