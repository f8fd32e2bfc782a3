"""The context of a loaded model: rules of rotary embedding that depend on the length of the sequence are fixed here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mlx_engine.config.rotation import BY_LENGTH, Rotation
from mlx_engine.errors import OptionError, is_whole


def for_context(config: Any, context: int | None) -> Any:
    """Return the config for sequences of at most `context` tokens; None is the model's usual context.

    A context that is longer than the model's is the model's.

    The config changes for two rules only. With LongRoPE, the usual context is that of the training, with the short
    divisors; a longer context has the long divisors from the first token on. With dynamic NTK, the usual context is
    `context_length`; a longer one has the frequencies that transformers uses at its end.

    Raises:
        OptionError: the context is no whole number >= 1.
    """
    if context is not None and not (is_whole(context) and context >= 1):
        expected = "a whole number of at least 1"
        raise OptionError(
            f"context must be {expected}, not {context!r}", option="context", expected=expected, found=context
        )
    rope, whole = by_length(config), int(config.context_length)
    if rope is None:
        return config
    if rope.rule == "longrope":
        # Up to the context of the training the short divisors, otherwise the long ones for all that the model has.
        length = whole if (context or 0) > rope.context else min(rope.context, whole)
    else:
        length = max(context or whole, whole)
    return replace(config, rope=rope.within(length), context_length=length)


def by_length(config: Any) -> Rotation | None:
    """Return the rotary settings of a config, if their rule depends on the length of the sequence; None otherwise."""
    rope = getattr(config, "rope", None)
    return rope if isinstance(rope, Rotation) and rope.rule in BY_LENGTH else None


def context_notes(config: Any) -> tuple[str, ...]:
    """Return a line for the user if a loaded model could have a longer context."""
    rope = by_length(config)
    if rope is None or rope.is_long:
        return ()
    return (
        f"context {config.context_length:,} tokens, with {rope.rule}; load with context=N (--context-len N) for more",
    )
