"""OLMo 2 and OLMo 3.

Papers: "2 OLMo 2 Furious", arXiv 2501.00656; "Olmo 3", arXiv 2512.13961. Reference: Hugging Face transformers,
models/olmo2 and models/olmo3. Differences from Llama: the outputs of attention and FFN are normed, not their inputs;
queries and keys are normed as whole rows before they are split into heads. In OLMo 3 most layers have sliding-window
attention; the others, the global layers, have YaRN where the config asks. GGUF has one architecture for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx_engine.backends.base import Backend
from mlx_engine.backends.parameters import LlamaLayer, Scores
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.config.declared import Expected, Key, Naming, declared, each_layer
from mlx_engine.config.rope import Rotation, rotation
from mlx_engine.config.settings import Settings
from mlx_engine.models import llama
from mlx_engine.models.decoder import Decoder
from mlx_engine.weights.parameters import Parameters
from mlx_engine.weights.plan import Plan
from mlx_engine.weights.table import Row, decoder_plan, parts

ARCHITECTURES = ("olmo2", "olmo3")
GGUF_ARCHITECTURE = "olmo2"

# Every fourth layer is global, unless the file says otherwise.
PATTERN = 4


class LocalLayers:
    """The setting of which layers have a window; none, if the model has no window."""

    def read(self, s: Settings, naming: Naming, known: Any) -> tuple[bool, ...]:
        """Return for each layer whether it has a window."""
        if naming == "hf":
            words = s.words("layer_types", known.n_layers, "sliding_attention", "full_attention")
            named = None if words is None else tuple(word == "sliding_attention" for word in words)
        else:
            named = s.flags("attention.sliding_window_pattern", known.n_layers)
        usual = tuple((i + 1) % PATTERN != 0 for i in range(known.n_layers))
        return (named or usual) if known.window else (False,) * known.n_layers

    def to_gguf(self, value: tuple[bool, ...]) -> Mapping[str, object]:
        """Return the flag of each layer, if a layer has a window."""
        return {"attention.sliding_window_pattern": list(value)} if any(value) else {}

    def to_hf(self, value: tuple[bool, ...], config: Any) -> Mapping[str, object]:
        """Return the name of each layer's kind."""
        return {"layer_types": ["sliding_attention" if is_local else "full_attention" for is_local in value]}


@dataclass(frozen=True)
class Config(llama.Config):
    """Llama's sizes. Tokens of local layers attend to the last `window` tokens; 0 is no window."""

    rope: Rotation = rotation(theta=500_000.0, rules=("linear", "dynamic", "yarn"), layers="full_attention")
    local_rope: Rotation = rotation(
        gguf="rope.freq_base_swa", theta=lambda known: known.rope.theta, rules=(), layers="sliding_attention"
    )
    window: int = declared(Key(Settings.whole_or_zero, ("attention.sliding_window", 0), ("sliding_window", 4096)))
    is_local: tuple[bool, ...] = declared(LocalLayers())

    expected = Expected(
        gguf={"attention.causal": True}, hf={"hidden_act": "silu", "attention_bias": False, "clip_qkv": None}
    )

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer; None for global layers."""
        return tuple(self.window if is_local else None for is_local in self.is_local)


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
        scores = Scores(config.head_dim**-0.5)
        layers = [
            LlamaLayer(
                **parts(parameters, i, config.norm_eps), norms_rows=True, window=window, scores=scores,
                rope=everywhere if window is None else nearby,
            )
            for i, window in enumerate(config.windows)
        ]  # fmt: skip
        output_norm = parameters.rms_norm("output_norm", config.norm_eps)
        super().__init__(config, parameters, backend, layers=layers, output_norm=output_norm)


def plan(checkpoint: Checkpoint) -> Plan:
    """Return the config and the expected tensors of a checkpoint.

    Raises:
        UnsupportedConfigError: a setting is missing, invalid or not implemented.
    """
    is_2 = checkpoint.architecture == "olmo2" and not checkpoint.settings.get("attention.sliding_window")
    return decoder_plan(checkpoint, Config2 if is_2 else Config, TENSORS)
