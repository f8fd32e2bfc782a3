"""Open a Qwen3 GGUF file with the setting and tensor names of transformers and mlx-lm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_engine.checkpoint.model_files import open_checkpoint
from mlx_engine.models import qwen3
from mlx_engine.quant.weight import Weight


@dataclass(frozen=True)
class Checkpoint:
    """`settings` as in config.json; `weights` is an iterator of (name, weight)."""

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
