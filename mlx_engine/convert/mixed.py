"""Matrices that cannot have the type that was asked for: report each of them, and refuse to write if they are most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlx_engine.errors import OptionError
from mlx_engine.quant.types import GGMLType


@dataclass(frozen=True)
class Matrix:
    """A matrix to convert.

    Attributes:
        name: its name.
        columns: weights of a row, which have to fill blocks.
        nbytes: its bytes in the source.
        asked: the type that was asked for.
        type: the type that it gets.
        is_small: whether that type has as few bits, or is the one that llama.cpp chooses in its place.
    """

    name: str
    columns: int
    nbytes: int
    asked: GGMLType
    type: GGMLType
    is_small: bool


def check_mixed(matrices: Sequence[Matrix], note: Callable[[str], None], *, allow_mixed: bool) -> None:
    """Report the matrices whose rows do not fill blocks of the type that was asked for, and their sum.

    Args:
        matrices: all matrices to convert.
        note: called with a line for each such matrix and one for the sum.
        allow_mixed: write even if most bytes do not get what was asked for.

    Raises:
        OptionError: less than half of the bytes get what was asked for, and `allow_mixed` is not set.
    """
    others = [matrix for matrix in matrices if matrix.type != matrix.asked]
    if not others:
        return
    for matrix in others:
        blocks = f"{matrix.columns:,} columns do not fill {matrix.asked.name} blocks of {matrix.asked.block_size}"
        note(f"{matrix.name}: {blocks}; its type is {matrix.type.name}")
    whole = sum(matrix.nbytes for matrix in matrices)
    types = ", ".join(f"{n} {name}" for name, n in Counter(matrix.type.name for matrix in others).most_common())
    share = sum(matrix.nbytes for matrix in others) / whole
    note(f"{len(others)} of {len(matrices)} matrices, {share:.0%} of their bytes, get another type: {types}")
    large = [matrix for matrix in others if not matrix.is_small]
    n_bytes = sum(matrix.nbytes for matrix in large)
    if 2 * n_bytes > whole and not allow_mixed:
        part = f"{len(large)} of {len(matrices)} matrices, {n_bytes / whole:.0%} of the bytes"
        message = f"{part}, cannot have the type of --to; choose another type, or give --allow-mixed"
        raise OptionError(message, option="--to", found=part)
