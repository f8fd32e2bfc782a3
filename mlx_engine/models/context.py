"""The context of a loaded model: rules of rotary embedding that depend on the length of the sequence are fixed here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mlx_engine.errors import OptionError, is_whole, require
from mlx_engine.models.rotation import BY_LENGTH, Rotation


def for_context(config: Any, context: int | None) -> Any:
    """Return the config for sequences of at most `context` tokens; None is the model's usual context.

    The config changes for two rules only. With LongRoPE, the usual context is that of the training, with the short
    divisors; a longer context has the long divisors from the first token on. With dynamic NTK, the usual context is
    `context_length`; a longer one has the frequencies that transformers uses at its end.

    Raises:
        OptionError: the model's rotary embedding does not reach this context.
    """
    rope = getattr(config, "rope", None)
    sound = context is None or (is_whole(context) and context >= 1)
    require(sound, option="context", expected="a whole number of tokens >= 1", found=context)
    by_length = isinstance(rope, Rotation) and rope.rule in BY_LENGTH
    if context is not None and context > config.context_length and not (by_length and rope.rule == "dynamic"):
        raise OptionError(option="context", expected=f"at most the model's {config.context_length:,}", found=context)
    if not by_length:
        return config
    usual = config.context_length if rope.rule == "dynamic" else min(rope.context, config.context_length)
    whole = max(context or usual, usual)
    if rope.rule == "longrope" and whole > rope.context:
        whole = config.context_length
    return replace(config, rope=rope.within(whole), context_length=whole)


def context_notes(config: Any) -> tuple[str, ...]:
    """Return a line for the user if a loaded model could have a longer context."""
    rope = getattr(config, "rope", None)
    if not isinstance(rope, Rotation) or rope.rule not in BY_LENGTH or rope.is_long:
        return ()
    return (f"context {config.context_length:,} tokens, with {rope.rule}; load with context=N (--context N) for more",)
