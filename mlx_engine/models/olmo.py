"""OLMo 1.

Paper: "OLMo: Accelerating the Science of Language Models", arXiv 2402.00838. Reference: Hugging Face transformers,
models/olmo. Difference from Llama: layer norms without weights. Releases that clamp queries, keys and values
(`clip_qkv`) are refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mlx_engine.backends.base import Backend
from mlx_engine.config.declared import Expected, number
from mlx_engine.config.rope import Rotation, rotation
from mlx_engine.models import llama, standard
from mlx_engine.models.decoder import Decoder
from mlx_engine.models.layer import Attention, Branch, Gated, Layer, LayerTensors
from mlx_engine.weights.parameters import Parameters

ARCHITECTURES = ("olmo",)
GGUF_ARCHITECTURE = "olmo"
EPS = 1e-5


@dataclass(frozen=True)
class Config(llama.Config):
    norm_eps: float = number(("attention.layer_norm_epsilon", EPS), ("layer_norm_eps", EPS))
    rope: Rotation = rotation(rules=("linear", "dynamic", "yarn"))

    expected = Expected(
        gguf={"attention.causal": True, "attention.clamp_kqv": 0.0},
        hf={"hidden_act": "silu", **llama.NO_BIAS},
    )


class Model(Decoder):
    def __init__(self, config: Config, parameters: Parameters, backend: Backend) -> None:
        rope, eps = standard.rope_of(parameters, config), config.norm_eps
        norm = parameters.plain_layer_norm("norm", config.hidden_size, eps)
        layers = [
            Layer(
                norm=norm, branches=(Branch(Attention.read(t, config, rope), t.linear("attn_output")),),
                ffn=replace(Gated.read(t), norm=norm),
            )
            for t in LayerTensors.of(parameters, config.n_layers, eps)
        ]  # fmt: skip
        super().__init__(config, parameters, backend, layers=layers, output_norm=norm)


TENSORS = {
    name: row
    for name, row in (llama.TENSORS | llama.PERMUTED).items()
    if "norm" not in name and not name.endswith("bias")
}
plan = standard.plan(Config, TENSORS)
