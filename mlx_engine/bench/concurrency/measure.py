"""Interleaved rounds: each number of clients runs once per round, so that a machine that slows down slows all.

Every other round is in reverse order, so that no number of clients always runs after the same one. A figure is the
median over the rounds, and the figures of every round are kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_engine.bench.concurrency.figures import Figures, Run, figures, medians
from mlx_engine.bench.concurrency.load import Load, Target
from mlx_engine.bench.roofline import Limits

Row = dict[str, Any]
Announce = Callable[[int, int, str], None]

CONCURRENCY = (1, 2, 4, 8, 16, 32)
# Tokens of the prompts and answers of the warm-up runs.
WARM_UP = Load(n_prompt=16, n_gen=4, requests=1, seed=-1)


@dataclass(frozen=True)
class Plan:
    """The settings of a measurement.

    Attributes:
        concurrency: the numbers of clients.
        load: what they request.
        rounds: runs of each number of clients.
        budget: seconds for all runs of one number of clients; None for no limit.
        clock: read for the budget.
    """

    concurrency: Sequence[int] = CONCURRENCY
    load: Load = field(default_factory=Load)
    rounds: int = 5
    budget: float | None = None
    clock: Callable[[], float] = time.perf_counter


@dataclass(frozen=True)
class Sample:
    """The figures of one run, and whether a limit of time ended it."""

    figures: Figures
    was_cut: bool = False


def warm_up(target: Target, plan: Plan) -> None:
    """Run a few tokens with each number of clients."""
    for n in plan.concurrency:
        target.run(n, WARM_UP.prompts(target, WARM_UP.draws(0, n), n), WARM_UP.n_gen)


def interleaved(
    plan: Plan, sample: Callable[[int, int, float | None], Sample], announce: Announce
) -> Iterator[dict[int, list[Sample]]]:
    """Yield all samples so far by number of clients, after each round.

    Args:
        plan: the settings.
        sample: called with (round, number of clients, seconds that are left or None).
        announce: called before each run with (runs done, runs in total, title).
    """
    found: dict[int, list[Sample]] = {n: [] for n in plan.concurrency}
    spent = dict.fromkeys(plan.concurrency, 0.0)
    total = plan.rounds * len(plan.concurrency)
    for number in range(plan.rounds):
        for place, n in enumerate(plan.concurrency if number % 2 == 0 else reversed(plan.concurrency)):
            left = None if plan.budget is None else plan.budget - spent[n]
            if found[n] and left is not None and left <= 0:
                continue
            announce(number * len(plan.concurrency) + place, total, f"{n} clients")
            start = plan.clock()
            one = sample(number, n, left)
            spent[n] += plan.clock() - start
            # A run that was cut counts only if there is no whole one.
            if not (found[n] and one.was_cut):
                found[n].append(one)
        yield found


def throughput(target: Target, plan: Plan, limits: Limits | None, announce: Announce) -> Iterator[list[Row]]:
    """Yield a row for each number of clients, after each round: rates, latencies, and shares of the limits."""

    def sample(number: int, n: int, left: float | None) -> Sample:
        prompts = plan.load.prompts(target, plan.load.draws(number, n), n)
        if limits is not None:
            limits.sample()
        run = target.run(n, prompts, plan.load.n_gen, seconds=left)
        if limits is not None:
            limits.sample()
        return Sample(figures(run, None if limits is None else limits.take()), run.was_cut)

    for found in interleaved(plan, sample, announce):
        rows = [row(plan.load, n, samples) for n, samples in found.items()]
        alone = next((one["total_ts"] for one in rows if one["concurrency"] == 1), None)
        yield [{**one, "gain": one["total_ts"] / alone if alone else None} for one in rows]


def shared_prefix(target: Target, plan: Plan, announce: Announce) -> Iterator[list[Row]]:
    """Yield a row for each number of clients, after each round: the time to first token with and without a hit.

    Cold: one request whose prefix no earlier request had. Warm: all clients, whose prompts begin with that prefix.
    Control: all clients, with prompts of the same length that share nothing.
    """
    load = plan.load

    def sample(number: int, n: int, left: float | None) -> Sample:
        draws = load.draws(number, n)
        prefix: Any = target.prompt(draws, load.shared_prefix)
        first, *rest = [prefix + own for own in [target.prompt(draws, load.n_prompt), *load.prompts(target, draws, n)]]
        alike: list[Any] = load.prompts(target, draws, n)
        control = [target.prompt(draws, load.shared_prefix) + own for own in alike]
        deadline = None if left is None else plan.clock() + left
        runs: list[Run] = []
        for clients, prompts in ((1, [first]), (n, rest), (n, control)):
            if len(runs) != 1:  # the second run finds the prefix of the first
                target.forget()
            seconds = None if deadline is None else deadline - plan.clock()
            runs.append(target.run(clients, prompts, load.n_gen, seconds=seconds))
        return Sample(prefix_figures(*runs), any(run.was_cut for run in runs))

    for found in interleaved(plan, sample, announce):
        yield [row(load, n, samples) for n, samples in found.items()]


def prefix_figures(cold: Run, warm: Run, control: Run) -> Figures:
    """Return the median times to first token, their ratios, and how many tokens were cached."""
    times = {name: figures(run)["ttft_ms"] for name, run in (("cold", cold), ("warm", warm), ("control", control))}
    cached = [request.n_cached for request in warm.requests if request.n_cached is not None]
    found: Figures = {f"{name}_ttft_ms": value for name, value in times.items()}
    for name in ("cold", "control"):
        both = times["warm"] is not None and times[name]
        found[f"warm_over_{name}"] = times["warm"] / times[name] if both else None  # type: ignore[operator]
    return found | {"cached_tokens": sum(cached) / len(cached) if cached else None}


def row(load: Load, n: int, samples: Sequence[Sample]) -> Row:
    """Return the row of a number of clients: medians over rounds, and the figures of every round."""
    each = [sample.figures for sample in samples]
    was_cut = any(sample.was_cut for sample in samples)
    cut = "from a run that the budget ended" if was_cut else None
    return {**load.numbers, "concurrency": n, "rounds": len(each), **medians(each), "estimated": cut, "samples": each}
