"""Rotations as files describe them: GGUF, and config.json in the spelling of transformers 4 and in that of 5."""

from __future__ import annotations

import math

from mlx_engine.backends.parameters import Rope
from mlx_engine.models.settings import Settings

THETA = 10_000.0
# Far above any model. For a damaged width frequencies would be made until memory ends.
WIDEST_HEAD = 65_536


def rope_from_gguf(s: Settings, head_dim: int) -> Rope:
    """Plain, or scaled by the "linear" rule.

    Raises:
        UnsupportedConfigError: a setting makes no sense, or the rule is another.
    """
    plain, factor = _plain(s, head_dim, s.number("rope.freq_base", THETA)), s.number("rope.scaling.factor", 1.0)
    return scaled(plain, factor) if s.choice("rope.scaling.type", "none", "linear") == "linear" else plain


def rope_from_hf(s: Settings, head_dim: int) -> Rope:
    """Plain, or scaled by the "linear" or the "llama3" rule.

    Raises:
        UnsupportedConfigError: a setting makes no sense, or the rule is another.
    """
    nested = s.mapping("rope_parameters")
    plain = _plain(s, head_dim, (nested or s).number("rope_theta", THETA))
    scaling = s.mapping("rope_scaling") if nested is None else nested
    if nested is not None:
        s.expect("rope_scaling", None)
    if scaling is None:
        return plain
    # The key had a shorter name once.
    kinds = ("default", "linear", "llama3")
    kind = scaling.choice("rope_type", scaling.choice("type", *kinds), *kinds)
    rope = plain if kind == "default" else scaled(plain, scaling.number("factor"))
    if kind == "llama3":
        low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
        if high <= low:
            raise scaling.error("high_freq_factor", f"more than low_freq_factor, {low:g}", high)
        context = scaling.whole("original_max_position_embeddings")
        rope = llama3(plain, factor=scaling.number("factor"), low=low, high=high, context=context)
    scaling.refuse_rest({"rope_theta"})
    return rope


def rope_to_gguf(s: Settings, head_dim: int, rope: Rope) -> tuple[dict[str, object], list[float]]:
    """What GGUF says of the rotation `rope` that `rope_from_hf` made of these settings, and its divisors if any.

    The "linear" rule has a factor; "llama3" has no name there: the file says by what each frequency is divided.
    """
    nested = s.mapping("rope_parameters")
    theta = (nested or s).number("rope_theta", THETA)
    scaling = nested or s.mapping("rope_scaling")
    keys: dict[str, object] = {"rope.freq_base": theta, "rope.dimension_count": head_dim}
    kinds = ("default", "linear", "llama3")
    kind = "default" if scaling is None else scaling.choice("rope_type", scaling.choice("type", *kinds), *kinds)
    if scaling is not None and kind == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": scaling.number("factor")}
    if kind != "llama3":
        return keys, []
    plain = _plain(s, head_dim, theta)
    return keys, [f / slow for f, slow in zip(plain.frequencies, rope.frequencies, strict=True)]


def scaled(rope: Rope, factor: float) -> Rope:
    """Positions count as 1 / factor."""
    return Rope(tuple(f / factor for f in rope.frequencies))


def llama3(rope: Rope, *, factor: float, low: float, high: float, context: int) -> Rope:
    """What turns less than `low` times over the context of the training is slowed down by `factor`.

    What turns more than `high` times stays as it is, and between the two the change is gradual. Source: "The Llama 3
    Herd of Models", arXiv 2407.21783, and Hugging Face transformers, modeling_rope_utils.
    """

    def slowed(f: float) -> float:
        turns = context * f / (2 * math.pi)
        kept = min(1.0, max(0.0, (turns - low) / (high - low)))
        return kept * f + (1 - kept) * f / factor

    return Rope(tuple(slowed(f) for f in rope.frequencies))


def _plain(s: Settings, head_dim: int, theta: float) -> Rope:
    if head_dim > WIDEST_HEAD:
        raise s.error("head_dim", f"at most {WIDEST_HEAD:,}", head_dim)
    return Rope.plain(head_dim, theta)
