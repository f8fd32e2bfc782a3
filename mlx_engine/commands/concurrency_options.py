"""The options of `bench --concurrency` and `bench --url`, and their conversion to a plan."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_engine.errors import OptionError, Words, require

if TYPE_CHECKING:
    from mlx_engine.bench.concurrency.measure import Plan
    from mlx_engine.commands.bench_options import MeasureOptions, TimingOptions

# Options of a single sequence, and those of the engine that a server has chosen for itself.
IGNORED = ("both", "depth", "kv", "sweep", "compare")
IGNORED_BY_URL = (
    *("backend", "quant", "quant_min_dim", "quant_layer", "threads", "no_jit", "no_overlap", "prefix_cache"),
)
NEEDS = "--concurrency or --url"


@dataclass(frozen=True)
class ConcurrencyOptions:
    """Several clients at once."""

    concurrency: Annotated[
        str | None,
        typer.Option(
            "--concurrency",
            metavar="N,N...",
            help="Measure N clients at once, each of which submits its next request when its last one has ended.",
            show_default="off; with --url 1,2,4,8,16,32",
        ),
    ] = None
    requests: Annotated[int, typer.Option("--requests", min=1, help="With --concurrency: requests of each client.")] = 2
    prefix_cache: Annotated[
        bool | None,
        typer.Option(
            "--prefix-cache/--no-prefix-cache",
            help="With --concurrency: keep prompts for later requests that begin alike.",
            show_default="no-prefix-cache; with --shared-prefix prefix-cache",
        ),
    ] = None
    shared_prefix: Annotated[
        int,
        typer.Option(
            "--shared-prefix",
            min=0,
            metavar="K",
            help="With --concurrency: K tokens before each prompt that all have in common; prints the time to first "
            "token cold, warm, and of prompts of the same length that share nothing.",
        ),
    ] = 0
    url: Annotated[
        str | None,
        typer.Option(
            "--url", help="Measure an OpenAI-compatible server at this address, over HTTP.", show_default="off"
        ),
    ] = None
    api_key: Annotated[str | None, typer.Option("--api-key", help="With --url: the server's key.")] = None

    @property
    def is_wanted(self) -> bool:
        """Whether to measure several clients."""
        return self.concurrency is not None or self.url is not None

    def check(self, given: Mapping[str, str]) -> None:
        """Check that no option was given that would be ignored. `given` has the given flags by name.

        Raises:
            OptionError: an option would be ignored.
        """
        if self.is_wanted:
            names = (*IGNORED, *(IGNORED_BY_URL if self.url is not None else ("api_key",)))
            option, ignored = "--concurrency" if self.url is None else "--url", [given[n] for n in names if n in given]
            require(not ignored, option=option, expected="no option that it would ignore", found=", ".join(ignored))
            return
        for name in ("requests", "prefix_cache", "shared_prefix", "api_key"):
            require(name not in given, option=given.get(name, ""), expected=NEEDS, found=Words("neither"))

    def plan(self, tests: MeasureOptions, timing: TimingOptions) -> Plan:
        """Return the plan of the measurement.

        Raises:
            OptionError: a list cannot be parsed, or there is more than one length of prompts or answers.
        """
        from mlx_engine.bench.concurrency.load import Load
        from mlx_engine.bench.concurrency.measure import CONCURRENCY, Plan
        from mlx_engine.bench.lists import numbers

        given = None if self.concurrency is None else [self.concurrency]
        clients = list(dict.fromkeys(numbers("--concurrency", given, list(CONCURRENCY))))
        require(min(clients) >= 1, option="--concurrency", expected="at least one client", found=min(clients))
        # A server may still have the prompts of an earlier run in its prefix cache.
        seed = 0 if self.url is None else secrets.randbits(32)
        n_prompt, n_gen = _one("-p", tests.n_prompt, Load.n_prompt), _one("-n", tests.n_gen, Load.n_gen)
        load = Load(n_prompt, n_gen, self.requests, self.shared_prefix, seed)
        return Plan(clients, load, timing.repetitions, timing.budget)

    @property
    def caches_prefixes(self) -> bool:
        """Whether the scheduler has a prefix cache."""
        return self.shared_prefix > 0 if self.prefix_cache is None else self.prefix_cache


def _one(option: str, texts: list[str] | None, default: int) -> int:
    """Parse an option that has one number with --concurrency."""
    from mlx_engine.bench.lists import numbers

    found = numbers(option, texts, [default])
    if len(found) != 1 or found[0] < 1:
        shown = ",".join(map(str, found))
        raise OptionError(option=option, expected="one number >= 1 with --concurrency", found=shown)
    return found[0]
