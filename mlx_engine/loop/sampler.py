"""The sampler of a sequence: keeps its tokens, seed and constraint, and chooses the next token with the backend.

Users can pass two kinds of functions (`Processors`): a logits processor edits the logits before each choice, and a
user's sampler function chooses the token itself.
"""

from __future__ import annotations

import copy
import math
import os
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mlx_engine.backends.base import Backend
from mlx_engine.backends.parameters import Array, Token
from mlx_engine.backends.sampling import Draw, masked
from mlx_engine.errors import ProcessorError, is_whole, shown
from mlx_engine.loop.constraint import Mask, Matcher
from mlx_engine.loop.logprobs import TokenLogprobs, token_logprobs
from mlx_engine.options import Options, Processor, Sampling, name_of


@dataclass(frozen=True, eq=False)
class Choice:
    """A chosen token, which a lazy backend may not have computed yet.

    Attributes:
        token: the token, as `Backend.embed` accepts it.
        logits: (R, V), the rows from which the tokens of a pass were chosen, not edited by processors.
        position: the position of the token in its sequence.
        row: the index of the row of `logits` from which the token was chosen.
        whole: whether the row has all logits. If not, another rank (process) has sent only the largest logits, which
            suffice for the choice.
        mask: which tokens (V,) the constraint allowed; None without a constraint, or with `Sampler.is_checked`.
    """

    token: Token
    logits: Array
    position: int
    row: int = 0
    whole: bool = True
    mask: Mask | None = None


