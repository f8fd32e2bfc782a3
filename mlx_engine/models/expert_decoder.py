"""The decoder of the Llama family with a mixture of experts in place of every FFN: Mixtral, Qwen2-MoE, Qwen3-MoE."""

from __future__ import annotations

from typing import Any

from mlx_engine.backends.base import Backend
from mlx_engine.backends.experts import Routing
from mlx_engine.backends.parameters import ExpertLayer, Scores
from mlx_engine.models.decoder import Decoder
from mlx_engine.weights.experts import experts
from mlx_engine.weights.parameters import Parameters
from mlx_engine.weights.table import parts


class ExpertDecoder(Decoder):
    """A Llama model with mixtures of experts.

    Beside Llama's sizes its config has n_experts, n_experts_used, and `normalize`: whether the weights of a token's
    experts add up to 1.
    """

    def __init__(self, config: Any, parameters: Parameters, backend: Backend) -> None:
        rope, scores, eps = config.rope.for_heads(config.head_dim), Scores(config.head_dim**-0.5), config.norm_eps
        routing = Routing(config.n_experts_used, config.normalize)
        layers = [
            ExpertLayer(
                **parts(parameters, i, eps), rope=rope, window=window, scores=scores,
                experts=experts(parameters, i, config.n_experts, routing),
            )
            for i, window in enumerate(config.windows)
        ]  # fmt: skip
        output_norm = parameters.rms_norm("output_norm", eps)
        super().__init__(config, parameters, backend, layers=layers, output_norm=output_norm)
