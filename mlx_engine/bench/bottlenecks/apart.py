"""Sum the spans of profiled passes per operation, phase and layer. Pure arithmetic; times in milliseconds."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mlx_engine.bench.bottlenecks.runs import Pass
from mlx_engine.observe.profiler import Cost, Span

PHASES = ("embedding", "layers", "norm", "projection", "sampling")


@dataclass
class Operation:
    """All calls of one role in the profiled passes.

    Attributes:
        samples: milliseconds of all its calls in a pass, one per pass.
        n_calls, needed: number of calls and their cost, summed over all passes.
    """

    role: str
    phase: str
    samples: list[float]
    n_calls: int = 0
    needed: Cost = field(default_factory=Cost)

    @property
    def ms(self) -> float:
        """Median milliseconds per pass."""
        return statistics.median(self.samples)

    @property
    def calls(self) -> float:
        """Calls per pass."""
        return self.n_calls / len(self.samples)

    @property
    def cost(self) -> Cost:
        """Cost per pass."""
        return Cost(self.needed.flops / len(self.samples), self.needed.nbytes / len(self.samples))


def spread(samples: Sequence[float]) -> dict[str, float | int]:
    """Return median, quartiles, extremes and number of samples."""
    several = len(samples) > 1
    q1, _, q3 = statistics.quantiles(samples, n=4, method="inclusive") if several else [samples[0]] * 3
    return {
        "median": statistics.median(samples), "q1": q1, "q3": q3, "min": min(samples), "max": max(samples),
        "n": len(samples),
    }  # fmt: skip


def operations(passes: Sequence[Pass]) -> list[Operation]:
    """Return the operations of passes of one kind, in the order of their first call."""
    found: dict[str, Operation] = {}
    for i, taken in enumerate(passes):
        for span in taken.spans:
            # Everything before the head is counted as one role, however a backend fuses it.
            role = "output_norm" if span.phase == "norm" and span.op != "norm_head" else span.role
            op = found.setdefault(role, Operation(role, span.phase, [0.0] * len(passes)))
            op.samples[i] += span.own * 1e3
            op.n_calls += 1
            op.needed += span.cost
    return list(found.values())


def phases(taken: Pass) -> dict[str, float]:
    """Return milliseconds of each phase, of the sum of all operations, and of the profiled pass."""
    found = dict.fromkeys(PHASES, 0.0)
    for span in taken.spans:
        found[span.phase] += span.own * 1e3
    return {**found, "sum": sum(found.values()), "watched": taken.seconds * 1e3}


def layers(passes: Sequence[Pass]) -> list[dict[str, float]]:
    """Return for each layer the median milliseconds per pass, of attention and feed-forward separately.

    `jitter` is the layer's longest pass divided by its shortest.
    """
    halves: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for taken in passes:
        of: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for span in taken.spans:
            if span.layer is not None:
                of[span.layer][is_feed_forward(span)] += span.own * 1e3
        for layer, (attention, feed_forward) in of.items():
            halves[layer].append((attention, feed_forward))
    return [_layer(layer, halves[layer]) for layer in sorted(halves)]


def _layer(layer: int, halves: Sequence[tuple[float, float]]) -> dict[str, float]:
    whole = [sum(both) for both in halves]
    return {
        "layer": layer,
        "attention": statistics.median(both[0] for both in halves),
        "feed_forward": statistics.median(both[1] for both in halves),
        "ms": statistics.median(whole),
        "min": min(whole),
        "max": max(whole),
        "jitter": max(whole) / min(whole) if min(whole) > 0 else 0.0,
    }


def is_feed_forward(span: Span) -> bool:
    """Return whether an operation is in the feed-forward half. Without parameters, it is in the previous one's half."""
    return span.part.startswith(("ffn", "post_ffw"))


def of_index(rounds: Iterable[Sequence[Pass]], index: int) -> list[Pass]:
    """Return the pass with this index of every round."""
    return [passes[index] for passes in rounds]