class Sampler:
    """Chooses the tokens of one sequence, in three steps.

    Pass the result of `draw` to `Backend.choose`. Pass the chosen token to `add`. When the token's id is needed on the
    host, call `settle`; on a lazy backend, this waits for the device.

    Several samplers may continue one prompt. Each has a number, `choice`, on which its random numbers depend. With
    `logprobs=False`, a pass may return only the largest logits, so log-probabilities are not available. A `matcher` is
    the state of the sequence's constraint. If there is a constraint, the next token can be drawn only after all earlier
    tokens have been settled, because the mask of allowed tokens depends on them.

    Attributes:
        is_constrained: whether there is a constraint.
        is_checked: whether the token is first chosen without a mask. A mask is then computed only if the constraint
            does not allow this token, which is rare. True for greedy sampling with a constraint on an eager backend,
            if there are no biases, no penalties, no processors and no log-probabilities (`TokenLogprobs.allowed` needs
            the mask). False on a lazy backend, where this check would have to wait for the token's id.
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
        needs_mask = logprobs or processors is not None or not sampling.is_argmax
        self.is_checked = matcher is not None and not needs_mask and not backend.lazy
        # `_mask` is the mask of the next token; None if it has not been computed. While a thread computes it, `_next`
        # has the id of the thread's process and the future of the mask.
        self._matcher = matcher
        self._mask: Mask | None = None
        self._next: tuple[int, Future[Mask]] | None = None

    def fork(self, choice: int) -> Sampler:
        """Return a sampler with the same seed and prompt, and with the number `choice`.

        Raises:
            ValueError: this sampler has already chosen a token.
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
        """Whether the text of the settled tokens is complete under the constraint, so that no token may follow."""
        return self._matcher is not None and self._matcher.is_complete

    @property
    def ids(self) -> list[int]:
        """The tokens of the prompt and the chosen tokens. Tokens that are not settled may be arrays of the backend."""
        return cast("list[int]", self._recent)

    def __call__(self, logits: Array, *, whole: bool = True) -> int:
        """Choose a token from logits (1, V), wait until its id is on the host, and return the id.

        All earlier tokens must be settled.
        """
        draw = self.draw()
        edited = self.edited(self._backend.host(logits)[0], draw) if self.processors else None
        (token,) = self._backend.choose(logits if edited is None else self._backend.array(edited[None]), [draw])
        if (again := self.redraw(token)) is not None:
            (token,) = self._backend.choose(logits, [again])
        return self.settle(self.add(token, logits, whole=whole))

    def draw(self) -> Draw:
        """Return the inputs for choosing the next token.

        Raises:
            ConstraintError: the constraint allows no token.
        """
        u = 0.0 if self._sampling.is_greedy else random_number(self._seed, len(self._recent), self.choice)
        if self._next is not None:
            (process, promised), self._next = self._next, None
            # In a forked process, the thread that would compute the mask does not exist.
            self._mask = promised.result() if process == os.getpid() else None
        if self._mask is None and self._matcher is not None and not self.is_checked:
            self._mask = self._matcher.mask()
        return Draw(self._sampling, self._recent, u, self._n_prompt, self._mask)

    def guess(self, ids: Sequence[Token], n_vocabulary: int) -> Draw:
        """Return the inputs with which a drafter should choose the token after the settled tokens and proposed `ids`.

        The inputs include the random number with which this sampler will choose the token at the same position, but no
        mask and no processors. So a drafter with nearly the model's probabilities mostly chooses the same token. Ids
        from `n_vocabulary` on, for which the drafter has no logits, are left out of penalties and biases.
        """
        sampling, n = self._sampling, len(self._recent) + len(ids)
        if any(token >= n_vocabulary for token, _ in sampling.logit_bias):
            known = tuple((token, bias) for token, bias in sampling.logit_bias if token < n_vocabulary)
            sampling = replace(sampling, logit_bias=known)
        u = 0.0 if sampling.is_greedy else random_number(self._seed, n, self.choice)
        if sampling.repetition_penalty == 1 and not sampling.has_penalties:
            return Draw(sampling, (), u)
        # The ids of the answer are ints. The proposed tokens may be arrays of a lazy backend.
        new = [token if isinstance(token, int) else self._backend.token_id(token) for token in ids]
        prompt = [token for token in self.ids[: self._n_prompt] if token < n_vocabulary]
        answer = [token for token in (*self.ids[self._n_prompt :], *new) if token < n_vocabulary]
        return Draw(sampling, [*prompt, *answer], u, len(prompt))

    def redraw(self, token: Token) -> Draw | None:
        """If the token was chosen without a mask and is not allowed, return the inputs for a new choice with the mask.

        Otherwise return None.

        Raises:
            ConstraintError: the constraint allows no token.
        """
        if self._matcher is None or not self.is_checked or self._matcher.allows(self._backend.token_id(token)):
            return None
        return Draw(self._sampling, self._recent, 0.0, self._n_prompt, self._matcher.mask())

    def edited(self, row: np.ndarray, draw: Draw) -> np.ndarray:
        """Return logits (V,) after the processors have edited them. All earlier tokens must be settled.

        Raises:
            ProcessorError: a processor has failed.
        """
        return row if self.processors is None else self.processors(self.ids, row, draw.mask)

    def prepare(self, executor: Executor) -> None:
        """Begin to compute the mask of the next token in a thread. All earlier tokens must be settled."""
        if self._matcher is not None and not self.is_checked:
            self._next = os.getpid(), executor.submit(self._matcher.mask)

    @property
    def best(self) -> int | None:
        """The number of largest logits that the choice needs; None if it needs all logits."""
        sampling = self._sampling
        if self._logprobs or sampling.repetition_penalty != 1 or sampling.has_penalties or sampling.logit_bias:
            return None
        if self._matcher is not None or self.processors is not None:  # they may forbid every token with a large logit
            return None
        return 1 if sampling.is_greedy else sampling.top_k

    def add(self, token: Token, logits: Array, row: int = 0, *, whole: bool = True) -> Choice:
        """Append a token that was chosen from row `row` of logits (R, V), without waiting for its id."""
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
        """Return the log-probabilities of the last settled token and of the `n_top` most likely tokens at its position.

        The log-probabilities are the model's, before any sampling option and any mask.

        Raises:
            ValueError: no token has been settled, or only the largest logits are known.
        """
        if self._settled is None:
            raise ValueError("logprobs: expected a settled token, found none")
        if not self._settled.whole:
            raise ValueError("logprobs: expected all logits, found only the largest ones")
        row = self._backend.host(self._settled.logits)[self._settled.row]
        chosen = cast(int, self._recent[self._settled.position])
        return token_logprobs(self._backend, row, chosen, n_top, self._settled.mask)

    def probability(self) -> float | None:
        """Return the last settled token's probability, before any sampling option; None if no token is settled."""
        return None if self._settled is None else math.exp(self.logprobs().logprob)


