"""One contest: every contestant runs once a round, so that a machine that slows down slows all of them."""

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

# How many times slower than another setting of its engine one may be to run again, after the first round and the
# second: then only the fastest goes on.
BEHIND = (1.2, 1.0)


@dataclass
class Entry:
    """A contestant and what it has done.

    Attributes:
        seconds: of the whole test, one per round.
        passes: seconds of every token written, a list per round.
        read_rates: bytes per second of the memory, read in order, measured after each of its turns.
        fastest_read_rates: the same, read as fast as we can.
        facts: what the engine says about itself.
        estimated: why a time is no measurement of the whole test.
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
        """Whether it has run as often as it may."""
        return self.absent is not None or (self.contestant.budget is not None and bool(self.seconds))


def play(contest: Contest, model: str, interpreters: Mapping[str, str]) -> list[Entry]:
    """All rounds. Every other round goes backwards, so that nobody always runs behind the same neighbour."""
    entries = [Entry(contestant) for contestant in contest.contestants]
    running = list(entries)
    with Processes(contest, model, interpreters) as processes:
        for number in range(contest.rounds):
            for entry in running if number % 2 == 0 else reversed(running):
                if not entry.is_over:
                    turn(entry, contest, processes)
            if number < len(BEHIND):
                running = still_in_it(running, BEHIND[number])
    return entries


def turn(entry: Entry, contest: Contest, processes: Processes) -> None:
    """One run; an engine that fails is out, the others go on."""
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


def still_in_it(entries: Sequence[Entry], behind: float) -> list[Entry]:
    """Those not further behind another setting of their engine, and those who stay anyway: all of ours do."""
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
        or statistics.median(entry.seconds) <= behind * best[entry.contestant.engine]
    ]


def told(contest: Contest, entry: Entry) -> str:
    """A line for whoever is watching."""
    who = f"{contest.title}: {entry.contestant.engine}, {entry.contestant.setting or 'as it is'}"
    if not entry.seconds:
        return f"{who}: {entry.absent}"
    rates = [contest.test.n_tokens / seconds for seconds in entry.seconds]
    spread = f"{min(rates):.4g} to {max(rates):.4g}"
    return f"{who}: {statistics.median(rates):.4g} tokens/s, {spread} {entry.estimated or ''}".rstrip()


def contest_row(contest: Contest, entry: Entry) -> dict[str, Any]:
    """An entry, and where it is known the bytes that the test reads at least."""
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
