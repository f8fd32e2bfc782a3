"""A test, such as the prefill of 512 tokens, and the samples of its repetitions."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Test:
    """A test: prefill `n_prompt` tokens, then decode `n_gen`, at depth `depth`. Computing the context is not timed."""

    n_prompt: int = 0
    n_gen: int = 0
    depth: int = 0

    @property
    def name(self) -> str:
        """The test's name in llama-bench."""
        parts = [f"pp{self.n_prompt}"] if self.n_prompt else []
        parts += [f"tg{self.n_gen}"] if self.n_gen else []
        return "+".join(parts) + (f" @ d{self.depth}" if self.depth else "")

    @property
    def numbers(self) -> dict[str, Any]:
        """The test as fields of a row."""
        return {"test": self.name, "n_prompt": self.n_prompt, "n_gen": self.n_gen, "n_depth": self.depth}

    @property
    def n_tokens(self) -> int:
        """The number of tokens for the rate in tokens per second."""
        return self.n_prompt + self.n_gen


@dataclass
class Result:
    """The samples of a cell.

    Attributes:
        seconds: the time of the test, one per repetition.
        passes: seconds of each decode pass, one list per repetition.
        estimated: how the samples were extrapolated, or None if the whole test was measured.
    """

    test: Test
    seconds: list[float] = field(default_factory=list)
    passes: list[list[float]] = field(default_factory=list)
    estimated: str | None = None

    @property
    def rates(self) -> list[float]:
        """Tokens per second, one per repetition."""
        return [self.test.n_tokens / seconds for seconds in self.seconds]

    def summary(self) -> dict[str, Any]:
        """Return mean, standard deviation (n - 1) and median of the rates, and all samples."""
        rates = self.rates
        return {
            **self.test.numbers,
            "avg_ts": statistics.fmean(rates),
            "stddev_ts": statistics.stdev(rates) if len(rates) > 1 else 0.0,
            "median_ts": statistics.median(rates),
            "samples_ts": rates,
            "samples_s": self.seconds,
            "passes_s": self.passes,
            "estimated": self.estimated,
        }