def best_of(samplers: Sequence[Sampler]) -> int | None:
    """Return the number of largest logits that the samplers need; None if one needs all, or there is no sampler."""
    needs = [sampler.best for sampler in samplers]
    known = [n for n in needs if n is not None]
    return max(known) if known and len(known) == len(needs) else None


def random_number(seed: int, position: int, choice: int = 0) -> float:
    """Return the random number in [0, 1) for one token, which depends only on seed, position and choice.

    So a sequence gets the same numbers if it is preempted and computed again, or runs in a batch. `choice` is the
    number of the answer among several answers to one prompt; answer 0 gets the numbers of a request with one answer.
    """
    key = (seed, position, choice) if choice else (seed, position)
    (bits,) = np.random.SeedSequence(key).generate_state(1, np.uint64)
    return float(bits >> np.uint64(11)) * 2.0**-53


class Processors:
    """The user's functions in a run: processors, in order, and a sampler function.

    For each token of an answer, each function is called once, with the ids of all earlier tokens and a copy of this
    token's logits.
    """

    def __init__(self, processors: Sequence[Processor], sampler: Processor | None) -> None:
        self._processors, self._sampler = processors, sampler

    @classmethod
    def of(cls, options: Options) -> Processors | None:
        """Return the functions in the options; None if there are none."""
        has_any = options.processors or options.sampler is not None
        return cls(options.processors, options.sampler) if has_any else None

    def __call__(self, ids: Sequence[int], logits: np.ndarray, mask: NDArray[np.bool_] | None = None) -> np.ndarray:
        """Return the logits (V,) from which the token is drawn, after all processors and the sampler function.

        A processor must leave a finite logit for at least one token that the constraint's mask (V,) allows. A sampler
        function gets logits to which the mask has been applied, and returns a token. If there is a sampler function,
        only this token has a finite logit in the result.

        Raises:
            ProcessorError: a function has failed, or has not returned logits or a token.
        """
        for i, processor in enumerate(self._processors):
            who = f"processors[{i}] ({name_of(processor)})"
            returned = _called(who, processor, ids, logits.copy())
            logits = _checked(who, returned, logits.shape, mask, len(ids))
        if self._sampler is None:
            return logits
        who, row = f"sampler ({name_of(self._sampler)})", logits.copy() if mask is None else masked(logits, mask)
        chosen = _called(who, self._sampler, ids, row.copy())
        token = chosen.item() if hasattr(chosen, "item") and getattr(chosen, "size", 1) == 1 else chosen
        if not is_whole(token) or not 0 <= token < len(row) or row[token] == -np.inf:
            expected = f"expected a token id from 0 to {len(row) - 1} with a finite logit"
            raise ProcessorError(
                f"{who} after {len(ids):,} tokens: {expected}, found {shown(chosen)}; return such an id"
            )
        alone = np.full_like(row, -np.inf)
        alone[token] = 0
        return alone


def _called(who: str, function: Callable[..., Any], ids: Sequence[int], logits: np.ndarray) -> Any:
    try:
        return function(list(ids), logits)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
        # Remove this frame from the traceback. The frame refers to the frames of its callers, so the error would keep
        # the scheduler and its memory alive.
        error.__traceback__ = error.__traceback__.tb_next if error.__traceback__ else None
        raise ProcessorError(f"{who} failed after {len(ids):,} tokens: {reason}") from error


def _checked(who: str, returned: Any, shape: tuple[int, ...], mask: NDArray[np.bool_] | None, n: int) -> np.ndarray:
    """Return the result of a processor as float32 logits; raise ProcessorError if no token can be drawn from them."""
    expected = f"{who} after {n:,} tokens: expected logits of shape {shape}"
    try:
        logits = np.asarray(returned, dtype=np.float32)
    except (TypeError, ValueError):
        raise ProcessorError(f"{expected}, found {shown(returned)}; return the logits") from None
    if logits.shape != shape:
        found = "None" if returned is None else f"shape {logits.shape}"
        raise ProcessorError(f"{expected}, found {found}; return the logits")
    allowed = logits if mask is None else logits[mask]
    if np.isnan(logits).any() or (logits == np.inf).any() or not (allowed > -np.inf).any():
        which = "" if mask is None else " that the constraint allows"
        raise ProcessorError(
            f"{expected} without NaN and plus infinity, with a finite logit of at least one token{which}, found other "
            "values; minus infinity bans a token"
        )
    return logits
