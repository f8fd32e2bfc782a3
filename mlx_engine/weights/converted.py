"""The report of quantising on load: what was converted, what was left, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mlx_engine.weights.conversion import KEEP, Conversion


@dataclass(frozen=True)
class Left:
    """The linear layers that were not converted for one reason."""

    reason: str
    count: int
    first: str


@dataclass(frozen=True)
class Converted:
    """The report of a conversion.

    Attributes:
        asked: the conversion.
        counts: number of converted layers, by the name of their new type.
        left: layers that were not converted although a type was asked for, by reason.
        nbytes: bytes of all weights, before a backend expands them, by the name of their type.
    """

    asked: Conversion
    counts: Mapping[str, int]
    left: tuple[Left, ...]
    nbytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def weights(self) -> str:
        """The type that most bytes of the weights have, and the bytes of all, such as "Q8_0, 16.2 MB of weights"."""
        most = max(self.nbytes, key=lambda name: self.nbytes[name], default="none")
        return f"{most}, {sum(self.nbytes.values()) / 1e6:,.1f} MB of weights"

    @classmethod
    def of(
        cls, asked: Conversion, rows: Sequence[tuple[str, str, str]], nbytes: Mapping[str, int] | None = None
    ) -> Converted:
        """Count from one row per layer: (name, new type or "", reason for not converting or "")."""
        types = [quant for _, quant, _ in rows if quant]
        reasons = dict.fromkeys(reason for _, _, reason in rows if reason)
        left = []
        for reason in reasons:
            names = [name for name, _, why in rows if why == reason]
            left.append(Left(reason, len(names), names[0]))
        return cls(asked, {quant: types.count(quant) for quant in dict.fromkeys(types)}, tuple(left), nbytes or {})

    def notes(self) -> tuple[str, ...]:
        """Return one line for the user, or none if no conversion was asked for."""
        if self.asked.quant == KEEP and not self.counts and not self.left:
            return ()
        # "keep", and overrides for layers that already have that type: there is no new type to print.
        none = f"0 linear layers{'' if self.asked.quant == KEEP else f' to {self.asked.quant}'}"
        done = ", ".join(f"{count} linear layers to {quant}" for quant, count in self.counts.items()) or none
        left = (f", {some.count} left: {some.reason} (first {some.first})" for some in self.left)
        is_float = set(self.counts or [self.asked.quant]) == {"f32"}
        return (f"{'converted' if is_float else 'quantised'} {done}" + "".join(left),)
