"""A model without its weights: built as for a run, with the size of each array in its place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from mlx_engine.backends.base import Backend
from mlx_engine.backends.program import Layers, OpByOp, Program
from mlx_engine.backends.stored_types import FLOAT_BYTES, row_bytes
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.models import Model, convert_model
from mlx_engine.models.conversion import Conversion
from mlx_engine.quant.weight import Weight


@dataclass(frozen=True, eq=False)
class Outline:
    """An array that a backend would hold: its shape and its bytes."""

    shape: tuple[int, ...]
    nbytes: int


class OutlineBackend:
    """A backend that prepares outlines. All else is done by the backend whose sizes it reports.

    Attributes:
        nbytes: bytes of all weights that have been prepared.
        n_left: bytes of the embedding tables that stay in the file, of which a pass reads a few rows.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend, self.nbytes, self.n_left = backend, 0, 0
        self._row_bytes: dict[tuple[str, int], float] = {}

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the backend."""
        return getattr(self._backend, name)

    def prepare(self, weight: Weight) -> Outline:
        """Return the outline of a weight."""
        outline = Outline(weight.shape, self._bytes_of(weight))
        self.nbytes += outline.nbytes
        return outline

    def embeds_stored(self, table: Weight) -> bool:
        """Return whether the backend reads a table as it is stored."""
        is_left = self._backend.embeds_stored(table)
        self.n_left += table.nbytes if is_left else 0
        return is_left

    def stack(self, matrices: Sequence[Any]) -> Sequence[Any]:
        """Return the outlines of several matrices, which may be stacked: their bytes stay the same."""
        return matrices

    def compile(self, layers: Layers) -> Program:
        """Return a program that is never run."""
        return OpByOp(cast(Backend, self), layers)

    def _bytes_of(self, weight: Weight) -> int:
        if len(weight.shape) < 2:
            return FLOAT_BYTES * math.prod(weight.shape)
        n_rows, key = math.prod(weight.shape[:-1]), (weight.type.name, weight.shape[-1])
        if key not in self._row_bytes:
            self._row_bytes[key] = row_bytes(self._backend, weight.type, weight.shape[-1])
        return round(n_rows * self._row_bytes[key])


@dataclass(frozen=True)
class Outlined:
    """A model of outlines.

    Attributes:
        model: the model, which cannot be run.
        nbytes: bytes of its weights as the backend would hold them.
        n_left: bytes of the embedding tables that would stay in the file.
    """

    model: Model
    nbytes: int
    n_left: int


def outlined(checkpoint: Checkpoint, backend: Backend) -> Outlined:
    """Build a checkpoint's model with outlines in place of weights. The errors are those of loading the model.

    Raises:
        UnknownArchitectureError, UnsupportedConfigError, TensorMismatchError, UnsupportedTypeError: the model cannot
            be built.
    """
    outline = OutlineBackend(backend)
    model = convert_model(checkpoint, cast(Backend, outline), Conversion()).model
    return Outlined(model, outline.nbytes, outline.n_left)
