"""Programs: a program runs all layers of a model on one backend. `models/decoder.py` defines the layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Protocol

from mlx_engine.backends.batch import Batch, Wanted
from mlx_engine.backends.parameters import Array

if TYPE_CHECKING:
    from mlx_engine.backends.base import Backend


class Layers(Protocol):
    """The definition of all layers: a function that calls the operations of a backend."""

    def __call__(self, be: Any, x: Array, batch: Any, *, want: Wanted) -> Array:
        """Return hidden states (T, D) of every token, or (R, D) of the wanted tokens."""


class Program(ABC):
    """All layers of a model, compiled for one backend. The model owns its program.

    Attributes:
        reason: why the layers run operation by operation on a backend that could compile them; None if they do not.
    """

    reason: str | None = None

    @abstractmethod
    def run(self, x: Array, batch: Batch) -> Array:
        """Return hidden states (R, D) after the last layer, of the wanted tokens, from (T, D) before the first layer.

        Keys and values are written to the batch's slots. If no logits are wanted, the returned array is undefined.
        """


class OpByOp(Program):
    """A program that runs the definition, operation by operation."""

    def __init__(self, backend: Backend, layers: Layers, reason: str | None = None) -> None:
        self._backend, self._layers = backend, layers
        self.reason = reason

    def run(self, x: Array, batch: Batch) -> Array:
        """Run the definition on the backend."""
        return self._layers(self._backend, x, batch, want=batch.want)
