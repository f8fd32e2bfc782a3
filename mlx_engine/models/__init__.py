"""Model files by architecture: GGUF's `general.architecture`, and config.json's `model_type`."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple, Protocol

from mlx_engine.backends.base import Backend
from mlx_engine.backends.batch import Batch
from mlx_engine.backends.parameters import Array
from mlx_engine.backends.program import Program
from mlx_engine.cache import KVLayer, KVPool, KVSequence
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.errors import ModelError, UnknownArchitectureError
from mlx_engine.models.conversion import Conversion, Converted
from mlx_engine.models.parameters import Parameters, Progress, check

MODULES = {
    "gemma3": "mlx_engine.models.gemma3",
    "gemma3_text": "mlx_engine.models.gemma3",
    "gpt2": "mlx_engine.models.gpt2",
    "llama": "mlx_engine.models.llama",
    "qwen2": "mlx_engine.models.qwen2",
    "qwen3": "mlx_engine.models.qwen3",
}


class Model(Protocol):
    """What a model file builds: a function of a batch."""

    config: Any
    backend: Backend
    program: Program

    @property
    def kv_layers(self) -> list[KVLayer]:
        """What each layer keeps of a token."""

    def forward(self, batch: Batch) -> Array | None:
        """Logits (R, V) of the tokens that are wanted, or None if there are none."""

    def new_kv(self, n_tokens: int, **options: Any) -> KVSequence:
        """An empty sequence of at most `n_tokens` tokens, with a pool of its own."""

    def new_pool(self, n_tokens: int, **options: Any) -> KVPool:
        """Memory for the keys and values of `n_tokens` tokens."""

    def scratch_kv(self, n_tokens: int) -> KVSequence:
        """An empty sequence for one pass of `n_tokens` tokens, of which no later pass reads anything."""


def model_file(checkpoint: Checkpoint) -> Any:
    """The module that implements a checkpoint's architecture: `plan(checkpoint)`, and the class `Model`.

    Raises:
        UnknownArchitectureError: no model file does.
    """
    name = MODULES.get(checkpoint.architecture)
    if name is None:
        raise UnknownArchitectureError(
            where=checkpoint.where, architecture=checkpoint.architecture, supported=sorted(MODULES)
        )
    return importlib.import_module(name)


class Loaded(NamedTuple):
    """A model, and what became of its linear layers."""

    model: Model
    converted: Converted


def load_model(checkpoint: Checkpoint, backend: Backend) -> Model:
    """Build a checkpoint's model on a backend, the weights as they are stored."""
    return convert_model(checkpoint, backend, Conversion()).model


def convert_model(
    checkpoint: Checkpoint, backend: Backend, conversion: Conversion, *, progress: Progress | None = None
) -> Loaded:
    """Build a checkpoint's model on a backend, its linear layers converted.

    Raises:
        OptionError: the conversion names a layer that the model does not have.
        UnknownArchitectureError: no model file implements it.
        UnsupportedConfigError: a setting is missing, makes no sense, or is not implemented.
        TensorMismatchError: the tensors are not those that the settings call for.
    """
    module = model_file(checkpoint)
    if not checkpoint.shapes:
        raise ModelError(
            f"{checkpoint.where}: expected a model's tensors, found none: it holds a vocabulary alone, "
            "which the `tokenize` command can use; choose another file to run"
        )
    plan = module.plan(checkpoint)
    tensors = check(checkpoint, plan)
    conversion.check(checkpoint.where, tensors)
    parameters = Parameters(checkpoint, tensors, backend, conversion=conversion, progress=progress)
    model: Model = module.Model(plan.config, parameters, backend)
    return Loaded(model, parameters.converted)
