"""Find the file of `mlx_engine/models` that implements a checkpoint's architecture, and build the model.

The architecture is `general.architecture` in GGUF files and `model_type` in config.json.
"""

from __future__ import annotations

import copy
import importlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from os.path import commonprefix
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from mlx_engine.backends.base import Backend, Program
from mlx_engine.backends.batch import Batch
from mlx_engine.backends.observed import tapped
from mlx_engine.backends.parameters import Array
from mlx_engine.cache import CacheLayer, KVPool, KVSequence
from mlx_engine.checkpoint.model_files import Checkpoint, open_checkpoint
from mlx_engine.config.known import LACKS
from mlx_engine.config.rope import for_context
from mlx_engine.errors import ModelError, OptionError, UnknownArchitectureError, UnsupportedConfigError, shown
from mlx_engine.machine.memory import available_memory
from mlx_engine.weights.adapters import Adapters
from mlx_engine.weights.conversion import Conversion, Converted
from mlx_engine.weights.parameters import Parameters, Progress
from mlx_engine.weights.plan import Plan, Tensor, check
from mlx_engine.weights.stage import OwnSlices, Stage


class FirstFault(NamedTuple):
    """The first intermediate array of a model's passes that has a NaN or infinity.

    Attributes:
        name: the name of the array, such as "blk.3.attn_q".
        rank: the rank that computed the array; None if one process runs the model alone.
        n_bad: number of values that are NaN or infinite.
    """

    name: str
    rank: int | None
    n_nan: int
    n_bad: int
    n_values: int


class _FoundError(Exception):
    """Ends the passes of `Model.first_fault` at the first value that is not finite."""

    def __init__(self, fault: FirstFault) -> None:
        self.fault = fault


class ModelConfig(Protocol):
    """The settings that all architectures have; each config class adds others.

    Attributes:
        n_heads: the number of query heads.
        vocab_size: the number of logits.
        context_length: the longest sequence in tokens.
    """

    n_layers: int
    hidden_size: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    context_length: int

    def __getattr__(self, name: str) -> Any:
        """Return a setting that only some architectures have."""


class ExtraLayer(Protocol):
    """A layer of multi-token prediction (MTP). From a token and its predecessor's hidden state, predict the next token.

    Attributes:
        n_vocabulary: the number of logits; the layer only predicts tokens whose ids are below this number.
    """

    n_vocabulary: int

    @property
    def kv_layers(self) -> list[CacheLayer]:
        """The description of the layer's cache, for `KVPool`."""

    def new_pool(self, n_tokens: int, **options: Any) -> KVPool:
        """Return a KV pool for `n_tokens` tokens of this layer."""

    def forward(self, batch: Batch, hidden: Array) -> tuple[Array, Array]:
        """Run the layer; return logits (R, `n_vocabulary`) and hidden states (R, D) of the wanted tokens.

        The last `batch.wanted[i]` tokens of each sequence i are wanted.
        Row t of `hidden` (T, D) is the hidden state of the token before token t of the batch: the model's hidden state
        after its last norm, or a hidden state that an earlier call of this method returned.
        """


