"""An embedding table that stays in its mapped file: a pass reads a few rows of a table that may have a gigabyte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mlx_engine.machine.mapped_pages import release_rows
from mlx_engine.quant.weight import Weight


@dataclass(frozen=True, eq=False)
class TableInFile(Weight):
    """A table whose rows are not kept in memory, so that it does not become resident in the course of many passes.

    Where the head is a part of the table, pages of the head are given back, too, and mapped again in the next pass.
    """

    def rows(self, ids: Sequence[int] | NDArray[np.integer]) -> NDArray[np.float32]:
        """Return what `Weight.rows` returns, and give back the pages of the file that were read for it."""
        found = super().rows(ids)
        release_rows(self.data, map(int, ids), self.type.bytes_for(self.shape[1]))
        return found
