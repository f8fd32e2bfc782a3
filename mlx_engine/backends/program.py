"""Programs: a program runs all layers of a model on one backend. `models/decoder.py` defines the layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from mlx_engine.backends.batch import Batch, Wanted
from mlx_engine.backends.parameters import Array

if TYPE_CHECKING:
    from mlx_engine.backends.base import Backend


class Layers(Protocol):
    """The definition of all layers: a function that calls the operations of a backend."""

    def __call__(self, be: Any, x: Array, batch: Any, *, want: Wanted) -> Array:
        """Return hidden states (T, D) of every token, or (R, D) of the wanted tokens."""


@dataclass(frozen=True)
class Fused:
    """How many gate+up pairs and q,k,v triples a program multiplies in one job each."""

    gate_up: int = 0
    qkv: int = 0

    def notes(self) -> tuple[str, ...]:
        """Return one line for the user, or none if nothing is fused."""
        if not self.gate_up and not self.qkv:
            return ()
        return (f"fused {self.gate_up} gate+up pairs, {self.qkv} q,k,v triples",)


class Program(ABC):
    """All layers of a model, compiled for one backend. The model owns its program."""

    fused: Fused = Fused()

    @abstractmethod
    def run(self, x: Array, batch: Batch) -> Array:
        """Return hidden states (R, D) after the last layer, of the wanted tokens, from (T, D) before the first layer.

        Keys and values are written to the batch's slots. If no logits are wanted, the returned array is undefined.
        """


class OpByOp(Program):
    """A program that runs the definition, operation by operation."""

    def __init__(self, backend: Backend, layers: Layers, fused: Fused | None = None) -> None:
        self._backend, self._layers = backend, layers
        self.fused = fused or Fused()

    def run(self, x: Array, batch: Batch) -> Array:
        """Run the definition on the backend."""
        return self._layers(self._backend, x, batch, want=batch.want)
