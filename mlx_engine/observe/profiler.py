"""The profiler: measures the time of each operation, and sums times per operation, per layer, and per phase of a pass.

A span is one run of an operation. Spans nest: the span of a block (an operation composed of primitives) contains the
spans of its primitives. A span's own time excludes the spans inside it and profiling overhead. So the sum of all own
times is the time of the outermost spans minus overhead, whether or not a backend fuses operations.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# Operations before the first layer or after the last one.
OUTSIDE = ("embed", "norm_head", "argmax", "sample")
SAMPLING = ("argmax", "sample")
# Outside of layers, these operations are part of the embedding: some models add learned positions or scale embeddings.
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
    """The sums over all calls of an operation, or over all operations of a layer."""

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
    """One run of an operation.

    Attributes:
        op: the name of the operation.
        layer: None outside of the layers.
        part: the name of the operation's first parameter without its layer number ("attn_norm"). An operation
            without parameters has the `part` of the previous operation. Outside of the layers, `part` is "".
        phase: embedding, layers, norm, projection or sampling.
        inner: seconds of the spans inside this span, and of profiling overhead (`Profiler.unnoticed`).
        own: seconds of this span, without `inner`.
        counted: the cost of the spans inside this span.
        cost: the cost of this span, without `counted`.
        role: the operation's name in bottleneck reports: the names of its linear layers ("attn_q+k+v"). Without linear
            layers, it is "attention, window", "embedding" or `op`.
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


class Profiler:
    """Adds up all spans of a run in `ops`, `layers` and `phases`. With `keep`, also keeps them for `take_spans`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter, *, keep: bool = False) -> None:
        self._clock, self._keep = clock, keep
        self._open: list[Span] = []
        self._layer: int | None = None
        self._part = ""
        self.spans: list[Span] = []
        self.ops: dict[str, Total] = defaultdict(Total)
        self.layers: dict[int | None, Total] = defaultdict(Total)
        self.phases: dict[str, float] = defaultdict(float)
        self._before: dict[str, float] = {}

    @contextmanager
    def span(self, op: str, layer: int | None = None, part: str = "") -> Iterator[Span]:
        """Time one operation.

        An operation in `OUTSIDE` is counted for no layer. If `layer` is None, any other operation is counted for the
        layer of the previous operation.
        """
        if op in OUTSIDE:
            self._layer, self._part = None, ""
        elif layer is not None:
            self._layer, self._part = layer, part
        span = Span(op, self._layer, self._part, self._clock())
        self._open.append(span)
        try:
            yield span
        finally:
            self._open.pop()
            seconds = self._clock() - span.start
            span.own = seconds - span.inner
            if self._open:
                self._open[-1].inner += seconds
            span.phase = self._phase(span)
            self.phases[span.phase] += span.own

    def record(self, span: Span, cost: Cost) -> None:
        """Add an ended span to the sums. `cost` includes the cost of the spans inside it, which are already added."""
        span.cost = cost.without(span.counted)
        self.ops[span.op].add(span.own, span.cost)
        self.layers[span.layer].add(span.own, span.cost)
        if self._open:
            self._open[-1].counted += span.counted + span.cost
        if self._keep:
            self.spans.append(span)

    @contextmanager
    def unnoticed(self) -> Iterator[None]:
        """Exclude the time of this block, which is profiling overhead, from all open spans."""
        start = self._clock()
        try:
            yield
        finally:
            if self._open:
                self._open[-1].inner += self._clock() - start

    def _phase(self, span: Span) -> str:
        if any(outer.op == "norm_head" for outer in self._open) or span.op == "norm_head":
            # A fused `norm_head` counts as projection, because the projection takes nearly all of its time.
            fused = span.op == "norm_head" and not span.counted.flops
            return "projection" if span.op == "linear" or fused else "norm"
        if span.op in SAMPLING:
            return "sampling"
        outside = span.layer is None and span.op in EMBEDDING
        return "embedding" if outside else "layers"

    def begin_pass(self) -> None:
        """Begin a pass, whose milliseconds `end_pass` returns."""
        self._before = dict(self.phases)
        self._layer, self._part = None, ""

    def end_pass(self) -> dict[str, float]:
        """End a pass and return the milliseconds of its phases: embedding, layers, norm, projection."""
        names = ("embedding", "layers", "norm", "projection")
        taken = {name: (self.phases.get(name, 0.0) - self._before.get(name, 0.0)) * 1e3 for name in names}
        self.begin_pass()
        return taken

    def take_spans(self) -> list[Span]:
        """Return the spans since the last call."""
        taken, self.spans = self.spans, []
        return taken

    def clear(self) -> None:
        """Discard all sums and spans."""
        for sums in (self.ops, self.layers, self.phases):
            sums.clear()
        self.spans = []

    def table(self) -> str:
        """Format the sums as two tables, per operation and per layer, most expensive first."""
        by_layer = {"outside" if key is None else f"layer {key}": total for key, total in self.layers.items()}
        return f"{_table('op', self.ops)}\n\n{_table('layer', by_layer)}"


def _table(title: str, totals: dict[str, Total]) -> str:
    whole = sum(total.seconds for total in totals.values())
    lines = [f"{title:<16}{'calls':>8}{'total ms':>12}{'share':>8}{'GFLOP/s':>10}{'GB/s':>8}"]
    for name, total in sorted(totals.items(), key=lambda item: -item[1].seconds):
        share = f"{total.seconds / whole:.1%}" if whole else "-"
        lines.append(
            f"{name:<16}{total.calls:>8}{total.seconds * 1e3:>12.3f}{share:>8}"
            f"{rate(total.flops, total.seconds):>10}{rate(total.nbytes, total.seconds):>8}"
        )
    lines.append(f"{'all':<16}{sum(t.calls for t in totals.values()):>8}{whole * 1e3:>12.3f}")
    return "\n".join(lines)


def rate(amount: float, seconds: float) -> str:
    """Format billions per second; "-" if either value is 0."""
    return f"{amount / seconds / 1e9:.2f}" if amount and seconds > 0 else "-"