class Model(Protocol):
    """The interface of models. The default methods are for a model that runs in one process.

    Attributes:
        program: the compiled layers.
        is_shared: whether several processes run the model together.
        n_stages: the number of pipeline stages. Up to this number of passes, of different sequences, may be in flight.
        extra: the MTP layer; None if the checkpoint has none, or if it is not used.
    """

    config: Any
    backend: Backend
    program: Program
    is_shared: bool = False
    n_stages: int = 1
    extra: ExtraLayer | None = None

    @property
    def kv_layers(self) -> list[CacheLayer]:
        """The description of each layer's cache: KV heads, head dim and window, or the shapes of a state."""

    def forward(self, batch: Batch) -> Array | None:
        """Run a forward pass and return logits (R, V) of the wanted tokens; None if no token is wanted."""

    def forward_hidden(self, batch: Batch) -> Array | None:
        """Like `forward`, but return the hidden states (R, D) of the wanted tokens after the last norm."""

    def run_on(self, backend: Backend) -> None:
        """Use another backend; a `Decoder` also compiles its layers for this backend."""
        self.backend = backend

    def submit(self, batch: Batch) -> Callable[[], Array] | None:
        """Begin a forward pass; return a function that waits for the logits (R, V), or None if no token is wanted."""
        logits = self.forward(batch)
        return None if logits is None else lambda: logits

    def idle(self) -> None:
        """Let other processes that share the model sleep until the next pass, because there is no work."""

    def new_kv(self, n_tokens: int, **options: Any) -> KVSequence:
        """Return the empty KV cache of a sequence of at most `n_tokens` tokens, in a new pool."""
        return self.new_pool(n_tokens, **options).sequence()

    def new_pool(self, n_tokens: int, **options: Any) -> KVPool:
        """Return a KV pool for `n_tokens` tokens."""

    def scratch_kv(self, n_tokens: int) -> KVSequence:
        """Return an empty KV cache for a single pass of `n_tokens` tokens; it needs less memory than `new_kv`."""
        return self.new_kv(n_tokens, longest_pass=n_tokens, kept=False)

    def kv_capacity(self) -> tuple[int, int | None]:
        """Return how many bytes of keys and values fit into the free memory, and the rank that limits this number.

        The rank is None if one process runs the model alone.
        """
        return available_memory(), None

    def first_fault(self, run: Callable[[Model], object]) -> FirstFault | None:
        """Return the first fault in the passes that `run` runs; None if all values are finite.

        `run` gets a copy of the model. The copy runs blocks as composed primitives, not as fused kernels, so that every
        intermediate value can be checked.
        """
        backend, traced = self.backend, copy.copy(self)

        def check(name: str, x: Array) -> None:
            values = backend.host(x)
            n_bad = int((~np.isfinite(values)).sum())
            if n_bad:
                raise _FoundError(FirstFault(name, None, int(np.isnan(values).sum()), n_bad, int(values.size)))

        traced.run_on(tapped(backend, check))
        try:
            run(traced)
        except _FoundError as found:
            return found.fault
        return None


@dataclass(frozen=True)
class Architecture:
    """An architecture that a file of `mlx_engine/models` implements.

    Attributes:
        title: the names of the models that have this architecture, for tables and messages.
        names: the values of `general.architecture` (GGUF) and `model_type` (config.json) for this architecture.
        gguf: the `general.architecture` that is written when a folder is converted to GGUF.
        config: the config class.
        model: the model class, called with (config, parameters, backend).
        plan: makes a checkpoint's `Plan`; raises UnsupportedConfigError if a setting is missing, invalid or not
            implemented.
    """

    title: str
    names: tuple[str, ...]
    gguf: str
    config: type[Any]
    model: Callable[[Any, Parameters, Backend], Model]
    plan: Callable[[Checkpoint], Plan]


def architectures_of(module: Any) -> Sequence[Architecture]:
    """Return the architectures of a module of `mlx_engine/models`; none if the module has no `ARCHITECTURES`.

    If the module has one architecture, `ARCHITECTURES` may be a tuple of its names (`Architecture.names`). The title is
    then the first line of the module's docstring, and the other attributes are the module's `GGUF_ARCHITECTURE`,
    `Config`, `Model` and `plan`.
    """
    found = getattr(module, "ARCHITECTURES", ())
    if not found or isinstance(found[0], Architecture):
        return found
    title = (module.__doc__ or "").split("\n", 1)[0].rstrip(".")
    return [Architecture(title, found, module.GGUF_ARCHITECTURE, module.Config, module.Model, module.plan)]


def architecture_of(checkpoint: Checkpoint) -> Architecture:
    """Return a checkpoint's architecture; raise UnknownArchitectureError if it is not implemented."""
    wanted, supported = checkpoint.architecture, list[str]()
    if checkpoint.naming == "gguf" and wanted == "llama" and checkpoint.settings.get("expert_count"):
        wanted = "mixtral"
    text = checkpoint.settings.get("text_config")
    if wanted == "mistral3" and isinstance(text, Mapping) and text.get("model_type") == "mistral4":
        wanted = "mistral4"
    # To import few files, begin with the file whose name shares the longest prefix with the architecture's name.
    names = sorted(file.name for file in iter_modules(importlib.import_module("mlx_engine.models").__path__))
    for name in sorted(names, key=lambda name: -len(commonprefix((name, wanted)))):  # noqa: RUF071 - no paths
        for architecture in architectures_of(importlib.import_module(f"mlx_engine.models.{name}")):
            supported += architecture.names
            if wanted in architecture.names:
                return architecture
    raise UnknownArchitectureError(
        where=checkpoint.where, architecture=checkpoint.architecture, supported=sorted(supported),
        lacks=LACKS.get(checkpoint.architecture),
    )  # fmt: skip


