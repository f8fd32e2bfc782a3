"""The contests: each is a test with its contestants.

llama.cpp runs with several settings, because the fastest differs between machines and tests; two rounds decide which
setting continues. The slow engines run once, with a time budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.peers.engines import LLAMA, MLX_LM, OURS, TRANSFORMERS
from mlx_engine.bench.samples import Test

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
        stays: whether it runs in every round, even if another setting of its engine is faster.
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
    """Return the contests, cheapest first; quick contests try the benchmark itself and measure nothing useful."""
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
