"""Q8_0 matrices as they lie in the file, and the two ways to multiply with them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import numpy as np

from mlx_engine.observe.log import LOGGER

# Up to so many vectors each is multiplied with the stored blocks; for more, blocks are expanded and BLAS multiplies.
FEW = 4
# Rows that are expanded at a time: with 1,024 to 3,072 columns they stay in a core's second-level cache.
ROWS = 128


@dataclass(frozen=True, eq=False)
class StoredQ8_0:  # noqa: N801 - the format's own spelling
    """An (N, K) matrix: its blocks, row by row, in one dimension of bytes."""

    shape: tuple[int, int]
    blocks: np.ndarray
    kernels: ModuleType

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads."""
        return int(self.blocks.nbytes)

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """(len(ids), K): these rows alone, expanded."""
        chosen = np.ascontiguousarray(self.blocks.reshape(self.shape[0], -1)[ids]).reshape(-1)
        return self._expanded(chosen, len(ids))

    def times(self, x: np.ndarray) -> np.ndarray:
        """(T, N) from (T, K): `x @ self.T`, the activations in float32."""
        x = np.ascontiguousarray(x, dtype=np.float32)
        N, K = self.shape
        y = np.empty((len(x), N), dtype=np.float32)
        if len(x) <= FEW:
            for vector, out in zip(x, y, strict=True):
                self.kernels.matvec(self.blocks, K, vector, out, 0, N)
            return y
        per_row = self.blocks.size // N
        for first in range(0, N, ROWS):
            last = min(first + ROWS, N)
            expanded = self._expanded(self.blocks[first * per_row : last * per_row], last - first)
            np.matmul(x, expanded.T, out=y[:, first:last])
        return y

    def _expanded(self, blocks: np.ndarray, n_rows: int) -> np.ndarray:
        out = np.empty((n_rows, self.shape[1]), dtype=np.float32)
        self.kernels.dequantize(blocks, out.reshape(-1), 0, out.size // 32)
        return out


@cache
def compiled_kernels() -> ModuleType | None:
    """The compiled kernels, ready to run; None where there can be none, said once."""
    try:
        from kernels.cpu import jit, q8_0
    except ImportError as error:
        LOGGER.log(logging.WARNING, "no compiled kernels, NumPy runs instead: %s", error)
        return None
    reason = jit.lacking()
    if reason is not None:
        LOGGER.log(logging.WARNING, "no compiled kernels, NumPy runs instead: %s", reason)
        return None
    if not jit.is_cached(q8_0.matvec):
        LOGGER.log(logging.WARNING, "compiling the CPU kernels, once; they are kept in %s", jit.FOLDER)
    blocks, x, y = np.zeros(34, dtype=np.uint8), np.zeros(32, dtype=np.float32), np.zeros(32, dtype=np.float32)
    q8_0.matvec(blocks, 32, x, y, 0, 1)
    q8_0.dequantize(blocks, y, 0, 1)
    return q8_0
