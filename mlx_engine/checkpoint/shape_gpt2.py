"""A GPT-2 of a given shape: the config and the tensors of its Hugging Face folder."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mlx_engine.checkpoint.shape_folders import Random
from mlx_engine.quant.types import F32, GGMLType


@dataclass(frozen=True)
class GPT2Shape:
    """Sizes of a GPT-2. Its FFN size is four times the hidden size, and its output head is tied to the embedding."""

    n_layers: int
    hidden_size: int
    n_heads: int
    vocab_size: int
    context_length: int
    type: GGMLType = F32

    def config(self) -> dict[str, Any]:
        """Return config.json: these sizes, and the other values of openai-community/gpt2."""
        return {
            "activation_function": "gelu_new",
            "architectures": ["GPT2LMHeadModel"],
            "attn_pdrop": 0.1,
            "bos_token_id": self.vocab_size - 1,
            "embd_pdrop": 0.1,
            "eos_token_id": self.vocab_size - 1,
            "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-5,
            "model_type": "gpt2",
            "n_ctx": self.context_length,
            "n_embd": self.hidden_size,
            "n_head": self.n_heads,
            "n_layer": self.n_layers,
            "n_positions": self.context_length,
            "resid_pdrop": 0.1,
            "summary_activation": None,
            "summary_first_dropout": 0.1,
            "summary_proj_to_labels": True,
            "summary_type": "cls_index",
            "summary_use_proj": True,
            "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
            "vocab_size": self.vocab_size,
        }

    def tensors(self) -> Iterator[Random]:
        """Yield tensors with GPT-2's initialisation: residual projections are scaled down with the number of layers."""
        D = self.hidden_size
        residual = 0.02 / math.sqrt(2 * self.n_layers)
        yield Random("wte.weight", (self.vocab_size, D), 0.02)
        yield Random("wpe.weight", (self.context_length, D), 0.01)
        for i in range(self.n_layers):
            yield from _layer_norm(f"h.{i}.ln_1", D)
            yield from _conv1d(f"h.{i}.attn.c_attn", D, 3 * D, 0.02)
            yield from _conv1d(f"h.{i}.attn.c_proj", D, D, residual)
            yield from _layer_norm(f"h.{i}.ln_2", D)
            yield from _conv1d(f"h.{i}.mlp.c_fc", D, 4 * D, 0.02)
            yield from _conv1d(f"h.{i}.mlp.c_proj", 4 * D, D, residual)
        yield from _layer_norm("ln_f", D)


def _layer_norm(name: str, width: int) -> tuple[Random, Random]:
    return Random(f"{name}.weight", (width,), 0.1, mean=1.0), Random(f"{name}.bias", (width,), 0.02)


def _conv1d(name: str, n_in: int, n_out: int, std: float) -> tuple[Random, Random]:
    """Return a linear layer in GPT-2's layout (Conv1D): one row per input."""
    return Random(f"{name}.weight", (n_in, n_out), std), Random(f"{name}.bias", (n_out,), 0.02)
