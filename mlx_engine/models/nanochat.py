"""Nanochat.

Reference: Hugging Face transformers, models/nanochat. Differences from Llama: norms have no weights; embeddings, query
heads and key heads are normed, too; RoPE rotates pairs in the opposite direction; the FFN has no gate, and its
activation is the square of ReLU; logits have a soft cap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mlx_engine.backends.base import Backend
from mlx_engine.backends.parameters import Array, Token
from mlx_engine.config.declared import Expected, number
from mlx_engine.models import llama, standard
from mlx_engine.models.decoder import Decoder
from mlx_engine.models.layer import Attention, Branch, Layer, LayerTensors, Plain
from mlx_engine.weights.parameters import Parameters
from mlx_engine.weights.table import Row

ARCHITECTURES = ("nanochat",)
GGUF_ARCHITECTURE = "nanochat"  # llama.cpp has no such architecture


@dataclass(frozen=True)
class Config(llama.Config):
    softcap: float = number("final_logit_softcapping", ("final_logit_softcapping", 15.0))

    expected = Expected(hf={"hidden_act": "relu2", "mlp_bias": False})


class Model(Decoder):
    def __init__(self, config: Config, parameters: Parameters, backend: Backend) -> None:
        rope, eps = config.rope.for_heads(config.head_dim), config.norm_eps
        back = replace(rope, frequencies=tuple(-f for f in rope.frequencies))
        self.norm = norm = parameters.plain_norm("norm", config.hidden_size, eps)
        # Here, heads are normed before the rotary embedding; transformers norms them after it. The result is the same,
        # because the norms have no weights, and a rotation does not change the RMS of a head.
        of_heads = (parameters.plain_norm("head_norm", config.head_dim, eps),) * 2
        layers = [
            Layer(
                norm=norm,
                branches=(Branch(replace(Attention.read(t, config, back), norms=of_heads), t.linear("attn_output")),),
                ffn=Plain(norm, t.linear("ffn_up"), t.linear("ffn_down"), "relu2"),
            )
            for t in LayerTensors.of(parameters, config.n_layers, eps)
        ]  # fmt: skip
        super().__init__(config, parameters, backend, layers=layers, output_norm=norm, logit_softcap=config.softcap)

    def embed(self, ids: Sequence[Token], positions: Sequence[int]) -> Array:
        return self.backend.norm(super().embed(ids, positions), self.norm)


MLP = {"ffn_up": Row("model.layers.*.mlp.fc1.weight", "F D"), "ffn_down": Row("model.layers.*.mlp.fc2.weight", "D F")}
TENSORS = {name: row for name, row in llama.TENSORS.items() if "norm" not in name and "ffn" not in name}
plan = standard.plan(Config, TENSORS | {f"blk.*.{name}.weight": row for name, row in MLP.items()})
