"""Kernel parameters of matrices: their address and format, and which matrices are multiplied in one job."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlx_engine.backends.cpu.host_memory import address
from mlx_engine.backends.parameters import LayerNorm, Linear, Norm, Scores
from mlx_engine.kernels.cpu.build import layout
from mlx_engine.kernels.cpu.build.library import Library


@dataclass(frozen=True, eq=False)
class Matrix:
    """An (N, K) matrix: the bytes of its quantised blocks, one-dimensional, or float32 (N, K).

    Attributes:
        format: the storage format, by the module of `kernels.cpu` that has its kernels.
    """

    shape: tuple[int, int]
    format: str
    data: np.ndarray

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads."""
        return int(self.data.nbytes)


class Block:
    """Linear layers with the same input, encoded for the compiled kernels. Their outputs are concatenated in one row.

    Two layers with an activation are gate and up, and the output is `activation(gate) * up`. `norm` is applied to the
    input, `post` to the output.
    """

    def __init__(
        self, linears: Sequence[Linear], norm: Norm | None, activation: int, library: Library, post: Norm | None = None
    ) -> None:
        # Keep the arrays alive: the words only have their addresses.
        self.linears, self.norm, self.post = tuple(linears), norm, post
        matrices: list[Matrix] = [linear.weight for linear in linears]
        gated = activation != 0 and len(matrices) == 2
        rows = [matrix.shape[0] for matrix in matrices]
        edges = np.cumsum([0, *rows]).tolist()
        # The columns of each layer in the output.
        self.columns = [slice(first, last) for first, last in itertools.pairwise(edges)]
        self.n_outputs, self.n_inputs = rows[0] if gated else sum(rows), matrices[0].shape[1]
        self.words = words = np.zeros(layout.TABLE + layout.WIDTH * len(matrices), dtype=np.int64)
        self.address = address(words)

        words[layout.TASK_GEMV] = library.address("multiply_stored")
        words[layout.TASK_GEMM] = library.address("multiply_rows")
        words[layout.TASK_PREPARE] = library.address("prepare_rows")
        for of, first in ((norm, layout.NORM_WEIGHT), (post, layout.POST_NORM_WEIGHT)):
            if of is not None:
                write_norm(words[first : first + 3], of)
        words[layout.N], words[layout.K], words[layout.ACTIVATION] = self.n_outputs, self.n_inputs, activation
        # Chunks depend on shapes only, so that results do not depend on threads. Narrow rows give longer chunks.
        row_bytes = sum(matrix.nbytes // matrix.shape[0] for matrix in matrices[: 2 if gated else 1])
        nbytes = sum(matrix.nbytes for matrix in matrices)
        chunk_bytes = max(layout.CHUNK_BYTES, min(nbytes // layout.LONG_JOB, layout.MOST_CHUNK_BYTES))
        words[layout.CHUNK_GEMV] = max(16, chunk_bytes // max(1, row_bytes) // 16 * 16)
        words[layout.CHUNK_GEMM] = layout.GEMM_ROWS // 2 if gated else layout.GEMM_ROWS
        words[layout.HAND_OUT] = nbytes > layout.CHUNK_BYTES
        words[layout.MATRICES] = len(matrices)
        # gemv needs whole vectors of inputs, and gate and up in one format, because it interleaves their rows.
        self.has_gemv = self.n_inputs % layout.LANES == 0 and not (gated and matrices[0].format != matrices[1].format)
        words[layout.HAS_GEMV] = self.has_gemv
        for matrix, linear, column, row in zip(matrices, linears, edges, self._table(), strict=False):
            write_matrix(row, matrix, library)
            row[layout.BIAS] = 0 if linear.bias is None else address(linear.bias)
            row[layout.COLUMN] = 0 if gated else column

    def _table(self) -> np.ndarray:
        return self.words[layout.TABLE :].reshape(-1, layout.WIDTH)


def write_matrix(words: np.ndarray, matrix: Matrix, library: Library) -> None:
    """Write a matrix's int64 words: its address, its rows, and the kernels of its format."""
    words[layout.WEIGHTS], words[layout.ROWS] = address(matrix.data), matrix.shape[0]
    words[layout.FORMAT : layout.WIDTH] = library.format(matrix.format)


def write_norm(words: np.ndarray, norm: Norm) -> None:
    """Write a norm's int64 words: the address of its weight, its eps as float64, the address of a layer norm's bias."""
    words[0], words[1:2].view(np.float64)[0] = address(norm.weight), norm.eps
    if isinstance(norm, LayerNorm):
        words[2] = address(norm.bias)


def norm_words(norm: Norm) -> np.ndarray:
    """Return the three words of a norm that is no part of a block."""
    words = np.zeros(3, dtype=np.int64)
    write_norm(words, norm)
    return words


def sinks_address(scores: Scores, n_heads: int) -> int:
    """Return the address of the sinks (H,) of attention; 0 if there are none.

    Raises:
        ValueError: there is not one float32 for each query head.
    """
    sinks = scores.sinks
    if sinks is None:
        return 0
    if sinks.shape != (n_heads,) or sinks.dtype != np.float32 or not sinks.flags.c_contiguous:
        raise ValueError(f"expected sinks ({n_heads},) of float32, found {sinks.shape} of {sinks.dtype}")
    return address(sinks)
