"""StarCoder and SantaCoder.

Paper: "StarCoder: may the source be with you!", arXiv 2305.06161. Reference: Hugging Face transformers,
models/gpt_bigcode. Difference from GPT-2: all heads share one head of keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlx_engine.backends.parameters import Activation
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.config.declared import Expected, activation_key, divides, whole
from mlx_engine.models import gpt2
from mlx_engine.weights.plan import Plan

ARCHITECTURES = ("gpt_bigcode", "starcoder")
GGUF_ARCHITECTURE = "starcoder"


@dataclass(frozen=True)
class Config(gpt2.Config):
    """GPT-2's sizes."""

    n_heads: int = whole("attention.head_count", "n_head", condition=divides("hidden_size"))
    activation: Activation = activation_key(
        {"gelu_pytorch_tanh": "gelu", **gpt2.ACTIVATIONS}, gguf="gelu", hf="activation_function"
    )

    expected = Expected(
        gguf={"attention.causal": True, "attention.head_count_kv": 1},
        hf={"scale_attn_weights": True, "multi_query": True},
        harmless=(
            *gpt2.Config.expected.harmless, "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32",
            "num_key_value_heads", "inference_runner", "max_batch_size", "max_sequence_length", "pad_key_length",
            "pre_allocate_kv_cache", "validate_runner_input",
        ),
    )  # fmt: skip

    @property
    def n_kv_heads(self) -> int:
        """The number of KV heads."""
        return 1

    def to_gguf(self) -> dict[str, object]:
        """Return this config as GGUF keys."""
        return super().to_gguf() | {"attention.head_count_kv": 1}


Model = gpt2.Model


def plan(checkpoint: Checkpoint) -> Plan:
    """Return the config and the expected tensors of a checkpoint.

    Raises:
        UnsupportedConfigError: a setting is missing, invalid or not implemented.
    """
    return gpt2.plan_of(checkpoint, Config, transposed=False)
