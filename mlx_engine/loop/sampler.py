"""The sampler of a sequence: keeps the tokens so far and the seed, on which the next choice depends."""

from __future__ import annotations

import copy
import math
import os
import secrets
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from mlx_engine.backends.base import Backend
from mlx_engine.backends.parameters import Array, Token
from mlx_engine.backends.sampling import Draw
from mlx_engine.loop.constraint import Mask, Matcher
from mlx_engine.loop.logprobs import TokenLogprobs, token_logprobs
from mlx_engine.loop.processors import Processors
from mlx_engine.options import Sampling


@dataclass(frozen=True, eq=False)
class Choice:
    """A chosen token, which a lazy backend may not have computed yet.

    Attributes:
        token: the token, as `Backend.embed` accepts it.
        logits: (R, V), the logits of the pass.
        position: the position of the token in the sequence.
        row: the row of the logits from which the token was chosen.
        whole: whether all logits of the row are known; if not, only the largest are, which suffice for the choice.
        mask: which tokens (V,) the constraint allowed; None without a constraint.
    """

    token: Token
    logits: Array
    position: int
    row: int = 0
    whole: bool = True
    mask: Mask | None = None


class Sampler:
    """Chooses the tokens of one sequence: pass `draw()` to `Backend.choose`, then `add` and `settle` the choice.

    Several samplers may continue one prompt. Each has its own number `choice`, on which its random numbers depend. With
    `logprobs=False` no log-probabilities are available: they need all logits. With a `matcher`, the next token can be
    drawn only when all before it are settled: its mask depends on them.

    Attributes:
        choice: the number of the sampler among those of its prompt.
        is_constrained: whether the next token depends on the ids of all tokens before it, by its mask.
        is_checked: whether the token with the largest logit is chosen first, and compared with the constraint: most
            are allowed, and then no mask is computed. Not on a lazy backend, which has the id only later; not with
            log-probabilities, which say how much probability the mask left.
        processors: the functions of the user that edit logits; None if there are none.
    """

    def __init__(
        self,
        backend: Backend,
        sampling: Sampling,
        prompt: Sequence[int],
        *,
        choice: int = 0,
        logprobs: bool = True,
        matcher: Matcher | None = None,
        processors: Processors | None = None,
    ) -> None:
        self._backend, self._sampling, self._logprobs, self.choice = backend, sampling, logprobs, choice
        self._recent: list[Token] = list(prompt)
        self._n_prompt = len(prompt)
        self._seed = secrets.randbits(64) if sampling.seed is None else int(sampling.seed)
        self._settled: Choice | None = None
        self.processors, self.is_constrained = processors, matcher is not None
        is_free = logprobs or processors is not None or not sampling.is_argmax
        self.is_checked = matcher is not None and not is_free and not backend.lazy
        # The mask of the next token, or the future of a thread that computes it.
        self._matcher = matcher
        self._mask: Mask | None = None
        self._next: tuple[int, Future[Mask]] | None = None

    def fork(self, choice: int) -> Sampler:
        """Return a sampler with the same seed and prompt, for another choice, before any token has been chosen.

        Raises:
            ValueError: this sampler has chosen a token.
        """
        if len(self._recent) > self._n_prompt:
            n = len(self._recent) - self._n_prompt
            raise ValueError(f"fork: expected a sampler that has not chosen a token, found one with {n}")
        forked = copy.copy(self)
        forked.choice, forked._recent = choice, list(self._recent)
        if self._matcher is not None:
            forked._matcher = self._matcher.copy()
        return forked

    @property
    def is_complete(self) -> bool:
        """Whether a constraint allows no token after the settled ones."""
        return self._matcher is not None and self._matcher.is_complete

    @property
    def ids(self) -> list[int]:
        """The tokens of the prompt and the chosen tokens. All are ints but the last ones that are not settled."""
        return cast("list[int]", self._recent)

    def __call__(self, logits: Array, *, whole: bool = True) -> int:
        """Choose from logits (1, V), wait until the id is on the host, and return it. All tokens before are settled."""
        draw = self.draw()
        edited = self.edited(self._backend.host(logits)[0], draw) if self.processors else None
        (token,) = self._backend.choose(logits if edited is None else self._backend.array(edited[None]), [draw])
        if (again := self.redraw(token)) is not None:
            (token,) = self._backend.choose(logits, [again])
        return self.settle(self.add(token, logits, whole=whole))

    def draw(self) -> Draw:
        """Return the inputs for choosing the next token. The choice before it need not be settled.

        Without the mask if the choice is checked: see `redraw`.

        Raises:
            ConstraintError: the constraint allows no token.
        """
        u = 0.0 if self._sampling.is_greedy else random_number(self._seed, len(self._recent), self.choice)
        if self._next is not None:
            (process, promised), self._next = self._next, None
            # A fork leaves the thread in the parent.
            self._mask = promised.result() if process == os.getpid() else None
        if self._mask is None and self._matcher is not None and not self.is_checked:
            self._mask = self._matcher.mask()
        return Draw(self._sampling, self._recent, u, self._n_prompt, self._mask)

    def guess(self, ids: Sequence[Token], n_vocabulary: int) -> Draw:
        """Return the inputs with which a drafter should choose the token after further proposed ids.

        They are those of the choice itself, with the same random number, but without mask and processors: so two
        models with nearly the same probabilities choose the same token. Ids from `n_vocabulary` on are left out of
        penalties and biases: the drafter has no logits for them.
        """
        sampling, n = self._sampling, len(self._recent) + len(ids)
        if any(token >= n_vocabulary for token, _ in sampling.logit_bias):
            known = tuple((token, bias) for token, bias in sampling.logit_bias if token < n_vocabulary)
            sampling = replace(sampling, logit_bias=known)
        u = 0.0 if sampling.is_greedy else random_number(self._seed, n, self.choice)
        if sampling.repetition_penalty == 1 and not sampling.has_penalties:
            return Draw(sampling, (), u)
        token_id = self._backend.token_id
        prompt = [token for token in self.ids[: self._n_prompt] if token < n_vocabulary]
        answer = [token for token in map(token_id, (*self._recent[self._n_prompt :], *ids)) if token < n_vocabulary]
        return Draw(sampling, [*prompt, *answer], u, len(prompt))

    def redraw(self, token: Token) -> Draw | None:
        """Return the inputs of another choice, with the mask, if the constraint does not allow a checked one; or None.

        Raises:
            ConstraintError: the constraint allows no token.
        """
        if self._matcher is None or not self.is_checked or self._matcher.allows(self._backend.token_id(token)):
            return None
        return Draw(self._sampling, self._recent, 0.0, self._n_prompt, self._matcher.mask())

    def edited(self, row: np.ndarray, draw: Draw) -> np.ndarray:
        """Return logits (V,) as the processors return them. All tokens before must be settled.

        Raises:
            ProcessorError: a processor has failed.
        """
        return row if self.processors is None else self.processors(self.ids, row, draw.mask)

    def prepare(self, executor: Executor) -> None:
        """Begin to compute the mask of the next token in a thread, when all tokens before it are settled."""
        if self._matcher is not None and not self.is_checked:
            self._next = os.getpid(), executor.submit(self._matcher.mask)

    @property
    def best(self) -> int | None:
        """How many of the largest logits the choice needs; None for all."""
        sampling = self._sampling
        if self._logprobs or sampling.repetition_penalty != 1 or sampling.has_penalties or sampling.logit_bias:
            return None
        if self._matcher is not None or self.processors is not None:  # the largest may all be forbidden
            return None
        return 1 if sampling.is_greedy else sampling.top_k

    def add(self, token: Token, logits: Array, row: int = 0, *, whole: bool = True) -> Choice:
        """Append a token that was chosen from a row of logits (R, V), without waiting for its id."""
        self._recent.append(token)
        return Choice(token, logits, len(self._recent) - 1, row, whole, self._mask)

    def settle(self, choice: Choice) -> int:
        """Wait for the id of a choice and return it."""
        chosen = self._recent[choice.position] = self._backend.token_id(choice.token)
        self._settled = choice
        if self._matcher is not None:
            self._matcher.advance(chosen)
            self._mask = None
        return chosen

    def logprobs(self, n_top: int = 0) -> TokenLogprobs:
        """Return the log-probabilities of the last settled token and of the `n_top` most likely tokens at its place.

        These are the model's probabilities, before any sampling option and any mask. They are computed here, from the
        kept logits.

        Raises:
            ValueError: no token has been settled, or only the largest logits are known.
        """
        if self._settled is None:
            raise ValueError("logprobs: expected a settled token, found none")
        if not self._settled.whole:
            raise ValueError("logprobs: expected all logits, found the largest alone")
        row = self._backend.host(self._settled.logits)[self._settled.row]
        chosen = cast(int, self._recent[self._settled.position])
        return token_logprobs(self._backend, row, chosen, n_top, self._settled.mask)

    def probability(self) -> float | None:
        """Return the model's probability of the last id, before any sampling option; None before the first id."""
        return None if self._settled is None else math.exp(self.logprobs().logprob)


def best_of(samplers: Sequence[Sampler]) -> int | None:
    """Return the number of largest logits that suffices for all samplers; None for all logits, or without samplers."""
    needs = [sampler.best for sampler in samplers]
    known = [n for n in needs if n is not None]
    return max(known) if known and len(known) == len(needs) else None


def random_number(seed: int, position: int, choice: int = 0) -> float:
    """Return a random number in [0, 1) for one token, which depends on the seed, the token's position and the choice.

    A sequence that is interrupted and computed again, or runs in a batch, gets the same numbers. Each choice of a
    prompt gets its own numbers; choice 0 gets the numbers of a run with a single choice.
    """
    key = (seed, position, choice) if choice else (seed, position)
    (bits,) = np.random.SeedSequence(key).generate_state(1, np.uint64)
    return float(bits >> np.uint64(11)) * 2.0**-53
