"""A request (a prompt and the outputs of one or more answers to it), and the sequences that compute its outputs."""

from __future__ import annotations

import itertools
from collections import abc, deque
from dataclasses import dataclass, field
from logging import INFO
from typing import TYPE_CHECKING

import numpy as np

from mlx_engine.backends.base import Backend
from mlx_engine.backends.parameters import Array, Token
from mlx_engine.cache import KVPool, KVSequence
from mlx_engine.cache.prefix import Match
from mlx_engine.errors import EngineError
from mlx_engine.loop.constraint import Matcher
from mlx_engine.loop.logprobs import TokenLogprobs
from mlx_engine.loop.metrics import Metrics
from mlx_engine.loop.output import Output
from mlx_engine.loop.row_reader import PromptLogprobs, RowReader
from mlx_engine.loop.sampler import Choice, Processors, Sampler
from mlx_engine.observe.log import LOGGER
from mlx_engine.options import Options

if TYPE_CHECKING:
    from mlx_engine.loop.speculation import Draft

_numbers = itertools.count()


@dataclass
class Times:
    """The time when a request reached each stage, in seconds of the scheduler's clock; None before this time."""

    submitted: float | None = None
    admitted: float | None = None
    first_token: float | None = None
    ended: float | None = None


class Request:
    """A prompt, and one or more answers to it.

    A request does not refer to its sequences, which refer to the scheduler's pool. So a caller who keeps a request does
    not keep the pool's memory in use.

    Attributes:
        prompt_array: the tokens of the prompt as an array (T,) int64.
        outputs: the output of each answer; `output` is the first one. The answers share one prefill.
        matcher: the state of the constraint at the start of an answer; None without a constraint.
        reader: reads rows of the prompt's logits or hidden states; None for a request that only generates tokens.
        is_hidden: whether the request's passes return hidden states in place of logits. Such a request generates no
            tokens.
        metrics: the times of the passes of the first answer.
        match: the prefix cache's match of the prompt, with its `pages` and `state` removed; None before admission and
            without a prefix cache.
        n_cached: number of tokens of the prompt that were taken from the prefix cache.
        n_from_disk: number of these cached tokens that were read from files.
        n_prefilled: the largest number of tokens of the prompt that were in the KV cache so far. A preemption (the loss
            of a sequence's pages, after which the sequence is computed again) does not reduce it.
        n_steps: number of scheduler steps whose passes ran tokens of this request.
        n_rows: number of tokens, of all requests, that these steps ran.
        n_bytes: bytes of weights, keys and values that these steps read; 0 if the scheduler does not count them.
        decode_bytes: the part of `n_bytes` that the steps after the first new token have read.
        decode_seconds: the time of the passes in the steps after the first new token.
        predicted_ids: the tokens of a text that the answers may repeat (the option `prediction`), for drafters.
        adapter: the number of the LoRA adapter of the request's sequences, see `KVSequence.adapter`.
        n_proposed: number of proposed tokens that passes have run.
        n_accepted: number of proposed tokens that were accepted.
        drafters: maps the name of each drafter that has proposed tokens to its numbers of proposed and accepted tokens.
        n_preemptions: number of times that a sequence of this request was preempted, to free pages for older sequences.
        error: the error that ended the request; None if it has not failed.
        number: numbers the requests of this process in the order in which they were made. The scheduler takes this
            order as the order of arrival.
    """

    def __init__(
        self,
        prompt_ids: abc.Sequence[int],
        options: Options,
        outputs: abc.Sequence[Output],
        *,
        metrics: Metrics | None = None,
        reader: RowReader | None = None,
        matcher: Matcher | None = None,
        predicted_ids: abc.Sequence[int] = (),
        adapter: int = 0,
    ) -> None:
        if not prompt_ids or not outputs:
            raise ValueError(f"expected a prompt and an output, found {len(prompt_ids)} tokens, {len(outputs)} outputs")
        self.prompt_ids, self.options, self.outputs = list(prompt_ids), options, tuple(outputs)
        self.matcher = matcher
        self.output, self.metrics, self.times = self.outputs[0], metrics or Metrics(), Times()
        self.n_cached = self.n_prefilled = self.n_steps = self.n_rows = self.n_preemptions = 0
        self.predicted_ids, self.adapter = predicted_ids, adapter
        self.n_proposed = self.n_accepted = self.n_from_disk = 0
        self.n_bytes = self.decode_bytes = self.decode_seconds = 0.0
        self.drafters: dict[str, list[int]] = {}
        self.match: Match | None = None
        self.prompt_array = np.array(self.prompt_ids, dtype=np.int64)
        self.reader, self.is_hidden = reader, reader is not None and reader.kind == "hidden"
        self.error: Exception | None = None
        self.number = next(_numbers)

    @property
    def has_ended(self) -> bool:
        """Whether all answers have ended, or the request has failed."""
        return self.error is not None or all(output.finish_reason is not None for output in self.outputs)

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs] | None:
        """The log-probabilities computed so far, from the prompt's second token on; None if not wanted."""
        return list(self.reader.tokens) if isinstance(self.reader, PromptLogprobs) else None

    @property
    def longest(self) -> int:
        """The most tokens of prompt and answer in the KV cache: all but the answer's last token, which no pass runs."""
        return len(self.prompt_ids) + max(1, *(output.max_tokens for output in self.outputs)) - 1


