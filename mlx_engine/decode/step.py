"""A step: one forward pass over the new tokens of one or more sequences, then the choice of a token for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mlx_engine.backends.base import Backend
from mlx_engine.backends.parameters import Array
from mlx_engine.cache import KVSequence, New, begin
from mlx_engine.decode.sampler import Sampler
from mlx_engine.models import Model


@dataclass(eq=False)
class Running:
    """A sequence that is being written.

    Attributes:
        kv: its keys and values.
        pick: chooses its tokens.
        unread: its tokens that the model has not read yet; the next step reads them.
    """

    kv: KVSequence
    pick: Sampler
    unread: list[int] = field(default_factory=list)


def forward(model: Model, *parts: New) -> Array:
    """Run one forward pass and return logits (R, V) of the tokens that are wanted, None if there are none.

    The new tokens count when it is complete, on a lazy backend when it has been begun. A pass that fails or is
    interrupted leaves every sequence as it was.

    Raises:
        CacheFullError: there is no room for the new tokens.
    """
    batch = begin(parts)
    try:
        logits = model.forward(batch)
    except BaseException:
        batch.roll_back()
        raise
    batch.commit()
    return logits


def choose(backend: Backend, logits: Array, samplers: Sequence[Sampler]) -> list[int]:
    """Return the chosen id for each of (B, V) rows, on the host."""
    tokens = backend.choose(logits, [sampler.draw() for sampler in samplers])
    rows = [logits if len(samplers) == 1 else backend.take(logits, (b,)) for b in range(len(samplers))]
    choices = [sampler.add(token, row) for sampler, token, row in zip(samplers, tokens, rows, strict=True)]
    return [sampler.settle(choice) for sampler, choice in zip(samplers, choices, strict=True)]


def step(model: Model, running: Sequence[Running]) -> list[int]:
    """Read what each sequence has unread, in one forward pass, and return the next token of each.

    Raises:
        CacheFullError: there is no room for the new tokens; no sequence has changed.
    """
    logits = forward(model, *(New(sequence.unread, sequence.kv) for sequence in running))
    tokens = choose(model.backend, logits, [sequence.pick for sequence in running])
    for sequence, token in zip(running, tokens, strict=True):
        sequence.unread = [token]
    return tokens
