"""The figures of a run of clients: rates and latencies, and the share of the machine's limits."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from mlx_engine.bench.work import Work

# By name; None where a run has no such figure.
Figures = dict[str, float | None]


@dataclass
class Timed:
    """The times of one request, in seconds of the client's clock.

    Attributes:
        submitted: when it was submitted.
        arrivals: when each token arrived; over HTTP, each piece of text.
        n_tokens: tokens that were generated.
        n_cached: tokens of the prompt that were taken from a prefix cache; None if unknown.
    """

    submitted: float
    arrivals: list[float] = field(default_factory=list)
    n_tokens: int = 0
    n_cached: int | None = None

    @property
    def first(self) -> float | None:
        """Seconds to the first token; None before it."""
        return self.arrivals[0] - self.submitted if self.arrivals else None

    @property
    def rate(self) -> float | None:
        """Generated tokens per second from submission to the last token; None before the first."""
        return self.n_tokens / (self.arrivals[-1] - self.submitted) if self.arrivals else None


@dataclass
class Steps:
    """The steps of a scheduler in a run.

    Attributes:
        n: steps.
        n_rows: tokens that they computed.
        n_decoding: steps that continued answers.
        n_decoded: tokens of answers that these continued.
        flops: floating-point operations of all steps.
        nbytes: bytes that they read from memory.
    """

    n: int = 0
    n_rows: int = 0
    n_decoding: int = 0
    n_decoded: int = 0
    flops: float = 0.0
    nbytes: float = 0.0

    def add(self, n_decode: int, n_prefill: int, work: Work) -> None:
        """Add a step."""
        self.n += 1
        self.n_rows += n_decode + n_prefill
        self.n_decoding += n_decode > 0
        self.n_decoded += n_decode
        self.flops += work.flops
        self.nbytes += work.nbytes


@dataclass
class Run:
    """A run of clients.

    Attributes:
        requests: its requests.
        seconds: from the first submission to the last token.
        steps: the steps of the scheduler; None over HTTP.
        was_cut: whether a limit of time ended it.
    """

    requests: Sequence[Timed]
    seconds: float
    steps: Steps | None = None
    was_cut: bool = False

    @property
    def n_tokens(self) -> int:
        """Generated tokens."""
        return sum(request.n_tokens for request in self.requests)


def figures(run: Run, limits: dict[str, float] | None = None) -> Figures:
    """Return the figures of a run.

    Args:
        run: the run.
        limits: memory bandwidth and peak arithmetic, as `Limits.take` returns them; None if they are unknown.
    """
    first = [request.first for request in run.requests if request.first is not None]
    rates = [request.rate for request in run.requests if request.rate is not None]
    gaps = [b - a for request in run.requests for a, b in itertools.pairwise(request.arrivals)]
    found: Figures = {"total_ts": run.n_tokens / run.seconds, "request_ts": quantile(rates, 0.5)}
    for name, seconds in (("ttft", first), ("gap", gaps)):
        for suffix, q in (("ms", 0.5), ("p99_ms", 0.99)):
            value = quantile(seconds, q)
            found[f"{name}_{suffix}"] = None if value is None else value * 1e3
    if run.steps is not None and run.steps.n:
        found |= shares(run, run.steps, limits)
    return found


def shares(run: Run, steps: Steps, limits: dict[str, float] | None) -> Figures:
    """Return the rows per step, what a run read and computed, and the shares of both limits.

    A limit in tokens per second is the rate of the run if its steps took the time of that limit alone: all weights,
    keys and values at the memory bandwidth, or all arithmetic at the peak.
    """
    found: Figures = {
        "n_steps": steps.n,
        "rows_per_step": steps.n_rows / steps.n,
        "decode_rows_per_step": steps.n_decoded / steps.n_decoding if steps.n_decoding else None,
        "gbs": steps.nbytes / run.seconds / 1e9,
        "gflops": steps.flops / run.seconds / 1e9,
    }
    if limits is None:
        return found
    read, peak = limits["read_gbs"] * 1e9, limits["peak_gflops"] * 1e9
    return found | limits | {
        "read_share": steps.nbytes / run.seconds / read,
        "peak_share": steps.flops / run.seconds / peak,
        "memory_limit_ts": run.n_tokens * read / steps.nbytes,
        "arithmetic_limit_ts": run.n_tokens * peak / steps.flops,
    }  # fmt: skip


def quantile(values: Sequence[float], q: float) -> float | None:
    """Return the median for q = 0.5, else the smallest value that a share q of all values does not exceed."""
    if not values:
        return None
    if q == 0.5:
        return statistics.median(values)
    return sorted(values)[math.ceil(q * len(values)) - 1]


def medians(rounds: Sequence[Figures]) -> Figures:
    """Return the median of each figure over rounds."""
    found: Figures = {}
    for name in dict.fromkeys(name for one in rounds for name in one):
        values = [value for one in rounds if (value := one.get(name)) is not None]
        found[name] = statistics.median(values) if values else None
    return found
