"""Parse the number lists of `-p`, `-n`, `-d` and `-pg`, and combine them into tests."""

from __future__ import annotations

import itertools
import re

from mlx_engine.bench.samples import Test
from mlx_engine.errors import OptionError, Words, require


def tests_of(
    n_prompt: list[str] | None, n_gen: list[str] | None, both: list[str] | None, depth: list[str] | None
) -> list[Test]:
    """Return all tests, as llama-bench combines them: prefill, then decode, then both, each at every depth.

    Raises:
        OptionError: a list cannot be parsed, or there is no test.
    """
    prompts, gens = numbers("-p", n_prompt, [512]), numbers("-n", n_gen, [64])
    if both and not (n_prompt or n_gen):
        prompts, gens = [], []
    pairs = [(p, 0) for p in prompts if p] + [(0, g) for g in gens if g] + [pair(text) for text in both or []]
    tests = [Test(p, g, d) for d, (p, g) in itertools.product(numbers("-d", depth, [0]), pairs)]
    require(len(tests) > 0, option="-p, -n, -pg", expected="at least one test", found=Words("none"))
    return tests


def numbers(option: str, texts: list[str] | None, default: list[int]) -> list[int]:
    """Parse `512`, `128,512`, `128-512`, `128-512+128` or `128-512*2`, or several of them."""
    return [n for text in texts for part in text.split(",") for n in span(option, part)] if texts else default


def span(option: str, text: str) -> list[int]:
    """Parse a number, or a range with a step that is added (+) or multiplied (*)."""
    found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9})(?:([+*])(\d{1,9}))?)?", text.strip())
    if found is None:
        raise OptionError(option=option, expected="numbers as 512, 128,512, 128-512+128 or 128-512*2", found=text)
    first, last, step, by = int(found[1]), int(found[2] or found[1]), found[3] or "+", int(found[4] or 1)
    leads_on = by >= 1 and (step == "+" or (by >= 2 and first >= 1))
    require(leads_on and first <= last, option=option, expected="an ascending range", found=text)
    n_most = 1000
    require(step == "*" or (last - first) // by < n_most, option=option, expected=f"at most {n_most} tests", found=text)
    out = []
    while first <= last:
        out.append(first)
        first = first + by if step == "+" else first * by
    return out


def pair(text: str) -> tuple[int, int]:
    """`512,64`."""
    found = re.fullmatch(r"(\d{1,9}),(\d{1,9})", text.strip())
    if found is None or not (int(found[1]) and int(found[2])):
        raise OptionError(option="-pg", expected="prompt tokens and tokens to generate, as 512,64", found=text)
    return int(found[1]), int(found[2])
