"""From a checkpoint's tensors to a model's layers: names and shapes checked first, then prepared for a backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_engine.backends.base import Backend
from mlx_engine.backends.parameters import Array, Linear, RMSNorm
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.errors import TensorMismatchError
from mlx_engine.quant import BY_NAME
from mlx_engine.quant.weight import Weight

# Called with (prepared, total) tensors while a model is built.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Tensor:
    """A tensor that an architecture has: its name in each kind of file, and its shape (row-major: out, in)."""

    gguf: str
    hf: str
    shape: tuple[int, ...]
    required: bool = True


@dataclass(frozen=True)
class Plan:
    """What a model file makes of a checkpoint's settings: sizes, and the tensors that they call for.

    Tensors named in `unused` may be there and are not read.
    """

    config: Any
    tensors: Sequence[Tensor]
    unused: tuple[str, ...] = ()


def check(checkpoint: Checkpoint, plan: Plan) -> dict[str, str]:
    """The checkpoint's own name of every tensor of the plan that it has, by GGUF name.

    Raises:
        TensorMismatchError: all missing, unexpected and misshapen tensors at once.
    """
    names: dict[str, str] = {}
    missing, misshapen = [], []
    for tensor in plan.tensors:
        name = tensor.hf if checkpoint.naming == "hf" else tensor.gguf
        found = checkpoint.shapes.get(name)
        if found is None:
            missing += [name] if tensor.required else []
            continue
        names[tensor.gguf] = name
        if found != tensor.shape:
            misshapen.append(f"{name} (expected {tensor.shape}, found {found})")
    unexpected = sorted(set(checkpoint.shapes) - set(names.values()) - set(plan.unused))
    if missing or unexpected or misshapen:
        raise TensorMismatchError(where=checkpoint.where, missing=missing, unexpected=unexpected, misshapen=misshapen)
    return names


class Parameters:
    """Prepares each tensor for a backend the first time a layer asks for it; a tied head shares its array."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        names: dict[str, str],
        backend: Backend,
        *,
        quant: str = "keep",
        progress: Progress | None = None,
    ) -> None:
        self._checkpoint, self._names, self._backend = checkpoint, names, backend
        self._quant, self._progress = quant, progress
        self._prepared: dict[tuple[str, str], Array] = {}

    def __contains__(self, gguf_name: str) -> bool:
        """Whether the checkpoint has this tensor."""
        return gguf_name in self._names

    def table(self, name: str) -> Array:
        """An embedding table (V, D), as it is stored."""
        return self._prepare(self._weight(name))

    def linear(self, name: str) -> Linear:
        """A linear layer of weight `name.weight`, quantised on load where that was asked for."""
        return Linear(name, self._prepare(self._converted(self._weight(name))))

    def rms_norm(self, name: str, eps: float) -> RMSNorm:
        """A norm of gain `name.weight`."""
        return RMSNorm(name, self._prepare(self._weight(name)), eps)

    def _weight(self, name: str) -> Weight:
        return self._checkpoint.weight(self._names[f"{name}.weight"])

    def _converted(self, weight: Weight) -> Weight:
        if self._quant == "keep" or self._quant == weight.type.name.lower():
            return weight
        wanted = BY_NAME[self._quant.upper()]
        if weight.shape[-1] % wanted.block_size:
            return weight
        return Weight.pack(weight.name, weight.dequantize(), wanted)

    def _prepare(self, weight: Weight) -> Array:
        key = (weight.name, weight.type.name)
        if key not in self._prepared:
            self._prepared[key] = self._backend.prepare(weight)
            if self._progress is not None:
                self._progress(min(len(self._prepared), len(self._names)), len(self._names))
        return self._prepared[key]
