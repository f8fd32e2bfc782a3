"""Open a Qwen3 GGUF file with the setting and tensor names of transformers and mlx-lm; repack Q8_0 for MLX.

MLX stores quants from 0 to 255, four to a 32-bit word, and for every group of 32 a scale and a bias: a weight is
`scale * quant + bias`. A Q8_0 block is such a group: its quants are shifted by 128, and the bias shifts them back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kernels import blocks
from mlx_engine.checkpoint.model_files import open_checkpoint
from mlx_engine.models import qwen3
from mlx_engine.quant.types import Q8_0
from mlx_engine.quant.weight import Weight

GROUP, BITS = 32, 8


@dataclass(frozen=True)
class Checkpoint:
    """A model: `settings` are those of config.json; `weights` yields (name, weight)."""

    settings: dict[str, Any]
    weights: Iterator[tuple[str, Weight]]


def open_qwen3(path: Path) -> Checkpoint:
    """Read the header; weights are read lazily."""
    checkpoint = open_checkpoint(path)
    plan = qwen3.plan(checkpoint)
    cfg: qwen3.Config = plan.config
    settings = {
        "model_type": "qwen3",
        "num_hidden_layers": cfg.n_layers,
        "hidden_size": cfg.hidden_size,
        "intermediate_size": cfg.intermediate_size,
        "num_attention_heads": cfg.n_heads,
        "num_key_value_heads": cfg.n_kv_heads,
        "head_dim": cfg.head_dim,
        "vocab_size": cfg.vocab_size,
        "max_position_embeddings": cfg.context_length,
        "rms_norm_eps": cfg.norm_eps,
        "rope_theta": cfg.rope.theta,
        "tie_word_embeddings": "output.weight" not in checkpoint.shapes,
    }
    names = {tensor.name: tensor.stored("hf").name for tensor in plan.tensors}
    return Checkpoint(settings, ((names[name], checkpoint.weight(name)) for name in checkpoint.shapes))


def repacked(name: str, weight: Weight) -> dict[str, np.ndarray]:
    """Return MLX's arrays for a tensor, by name; a tensor that is not Q8_0 becomes float32."""
    if weight.type != Q8_0:
        return {name: weight.dequantize()}
    stored = weight.data.view(blocks.Q8_0).reshape(weight.shape[0], -1)
    quants = np.ascontiguousarray(stored["qs"]).view(np.uint8) ^ 0x80
    scales = stored["d"].astype(np.float32)
    stem = name.removesuffix("weight")
    return {
        name: quants.reshape(len(stored), -1).view("<u4"),
        stem + "scales": scales,
        # This product is exact, because 128 is a power of two.
        stem + "biases": -128 * scales,
    }