class Loaded(NamedTuple):
    """A model, and the report of how its linear layers were converted."""

    model: Model
    converted: Converted


def load_model(checkpoint: Checkpoint, backend: Backend) -> Model:
    """Build a checkpoint's model, with weights in their stored types."""
    return convert_model(checkpoint, backend, Conversion()).model


class Planned(NamedTuple):
    """The config and tensors of a model, and the conversion of its weights; known before any weight is read.

    Attributes:
        make: `Architecture.model`.
        stage: the layers that this process runs; None for all layers.
        slices: the parts of the tensors that this process holds; None for whole tensors.
        held_share: the fraction of each layer's experts that is in memory at the same time.
    """

    checkpoint: Checkpoint
    make: Callable[[Any, Parameters, Backend], Model]
    config: Any
    tensors: Mapping[str, Tensor]
    conversion: Conversion
    stage: Stage | None = None
    slices: OwnSlices | None = None
    adapters: Adapters | None = None
    held_share: float = 1.0

    @property
    def n_parameters(self) -> int:
        """Number of parameters, without unused tensors and the MTP layer; the table of a tied head counts once."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values()) - self.n_extra

    @property
    def n_extra(self) -> int:
        """Number of parameters of the MTP layer."""
        return sum(
            math.prod(tensor.shape)
            for name, tensor in self.tensors.items()
            if name.startswith(f"blk.{self.config.n_layers}.")
        )

    def needs(self) -> frozenset[str]:
        """Return the names of the kernels to compile before weights are read, for `backends.Settings.needs`."""
        found = set[str]()
        for name, tensor in self.tensors.items():
            stored = tensor.stored(self.checkpoint.naming)
            if len(tensor.shape) == 2 and not stored.is_shifted:
                type_ = self.checkpoint.weight(stored.name).type
                found.add(self.conversion.type_of(name.removesuffix(".weight"), tensor.shape, type_)[0].name.lower())
        if any("_exps." in name for name in self.tensors):
            found.add("experts")
        # With adapters, FFNs run op by op, and a kernel of "states" computes their activation functions.
        if self.adapters is not None or any(".ssm_" in name or ".shortconv." in name for name in self.tensors):
            found.add("states")
        return frozenset(found)

    def stored_types(self) -> Mapping[str, int]:
        """Return the types of the layers' weights in the file, as {name of the type: bytes of these weights}."""
        found = Counter[str]()
        for name, tensor in self.tensors.items():
            if name.startswith("blk."):
                type_ = self.checkpoint.weight(tensor.stored(self.checkpoint.naming).name).type
                found[type_.name] += type_.bytes_for(math.prod(tensor.shape))
        return found

    def build(self, backend: Backend, progress: Progress | None = None) -> Loaded:
        """Build the model on a backend: read and convert the weights."""
        parameters = Parameters(
            self.checkpoint, self.tensors, backend, conversion=self.conversion, progress=progress, stage=self.stage,
            slices=self.slices, adapters=self.adapters, held_share=self.held_share,
        )  # fmt: skip
        return Loaded(self.make(self.config, parameters, backend), parameters.converted)


def plan_model(
    checkpoint: Checkpoint, conversion: Conversion, context: int | None = None, *, with_extra: bool = False
) -> Planned:
    """Return the plan of a checkpoint's model, for sequences of at most `context` tokens.

    `with_extra` adds the MTP layer, if the checkpoint has one and it is implemented.

    Raises:
        OptionError: the conversion names a layer that the model does not have, or `context` is not a whole number >= 1.
        ModelError: the file has a vocabulary but no tensors.
        UnknownArchitectureError: the architecture is not implemented.
        UnsupportedConfigError: a setting is missing, invalid or not implemented.
        TensorMismatchError: the tensors do not match the settings.
    """
    architecture = architecture_of(checkpoint)
    if not checkpoint.shapes:
        raise ModelError(
            f"{checkpoint.where}: expected a model's tensors, found none: it holds a vocabulary alone, "
            "which the `tokenize` command can use; choose another file to run"
        )
    plan = architecture.plan(checkpoint)
    if with_extra:
        plan = replace(plan, tensors=[*plan.tensors, *plan.extra])
    tensors = check(checkpoint, plan)
    conversion.check(checkpoint.where, tensors)
    return Planned(checkpoint, architecture.model, for_context(plan.config, context), tensors, conversion)


