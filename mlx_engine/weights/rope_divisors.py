"""Translate divisors of rotary frequencies between the tensors of GGUF files and the settings of Hugging Face folders.

`rope_factors_short.weight` and `rope_factors_long.weight` are the divisors of LongRoPE. `rope_freqs.weight` has the
divisors of Llama 3, Llama 4 or Gemma 4, because GGUF has no keys for their scaling rules. To write a config.json,
`rule_of` derives the parameters of a rule from the divisors, and checks that the rule gives these divisors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.config.rope import Rotation
from mlx_engine.errors import ModelError
from mlx_engine.weights.plan import Plan

FREQUENCIES = "rope_freqs"
NAME = f"{FREQUENCIES}.weight"
# `low_freq_factor` and `high_freq_factor` of every published Llama 3, in rotations over the training context.
LOW, HIGH = 1.0, 4.0
# If a divisor is larger than this, its pair of elements is not rotated.
NOT_ROTATED = 1e29
# Relative tolerance of divisors, which files store in float32.
CLOSE = 1e-5


def rule_of(checkpoint: Checkpoint, config: Any) -> dict[str, Rotation]:
    """Return {"rope": the rotation that `rope_freqs` of a GGUF file encodes}.

    Return an empty dict if the file has no `rope_freqs`, or if all its divisors are 1.

    Raises:
        ModelError: no known rule gives these divisors.
    """
    if checkpoint.naming != "gguf" or NAME not in checkpoint.shapes:
        return {}
    divisors = checkpoint.weight(NAME).dequantize().astype(np.float64)
    if (divisors == 1).all():
        return {}
    # config.json can have only one scaling rule. So if the GGUF keys name a rule, the divisors' rule cannot be written.
    is_sound = config.rope.rule == "default" and (np.isfinite(divisors) & (divisors > 0)).all()
    plain, head_dim = replace(config.rope, context=config.context_length), 2 * len(divisors)
    for rope in _candidates(plain, divisors) if is_sound else ():
        found = np.array([np.inf if not slow else fast / slow for fast, slow in _pairs(rope, head_dim)])
        found = np.where(np.isinf(found) & (divisors > NOT_ROTATED), divisors, found)
        if np.allclose(found, divisors, rtol=CLOSE, atol=0):
            return {"rope": rope}
    raise ModelError(
        f"{checkpoint.where}: {NAME}: expected the divisors of Llama 3's rule or of Gemma 4's, found others. "
        "config.json has no settings for them, so write a GGUF file, with --to q8_0 or --to q4_0"
    )


def _pairs(rope: Rotation, head_dim: int) -> list[tuple[float, float]]:
    plain = Rotation(rope.theta).for_heads(head_dim).frequencies
    return list(zip(plain, rope.for_heads(head_dim).frequencies, strict=True))


def _candidates(plain: Rotation, divisors: NDArray[np.float64]) -> Sequence[Rotation]:
    """Return the rotations that may have these divisors: Gemma 4's if a pair is not rotated, else Llama 3's and 4's."""
    rotated = divisors[divisors < NOT_ROTATED]
    if not len(rotated):
        return []
    part = replace(plain, rule="proportional", factor=float(rotated[0]), part=len(rotated) / len(divisors))
    if len(rotated) < len(divisors):
        return [part]
    slowest = float(divisors.max())
    llama3 = replace(plain, rule="llama3", factor=slowest, low=LOW, high=HIGH)
    # Llama 4 has the rule of Llama 3, with `high` equal to `low`.
    return [
        replace(llama3, high=high, context=context)
        for high in (HIGH, LOW)
        for context in _contexts(plain, divisors, slowest)
    ]


def _contexts(plain: Rotation, divisors: NDArray[np.float64], factor: float) -> list[int]:
    """Return candidates for the training context, one for each divisor between 1 and `factor`.

    If there is no such divisor, return powers of 2.
    """
    found = []
    for frequency, divisor in zip(plain.for_heads(2 * len(divisors)).frequencies, divisors, strict=True):
        if 1 < divisor < factor:
            kept = (1 / divisor - 1 / factor) / (1 - 1 / factor)
            found.append(round((LOW + kept * (HIGH - LOW)) * 2 * math.pi / frequency))
    return list(dict.fromkeys(found)) or [1 << n for n in range(4, 24)]


# Maps each field of `Rotation` that has divisors of LongRoPE to the GGUF name of the tensor with these divisors.
TENSORS = {"short": "rope_factors_short.weight", "long": "rope_factors_long.weight"}


def with_divisors(checkpoint: Checkpoint, plan: Plan) -> Plan:
    """Return the plan with LongRoPE's divisors; if the plan's config has another rule, return the plan unchanged.

    The divisors of a GGUF file are read into the config. The divisors of a folder are added to `Plan.gguf_only`.

    Raises:
        ModelError: a tensor of divisors is missing or damaged.
    """
    config: Any = plan.config
    if config.rope.rule != "longrope":
        return plan
    if checkpoint.naming == "hf":
        return replace(plan, gguf_only={name: getattr(config.rope, field) for field, name in TENSORS.items()})
    n = (config.rope.n_rotated or getattr(config, "rope_dim", config.head_dim)) // 2
    found = {field: _divisors(checkpoint, name, n) for field, name in TENSORS.items()}
    unused = (*plan.unused, *TENSORS.values())
    return replace(plan, config=replace(config, rope=replace(config.rope, **found)), unused=unused)


def _divisors(checkpoint: Checkpoint, name: str, n: int) -> tuple[float, ...]:
    shape = checkpoint.shapes.get(name)
    if shape != (n,):
        found = "none" if shape is None else f"the shape {shape}"
        raise ModelError(f"{checkpoint.where}: {name}: expected {n} divisors of frequencies, found {found}; "
                         "download the file again")  # fmt: skip
    values = tuple(float(value) for value in checkpoint.weight(name).dequantize())
    if not all(0 < value < math.inf for value in values):
        raise ModelError(f"{checkpoint.where}: {name}: expected finite numbers > 0, found others; "
                         "download the file again")  # fmt: skip
    return values
