"""Matrices for the compiled kernels: where they lie, in which format, and which of them are multiplied together."""

from __future__ import annotations

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
        K = matrices[0].shape[1]
        self.widths = [matrix.shape[0] for matrix in matrices]
        self.table = np.zeros((len(matrices), kernels.WIDTH), dtype=np.int64)
        for row, linear, column in zip(self.table, linears, np.cumsum([0, *self.widths]), strict=False):
            row[kernels.KIND], row[kernels.WEIGHTS] = linear.weight.kind, linear.weight.data.ctypes.data
            row[kernels.N], row[kernels.COLUMN] = linear.weight.shape[0], 0 if gated else column
            row[kernels.BIAS] = 0 if linear.bias is None else linear.bias.ctypes.data
        self.n_columns = self.widths[0] if gated else sum(self.widths)
        # Chunks depend on shapes alone; where rows are few bytes, a chunk has more of them.
        row_bytes = sum(m.nbytes // m.shape[0] for m in matrices) if gated else matrices[0].nbytes // self.widths[0]
        few = max(16, kernels.CHUNK_BYTES // max(1, row_bytes) // 16 * 16)
        many = kernels.MANY_ROWS // 2 if gated else kernels.MANY_ROWS
        self.rows = np.array([few, many], dtype=np.int64)
        self.input_width = K
