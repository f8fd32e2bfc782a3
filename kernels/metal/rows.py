"""Which SIMD-group multiplies which rows: the geometry of the kernels with several rows per SIMD-group.

A *group* is R rows of one matrix; no group straddles two matrices. A *unit* is a group times a tile of M vectors: the
units of a group are neighbours, so that its weights come from memory once. A unit is the work of one SIMD-group, or
of KS neighbouring ones that share the columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from kernels.launch import Size

# Vectors that one launch can take: more are `tiles`' work, where arithmetic is the limit and not memory.
MOST_VECTORS = 8
# Vectors of a tile: sixteen numbers of each are held in registers.
TILE_VECTORS = 4


@dataclass(frozen=True)
class Tuning:
    """What changes a kernel's speed and no bit of its result.

    Attributes:
        rows: R, rows of a SIMD-group. More of them read x less often; fewer keep more SIMD-groups busy.
        simdgroups: NSG, SIMD-groups of a threadgroup.
    """

    rows: int = 4
    simdgroups: int = 2

    def __post_init__(self) -> None:
        if not (1 <= self.rows <= 16 and 1 <= self.simdgroups <= 32):
            raise ValueError(
                f"tuning: expected 1 to 16 rows and 1 to 32 SIMD-groups, found {self.rows} and {self.simdgroups}"
            )


TUNINGS = tuple(Tuning(rows, simdgroups) for rows in (1, 2, 4, 8) for simdgroups in (2, 4, 8))


@dataclass(frozen=True)
class Geometry:
    """A launch over the rows of one or more matrices.

    Attributes:
        tile: M, vectors of a unit.
        tiles: units of a group.
        rows: R.
        simdgroups: NSG.
        split: KS.
        grid: threads.
        threadgroup: threads of one group.
    """

    tile: int
    tiles: int
    rows: int
    simdgroups: int
    split: int
    grid: Size
    threadgroup: Size

    @cached_property
    def template(self) -> tuple[tuple[str, int], ...]:
        """What the text of a kernel calls all that."""
        return (
            ("M", self.tile),
            ("TILES", self.tiles),
            ("R", self.rows),
            ("NSG", self.simdgroups),
            ("KS", self.split),
        )


@lru_cache(maxsize=1024)
def geometry(n_rows: tuple[int, ...], vectors: int, tuning: Tuning, split: int = 1) -> Geometry:
    """Enough SIMD-groups for matrices of `n_rows` rows and so many vectors.

    Raises:
        ValueError: the SIMD-groups that share a row would not be in one threadgroup.
    """
    if tuning.simdgroups % split:
        raise ValueError(
            f"tuning: {split} SIMD-groups share a row here: expected a multiple of that many in a threadgroup, "
            f"found {tuning.simdgroups}"
        )
    tiles = -(-vectors // TILE_VECTORS)
    groups = sum(-(-n // tuning.rows) for n in n_rows)
    threadgroups = -(-groups * tiles * split // tuning.simdgroups)
    threads = 32 * tuning.simdgroups
    return Geometry(
        tile=-(-vectors // tiles),
        tiles=tiles,
        rows=tuning.rows,
        simdgroups=tuning.simdgroups,
        split=split,
        grid=(threadgroups * threads, 1, 1),
        threadgroup=(threads, 1, 1),
    )


@lru_cache(maxsize=1024)
def k_split(n_rows: int, n_columns: int) -> int:
    """KS: how many SIMD-groups share the columns of a row. It orders a sum, so the shape alone decides it.

    A matrix of few rows has too few SIMD-groups to keep the memory of a large GPU busy: rows are split where that makes
    at most 4,096 of them, and never so that a SIMD-group has less than two loads of 512 columns per row.
    """
    return next((s for s in (4, 2) if n_rows * s <= 4096 and n_columns >= 1024 * s), 1)


@lru_cache(maxsize=1024)
def default_tuning(n_rows: int, vectors: int) -> Tuning:
    """A start: two rows where there are few, or where several vectors take the registers. Only a measurement knows."""
    return Tuning(rows=2 if vectors > 1 or n_rows <= 2048 else 4, simdgroups=4)


@dataclass(frozen=True)
class Work:
    """What one SIMD-group does: rows [first, stop) of a matrix times vectors [first_vector, stop_vector).

    `part` of KS says which of the columns: those of every KS-th stretch of 512, the own one first.
    """

    matrix: int
    first: int
    stop: int
    first_vector: int
    stop_vector: int
    part: int


def work(n_rows: tuple[int, ...], vectors: int, g: Geometry, simdgroup: int) -> Work | None:
    """The work of a SIMD-group by its number in the grid, as the kernels' text has it; None if it has none."""
    unit, part = divmod(simdgroup, g.split)
    group, tile = divmod(unit, g.tiles)
    for matrix, n in enumerate(n_rows):
        groups = -(-n // g.rows)
        if group < groups:
            first, first_vector = group * g.rows, tile * g.tile
            return Work(matrix, first, min(first + g.rows, n), first_vector, min(first_vector + g.tile, vectors), part)
        group -= groups
    return None
