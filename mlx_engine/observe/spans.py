"""A span: one timed operation, with its cost and its role; totals of spans."""

from __future__ import annotations

from dataclasses import dataclass

# Operations before the first layer or after the last one.
OUTSIDE = ("embed", "norm_head", "argmax", "sample")
SAMPLING = ("argmax", "sample")
# Outside of layers these belong to the embedding: learned positions are added, and some models scale embeddings.
EMBEDDING = ("embed", "add", "scale")


@dataclass(frozen=True)
class Cost:
    """The cost of an operation: floating-point operations, and bytes read and written."""

    flops: float = 0.0
    nbytes: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.nbytes + other.nbytes)

    def without(self, other: Cost) -> Cost:
        """Return this cost minus `other`, not below 0."""
        return Cost(max(0.0, self.flops - other.flops), max(0.0, self.nbytes - other.nbytes))


@dataclass
class Total:
    """Sums over calls."""

    calls: int = 0
    seconds: float = 0.0
    flops: float = 0.0
    nbytes: float = 0.0

    def add(self, seconds: float, cost: Cost) -> None:
        """Add one call."""
        self.calls += 1
        self.seconds += seconds
        self.flops += cost.flops
        self.nbytes += cost.nbytes


@dataclass
class Span:
    """An operation that is running or has just ended.

    Attributes:
        part: the operation's first parameter without its layer number ("attn_norm"), or the previous operation's.
        phase: embedding, layers, norm, projection or sampling.
        inner, own: seconds of the spans inside, and this span's seconds without them.
        counted, cost: the cost of the spans inside, and this span's cost without them.
        role: the operation's purpose, as named in a profile.
    """

    op: str
    layer: int | None
    part: str
    start: float
    phase: str = ""
    inner: float = 0.0
    own: float = 0.0
    counted: Cost = Cost()
    cost: Cost = Cost()
    role: str = ""


def rate(amount: float, seconds: float) -> str:
    """Format billions per second; "-" if either value is 0."""
    return f"{amount / seconds / 1e9:.2f}" if amount and seconds > 0 else "-"
