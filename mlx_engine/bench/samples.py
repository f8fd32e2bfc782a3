"""A test, such as the prefill of 512 tokens: its notation on the command line, and the samples of its repetitions."""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_engine.errors import OptionError, require


@dataclass(frozen=True)
class Test:
    """A test: prefill `depth` tokens without timing, then time the prefill of `n_prompt` and the decode of `n_gen`."""

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
        """The number of timed tokens."""
        return self.n_prompt + self.n_gen


@dataclass
class Result:
    """The samples of a test, one per repetition.

    Attributes:
        seconds: the duration of each repetition.
        passes: the durations in seconds of the decode passes, a list per repetition.
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
        """Return mean, standard deviation (with divisor n - 1) and median of the rates, and all samples."""
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


# The largest number of values of a range on the command line.
MOST = 1000


def tests_of(
    n_prompt: list[str] | None, n_gen: list[str] | None, both: list[str] | None, depth: list[str] | None
) -> list[Test]:
    """Return all tests in the order of llama-bench: for each depth, tests of prefill, then of decode, then of both.

    If `both` is given without `n_prompt` and `n_gen`, only tests of both are returned.

    Raises:
        OptionError: a list cannot be parsed, or there is no test.
    """
    prompts, gens = numbers("-p", n_prompt, [512]), numbers("-n", n_gen, [64])
    if both and not (n_prompt or n_gen):
        prompts, gens = [], []
    pairs = [(p, 0) for p in prompts if p] + [(0, g) for g in gens if g] + [pair(text) for text in both or []]
    tests = [Test(p, g, d) for d, (p, g) in itertools.product(numbers("-d", depth, [0]), pairs)]
    require(
        len(tests) > 0, option="-p, -n, -pg", expected="at least one test", found=len(tests),
        message="give at least one test: prompt tokens with -p, generated tokens with -n, or both with -pg",
    )  # fmt: skip
    return tests


def numbers(option: str, texts: list[str] | None, default: list[int]) -> list[int]:
    """Return the numbers that texts such as `512`, `128,512`, `128-512+128` or `128-512*2` list, or the default."""
    return [n for text in texts for part in text.split(",") for n in span(option, part)] if texts else default


def span(option: str, text: str) -> list[int]:
    """Return the numbers of a text such as `5`, `1-9` (add 1), `128-512+128` (add 128) or `128-512*2` (double)."""
    found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9})(?:([+*])(\d{1,9}))?)?", text.strip())
    if found is None:
        message = f"{option}: {text!r} is no list of numbers, such as 1,2,4 or 128-512+128 or 128-512*2"
        raise OptionError(option=option, expected="a list of numbers", found=text, message=message)
    first, last, step, by = int(found[1]), int(found[2] or found[1]), found[3] or "+", int(found[4] or 1)
    leads_on = by >= 1 and (step == "+" or (by >= 2 and first >= 1))
    message = f"{option}: {text} is no ascending range"
    require(leads_on and first <= last, option=option, expected="an ascending range", found=text, message=message)
    is_short = step == "*" or (last - first) // by < MOST
    message = f"{option}: {text} has more than {MOST:,} numbers"
    require(is_short, option=option, expected=f"at most {MOST} tests", found=text, message=message)
    out = []
    while first <= last:
        out.append(first)
        first = first + by if step == "+" else first * by
    return out


def pair(text: str) -> tuple[int, int]:
    """Parse numbers of prompt tokens and generated tokens, such as `512,64`."""
    found = re.fullmatch(r"(\d{1,9}),(\d{1,9})", text.strip())
    if found is None or not (int(found[1]) and int(found[2])):
        message = f"-pg: {text!r} is no pair of prompt and generated tokens, such as 512,64"
        raise OptionError(option="-pg", expected="two numbers", found=text, message=message)
    return int(found[1]), int(found[2])


def check_context(name: str, n_tokens: int, context: int) -> None:
    """Raise OptionError if a test needs more tokens than the model's context has."""
    expected = f"at most {context:,} tokens, the context"
    message = f"{name} needs {n_tokens:,} tokens; the model's context has {context:,}"
    require(n_tokens <= context, option=name, expected=expected, found=n_tokens, message=message)


# The smallest number of measured passes to which `rest` fits a line.
ENOUGH = 8


def rest(passes: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """Estimate the durations in seconds of the passes that were not run.

    With a KV cache, every length is 1, and the estimate is the mean of the measured passes. Without a cache, the time
    is assumed to be a linear function of the length, which is fitted to the later half of the measured passes: the
    first, shorter passes use other kernels. With fewer than ENOUGH measured passes, the time is assumed to be
    proportional to the length.

    Args:
        passes: the seconds of the passes that were run.
        lengths: the number of tokens that each pass computes: first the measured passes, then the missing ones.
    """
    n = len(passes)
    missing = lengths[n:]
    if n < ENOUGH or len(set(lengths[n // 2 : n])) < 2:
        per_length = sum(passes) / sum(lengths[:n])
        return [per_length * length for length in missing]
    slope, start = statistics.linear_regression(lengths[n // 2 : n], passes[n // 2 :])
    if slope < 0:
        slope, start = 0.0, statistics.fmean(passes[n // 2 :])
    return [start + slope * length for length in missing]
