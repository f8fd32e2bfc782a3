"""OLMo 2 and OLMo 3.

Papers: "2 OLMo 2 Furious", arXiv 2501.00656; "Olmo 3", arXiv 2512.13961. Reference: Hugging Face transformers,
models/olmo2 and models/olmo3. Differences from Llama: the outputs of attention and FFN are normed, not their inputs;
queries and keys are normed as whole rows before they are split into heads. In OLMo 3 most layers are local: they have
sliding-window attention, and never YaRN. The global layers may have YaRN. GGUF has one architecture for OLMo 2 and 3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mlx_engine.backends.base import Backend
from mlx_engine.backends.parameters import Rope
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.config.declared import Expected, Key, declared, each_layer
from mlx_engine.config.layer_kinds import layer_kinds
from mlx_engine.config.rope import Rotation, rotation
from mlx_engine.config.settings import Settings
from mlx_engine.models import llama
from mlx_engine.models.decoder import Decoder
from mlx_engine.models.layer import Attention, Branch, Gated, Layer, LayerTensors, RowNorms
from mlx_engine.weights.parameters import Parameters
from mlx_engine.weights.plan import Plan
from mlx_engine.weights.table import Row, decoder_plan

ARCHITECTURES = ("olmo2", "olmo3")
GGUF_ARCHITECTURE = "olmo2"

# Every fourth layer is global, unless the file says otherwise.
PATTERN = 4


@dataclass(frozen=True)
class Config(llama.Config):
    """Llama's settings. Tokens of local layers attend to the last `window` tokens; 0 means that no layer is local."""

    rope: Rotation = rotation(theta=500_000.0, rules=("linear", "dynamic", "yarn"), layers="full_attention")
    local_rope: Rotation = rotation(
        gguf="rope.freq_base_swa", theta=lambda known: known.rope.theta, rules=(), layers="sliding_attention"
    )
    window: int = declared(Key(Settings.whole_or_zero, ("attention.sliding_window", 0), ("sliding_window", 4096)))
    is_local: tuple[bool, ...] = layer_kinds(
        PATTERN, flags={"gguf": "attention.sliding_window_pattern"}, if_window=True
    )

    expected = Expected(gguf={"attention.causal": True}, hf={"hidden_act": "silu", **llama.NO_BIAS, "clip_qkv": None})


@dataclass(frozen=True)
class Config2(Config):
    """The config of OLMo 2, whose layers all attend to all tokens."""

    rope: Rotation = rotation(rules=("linear", "dynamic", "yarn"))
    local_rope: Rotation = rotation(gguf="rope.freq_base_swa", rules=("linear", "dynamic", "yarn"))
    window: int = declared(Key(Settings.whole_or_zero, ("attention.sliding_window", 0), ("sliding_window", 0)))

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


class Model(Decoder):
    """A Llama model with norms after attention and FFN, and local and global layers."""

    def __init__(self, config: Config, parameters: Parameters, backend: Backend) -> None:
        everywhere, nearby = config.rope.for_heads(config.head_dim), config.local_rope.for_heads(config.head_dim)
        tensors = LayerTensors.of(parameters, config.n_layers, config.norm_eps)
        layers = [
            Layer(
                branches=(
                    Branch(
                        _attention(t, config, everywhere if window is None else nearby, window),
                        t.linear("attn_output"), t.norm("post_attention_norm"),
                    ),
                ),
                ffn=Gated.read(t),
            )
            for t, window in zip(tensors, config.windows, strict=True)
        ]  # fmt: skip
        super().__init__(config, parameters, backend, layers=layers)


def _attention(t: LayerTensors, config: Config, rope: Rope, window: int | None) -> Attention:
    norms = RowNorms(t.rms_norm("attn_q_norm"), t.rms_norm("attn_k_norm"))
    return replace(Attention.read(t, config, rope, window=window), norms=norms)


def plan(checkpoint: Checkpoint) -> Plan:
    """Return the config and the expected tensors of a checkpoint.

    Raises:
        UnsupportedConfigError: a setting is missing, invalid or not implemented.
    """
    is_2 = checkpoint.architecture == "olmo2" and not checkpoint.settings.get("attention.sliding_window")
    return decoder_plan(checkpoint, Config2 if is_2 else Config, TENSORS)
