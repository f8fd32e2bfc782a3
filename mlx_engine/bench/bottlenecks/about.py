"""Describe the measured model, as stored on its backend."""

from __future__ import annotations

import math
from typing import Any

from mlx_engine.backends.costs import nbytes_of, shape_of
from mlx_engine.backends.parameters import Linear
from mlx_engine.backends.profiled import role_of
from mlx_engine.bench.origin import describe
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.engine import Engine
from mlx_engine.loop.memory import linears

# More bits per weight than any block format has: weights with more bits are floats.
MOST_BITS = 12
FORMATS = {"gguf": "GGUF", "hf": "safetensors"}


def about(engine: Engine, checkpoint: Checkpoint, digest: str) -> dict[str, Any]:
    """Return the model's sizes and formats, in its files and on its backend."""
    config, found = engine.config, layers_of(engine)
    described = describe(checkpoint)
    return {
        "name": described["model_name"],
        "architecture": checkpoint.architecture,
        "format": FORMATS[checkpoint.naming],
        "sha256": digest,
        "parameters": described["model_n_params"],
        "file_bytes": described["model_size"],
        "layers": config.n_layers,
        "width": config.hidden_size,
        "vocabulary": config.vocab_size,
        "context": config.context_length,
        "weight_bytes": sum(nbytes_of(weight) for weight in {id(n.weight): n.weight for n in found}.values()),
        "linears": len(found),
        "linears_quantised": sum(bits_of(linear) < MOST_BITS for linear in found),
        "bits": bits(found),
    }


def layers_of(engine: Engine) -> list[Linear]:
    """Return all linear layers of a model, each once (q, k and v separately)."""
    found = [linear for value in vars(engine.model).values() for linear in linears(value)]
    return list({id(linear): linear for linear in found}.values())


def bits(found: list[Linear]) -> dict[str, float]:
    """Return the bits per weight on the backend of each kind of linear layer (8.5 for Q8_0)."""
    sums: dict[str, tuple[int, int]] = {}
    for linear in found:
        role = role_of([linear])
        nbytes, count = sums.get(role, (0, 0))
        sums[role] = nbytes + nbytes_of(linear.weight), count + math.prod(shape_of(linear.weight))
    return {role: 8 * nbytes / count for role, (nbytes, count) in sums.items()}


def bits_of(linear: Linear) -> float:
    """Return the bits per weight of a layer."""
    return 8 * nbytes_of(linear.weight) / math.prod(shape_of(linear.weight))
