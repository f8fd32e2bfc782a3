"""Defaults and conditions of config fields: functions of a value and of the fields that were read before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlx_engine.config.declared import Condition
from mlx_engine.config.settings import MOST_LAYERS, REQUIRED, Settings

# Far above any model. A damaged file with a huge head dim would exhaust memory with rotary frequencies.
WIDEST_HEAD = 65_536


def n_embeddings(known: Any) -> int:
    """Return a default: the number of rows of the embedding table."""
    return int(known.n_embeddings)


def one_per_head(known: Any) -> int:
    """Return a default: the number of query heads, for models without grouped-query attention."""
    return int(known.n_heads)


def per_head(known: Any) -> int:
    """Return a default: hidden_size / n_heads."""
    return max(1, int(known.hidden_size // known.n_heads))


def believable(n_layers: int, known: Any) -> str | None:
    """Check the number of layers, which may be damaged, before objects are made for each."""
    return None if n_layers <= MOST_LAYERS else f"at most {MOST_LAYERS:,}"


def divides(name: str) -> Condition:
    """Return the condition that the value divides the earlier field `name`."""

    def condition(value: int, known: Any) -> str | None:
        of = getattr(known, name)
        return f"a divisor of {name}, {of}" if of % value else None

    return condition


def halves(head_dim: int, known: Any) -> str | None:
    """Check that rotary embedding is possible with this head dim."""
    if head_dim % 2:
        return "an even number, for its halves are rotated against each other"
    return None if head_dim <= WIDEST_HEAD else f"at most {WIDEST_HEAD:,}"


def convolves(n_tokens: int, known: Any) -> str | None:
    """Check the width of a convolution, in tokens: a state has all of them but one."""
    return None if n_tokens >= 2 else "2 or more tokens"


def each_layer(*kinds: str) -> Callable[[Settings, str, Any], object]:
    """Return a check that a list, if it is present, has one of these kinds for every layer."""
    return lambda s, key, config: s.words(key, config.n_layers, *kinds)


def stated(value: str) -> Callable[[Settings, str, Any], object]:
    """Return a check that a setting is present and has this value; its default would be another one."""
    return lambda s, key, config: s.choice(key, REQUIRED, value)
