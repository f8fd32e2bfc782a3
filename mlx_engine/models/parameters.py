"""Load a model's weights: check names and shapes of a checkpoint's tensors, then prepare them for a backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mlx_engine.backends.base import Backend
from mlx_engine.backends.parameters import Array, LayerNorm, Linear, RMSNorm
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.errors import TensorMismatchError
from mlx_engine.models.conversion import Conversion, Converted
from mlx_engine.quant.types import F32
from mlx_engine.quant.weight import Weight

# Called with (prepared, total) tensors while a model is built.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Stored:
    """How a file stores a tensor: its name there, and how its values differ from the model's.

    Attributes:
        name: the name in the file.
        rows: (first, of) if the tensor is a part of a larger tensor of `of` rows and begins at row `first`.
        transposed: whether the matrix is stored transposed, as in Conv1D layers.
        plus: added to every stored value to get the model's value.
        times: factor by which every value, minus `plus`, is multiplied in the file.
        heads: number of heads, if the file interleaves the rows of each head's two halves.
    """

    name: str
    rows: tuple[int, int] | None = None
    transposed: bool = False
    plus: float = 0.0
    heads: int | None = None
    times: float = 1.0

    @property
    def is_shifted(self) -> bool:
        """Whether stored values differ from the model's values."""
        return self.plus != 0 or self.times != 1

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the stored tensor, given the shape of the model's tensor."""
        whole = shape if self.rows is None else (self.rows[1], *shape[1:])
        return whole[::-1] if self.transposed else whole

    def take(self, weight: Weight, shape: tuple[int, ...]) -> Weight:
        """Return the model's tensor from the stored tensor: a view of its bytes if possible."""
        first, of = self.rows or (0, shape[0])
        data, last = weight.data, first + shape[0]
        if self.transposed:
            # Transpose elements of whole values: byte by byte it takes ten times as long.
            values = data.view(f"u{weight.type.block_bytes}").reshape(shape[1], of)
            data = values[:, first:last].T.reshape(-1).view(np.uint8)
        elif self.rows is not None:
            data = data[data.size * first // of : data.size * last // of]
        if self.heads is not None:
            data = data.reshape(self.heads, shape[0] // self.heads // 2, 2, -1).transpose(0, 2, 1, 3).reshape(-1)
        taken = Weight(weight.name, shape, weight.type, data)
        if not self.is_shifted:
            return taken
        values = taken.dequantize() / np.float32(self.times) + np.float32(self.plus)
        return Weight.pack(weight.name, values, F32)

    def put(self, parts: Sequence[Weight]) -> Weight:
        """Return the stored tensor from the model's tensors that are its rows, in order: the inverse of `take`.

        Raises:
            ValueError: the parts are of several types.
        """
        if len({part.type for part in parts}) > 1:
            raise ValueError(f"{self.name}: expected parts of one type, found {[part.type.name for part in parts]}")
        type_, width = parts[0].type, parts[0].shape[1:]
        if self.is_shifted:
            type_, plus, times = F32, np.float32(self.plus), np.float32(self.times)
            parts = [Weight.pack(part.name, (part.dequantize() - plus) * times, F32) for part in parts]
        data = np.concatenate([self._dealt(part) for part in parts])
        shape = (sum(part.shape[0] for part in parts), *width)
        if self.transposed:
            data = data.view(f"u{type_.block_bytes}").reshape(shape).T.reshape(-1).view(np.uint8)
            shape = shape[::-1]
        return Weight(self.name, shape, type_, data)

    def _dealt(self, part: Weight) -> NDArray[np.uint8]:
        """Return the bytes of a part, with the rows of each head's two halves interleaved if the file needs it."""
        if self.heads is None:
            return part.data
        halves = part.data.reshape(self.heads, 2, part.shape[0] // self.heads // 2, -1)
        return halves.transpose(0, 2, 1, 3).reshape(-1)


@dataclass(frozen=True)
class Tensor:
    """A tensor of an architecture: its name, how each kind of file stores it, its row-major shape (out, in).

    `name` is the GGUF name. GGUF files store the tensor under this name unless `gguf` is given.
    """

    name: str
    hf: str | Stored
    shape: tuple[int, ...]
    required: bool = True
    gguf: Stored | None = None

    def stored(self, naming: Literal["gguf", "hf"]) -> Stored:
        """Return how files of this kind store the tensor."""
        if naming == "gguf":
            return self.gguf or Stored(self.name)
        return self.hf if isinstance(self.hf, Stored) else Stored(self.hf)

    def weight(self, checkpoint: Checkpoint) -> Weight:
        """Return the tensor's weight from a checkpoint."""
        stored = self.stored(checkpoint.naming)
        return stored.take(checkpoint.weight(stored.name), self.shape)


@dataclass(frozen=True)
class Plan:
    """A checkpoint's config, and the tensors that a model with this config needs.

    Attributes:
        config: the config.
        tensors: the tensors of the model, and how the checkpoint stores them.
        unused: names of tensors that a file may have and that are not read.
        in_tensors: fields of the config that a GGUF file encodes in tensors, because GGUF has no key for them.
        gguf_only: tensors that a GGUF file needs only to encode those fields, by name.
    """

    config: Any
    tensors: Sequence[Tensor]
    unused: tuple[str, ...] = ()
    in_tensors: tuple[str, ...] = ()
    gguf_only: Mapping[str, Sequence[float]] = field(default_factory=dict)


def check(checkpoint: Checkpoint, plan: Plan) -> dict[str, Tensor]:
    """Check the checkpoint's tensors against the plan, and return the plan's tensors that it has, by name.

    Raises:
        TensorMismatchError: lists all missing, unexpected and misshapen tensors.
    """
    found: dict[str, Tensor] = {}
    # Names in the plan's order, without repetition: several tensors of the model may be stored as one.
    names, missing, misshapen = set[str](), dict[str, None](), dict[str, None]()
    for tensor in plan.tensors:
        stored = tensor.stored(checkpoint.naming)
        shape, expected = checkpoint.shapes.get(stored.name), stored.shape(tensor.shape)
        if shape is None:
            if tensor.required:
                missing[stored.name] = None
            continue
        found[tensor.name] = tensor
        names.add(stored.name)
        if shape != expected:
            misshapen[f"{stored.name} (expected {expected}, found {shape})"] = None
    unexpected = sorted(set(checkpoint.shapes) - names - set(plan.unused))
    if missing or unexpected or misshapen:
        raise TensorMismatchError(
            where=checkpoint.where, missing=list(missing), unexpected=unexpected, misshapen=list(misshapen)
        )
    return found


class Parameters:
    """Prepares each tensor for a backend on its first use. A tied head shares the array of the embedding table."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        tensors: Mapping[str, Tensor],
        backend: Backend,
        *,
        conversion: Conversion | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._checkpoint, self._tensors, self._backend = checkpoint, tensors, backend
        self._conversion, self._progress = conversion or Conversion(), progress
        self._prepared: dict[tuple[str, str], Array] = {}
        self._seen: set[str] = set()
        self._rows: list[tuple[str, str, str]] = []

    def __contains__(self, name: str) -> bool:
        """Whether the checkpoint has this tensor."""
        return name in self._tensors

    @property
    def converted(self) -> Converted:
        """The types of the linear layers so far."""
        return Converted.of(self._conversion, self._rows)

    def table(self, name: str) -> Array | Weight:
        """Return an embedding table (V, D), in its stored type."""
        weight = self._stored(f"{name}.weight")
        if not self._backend.embeds_stored(weight):
            return self._prepare(f"{name}.weight", weight)
        self._done(f"{name}.weight")
        return weight

    def linear(self, name: str) -> Linear:
        """Return a linear layer of `name.weight`, converted as the options say, and `name.bias` if it exists."""
        bias = self._vector(f"{name}.bias") if f"{name}.bias" in self else None
        stored = self._stored(f"{name}.weight")
        type_, reason = self._conversion.type_of(name, stored.shape, stored.type)
        self._rows.append((name, "" if type_ == stored.type else type_.name.lower(), reason))
        return Linear(name, self._prepare(f"{name}.weight", stored.as_type(type_)), bias)

    def rms_norm(self, name: str, eps: float) -> RMSNorm:
        """Return an RMS norm of weight `name.weight`."""
        return RMSNorm(name, self._vector(f"{name}.weight"), eps)

    def layer_norm(self, name: str, eps: float) -> LayerNorm:
        """Return a layer norm of weight `name.weight` and bias `name.bias`."""
        return LayerNorm(name, self._vector(f"{name}.weight"), self._vector(f"{name}.bias"), eps)

    def values(self, name: str) -> NDArray[np.float32]:
        """Return the values of `name.weight` in float32, for computations while the model is built."""
        values = self._stored(f"{name}.weight").dequantize()
        self._done(f"{name}.weight")
        return values

    def _stored(self, name: str) -> Weight:
        return self._tensors[name].weight(self._checkpoint)

    def _vector(self, name: str) -> Array:
        return self._prepare(name, self._stored(name))

    def _prepare(self, name: str, weight: Weight) -> Array:
        """Prepare a weight once for each type, so that a tied head that is not converted shares the table's array."""
        key = (name, weight.type.name)
        if key not in self._prepared:
            self._prepared[key] = self._backend.prepare(weight)
            self._done(name)
        return self._prepared[key]

    def _done(self, name: str) -> None:
        """Report progress; a table that is also the head counts once."""
        is_new = name not in self._seen
        self._seen.add(name)
        if is_new and self._progress is not None:
            self._progress(len(self._seen), len(self._tensors))
