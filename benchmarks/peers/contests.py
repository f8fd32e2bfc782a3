"""Define and run the contests. A contest is a test with its contestants, which are engines with settings.

Every contestant runs once per round, so that a machine that slows down slows all of them. llama.cpp runs with several
settings, because the fastest setting depends on the machine and the test. Settings that are much slower stop after the
first round (`SLOWER`). After two rounds, only the fastest setting continues, and in decode also llama.cpp's default.
Slow engines run once, with a time budget.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from benchmarks.peers.process import PeerError, Process
from mlx_engine.bench.samples import Test
from mlx_engine.bench.work import Sizes, work

OURS, LLAMA, TRANSFORMERS, MLX_LM, OPENVINO = "mlx_engine", "llama.cpp", "transformers", "mlx-lm", "OpenVINO"


@dataclass(frozen=True)
class Engine:
    """An engine.

    Attributes:
        module: its file in this folder.
        computes: types of weights, activations and KV cache, for BENCHMARKS.md.
    """

    module: str
    computes: str


ENGINES = {
    OURS: Engine("ours", "Q8_0 blocks as stored, float32 activations and cache"),
    LLAMA: Engine("llama", "Q8_0 blocks as stored, activations rounded to 8 bits, 16-bit cache"),
    TRANSFORMERS: Engine("transformers_f32", "the file's weights as float32, float32 activations and cache; PyTorch"),
    OPENVINO: Engine("openvino", "the file's weights rounded again, activations and cache rounded to 8 bits"),
    MLX_LM: Engine("mlx_8bit", "the file's quants in MLX's 8-bit format, float32 activations and cache; MLX's CPU"),
}
# The engines of this package's own contests; OpenVINO runs in `benchmarks.activations` alone.
MEASURED = (OURS, LLAMA, TRANSFORMERS, MLX_LM)


def interpreters(given: Mapping[str, str]) -> dict[str, str]:
    """Return the Python interpreter of every engine: the given one, or the interpreter of this process."""
    return {name: given.get(name, sys.executable) for name in ENGINES}


# Contests of whole processes, and of the errors of logits.
START, ERRORS = "start", "errors"
ROUNDS = 5
DEPTH = 4096
# Seconds for each slow engine's only run of a test.
BUDGET = 10.0

FORMATS, PASSES = "q8_0 against f32", "early and late passes"


@dataclass(frozen=True)
class Contestant:
    """An engine with settings.

    Attributes:
        opening: arguments of the request that opens its process; contestants with equal arguments share a process.
        threads: threads of a run; None means all cores.
        budget: seconds for a run; an engine with a budget runs in the first round only.
        stays: whether the contestant runs in every round, even if another setting of its engine is faster.
    """

    engine: str
    opening: Mapping[str, Any] = field(default_factory=dict)
    threads: int | None = None
    budget: float | None = None
    stays: bool = False

    @property
    def setting(self) -> str:
        """Return the settings as text, to distinguish contestants of one engine."""
        words = [f"{self.threads} thread{'s' * (self.threads > 1)}"] if self.threads else []
        if self.opening.get("quant", "keep") != "keep":
            words.append(str(self.opening["quant"]))
        if "activations" in self.opening:
            words.append(f"activations {self.opening['activations']}")
        if "kv_type" in self.opening:
            words.append(f"keys and values {self.opening['kv_type']}")
        if "flash_attention" in self.opening:
            words.append(f"{'' if self.opening['flash_attention'] else 'no '}flash attention")
        return ", ".join(words)


@dataclass(frozen=True)
class Contest:
    """Contestants whose runs of one test are interleaved.

    Attributes:
        watches_memory: whether memory bandwidth is measured after each run.
        about: the title of a contest that compares something else than the speed of the test.
    """

    test: Test
    contestants: tuple[Contestant, ...]
    rounds: int = ROUNDS
    watches_memory: bool = False
    about: str | None = None

    @property
    def title(self) -> str:
        """Return the name of the contest in the rows."""
        return self.about or self.test.name


def plan(backend: str, cores: int, *, quick: bool = False) -> list[Contest]:
    """Return the contests, cheapest first. Quick contests only test the benchmark; their figures mean nothing."""
    ours, slow = Contestant(OURS, {"backend": backend}), (
        Contestant(TRANSFORMERS, budget=BUDGET),
        Contestant(MLX_LM, budget=BUDGET),
    )  # fmt: skip
    expanded = Contestant(OURS, {"backend": backend, "quant": "f32"})
    # Without this setting llama.cpp chooses whether it uses flash attention.
    plain: Mapping[str, Any] = {"flash_attention": False}
    reading = (Contestant(LLAMA, threads=cores), Contestant(LLAMA, plain, threads=cores))
    alone = (Contestant(LLAMA, threads=1), Contestant(LLAMA, plain, threads=1)) if cores > 1 else ()
    writing = (Contestant(LLAMA, threads=cores, stays=True), *reading[1:], *alone)
    if quick:
        return [
            Contest(Test(n_gen=8), (ours, *writing, *slow), rounds=2, watches_memory=True),
            Contest(Test(n_prompt=32), (ours, *reading), rounds=2),
            Contest(Test(n_gen=8), (ours, expanded), rounds=1, about=FORMATS),
        ]
    return [
        Contest(Test(n_gen=64), (ours, *writing, *slow), watches_memory=True),
        Contest(Test(n_prompt=512), (ours, *reading, *slow)),
        Contest(Test(n_gen=32), (ours, expanded), about=FORMATS),
        Contest(Test(n_gen=256), (ours,), rounds=3, about=PASSES),
        Contest(Test(n_prompt=2048), (ours, *reading)),
        Contest(Test(n_gen=64, depth=DEPTH), (ours, *writing), watches_memory=True),
    ]


# The warm-up run, and the shorter warm-up run of an engine with a budget.
WARM = Test(n_prompt=512, n_gen=8)
WARM_SLOW = Test(n_prompt=16, n_gen=1)
# Tokens of context beyond the test's own.
SPARE = 8


class Processes:
    """Processes by contestant. Contestants that differ only in threads share a process and its KV cache."""

    def __init__(self, contest: Contest, model: str, interpreters: Mapping[str, str]) -> None:
        self._contest, self._model, self._interpreters = contest, model, interpreters
        self._made: dict[str, Process | PeerError] = {}

    def of(self, contestant: Contestant) -> Process:
        """Return the contestant's process, ready to run.

        Raises:
            PeerError: the engine is not installed, or failed; raised again for every later call.
        """
        key = f"{contestant.engine} {dict(contestant.opening)}"
        if key not in self._made:
            try:
                self._made[key] = self._opened(contestant)
            except PeerError as error:
                self._made[key] = error
        made = self._made[key]
        if isinstance(made, PeerError):
            raise made
        return made

    def _opened(self, contestant: Contestant) -> Process:
        test = self._contest.test
        context = max(test.depth + test.n_tokens, WARM.n_prompt) + SPARE
        process = opened(contestant, self._interpreters, model=self._model, context=context)
        try:
            if test.depth:
                process.ask("fill", n=test.depth)
            most = WARM if contestant.budget is None else WARM_SLOW
            warm = Test(min(test.n_prompt, most.n_prompt), min(test.n_gen, most.n_gen), test.depth)
            process.ask("run", **asked(warm, contestant))
        except PeerError:
            process.close()
            raise
        return process

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for made in self._made.values():
            if isinstance(made, Process):
                made.close()


def opened(contestant: Contestant, interpreters: Mapping[str, str], **request: Any) -> Process:
    """Start the process of a contestant with the arguments of its request `open`; raise PeerError if this fails."""
    request = {**request, **contestant.opening}
    return Process(ENGINES[contestant.engine].module, interpreters[contestant.engine], **request)


def asked(test: Test, contestant: Contestant) -> dict[str, Any]:
    """Return the arguments of a `run` request."""
    return {
        "n_prompt": test.n_prompt,
        "n_gen": test.n_gen,
        "n_depth": test.depth,
        "threads": contestant.threads,
        "budget": contestant.budget,
    }


# After the first round and after the second, a setting runs again if its time is at most this factor times that of the
# fastest setting of its engine.
SLOWER = (1.2, 1.0)


@dataclass
class Entry:
    """A contestant and its results.

    Attributes:
        seconds: of the whole test, one per round.
        passes: seconds of every generated token, a list per round.
        read_rates: memory bandwidth in bytes per second, reading one stream, measured after each of the runs.
        fastest_read_rates: the same, reading eight streams.
        facts: versions and settings that the engine reports.
        estimated: the part of the test from which a time was extrapolated; None if the whole test was measured.
        absent: why the contestant has no times, or no more of them.
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
        """Whether the contestant has failed, or has a budget and has run once."""
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
