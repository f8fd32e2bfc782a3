"""Passes taken apart, summed: per operation, per phase, per layer. Pure arithmetic on spans; times in milliseconds."""

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
    """One role in a pass.

    Attributes:
        samples: milliseconds of all its calls in one pass, one for each pass.
        n_calls, needed: of all passes together.
    """

    role: str
    phase: str
    samples: list[float]
    n_calls: int = 0
    needed: Cost = field(default_factory=Cost)

    @property
    def ms(self) -> float:
        """The median pass."""
        return statistics.median(self.samples)

    @property
    def calls(self) -> float:
        """In one pass."""
        return self.n_calls / len(self.samples)

    @property
    def cost(self) -> Cost:
        """Of one pass."""
        return Cost(self.needed.flops / len(self.samples), self.needed.nbytes / len(self.samples))


def spread(samples: Sequence[float]) -> dict[str, float | int]:
    """Median, quartiles, extremes and number of samples."""
    several = len(samples) > 1
    q1, _, q3 = statistics.quantiles(samples, n=4, method="inclusive") if several else [samples[0]] * 3
    return {
        "median": statistics.median(samples), "q1": q1, "q3": q3, "min": min(samples), "max": max(samples),
        "n": len(samples),
    }  # fmt: skip


def operations(passes: Sequence[Pass]) -> list[Operation]:
    """Every role of some passes of one kind, in the order of their first call."""
    found: dict[str, Operation] = {}
    for i, taken in enumerate(passes):
        for span in taken.spans:
            # What stands before the head is one step, whatever a backend makes of it.
            role = "output_norm" if span.phase == "norm" and span.op != "norm_head" else span.role
            op = found.setdefault(role, Operation(role, span.phase, [0.0] * len(passes)))
            op.samples[i] += span.own * 1e3
            op.n_calls += 1
            op.needed += span.cost
    return list(found.values())


def phases(taken: Pass) -> dict[str, float]:
    """Milliseconds of each phase, of the sum of all operations, and of the pass with its stopwatches."""
    found = dict.fromkeys(PHASES, 0.0)
    for span in taken.spans:
        found[span.phase] += span.own * 1e3
    return {**found, "sum": sum(found.values()), "watched": taken.seconds * 1e3}


def layers(passes: Sequence[Pass]) -> list[dict[str, float]]:
    """Of each layer the median milliseconds of a pass, of its two halves, and how far the slowest is above the fastest.

    `jitter` is the longest of its passes over the shortest.
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
    """Whether a layer's operation belongs to its second half; what has no parameters belongs to what came before."""
    return span.part.startswith(("ffn", "post_ffw"))


def of_index(rounds: Iterable[Sequence[Pass]], index: int) -> list[Pass]:
    """The same pass of every round."""
    return [passes[index] for passes in rounds]
