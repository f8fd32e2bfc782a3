"""What was measured: the model as it is held on its backend, and the settings. Nothing is measured here."""

from __future__ import annotations

import math
from typing import Any

from mlx_engine.backends.parameters import Linear
from mlx_engine.backends.profiled import nbytes_of, role_of, shape_of
from mlx_engine.bench.roofline import linears
from mlx_engine.bench.run import describe
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.engine import Engine

# More than the widest of the block formats has; what has more is held as floats.
MOST_BITS = 12
FORMATS = {"gguf": "GGUF", "hf": "safetensors"}


def about(engine: Engine, checkpoint: Checkpoint, digest: str) -> dict[str, Any]:
    """The model: what its files say, and what its backend multiplies with."""
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
    """Every linear layer of a model, q, k and v apart, each once."""
    found = [linear for value in vars(engine.model).values() for linear in linears(value)]
    return list({id(linear): linear for linear in found}.values())


def bits(found: list[Linear]) -> dict[str, float]:
    """Bits per weight, as the backend holds them, of each kind of linear layer; 8.5 are Q8_0's."""
    sums: dict[str, tuple[int, int]] = {}
    for linear in found:
        role = role_of([linear])
        nbytes, count = sums.get(role, (0, 0))
        sums[role] = nbytes + nbytes_of(linear.weight), count + math.prod(shape_of(linear.weight))
    return {role: 8 * nbytes / count for role, (nbytes, count) in sums.items()}


def bits_of(linear: Linear) -> float:
    """Bits per weight of one layer."""
    return 8 * nbytes_of(linear.weight) / math.prod(shape_of(linear.weight))
