"""Measure several clients at once, in interleaved rounds, and format the results as tables.

A round has a run for each number of clients, so a temporary slowdown of the machine affects all numbers of clients
alike. Every second round is in reverse order, so that 8 clients, for example, do not always run after 4 clients. The
tables show medians over the rounds; the rows also keep the figures of every round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_engine.bench.clients import Figures, Load, Run, Scheduled, Served, Target, figures, medians
from mlx_engine.bench.origin import OtherProcesses, disturbed, fields, origin
from mlx_engine.bench.roofline import Limits
from mlx_engine.bench.run import Announce, engines
from mlx_engine.bench.samples import check_context
from mlx_engine.bench.tables import Row, aligned, figure, printable
from mlx_engine.engine import CheckedCheckpoint

CONCURRENCY = (1, 2, 4, 8, 16, 32)
# The requests of the warm-up runs.
WARM_UP = Load(n_prompt=16, n_gen=4, requests=1, seed=-1)


@dataclass(frozen=True)
class Plan:
    """The settings of a measurement.

    Attributes:
        concurrency: the numbers of clients.
        rounds: runs of each number of clients.
        budget: seconds for all runs of one number of clients; None for no limit.
    """

    concurrency: Sequence[int] = CONCURRENCY
    load: Load = field(default_factory=Load)
    rounds: int = 5
    budget: float | None = None
    clock: Callable[[], float] = time.perf_counter


@dataclass(frozen=True)
class Sample:
    """The figures of one run (in `shared_prefix`, of three runs), and whether the budget ended a run."""

    figures: Figures
    was_cut: bool = False


def warm_up(target: Target, plan: Plan) -> None:
    """Run a few tokens with each number of clients."""
    for n in plan.concurrency:
        target.run(n, WARM_UP.prompts(target, WARM_UP.draws(0, n), n), WARM_UP.n_gen)


def interleaved(
    plan: Plan, sample: Callable[[int, int, float | None], Sample], announce: Announce
) -> Iterator[dict[int, list[Sample]]]:
    """Run the rounds. After each round, yield a map from each number of clients to its samples so far.

    For each run, `announce` is called with (runs done, runs in total, title), then `sample` with (index of the round,
    number of clients, seconds that are left of the budget). Without a budget, the last argument is None.
    """
    found: dict[int, list[Sample]] = {n: [] for n in plan.concurrency}
    spent = dict.fromkeys(plan.concurrency, 0.0)
    total = plan.rounds * len(plan.concurrency)
    for number in range(plan.rounds):
        for place, n in enumerate(plan.concurrency if number % 2 == 0 else reversed(plan.concurrency)):
            left = None if plan.budget is None else plan.budget - spent[n]
            if found[n] and left is not None and left <= 0:
                continue
            announce(number * len(plan.concurrency) + place, total, _title(plan, n))
            start, others = plan.clock(), OtherProcesses()
            one = sample(number, n, left)
            spent[n] += plan.clock() - start
            one.figures["others_share"] = others.share()
            # If the budget has ended a run, its figures are kept only if it is the first with this number of clients.
            if not (found[n] and one.was_cut):
                found[n].append(one)
        yield found


def _title(plan: Plan, n: int) -> str:
    return f"{plan.load.name}, {n} client{'s' if n > 1 else ''}"


def throughput(target: Target, plan: Plan, limits: Limits | None, announce: Announce) -> Iterator[list[Row]]:
    """After each round, yield a row for each number of clients: rates, latencies, and shares of `limits`."""

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
    """After each round, yield a row for each number of clients: times to first token with and without cached prefix.

    The cold run is one request, whose prefix is new. In the warm run, the prompts of all clients begin with this
    prefix. In the control run, the prompts of all clients are as long as in the warm run, but share no prefix.
    """
    load = plan.load

    def sample(number: int, n: int, left: float | None) -> Sample:
        draws = load.draws(number, n)
        prefix: Any = target.prompt(draws, load.shared_prefix)
        first, *rest = [prefix + own for own in [target.prompt(draws, load.n_prompt), *load.prompts(target, draws, n)]]
        own_prompts: list[Any] = load.prompts(target, draws, n)
        control = [target.prompt(draws, load.shared_prefix) + own for own in own_prompts]
        deadline = None if left is None else plan.clock() + left
        runs: list[Run] = []
        for clients, prompts in ((1, [first]), (n, rest), (n, control)):
            if len(runs) != 1:  # before a warm run, do not forget the prefix that the cold run has cached
                target.forget()
            seconds = None if deadline is None else deadline - plan.clock()
            runs.append(target.run(clients, prompts, load.n_gen, seconds=seconds))
        return Sample(prefix_figures(*runs), any(run.was_cut for run in runs))

    for found in interleaved(plan, sample, announce):
        yield [row(load, n, samples) for n, samples in found.items()]


def prefix_figures(cold: Run, warm: Run, control: Run) -> Figures:
    """Return the median times to first token, their ratios, and the mean number of cached tokens of a warm prompt."""
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
    found = medians(each)
    was_cut = any(sample.was_cut for sample in samples)
    cut = "from a run that the budget ended" if was_cut else None
    others = fields(found.get("others_share"))
    return {
        **load.numbers, "concurrency": n, "rounds": len(each), **found, **others, "estimated": cut, "samples": each,
    }  # fmt: skip


def engine_rows(
    model: str,
    backends: Sequence[str],
    plan: Plan,
    *,
    announce: Announce = lambda done, total, title: None,
    prefix_cache: bool = False,
    overlap: bool = True,
    **how: Any,
) -> Iterator[list[Row]]:
    """After each round, yield all rows so far, one per backend and number of clients. `how` is passed to `run.engines`.

    Raises:
        BackendUnavailableError: a name is not the name of a backend.
        OptionError: a prompt and its answer do not fit the model's context.
    """
    load, shared = plan.load, {"kv": True, "prefix_cache": prefix_cache}

    def check(opened: CheckedCheckpoint) -> None:
        check_context(load.name, load.longest, opened.config.context_length)

    found: list[Row] = []
    for about, reason, bench in engines(model, backends, check, shared=shared, overlap=overlap, **how):
        about["unavailable"] = reason
        if bench is None:
            found += [{**about, **load.numbers, "concurrency": n} for n in plan.concurrency]
            yield found
            continue
        settings: dict[str, Any] = {"slots": max(plan.concurrency), "longest": load.longest, "overlap": overlap}
        target = Scheduled(bench.engine, bench.sizes, prefix_cache=prefix_cache, **settings)
        rows: list[Row] = []
        for measured in target_rows(target, plan, bench.limits, announce):
            # With several ranks (processes that share the model), the load of other processes is unknown, because the
            # measured load includes the other ranks on this machine.
            unknown = fields(None) if bench.engine.model.is_shared else {}
            rows = [{**about, **bench.about(), **row, **unknown} for row in measured]
            yield [*found, *rows]
        found += rows
        del bench, target  # free the engine before the next one is loaded


def server_rows(server: Served, plan: Plan, *, announce: Announce = lambda *report: None) -> Iterator[list[Row]]:
    """After each round, yield all rows so far, one per number of clients of a server."""
    common = {**origin(), "model_name": server.model, "model_size": None, "model_n_params": None, "quant": "keep"}
    common |= {"backend": "HTTP", "url": server.url, "device": None, "threads": None, "unavailable": None, "kv": True}
    # The load of other processes is unknown, because the measured load includes the server if it is on this machine.
    common |= fields(None)
    for rows in target_rows(server, plan, None, announce):
        yield [{**row, **common} for row in rows]


def target_rows(target: Target, plan: Plan, limits: Limits | None, announce: Announce) -> Iterator[list[Row]]:
    """Warm up, then yield the rows of `shared_prefix` if the prompts share a prefix, else the rows of `throughput`."""
    announce(0, plan.rounds * len(plan.concurrency), _title(plan, plan.concurrency[0]))
    warm_up(target, plan)
    if plan.load.shared_prefix:
        yield from shared_prefix(target, plan, announce)
    else:
        yield from throughput(target, plan, limits, announce)


# (title, field of a row) of each column.
THROUGHPUT = (
    ("t/s", "total_ts"),
    ("gain", "gain"),
    ("t/s each", "request_ts"),
    ("first token ms", "ttft_ms"),
    ("p99", "ttft_p99_ms"),
    ("gap ms", "gap_ms"),
    ("p99", "gap_p99_ms"),
    ("rows/step", "rows_per_step"),
    ("of answers", "decode_rows_per_step"),
    ("of read", "read_share"),
    ("of peak", "peak_share"),
)
PREFIX = (
    ("cold ms", "cold_ttft_ms"),
    ("warm ms", "warm_ttft_ms"),
    ("control ms", "control_ttft_ms"),
    ("warm/cold", "warm_over_cold"),
    ("warm/control", "warm_over_control"),
    ("cached tokens", "cached_tokens"),
)
SHARES = ("read_share", "peak_share")


def markdown(rows: Sequence[Row]) -> str:
    """Return a table with a line per backend and number of clients, and notes on its columns."""
    row = rows[0]
    # Columns without values are left out: a server, for example, does not report its steps.
    all_columns = PREFIX if row["shared_prefix"] else THROUGHPUT
    columns = [(title, name) for title, name in all_columns if any(one.get(name) is not None for one in rows)]
    head = ["backend", "threads", "clients", *(title for title, _ in columns)]
    shown = [name for _, name in columns]
    lines = [head, *([*_who(one), *(_cell(one, name) for name in shown)] for one in rows)]
    reasons = {one["backend"]: one["unavailable"] for one in rows if one.get("unavailable")}
    absent = [f"{backend}: not measured, {reason}." for backend, reason in reasons.items()]
    title, warning = f"{printable(row['model_name'])}, {row['test']}", disturbed(rows)
    return "\n\n".join([title, *([warning] if warning else []), aligned(lines), *_notes(rows), *absent])


def page(rows: Sequence[Row], plots: Sequence[str]) -> str:
    """Return the page of the output folder: machine, table and plots."""
    row = rows[0]
    machine, versions = row["machine"], ", ".join(f"{name} {version}" for name, version in row["versions"].items())
    where = f"{machine['processor']}, {machine['cores']} cores; {versions}; commit {row['commit']}, {row['time']}."
    return "\n\n".join(["# Clients at once", where, markdown(rows), *(f"![{name}]({name})" for name in plots)]) + "\n"


def _who(row: Row) -> list[str]:
    return [row["backend"], "-" if row["threads"] is None else str(row["threads"]), str(row["concurrency"])]


def _cell(row: Row, name: str) -> str:
    value = row.get(name)
    if value is None:
        return "-"
    mark = "~" if row["estimated"] else ""
    return mark + (f"{value:.0%}" if name in SHARES else figure(value))


def _notes(rows: Sequence[Row]) -> list[str]:
    """Return the notes below the table."""
    row = rows[0]
    loop = f"Each client submits {row['requests_per_client']} requests, each when the previous one has ended."
    if row["shared_prefix"]:
        notes = [
            f"Times to first token, medians. Cold: one client, whose prefix of {row['shared_prefix']:,} tokens is new. "
            "Warm: all clients, with this prefix. Control: prompts of the same length that share nothing."
        ]
    else:
        notes = [
            f"{loop} t/s: generated tokens of all clients per second. Gain: t/s divided by the t/s of one client. t/s "
            "each: of one request, from its submission to its last token. Gap: time between two tokens of an answer. "
            "All are medians over rounds."
        ]
    limited = [one for one in rows if one.get("read_gbs") is not None]
    if limited:
        notes.append(
            "Of read: bytes of weights, keys and values that the steps read per second, divided by the memory "
            f"bandwidth, {_span(limited, 'read_gbs')} GB/s. Of peak: arithmetic of the steps per second, divided by "
            f"the peak, {_span(limited, 'peak_gflops')} GFLOP/s. Both limits were measured between the runs."
        )
    if any(one.get("estimated") for one in rows):
        notes.append("~: the budget ended the run.")
    return notes


def _span(rows: Sequence[Row], name: str) -> str:
    low, high = figure(min(row[name] for row in rows)), figure(max(row[name] for row in rows))
    return low if low == high else f"{low} to {high}"
