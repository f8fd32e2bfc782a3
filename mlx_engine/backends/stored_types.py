"""Which types a backend multiplies as they are stored: found by preparing a small matrix of each."""

from __future__ import annotations

import numpy as np

from mlx_engine.backends.base import Backend
from mlx_engine.backends.costs import nbytes_of
from mlx_engine.backends.parameters import Native
from mlx_engine.quant import readable_types
from mlx_engine.quant.types import GGMLType
from mlx_engine.quant.weight import Weight

FLOAT_BYTES = 4
# Rows of the matrix that is prepared.
ROWS = 16
# Columns: whole blocks of every type.
COLUMNS = 512


def probe(backend: Backend, type_: GGMLType, width: int) -> tuple[Weight, Native, int]:
    """Return a small matrix of `ROWS` rows, what the backend makes of it, and the bytes of that."""
    weight = Weight("probe", (ROWS, width), type_, np.zeros(type_.bytes_for(ROWS * width), np.uint8))
    prepared = backend.prepare(weight)
    return weight, prepared, nbytes_of(prepared)


def stored_types(backend: Backend) -> tuple[str, ...]:
    """Return the names of the readable types that are not expanded to float32 on this backend; F32 never is."""

    def is_stored(type_: GGMLType) -> bool:
        nbytes = probe(backend, type_, COLUMNS)[2] / ROWS
        return nbytes < FLOAT_BYTES * COLUMNS or nbytes <= type_.bytes_for(COLUMNS)

    return tuple(type_.name for type_ in readable_types() if is_stored(type_))
