"""OLMo 2 and OLMo 3.

Papers: "2 OLMo 2 Furious", arXiv 2501.00656; "Olmo 3", arXiv 2512.13961. Reference: Hugging Face transformers,
models/olmo2 and models/olmo3. Differences from Llama: the outputs of attention and FFN are normed, not their inputs;
queries and keys are normed over all heads together. In OLMo 3, most layers are local: they have sliding-window
attention and never YaRN; the layers with full attention may have YaRN. GGUF has one architecture for OLMo 2 and 3.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.config.declared import Expected, each_layer, whole_or_zero
from mlx_engine.config.layer_kinds import layer_kinds
from mlx_engine.config.rope import Rotation, rotation
from mlx_engine.models import llama, standard
from mlx_engine.weights.plan import Plan
from mlx_engine.weights.table import Row, decoder_plan

ARCHITECTURES = ("olmo2", "olmo3")
GGUF_ARCHITECTURE = "olmo2"


@dataclass(frozen=True)
class Config(llama.Config):
    """The config of OLMo 3. In a local layer, a token attends to itself and the `window - 1` tokens before it.

    If `window` is 0, no layer is local.
    """

    rope: Rotation = rotation(theta=500_000.0, rules=("linear", "dynamic", "yarn"), layers="full_attention")
    local_rope: Rotation = rotation(
        gguf="rope.freq_base_swa", theta=lambda known: known.rope.theta, layers="sliding_attention"
    )
    window: int = whole_or_zero(("attention.sliding_window", 0), ("sliding_window", 4096))
    is_local: tuple[bool, ...] = layer_kinds(4, flags={"gguf": "attention.sliding_window_pattern"}, if_window=True)

    expected = Expected(gguf={"attention.causal": True}, hf={"hidden_act": "silu", **llama.NO_BIAS, "clip_qkv": None})


@dataclass(frozen=True)
class Config2(Config):
    """The config of OLMo 2: all layers have full attention."""

    rope: Rotation = rotation(rules=("linear", "dynamic", "yarn"))
    local_rope: Rotation = rotation(gguf="rope.freq_base_swa", rules=("linear", "dynamic", "yarn"))
    window: int = whole_or_zero(("attention.sliding_window", 0), ("sliding_window", 0))

    expected = Expected(
        hf={**Config.expected.hf, "sliding_window": (None, 0), "layer_types": each_layer("full_attention")}
    )


TENSORS = {
    **{name: row for name, row in llama.TENSORS.items() if "attn_norm" not in name and "ffn_norm" not in name},
    "blk.*.attn_q_norm.weight": Row("model.layers.*.self_attn.q_norm.weight", "HE"),
    "blk.*.attn_k_norm.weight": Row("model.layers.*.self_attn.k_norm.weight", "GE"),
    "blk.*.post_attention_norm.weight": Row("model.layers.*.post_attention_layernorm.weight", "D"),
    "blk.*.post_ffw_norm.weight": Row("model.layers.*.post_feedforward_layernorm.weight", "D"),
}
Model = standard.Model


def plan(checkpoint: Checkpoint) -> Plan:
    is_2 = checkpoint.architecture == "olmo2" and not checkpoint.settings.get("attention.sliding_window")
    return decoder_plan(checkpoint, Config2 if is_2 else Config, TENSORS)
