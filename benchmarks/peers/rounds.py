"""One contest: every contestant runs once per round, so that a machine that slows down slows all of them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.peers.engines import OURS
from benchmarks.peers.plan import Contest, Contestant
from benchmarks.peers.process import PeerError
from benchmarks.peers.processes import Processes, asked
from mlx_engine.bench.work import Sizes, work

# A setting runs again if it is at most so many times slower than the fastest setting of its engine, after the first
# round and after the second: then only the fastest continues.
SLOWER = (1.2, 1.0)


@dataclass
class Entry:
    """A contestant and its results.

    Attributes:
        seconds: of the whole test, one per round.
        passes: seconds of every generated token, a list per round.
        read_rates: memory bandwidth in bytes per second, read in one stream, measured after each of its runs.
        fastest_read_rates: the same, read in eight streams.
        facts: versions and settings that the engine reports.
        estimated: from which part of the test a time was extrapolated; None if the whole test was measured.
        absent: why it has no more times.
    """

    contestant: Contestant
    seconds: list[float] = field(default_factory=list)
    passes: list[list[float]] = field(default_factory=list)
    read_rates: list[float] = field(default_factory=list)
    fastest_read_rates: list[float] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    estimated: str | None = None
    absent: str | None = None

    @property
    def is_over(self) -> bool:
        """Whether it has failed, or has a budget and has run once."""
        return self.absent is not None or (self.contestant.budget is not None and bool(self.seconds))


def play(contest: Contest, model: str, interpreters: Mapping[str, str]) -> list[Entry]:
    """Run all rounds. Every other round is in reverse order, so that no engine always runs after the same one."""
    entries = [Entry(contestant) for contestant in contest.contestants]
    running = list(entries)
    with Processes(contest, model, interpreters) as processes:
        for number in range(contest.rounds):
            for entry in running if number % 2 == 0 else reversed(running):
                if not entry.is_over:
                    turn(entry, contest, processes)
            if number < len(SLOWER):
                running = continuing(running, SLOWER[number])
    return entries


def turn(entry: Entry, contest: Contest, processes: Processes) -> None:
    """Run a contestant once; an engine that fails is left out of later rounds."""
    try:
        process = processes.of(entry.contestant)
        entry.facts = process.facts
        done = process.ask("run", **asked(contest.test, entry.contestant))
        if contest.watches_memory:
            found = process.ask("read_rates")
            entry.read_rates += found.get("in_order", [])
            entry.fastest_read_rates += found.get("fastest", [])
    except PeerError as error:
        entry.absent = str(error)
        return
    entry.seconds.append(done["seconds"])
    entry.passes.append(done["passes"])
    entry.estimated = done["estimated"]


def continuing(entries: Sequence[Entry], slower: float) -> list[Entry]:
    """Return the contestants that run again: this engine, those that stay, and settings that are fast enough."""
    best: dict[str, float] = {}
    for entry in entries:
        if entry.seconds:
            name, seconds = entry.contestant.engine, statistics.median(entry.seconds)
            best[name] = min(best.get(name, seconds), seconds)
    return [
        entry
        for entry in entries
        if entry.contestant.engine == OURS
        or entry.contestant.stays
        or not entry.seconds
        or statistics.median(entry.seconds) <= slower * best[entry.contestant.engine]
    ]


def report_line(contest: Contest, entry: Entry) -> str:
    """Return a line that reports an entry."""
    who = f"{contest.title}: {entry.contestant.engine}, {entry.contestant.setting or 'as it is'}"
    if not entry.seconds:
        return f"{who}: {entry.absent}"
    rates = [contest.test.n_tokens / seconds for seconds in entry.seconds]
    spread = f"{min(rates):.4g} to {max(rates):.4g}"
    return f"{who}: {statistics.median(rates):.4g} tokens/s, {spread} {entry.estimated or ''}".rstrip()


def contest_row(contest: Contest, entry: Entry) -> dict[str, Any]:
    """Return an entry as a row, with the bytes that the test must read if they are known."""
    known = entry.facts.get("sizes")
    return {
        "contest": contest.title,
        **contest.test.numbers,
        "engine": entry.contestant.engine,
        "setting": entry.contestant.setting,
        "default": not entry.contestant.opening,
        "nbytes": work(Sizes(**known), contest.test, kv=True).nbytes if known else None,
        "seconds": entry.seconds,
        "passes_s": entry.passes if entry.contestant.engine == OURS else [],
        "read_rates": entry.read_rates,
        "fastest_read_rates": entry.fastest_read_rates,
        "facts": entry.facts,
        "estimated": entry.estimated,
        "absent": entry.absent,
    }
