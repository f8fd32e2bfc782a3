"""The load of a measurement: how many requests the clients submit, and what their prompts are."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from mlx_engine.bench.concurrency.figures import Run

# Token ids, or text for a server whose vocabulary is unknown.
Prompt: TypeAlias = "list[int] | str"


class Target(Protocol):
    """What runs clients: a scheduler or a server."""

    def prompt(self, draws: random.Random, n_tokens: int) -> Prompt:
        """Return a random prompt; prompts can be concatenated."""

    def run(self, n_clients: int, prompts: Sequence[Prompt], n_gen: int, *, seconds: float | None = None) -> Run:
        """Run clients in a closed loop over the prompts; with `seconds`, cancel what has not ended by then."""

    def forget(self) -> None:
        """Drop all cached prefixes, where that is possible."""


@dataclass(frozen=True)
class Load:
    """The load of every number of clients.

    Attributes:
        n_prompt: tokens of a prompt that no other prompt has.
        n_gen: tokens to generate.
        requests: requests of each client.
        shared_prefix: tokens before these that all prompts have in common.
        seed: seed of the random tokens.
    """

    n_prompt: int = 128
    n_gen: int = 64
    requests: int = 2
    shared_prefix: int = 0
    seed: int = 0

    @property
    def longest(self) -> int:
        """Tokens of a prompt and its answer."""
        return self.shared_prefix + self.n_prompt + self.n_gen

    @property
    def name(self) -> str:
        """The name of the load, in the style of llama-bench."""
        return f"pp{self.n_prompt}+tg{self.n_gen}" + (f" @ shared {self.shared_prefix}" if self.shared_prefix else "")

    @property
    def numbers(self) -> dict[str, Any]:
        """The load as fields of a row."""
        return {
            "test": self.name,
            "n_prompt": self.n_prompt,
            "n_gen": self.n_gen,
            "requests_per_client": self.requests,
            "shared_prefix": self.shared_prefix,
            "seed": self.seed,
        }

    def draws(self, number: int, n_clients: int) -> random.Random:
        """Return the random numbers of a round: no two runs have a prompt in common."""
        return random.Random(f"{self.seed} {number} {n_clients}")

    def prompts(self, target: Target, draws: random.Random, n_clients: int) -> list[Prompt]:
        """Return the prompts of a run, without a shared prefix."""
        return [target.prompt(draws, self.n_prompt) for _ in range(n_clients * self.requests)]
