"""Mistral 7B and its kin, dense.

Paper: "Mistral 7B", arXiv 2310.06825. Reference: Hugging Face transformers, models/mistral.
Different from Llama: some releases let a token attend to a window of the latest tokens alone. To GGUF it is a Llama.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlx_engine.backends.base import Backend
from mlx_engine.backends.parameters import LlamaLayer
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.models import llama
from mlx_engine.models.config import Expected, whole_or_none
from mlx_engine.models.decoder import Decoder
from mlx_engine.models.parameters import Parameters, Plan
from mlx_engine.models.table import parts

ARCHITECTURES = ("mistral",)
GGUF_ARCHITECTURE = "llama"


@dataclass(frozen=True)
class Config(llama.Config):
    """Llama's sizes; a token attends to the last `window` tokens, itself included, or to all of them."""

    window: int | None = whole_or_none(None, ("sliding_window", 4096))

    expected = Expected(gguf=llama.Config.expected.gguf, hf={"hidden_act": "silu"})

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The same for every layer."""
        return (self.window,) * self.n_layers


class Model(Decoder):
    """Llama's layers, with a window."""

    def __init__(self, config: Config, parameters: Parameters, backend: Backend) -> None:
        rope, eps, window = config.rope.for_heads(config.head_dim), config.norm_eps, config.window
        layers = [LlamaLayer(**parts(parameters, i, eps), rope=rope, window=window) for i in range(config.n_layers)]
        output_norm = parameters.rms_norm("output_norm", eps)
        super().__init__(
            config, parameters, backend, layers=layers, output_norm=output_norm, scale=config.head_dim**-0.5
        )


def plan(checkpoint: Checkpoint) -> Plan:
    """Return the sizes and tensors of a checkpoint.

    Raises:
        UnsupportedConfigError: a setting is missing, makes no sense, or is not implemented.
    """
    return llama.plan(checkpoint, Config)
