"""A Gemma 3 of a given shape: the config and the tensors of its Hugging Face folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mlx_engine.checkpoint.shape_folders import Random
from mlx_engine.quant.types import BF16, GGMLType


@dataclass(frozen=True)
class Gemma3Shape:
    """Sizes of a Gemma 3 text model."""

    n_layers: int
    hidden_size: int
    intermediate_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    window: int
    type: GGMLType = BF16

    def config(self) -> dict[str, Any]:
        """Return config.json: these sizes, and the other values of google/gemma-3-1b-it."""
        return {
            "architectures": ["Gemma3ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_logit_softcapping": None,
            "bos_token_id": 2,
            "cache_implementation": "hybrid",
            "eos_token_id": [1, 106],
            "final_logit_softcapping": None,
            "head_dim": self.head_dim,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": self.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.context_length,
            "model_type": "gemma3_text",
            "num_attention_heads": self.n_heads,
            "num_hidden_layers": self.n_layers,
            "num_key_value_heads": self.n_kv_heads,
            "pad_token_id": 0,
            "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-6,
            "rope_local_base_freq": 10_000,
            "rope_scaling": None,
            "rope_theta": 1_000_000,
            "sliding_window": self.window,
            "sliding_window_pattern": 6,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": self.vocab_size,
        }

    def tensors(self) -> Iterator[Random]:
        """Yield random matrices and norm weights. Gemma stores a norm weight as its difference from 1."""
        D, F, E = self.hidden_size, self.intermediate_size, self.head_dim
        H, K = self.n_heads * E, self.n_kv_heads * E
        yield Random("model.embed_tokens.weight", (self.vocab_size, D), 0.02)
        for i in range(self.n_layers):
            matrices = {
                "self_attn.q_proj": (H, D),
                "self_attn.k_proj": (K, D),
                "self_attn.v_proj": (K, D),
                "self_attn.o_proj": (D, H),
                "mlp.gate_proj": (F, D),
                "mlp.up_proj": (F, D),
                "mlp.down_proj": (D, F),
            }
            norms = {
                "input_layernorm": D,
                "self_attn.q_norm": E,
                "self_attn.k_norm": E,
                "post_attention_layernorm": D,
                "pre_feedforward_layernorm": D,
                "post_feedforward_layernorm": D,
            }
            for name, shape in matrices.items():
                yield Random(f"model.layers.{i}.{name}.weight", shape, 0.02)
            for name, width in norms.items():
                yield Random(f"model.layers.{i}.{name}.weight", (width,), 0.1)
        yield Random("model.norm.weight", (D,), 0.1)
