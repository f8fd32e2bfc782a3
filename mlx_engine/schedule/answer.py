"""An answer to a request as the scheduler computes it: a running sequence and its output."""

from __future__ import annotations

from dataclasses import dataclass, field
from logging import INFO
from typing import cast

from mlx_engine.backends.base import Backend
from mlx_engine.cache import KVPool
from mlx_engine.decode.output import Output
from mlx_engine.decode.passes import Part, Running
from mlx_engine.decode.sampler import Sampler
from mlx_engine.observe.log import enabled
from mlx_engine.schedule.request import Request


@dataclass(eq=False)
class Answer(Running):
    """One answer.

    A request refers to no answer, so that a scheduler that is dropped frees its memory at once.

    Attributes:
        request: the request.
        index: the index of its output.
        forks: the samplers of the other answers, until the prompt has been run and they become answers of their own.
        seconds: the time of the passes since its last token.
        share: its part of this time.
    """

    request: Request = field(kw_only=True)
    index: int = 0
    forks: tuple[Sampler, ...] = ()
    seconds: float = 0.0
    share: float = 0.0

    @classmethod
    def of(cls, request: Request, pool: KVPool, backend: Backend) -> Answer:
        """Return the first answer to a request, which has the samplers of the others."""
        prompt = request.prompt_ids
        logprobs = request.options.logprobs is not None or enabled(INFO)  # the log of tokens has probabilities
        pick = Sampler(backend, request.options.sampling, prompt, logprobs=logprobs)
        forks = tuple(pick.fork(choice) for choice in range(1, len(request.outputs)))
        return cls(pool.sequence(request.longest), pick, list(prompt), request=request, forks=forks)

    @property
    def output(self) -> Output:
        """The output."""
        return self.request.outputs[self.index]

    @property
    def ids(self) -> list[int]:
        """The tokens of the prompt and of the answer so far."""
        return [*self.request.prompt_ids, *self.output.token_ids]

    def arrival(self) -> tuple[int, int]:
        """Return the key of the order of arrival."""
        return self.request.number, self.index

    def n_pages(self, n: int) -> int:
        """Return how many pages its sequence takes for n more tokens."""
        page, length = self.kv.pool.page, self.kv.length + self.kv.pending
        return -(-(length + n) // page) - -(-length // page)

    def part(self, budget: int) -> Part:
        """Return its part of a pass with at most `budget` of its tokens."""
        n = min(len(self.unread), budget)
        return Part(self, n, (self.pick, *self.forks) if n == len(self.unread) else ())

    def fork(self, index: int, pick: Sampler, token: int) -> Answer:
        """Return the answer that shares this one's prompt and goes on with another token."""
        return Answer(self.kv.fork(), pick, [token], request=self.request, index=index)

    def rewind(self) -> None:
        """Free all pages; the tokens so far are unread again."""
        self.kv.close()
        self.unread = list(self.ids)


def answer_of(part: Part) -> Answer:
    """Return the answer that a part of a pass belongs to."""
    return cast(Answer, part.sequence)
