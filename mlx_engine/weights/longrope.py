"""LongRoPE's divisors of frequencies in GGUF files: two tensors. A folder has them in its settings."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.errors import ModelError
from mlx_engine.weights.plan import Plan

# By field of `Rotation`.
TENSORS = {"short": "rope_factors_short.weight", "long": "rope_factors_long.weight"}


def with_divisors(checkpoint: Checkpoint, plan: Plan) -> Plan:
    """Return the plan with LongRoPE's divisors: read from a GGUF file, or to be written from a folder.

    Raises:
        ModelError: a tensor of divisors is missing or damaged.
    """
    config: Any = plan.config
    if config.rope.rule != "longrope":
        return plan
    if checkpoint.naming == "hf":
        return replace(plan, gguf_only={name: getattr(config.rope, field) for field, name in TENSORS.items()})
    n = (config.rope.n_rotated or config.head_dim) // 2
    found = {field: _divisors(checkpoint, name, n) for field, name in TENSORS.items()}
    unused = (*plan.unused, *TENSORS.values())  # by the model: they are read here
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
