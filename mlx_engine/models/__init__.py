"""Model files by architecture: GGUF's `general.architecture`, and config.json's `model_type`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pkgutil import iter_modules
from typing import Any, NamedTuple, Protocol, cast

from mlx_engine.backends.base import Backend
from mlx_engine.backends.batch import Batch
from mlx_engine.backends.parameters import Array
from mlx_engine.backends.program import Program
from mlx_engine.cache import KVLayer, KVPool, KVSequence
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.errors import ModelError, UnknownArchitectureError
from mlx_engine.models.conversion import Conversion, Converted
from mlx_engine.models.parameters import Parameters, Plan, Progress, check


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


class ModelFile(Protocol):
    """A module of this folder that implements architectures.

    Attributes:
        ARCHITECTURES: what GGUF's `general.architecture` and config.json's `model_type` call them.
        GGUF_ARCHITECTURE: what a GGUF file that is written from a folder calls them.
        Model: the class, called with (config, parameters, backend).
    """

    ARCHITECTURES: tuple[str, ...]
    GGUF_ARCHITECTURE: str
    Model: Callable[[Any, Parameters, Backend], Model]

    def plan(self, checkpoint: Checkpoint) -> Plan:
        """Return the sizes and tensors of a checkpoint.

        Raises:
            UnsupportedConfigError: a setting is missing, makes no sense, or is not implemented.
        """


def model_file(checkpoint: Checkpoint) -> ModelFile:
    """Return the module that implements a checkpoint's architecture: whichever of this folder says that it does.

    Raises:
        UnknownArchitectureError: no model file does.
    """
    architecture, supported = checkpoint.architecture, list[str]()
    # A file is mostly named after its architecture, so that no other has to be imported.
    for name in sorted((file.name for file in iter_modules(__path__)), key=lambda name: name != architecture):
        module: Any = importlib.import_module(f"{__name__}.{name}")
        supported += getattr(module, "ARCHITECTURES", ())
        if architecture in supported:
            return cast(ModelFile, module)
    raise UnknownArchitectureError(
        where=checkpoint.where, architecture=checkpoint.architecture, supported=sorted(supported)
    )


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
    model = module.Model(plan.config, parameters, backend)
    return Loaded(model, parameters.converted)