def convert_model(checkpoint: Checkpoint, backend: Backend, conversion: Conversion) -> Loaded:
    """Build a checkpoint's model, with its linear layers converted; errors as for `plan_model`."""
    return plan_model(checkpoint, conversion).build(backend)


ALLOW = "--allow-setting"


def open_model(path: Path, allow_settings: Sequence[str] = ()) -> Checkpoint:
    """Open a model file, and remove the named settings that are not implemented.

    A nested setting is named as "rope_scaling.factor". A GGUF key may be given with or without the architecture's
    prefix. A named setting that is implemented is not removed.

    Raises:
        OptionError: one of the names is not a setting of the file. SourceError, FormatError: the file cannot be opened,
        or is damaged. ModelError: a folder's weights are quantised in a way that is not implemented. If
        `allow_settings` has names, also raised if the architecture is not implemented, or if a setting that is not
        among the names is not implemented.
    """
    check_allowed(allow_settings)
    checkpoint = open_checkpoint(path)
    return allow(checkpoint, allow_settings) if allow_settings else checkpoint


def check_allowed(allow_settings: object) -> None:
    """Raise OptionError unless `allow_settings` is a list or tuple of names."""
    if not (isinstance(allow_settings, list | tuple) and all(isinstance(name, str) for name in allow_settings)):
        message = f"allow_settings must be a list of names, not {shown(allow_settings)}"
        raise OptionError(message, option="allow_settings", found=allow_settings)


def allow(checkpoint: Checkpoint, names: Sequence[str]) -> Checkpoint:
    """Return the checkpoint without the named settings that are not implemented; add a note for each name."""
    paths = {name: _path(checkpoint, name) for name in names}
    plan, ignored = architecture_of(checkpoint).plan, dict[str, object]()
    while True:
        try:
            plan(checkpoint)
            break
        except UnsupportedConfigError as error:
            refused = error.name or ""
            name = next((n for n in paths if n not in ignored and f"{refused}.".startswith(_dotted(paths[n]))), None)
            if name is None:
                raise
            settings, ignored[name] = _without(checkpoint.settings, paths[name])
            checkpoint = replace(checkpoint, settings=settings)
    return replace(checkpoint, notes=tuple(_note(name, ignored) for name in paths))


def _dotted(path: Sequence[str]) -> str:
    return ".".join(path) + "."


def _path(checkpoint: Checkpoint, name: str) -> tuple[str, ...]:
    """Return the keys from the outermost mapping to a setting; raise OptionError if there is no such setting."""
    rest = name.removeprefix(f"{checkpoint.architecture}.") if checkpoint.naming == "gguf" else name
    at, keys = cast("Mapping[str, Any]", checkpoint.settings), list[str]()
    # A key may contain dots, so each step first tries the whole rest of the name as one key.
    while rest not in at:
        key, _, rest = rest.partition(".")
        if not rest or not isinstance(at.get(key), Mapping):
            raise OptionError(f"{ALLOW}: {checkpoint.where} has no setting {name!r}", option=ALLOW, found=name)
        keys.append(key)
        at = at[key]
    return (*keys, rest)


def _without(settings: Mapping[str, Any], path: Sequence[str]) -> tuple[dict[str, Any], object]:
    """Return a copy of the settings without the setting at `path`, and the value of this setting."""
    key, *rest = path
    if not rest:
        return {other: value for other, value in settings.items() if other != key}, settings[key]
    inner, value = _without(settings[key], rest)
    return {**settings, key: inner}, value


def _note(name: str, ignored: Mapping[str, object]) -> str:
    if name not in ignored:
        return f"{ALLOW} {name}: not needed, the setting is implemented or changes nothing"
    return f"{ALLOW} {name}: {shown(ignored[name])} is not implemented and was ignored; results may be wrong"
