"""One forward pass over the new tokens of one or more sequences."""

from __future__ import annotations

from mlx_engine.backends.parameters import Array
from mlx_engine.cache import SequenceInput, begin
from mlx_engine.weights.model import Model


def forward(model: Model, *parts: SequenceInput) -> Array | None:
    """Run one forward pass and return logits (R, V) of the wanted tokens, or None if there are none.

    The new tokens are committed when the pass has run, or on a lazy backend has been submitted. A pass that fails or is
    interrupted leaves every sequence unchanged.

    Raises:
        CacheFullError: there are too few pages for the new tokens.
    """
    batch = begin(parts)
    try:
        logits = model.forward(batch)
    except BaseException:
        batch.roll_back()
        raise
    batch.commit()
    return logits


def forward_logits(model: Model, *parts: SequenceInput) -> Array:
    """Run one forward pass as `forward` does, with at least one wanted token, and return logits (R, V)."""
    if all(part.wanted == 0 for part in parts):  # before the tokens are committed
        raise ValueError("expected a forward pass with wanted tokens, found none")
    return wanted_logits(forward(model, *parts))


def wanted_logits(logits: Array | None) -> Array:
    """Return the logits of a pass; raise ValueError if it had no wanted tokens."""
    if logits is None:
        raise ValueError("expected a forward pass with wanted tokens, found none")
    return logits