@dataclass(eq=False)
class Sequence:
    """One answer to a request while it is being computed: the prompt's tokens and the tokens chosen so far.

    Attributes:
        output: the output to which the sequence's new tokens are appended, one of `Request.outputs`.
        unread: the tokens that no pass has run yet. On a lazy backend, the last one may not be computed yet.
        index: the index of `output` among the outputs of the request.
        parallel: the samplers of the request's other outputs (parallel samples). After the pass with the last token of
            the prompt, each of them gets its own sequence.
        seconds: the time of the passes that have run tokens of this sequence since its last new token.
        share: this sequence's part of `seconds`, by its share of the tokens in each pass.
        draft: the state of speculation in this sequence; None before the first proposal.
        hidden: the hidden states of the last tokens, for a drafter that reads them. Each item has the position of the
            first of n tokens, and the hidden states (n, D) of these tokens.
    """

    request: Request
    output: Output
    kv: KVSequence
    sampler: Sampler
    unread: list[Token]
    index: int = 0
    parallel: tuple[Sampler, ...] = ()
    seconds: float = 0.0
    share: float = 0.0
    draft: Draft | None = None
    hidden: deque[tuple[int, np.ndarray]] = field(default_factory=deque)

    @classmethod
    def of(cls, request: Request, pool: KVPool, backend: Backend) -> Sequence:
        """Return the first sequence of a request, which also has the samplers of the request's other outputs."""
        prompt = request.prompt_ids
        # At the log level INFO, each token is logged with its probability.
        logprobs = request.options.logprobs is not None or LOGGER.isEnabledFor(INFO)
        matcher = None if request.matcher is None else request.matcher.copy()
        sampler = Sampler(
            backend, request.options.sampling, prompt, logprobs=logprobs, matcher=matcher,
            processors=Processors.of(request.options),
        )  # fmt: skip
        parallel = tuple(sampler.fork(choice) for choice in range(1, len(request.outputs)))
        kv = pool.sequence(request.longest)
        kv.adapter = request.adapter
        return cls(request, request.output, kv, sampler, list(prompt), parallel=parallel)

    @property
    def ids(self) -> list[int]:
        """The tokens of the prompt and of the output so far."""
        return [*self.request.prompt_ids, *self.output.token_ids]

    def arrival(self) -> tuple[int, int]:
        """Return a key that sorts sequences by the arrival of their requests."""
        return self.request.number, self.index

    def n_pages(self, n: int) -> int:
        """Return the number of new pages for n more tokens, in a page table of layers without an attention window."""
        page, length = self.kv.pool.page, self.kv.length + self.kv.pending
        return -(-(length + n) // page) - -(-length // page)

    def chunk(self, budget: int, most_rows: int | None = None) -> ScheduledChunk:
        """Return a chunk of the first unread tokens, at most `budget`, for a pass.

        `most_rows` bounds the rows that the pass computes for the request's reader. The row from which the next token
        is chosen does not count.
        """
        n, reader, request = min(len(self.unread), budget), self.request.reader, self.request
        first = self.kv.length + self.kv.pending
        if reader is not None and most_rows is not None:
            n = min(n, max(0, reader.start - first) + most_rows)
        ends = n == len(self.unread) and not request.is_hidden
        n_read = 0 if reader is None else reader.n_wanted(first, n)
        samplers = (self.sampler, *self.parallel) if ends else ()
        return ScheduledChunk(self, n, samplers, n_wanted=max(n_read, int(ends)), n_read=n_read, first=first)

    def fork(self, sampler: Sampler, token: int) -> Sequence:
        """Return the sequence of another output, which shares the prompt's pages and begins with `token`."""
        index = sampler.choice
        return Sequence(self.request, self.request.outputs[index], self.kv.fork(), sampler, [token], index)

    def rewind(self) -> None:
        """Free all pages, and mark all tokens so far as unread, so that they are run again."""
        self.kv.close()
        self.unread = list(self.ids)


@dataclass(eq=False)
class ScheduledChunk:
    """The tokens of a sequence that one forward pass runs.

    Attributes:
        n: the number of tokens in the chunk: unread tokens, then proposed ones. After the choice, rejected proposals
            are subtracted.
        samplers: the samplers that choose a token from the logits of the chunk's last unread token. The first one is
            the sequence's own sampler. Empty if the sequence has more unread tokens after the chunk, or if the request
            reads hidden states.
        row: an index into the rows (logits or hidden states) that the pass returns: the row of the chunk's last unread
            token.
        n_wanted: the pass returns a row for each of the chunk's last `n_wanted` tokens.
        n_read: the request's reader gets the rows of the chunk's last `n_read` tokens.
        first: the position of the chunk's first token.
        choices: the chosen tokens, one per sampler; empty until they have been chosen.
        error: why no token could be chosen, or None.
        proposed: the tokens that the drafter named `drafter` proposes after the last unread token. The pass returns a
            row for each of them.
        hidden: the hidden states (n, D) of the tokens, if a drafter reads them.
        logits: the logits of the pass if tokens are proposed. They are kept because the tokens after the first one
            are chosen only when the pass has been settled.
    """

    sequence: Sequence
    n: int
    samplers: tuple[Sampler, ...] = ()
    row: int = -1
    choices: list[Choice] = field(default_factory=list)
    n_wanted: int = 0
    n_read: int = 0
    first: int = 0
    error: EngineError | None = None
    proposed: abc.Sequence[int] = ()
    drafter: str = ""
    hidden: Array | None = None
    logits: Array | None = None
