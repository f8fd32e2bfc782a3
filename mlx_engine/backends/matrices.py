"""Matrices for the compiled kernels: where they lie, in which format, and which of them are multiplied together."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from mlx_engine.backends.parameters import Linear


@dataclass(frozen=True, eq=False)
class Matrix:
    """An (N, K) matrix as it is stored: bytes of blocks in one dimension, or float32.

    Attributes:
        kind: a format of `kernels.cpu.formats`.
    """

    shape: tuple[int, int]
    kind: int
    data: np.ndarray

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads."""
        return int(self.data.nbytes)


class Group:
    """Linear layers with one input, as a job's table has them: their products lie side by side in one row."""

    def __init__(self, linears: Sequence[Linear], kernels: ModuleType, *, gated: bool) -> None:
        self.linears = tuple(linears)  # the table knows their arrays by address alone
        matrices: list[Matrix] = [linear.weight for linear in linears]
        widths = [matrix.shape[0] for matrix in matrices]
        edges = np.cumsum([0, *widths]).tolist()
        # Where each layer's products lie in a row of the output.
        self.columns = [slice(first, last) for first, last in itertools.pairwise(edges)]
        self.table = np.zeros((len(matrices), kernels.WIDTH), dtype=np.int64)
        for row, linear, column in zip(self.table, linears, edges, strict=False):
            row[kernels.KIND], row[kernels.WEIGHTS] = linear.weight.kind, linear.weight.data.ctypes.data
            row[kernels.N], row[kernels.COLUMN] = linear.weight.shape[0], 0 if gated else column
            row[kernels.BIAS] = 0 if linear.bias is None else linear.bias.ctypes.data
        self.n_columns = widths[0] if gated else sum(widths)
        # Chunks depend on shapes alone; where rows are few bytes, a chunk has more of them.
        row_bytes = sum(m.nbytes // m.shape[0] for m in matrices[: 2 if gated else 1])
        few = max(16, kernels.CHUNK_BYTES // max(1, row_bytes) // 16 * 16)
        many = kernels.MANY_ROWS // 2 if gated else kernels.MANY_ROWS
        worthwhile = sum(m.nbytes for m in matrices) > kernels.CHUNK_BYTES
        self.rows = np.array([few, many, worthwhile], dtype=np.int64)
