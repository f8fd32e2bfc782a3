"""MiniCPM3.

Reference: Hugging Face transformers, models/minicpm3. Differences from DeepSeek-V2: all layers are dense; RoPE rotates
the pairs (j, j + R/2) of the R rotated elements, in folders and GGUF files; the RoPE scaling rule may be LongRoPE; the
embeddings and the outputs of attention and FFN are multiplied by constants, and the logits are divided by a constant.
GGUF has no keys for these constants.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from mlx_engine.backends.parameters import Rope, Scores
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.config.declared import Expected, constant, declared, per_head
from mlx_engine.config.rope import Rotation, rotation
from mlx_engine.config.settings import Settings
from mlx_engine.models import deepseek, granite, llama, standard
from mlx_engine.models.layer import Branch, LayerTensors
from mlx_engine.weights.experts import OfFolders
from mlx_engine.weights.plan import Plan
from mlx_engine.weights.rope_divisors import TENSORS as DIVISORS
from mlx_engine.weights.table import decoder_plan

ARCHITECTURES = ("minicpm3",)
GGUF_ARCHITECTURE = "minicpm3"


@dataclass(frozen=True)
class Config(deepseek.Latent):
    is_interleaved: ClassVar[bool] = False
    is_joined: ClassVar[bool] = True
    value_dim: int = declared(deepseek.OfHead("value", "v_head_dim", per_head))
    mscale: float = constant(0.0)
    rope: Rotation = rotation(rules=("longrope",))
    embedding_multiplier: float = declared(OfFolders(12.0, "scale_emb", Settings.number, 12.0))
    depth: float = declared(OfFolders(1.4, "scale_depth", Settings.number, 1.4))
    base_width: float = declared(OfFolders(256.0, "dim_model_base", Settings.number, 256.0))

    expected = Expected(
        gguf={"attention.causal": True, "attention.head_count_kv": deepseek.one_or_all},
        hf={"hidden_act": "silu", **llama.NO_BIAS, "num_key_value_heads": deepseek.one_or_all},
        harmless=("head_dim", "qk_head_dim"),
    )

    @property
    def attention_multiplier(self) -> float:
        return self.scale

    @property
    def residual_multiplier(self) -> float:
        return float(self.depth / self.n_layers**0.5)

    @property
    def logits_divisor(self) -> float:
        return self.hidden_size / self.base_width

    def to_gguf(self) -> dict[str, object]:
        """Return this config as GGUF keys. Head dims have the keys `key_length` and `value_length`, without `_mla`."""
        keys = {key: value for key, value in super().to_gguf().items() if not key.endswith("_mla")}
        lengths = {"key_length": self.nope_dim + self.rope_dim, "value_length": self.value_dim}
        return {
            **keys, **{f"attention.{key}": value for key, value in {**lengths, "head_count_kv": self.n_heads}.items()}
        }  # fmt: skip


class Model(granite.Model):
    """Granite's decoder with latent attention."""

    def branch(self, config: Any, t: LayerTensors, rope: Rope | None, scores: Scores) -> Branch:
        return Branch(deepseek.latent_attention(config, t), t.linear("attn_output"))


TENSORS = {name: replace(row, kind=None) for name, row in deepseek.TENSORS.items()}


def plan(checkpoint: Checkpoint) -> Plan:
    made = decoder_plan(checkpoint, Config, TENSORS, tied=True)
    # llama.cpp's converter writes no key for LongRoPE, but it writes the divisors of LongRoPE's frequencies as tensors.
    if checkpoint.naming == "gguf" and DIVISORS["long"] in checkpoint.shapes and made.config.rope.rule == "default":
        rope = replace(made.config.rope, rule="longrope", context=made.config.context_length)
        made = replace(made, config=replace(made.config, rope=rope))
    return standard.with_rotation(checkpoint, deepseek.with_latents(made, checkpoint))
