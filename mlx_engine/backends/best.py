"""The largest logits of each rank, in place of all: greedy sampling and top-k need no others.

A rank packs the k largest of its columns of each row, and their columns; unpacked, the candidates of all ranks are in
whole rows, whose other values are smaller than every candidate. The k largest of a whole row are among the candidates,
and of equal logits the first columns, as in `sampling.largest`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mlx_engine.backends.sampling import LARGEST, largest


def packs(k: int | None, n: int) -> bool:
    """Return whether the k largest of n logits, and their columns, are fewer bytes than all; None is all."""
    return k is not None and 2 * k < n


def packed(logits: NDArray[np.float32], k: int) -> NDArray[np.float32]:
    """Return (R, 2, k): the k largest of a rank's logits (R, N), and their columns, which are exact in float32.

    If the rank has fewer than k columns, minus infinities follow. If a row is not finite, the first value is NaN.
    """
    found = np.full((len(logits), 2, k), -np.inf, dtype=np.float32)
    for row, out in zip(logits, found, strict=True):
        if not np.isfinite(row).all():
            out[0, 0] = np.nan
            continue
        columns = largest(row, min(k, len(row)))
        out[0, : len(columns)], out[1, : len(columns)] = row[columns], columns
    return found


def unpacked(gathered: NDArray[np.float32], n: int) -> NDArray[np.float32]:
    """Return (R, n) logits from what all ranks have packed, (size, R, 2, k); each has ceil(n / size) columns."""
    size, n_rows = gathered.shape[:2]
    made = np.empty((n_rows, n), dtype=np.float32)
    for r, row in enumerate(made):
        if np.isnan(gathered[:, r]).any():
            row[:] = np.nan
            continue
        values, columns = gathered[:, r, 0], gathered[:, r, 1]
        there = np.isfinite(values)
        least = float(values[there].min())
        row[:] = max(least - 1 - abs(least), -LARGEST)
        for rank in range(size):
            here = columns[rank, there[rank]].astype(np.int64)
            row[rank * -(-n // size) + here] = values[rank, there[rank]]
    return made
