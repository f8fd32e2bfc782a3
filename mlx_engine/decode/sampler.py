"""The sampler of a sequence: keeps the tokens so far and the seed, on which the next choice depends."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlx_engine.backends.base import Backend
from mlx_engine.backends.parameters import Array, Token
from mlx_engine.backends.sampling import Draw, Sampling


@dataclass(frozen=True, eq=False)
class Choice:
    """A chosen token, which a lazy backend may not have computed yet.

    Attributes:
        token: the token, as `Backend.embed` accepts it.
        logits: (R, V), the logits of the pass.
        position: its position in the sequence.
        row: the row of the logits that it was chosen from.
    """

    token: Token
    logits: Array
    position: int
    row: int = 0


class Sampler:
    """Chooses the tokens of one sequence: pass `draw()` to `Backend.choose`, then `add` and `settle` the choice."""

    def __init__(self, backend: Backend, sampling: Sampling, prompt: Sequence[int]) -> None:
        self._backend, self._sampling = backend, sampling
        self._recent: list[Token] = list(prompt)
        self._seed = secrets.randbits(64) if sampling.seed is None else int(sampling.seed)
        self._settled: Choice | None = None

    def __call__(self, logits: Array) -> int:
        """Choose from logits (1, V), wait until the id is on the host, and return it."""
        (token,) = self._backend.choose(logits, [self.draw()])
        return self.settle(self.add(token, logits))

    def draw(self) -> Draw:
        """Return the inputs for choosing the next token. The choice before it need not be settled."""
        u = 0.0 if self._sampling.is_greedy else random_number(self._seed, len(self._recent))
        return Draw(self._sampling, self._recent, u)

    def add(self, token: Token, logits: Array, row: int = 0) -> Choice:
        """Append a token that was chosen from a row of logits (R, V), without waiting for its id."""
        self._recent.append(token)
        return Choice(token, logits, len(self._recent) - 1, row)

    def settle(self, choice: Choice) -> int:
        """Wait for the id of a choice and return it."""
        chosen = self._recent[choice.position] = self._backend.token_id(choice.token)
        self._settled = choice
        return chosen

    def probability(self) -> float | None:
        """Return the model's probability of the last id, before any sampling option; None before the first id.

        Computed on demand from the kept logits, so that runs without logging do not pay for it.
        """
        if self._settled is None:
            return None
        row = self._backend.host(self._settled.logits)[self._settled.row].astype(np.float64)
        p = np.exp(row - row.max())
        return float(p[self._recent[self._settled.position]] / p.sum())


def random_number(seed: int, position: int) -> float:
    """Return a random number in [0, 1) for one token, which depends on the seed and the token's position only.

    A sequence that is interrupted and computed again, or runs in a batch, gets the same numbers.
    """
    (bits,) = np.random.SeedSequence((seed, position)).generate_state(1, np.uint64)
    return float(bits >> np.uint64(11)) * 2.0**-53
