"""The messages between ranks, and the tokens per second that hosts and links allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_engine.distributed.hosts import Link
from mlx_engine.distributed.model_parts import ModelParts, Pass
from mlx_engine.distributed.plan import FLOAT_BYTES, Rank

# Sums per layer with tensor parallelism: after attention, and after the FFN.
SUMS = 2


@dataclass(frozen=True)
class Messages:
    """What one pass sends over each link of the ring.

    Attributes:
        hidden: bytes of a message of hidden states.
        n_hidden: how many such messages a link carries one after the other.
        logits: bytes of a message of logits.
        n_logits: how many such messages.
    """

    hidden: int
    n_hidden: int
    logits: int
    n_logits: int

    @property
    def nbytes(self) -> int:
        """All bytes."""
        return self.hidden * self.n_hidden + self.logits * self.n_logits

    def seconds(self, link: Link) -> float:
        """Return the time of all messages, one after the other."""
        return self.n_hidden * link.seconds(self.hidden) + self.n_logits * link.seconds(self.logits)


@dataclass(frozen=True)
class Rates:
    """Tokens per second, and where the time of a token of a single request goes.

    Attributes:
        decode: of one request.
        decode_all: of all requests together, when every rank is busy.
        prefill: of one prompt.
        prefill_all: of several prompts.
        compute_seconds: of a token of one request, on all ranks.
        link_seconds: of a token of one request, on all links.
    """

    decode: float
    decode_all: float
    prefill: float
    prefill_all: float
    compute_seconds: float
    link_seconds: float


def messages(model: ModelParts, ranks: Sequence[Rank], of: Pass) -> Messages:
    """Return the messages of a pass on the critical path.

    In a pipeline hidden states cross every border, and the last rank sends logits to the first. With tensor
    parallelism every sum gathers the hidden states of all ranks, which takes one step of the ring per other rank.
    """
    n = len(ranks)
    hidden = FLOAT_BYTES * model.hidden * of.n_sequences * of.n_tokens
    logits = FLOAT_BYTES * model.vocab_size * of.n_sequences
    if n == 1:
        return Messages(0, 0, 0, 0)
    if ranks[0].slices == 1:
        return Messages(hidden, n - 1, logits, 1)
    steps = n - 1
    return Messages(hidden, SUMS * len(model.layers) * steps, -(-logits // n), steps)


def rates(model: ModelParts, ranks: Sequence[Rank], link: Link, context: int, prompt: int, slots: int, chunk: int) -> Rates:
    """Return the expected rates.

    Args:
        model: the parts of the model.
        ranks: what lies where.
        link: every link of the ring.
        context: tokens in the cache during decode.
        prompt: tokens of a prompt.
        slots: requests that are answered at the same time.
        chunk: the most tokens of a prompt in a pass.
    """
    one = Pass(1, 1, context)
    compute, sent = _compute(ranks, one), messages(model, ranks, one).seconds(link)
    chunks = [Pass(1, min(chunk, prompt - start), start) for start in range(0, prompt, chunk)]
    alone = sum(_compute(ranks, each) + messages(model, ranks, each).seconds(link) for each in chunks)
    n_parts = 1 if ranks[0].slices > 1 else min(len(ranks), slots)
    part = Pass(-(-slots // n_parts), 1, context)
    decode_all = n_parts * part.n_sequences / _turn(model, ranks, link, part, n_parts)
    prompts = sum(_turn(model, ranks, link, each, n_parts) for each in chunks)
    return Rates(
        decode=1 / (compute + sent),
        decode_all=decode_all,
        prefill=prompt / alone,
        prefill_all=n_parts * prompt / prompts,
        compute_seconds=compute,
        link_seconds=sent,
    )


def _compute(ranks: Sequence[Rank], of: Pass) -> float:
    """Return the seconds of a pass that is alone: the ranks of a pipeline run in turn, slices at the same time."""
    each = [rank.host.seconds(rank.work(of)) for rank in ranks]
    if ranks[0].slices == 1:
        return sum(time * rank.host.slowdown for time, rank in zip(each, ranks, strict=True))
    return max(time * rank.host.crowding for time, rank in zip(each, ranks, strict=True))


def _turn(model: ModelParts, ranks: Sequence[Rank], link: Link, of: Pass, n_parts: int) -> float:
    """Return the seconds in which each of `n_parts` passes goes once through all ranks.

    It is the time of one pass, or longer if a rank or a link is busy with the passes of all parts.
    """
    sent = messages(model, ranks, of)
    alone = _compute(ranks, of) + sent.seconds(link)
    if n_parts == 1:
        return alone
    busiest = max(rank.host.seconds(rank.work(of)) * rank.host.crowding for rank in ranks)
    return max(alone, n_parts * busiest, n_parts * link.occupied(max(sent.hidden, sent.logits)))
