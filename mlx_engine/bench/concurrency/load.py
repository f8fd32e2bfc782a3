"""The load of a measurement (requests of the clients and their prompts), and the figures of a run."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from mlx_engine.bench.work import Work

# By name; None where a run has no such figure.
Figures = dict[str, float | None]


@dataclass
class RequestTimes:
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

    requests: Sequence[RequestTimes]
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


# Token ids, or text for a server whose vocabulary is unknown.
Prompt: TypeAlias = "list[int] | str"


class Target(Protocol):
    """What runs clients: a scheduler or a server."""

    def prompt(self, draws: random.Random, n_tokens: int) -> Prompt:
        """Return a random prompt; prompts can be concatenated."""

    def run(self, n_clients: int, prompts: Sequence[Prompt], n_gen: int, *, seconds: float | None = None) -> Run:
        """Run clients in a closed loop over the prompts; with `seconds`, cancel what has not ended by then."""

    def forget(self) -> None:
        """Drop all cached prefixes, where that is possible."""


@dataclass(frozen=True)
class Load:
    """The load of every number of clients.

    Attributes:
        n_prompt: tokens of a prompt that no other prompt has.
        n_gen: tokens to generate.
        requests: requests of each client.
        shared_prefix: tokens before these that all prompts have in common.
        seed: seed of the random tokens.
    """

    n_prompt: int = 128
    n_gen: int = 64
    requests: int = 2
    shared_prefix: int = 0
    seed: int = 0

    @property
    def longest(self) -> int:
        """Tokens of a prompt and its answer."""
        return self.shared_prefix + self.n_prompt + self.n_gen

    @property
    def name(self) -> str:
        """The name of the load, in the style of llama-bench."""
        return f"pp{self.n_prompt}+tg{self.n_gen}" + (f" @ shared {self.shared_prefix}" if self.shared_prefix else "")

    @property
    def numbers(self) -> dict[str, Any]:
        """The load as fields of a row."""
        return {
            "test": self.name,
            "n_prompt": self.n_prompt,
            "n_gen": self.n_gen,
            "requests_per_client": self.requests,
            "shared_prefix": self.shared_prefix,
            "seed": self.seed,
        }

    def draws(self, number: int, n_clients: int) -> random.Random:
        """Return the random numbers of a round: no two runs have a prompt in common."""
        return random.Random(f"{self.seed} {number} {n_clients}")

    def prompts(self, target: Target, draws: random.Random, n_clients: int) -> list[Prompt]:
        """Return the prompts of a run, without a shared prefix."""
        return [target.prompt(draws, self.n_prompt) for _ in range(n_clients * self.requests)]
