"""The engines by name, and the Python interpreter of each."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

OURS, LLAMA, TRANSFORMERS, MLX_LM = "mlx_engine", "llama.cpp", "transformers", "mlx-lm"


@dataclass(frozen=True)
class Engine:
    """An engine.

    Attributes:
        module: its file in this folder.
        computes: types of weights, activations and KV cache, for BENCHMARKS.md.
    """

    module: str
    computes: str


ENGINES = {
    OURS: Engine("ours", "Q8_0 blocks as stored, float32 activations and cache"),
    LLAMA: Engine("llama", "Q8_0 blocks as stored, activations rounded to 8 bits, 16-bit cache"),
    TRANSFORMERS: Engine("transformers_f32", "the file's weights as float32, float32 activations and cache; PyTorch"),
    MLX_LM: Engine("mlx_8bit", "the file's quants in MLX's 8-bit format, float32 activations and cache; MLX's CPU"),
}


def interpreters(given: Mapping[str, str]) -> dict[str, str]:
    """Return the Python of every engine: the one that is given, else the one that runs this."""
    return {name: given.get(name, sys.executable) for name in ENGINES}
