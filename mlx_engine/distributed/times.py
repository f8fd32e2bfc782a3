"""The messages between ranks, and the tokens per second that hosts and links allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from mlx_engine.backends.best import packs
from mlx_engine.distributed.hosts import Link
from mlx_engine.distributed.model_parts import ModelParts, Pass
from mlx_engine.distributed.plan import FLOAT_BYTES, Asked, Rank

ShardKind: TypeAlias = Literal["pipeline", "tensor"]


@dataclass(frozen=True)
class Messages:
    """What one pass sends over each link of the ring.

    Attributes:
        hidden: bytes of a message of hidden states.
        n_hidden: number of such messages, each of which waits for the one before.
        logits: bytes of a message of logits.
        n_logits: number of such messages.
        n_begin: number of messages of few bytes after which the last rank begins.
    """

    hidden: int
    n_hidden: int
    logits: int
    n_logits: int
    n_begin: int = 0

    @property
    def nbytes(self) -> int:
        """All bytes."""
        return self.hidden * self.n_hidden + self.logits * self.n_logits

    def seconds(self, link: Link) -> float:
        """Return the time of all messages, one after the other."""
        begin = self.n_begin * link.seconds(0)
        return begin + self.n_hidden * link.seconds(self.hidden) + self.n_logits * link.seconds(self.logits)

    @property
    def n(self) -> int:
        """The number of all messages."""
        return self.n_begin + self.n_hidden + self.n_logits


@dataclass(frozen=True)
class Rates:
    """Tokens per second, and where the time of a token of a single request goes.

    Attributes:
        decode: of one request.
        decode_all: of all requests together, when every rank is busy.
        prefill: of one prompt.
        prefill_all: of as many prompts as there are requests.
        compute_seconds: of a token of one request, on all ranks.
        link_seconds: of a token of one request, on all links.
    """

    decode: float
    decode_all: float
    prefill: float
    prefill_all: float
    compute_seconds: float
    link_seconds: float


@dataclass(frozen=True)
class Timing:
    """The time of passes of a model on ranks with links; `best` is that of `Asked`."""

    model: ModelParts
    ranks: Sequence[Rank]
    link: Link
    shard: ShardKind
    best: int | None = None

    def messages(self, of: Pass) -> Messages:
        """Return the messages of a pass on the critical path.

        In a pipeline hidden states cross every border, and the last rank sends logits to the first. With tensor
        parallelism every sum gathers the hidden states of all ranks, which takes one step of the ring per other rank,
        and the last rank begins when rank 0's message about the pass has gone through all others. If the largest
        logits suffice, a rank sends them and their columns.
        """
        others = len(self.ranks) - 1
        hidden = FLOAT_BYTES * self.model.hidden * of.n_sequences * of.n_tokens
        n_logits, pairs = self.model.vocab_size, 2 * (self.best or 0)
        if others == 0:
            return Messages(0, 0, 0, 0)
        if self.shard == "pipeline":
            n_logits = pairs if packs(self.best, n_logits) else n_logits
            return Messages(hidden, others, FLOAT_BYTES * n_logits * of.n_sequences, 1)
        exchanges = sum(layer.exchanges for layer in self.model.layers)
        n_logits = pairs or -(-n_logits // len(self.ranks))
        return Messages(hidden, exchanges * others, FLOAT_BYTES * n_logits * of.n_sequences, others, n_begin=others)

    def rates(self, asked: Asked, chunk: int) -> Rates:
        """Return the expected rates; a pass has at most `chunk` tokens of a prompt."""
        token = Pass(1, 1, asked.context)
        chunks = [Pass(1, min(chunk, asked.prompt - at), at) for at in range(0, asked.prompt, chunk)]
        n_parts = 1 if self.shard == "tensor" else min(len(self.ranks), asked.slots)
        part = Pass(-(-asked.slots // n_parts), 1, asked.context)
        return Rates(
            decode=1 / self.alone(token),
            decode_all=n_parts * part.n_sequences / self.turn(part, n_parts),
            prefill=asked.prompt / self.all_of(chunks),
            prefill_all=n_parts * asked.prompt / self.all_of([each for each in chunks for _ in range(n_parts)]),
            compute_seconds=self.compute(token),
            link_seconds=self.sent(token),
        )

    def alone(self, of: Pass) -> float:
        """Return the seconds of a pass while there is no other."""
        return self.compute(of) + self.sent(of)

    def sent(self, of: Pass) -> float:
        """Return the seconds of all messages of a pass, until each has been read."""
        messages, delay = self.messages(of), max(rank.host.delay for rank in self.ranks)
        return messages.seconds(self.link) + messages.n * delay

    def compute(self, of: Pass) -> float:
        """Return the seconds of a pass without messages: ranks of a pipeline compute in turn, slices at once."""
        if self.shard == "pipeline":
            return sum(rank.host.among_waiting(rank.work(of)) for rank in self.ranks)
        return max(rank.host.seconds(rank.work(of)) * rank.host.crowding for rank in self.ranks)

    def all_of(self, passes: Sequence[Pass]) -> float:
        """Return the seconds of passes that follow each other without waiting, such as the parts of a prompt.

        In a pipeline a rank begins a pass as soon as the pass has arrived and the one before is done.
        """
        if self.shard == "tensor" or len(passes) == 1:
            return sum(map(self.alone, passes))
        done, sent, now = [0.0] * len(self.ranks), [0.0] * len(self.ranks), 0.0
        for each in passes:
            now = 0.0
            for i, rank in enumerate(self.ranks):
                done[i] = max(now, done[i]) + rank.host.seconds(rank.work(each)) * rank.host.crowding
                leaves, nbytes = max(done[i], sent[i]), self.messages(each).hidden
                sent[i] = leaves + self.link.occupied(nbytes)
                now = leaves + self.link.seconds(nbytes)
        return done[-1] + self.link.seconds(self.messages(passes[-1]).logits) if len(self.ranks) > 1 else done[-1]

    def turn(self, of: Pass, n_parts: int) -> float:
        """Return the seconds in which each of `n_parts` passes goes once through all ranks.

        These are the seconds of one pass, or more if a rank or a link is busy with the passes of all parts.
        """
        if n_parts == 1:
            return self.alone(of)
        busiest = max(rank.host.seconds(rank.work(of)) * rank.host.crowding for rank in self.ranks)
        sent = self.messages(of)
        return max(self.alone(of), n_parts * busiest, n_parts * self.link.occupied(max(sent.hidden, sent.logits)))
