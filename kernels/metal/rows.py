"""The geometry (grid and threadgroup) of products with quantised weights: which SIMD-group has which rows and vectors.

A SIMD-group multiplies four rows of a matrix at a time, because eight of its 32 lanes share the columns of a row. Each
lane has R rows, so a SIMD-group has a *group* of 4 R rows. A *unit* is the product of a group and a tile of M vectors.
A unit is computed by one SIMD-group, or by KS adjacent SIMD-groups, which share the columns. All units of a threadgroup
have the same vectors. The threadgroups that have the same rows, one per tile of vectors, are adjacent.

The bits of results do not depend on the geometry: the order of summation depends only on K, the number of columns
(`products.h.metal`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..cached import cached_property
from ..launch import Size

# The most vectors of a tile. Up to this number of vectors, memory bandwidth limits a product, and the product's kernel
# also computes the RMSNorm of its input x. With more vectors, arithmetic is the limit, and `norm_rows.py` computes
# the RMSNorm.
MOST_VECTORS = 8
# The number of rows that a SIMD-group multiplies at a time.
LANE_ROWS = 4


@dataclass(frozen=True)
class Tuning:
    """Parameters that change the speed of a kernel but not its results.

    Attributes:
        rows: R, rows per lane. With more rows, x is read less often; with fewer rows, the work fills more SIMD-groups.
        simdgroups: NSG, SIMD-groups per threadgroup.
    """

    rows: int = 4
    simdgroups: int = 2

    def __post_init__(self) -> None:
        if not (1 <= self.rows <= 16 and 1 <= self.simdgroups <= 32):
            raise ValueError(
                f"tuning: expected 1 to 16 rows and 1 to 32 SIMD-groups, found {self.rows} and {self.simdgroups}"
            )


TUNINGS = tuple(Tuning(rows, simdgroups) for rows in (1, 2, 4) for simdgroups in (2, 4, 8, 16))


@dataclass(frozen=True)
class Geometry:
    """The geometry of a launch over the rows of one or more matrices.

    Attributes:
        tile: M, vectors per unit.
        tiles: number of tiles. It is not a template argument, so one compiled kernel serves every number of vectors
            above 8.
        rows: R, rows per lane.
        simdgroups: NSG, SIMD-groups per threadgroup.
        split: KS, SIMD-groups that share the columns of a row.
        grid: total threads.
        threadgroup: threads per threadgroup.
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
        """The template arguments of the geometry."""
        return (("M", self.tile), ("R", self.rows), ("NSG", self.simdgroups), ("KS", self.split))


@lru_cache(maxsize=1024)
def geometry(n_rows: tuple[int, ...], vectors: int, tuning: Tuning, split: int = 1) -> Geometry:
    """Return the geometry for matrices with these numbers of rows.

    Raises:
        ValueError: `tuning` would put the SIMD-groups that share a row into several threadgroups.
    """
    if tuning.simdgroups % split:
        raise ValueError(
            f"tuning: {split} SIMD-groups share a row here: expected a multiple of {split} per threadgroup, "
            f"found {tuning.simdgroups}"
        )
    tiles = -(-vectors // MOST_VECTORS)
    groups = sum(-(-n // (LANE_ROWS * tuning.rows)) for n in n_rows)
    threadgroups = -(-groups * split // tuning.simdgroups) * tiles
    threads = 32 * tuning.simdgroups
    return Geometry(
        tile=min(vectors, MOST_VECTORS),
        tiles=tiles,
        rows=tuning.rows,
        simdgroups=tuning.simdgroups,
        split=split,
        grid=(threadgroups * threads, 1, 1),
        threadgroup=(threads, 1, 1),
    )


def segments(n_columns: int) -> int:
    """Return the number of segments into which a row's columns are cut for the sum (`Order` in `products.h.metal`)."""
    return 4 if n_columns >= 4096 else 2 if n_columns >= 2048 else 1


@lru_cache(maxsize=1024)
def k_split(n_rows: int, n_columns: int, vectors: int = 1) -> int:
    """Return KS, the number of SIMD-groups that share the columns of a row, one segment each.

    If there are few rows, one SIMD-group per 4 R rows would not keep the memory of a large GPU busy, so SIMD-groups
    share columns. With more than eight vectors, KS is 1.
    """
    split = segments(n_columns)
    return split if vectors <= MOST_VECTORS and n_rows * split <= 8192 else 1


@lru_cache(maxsize=1024)
def default_tuning(n_rows: int, vectors: int) -> Tuning:
    """Return the default tuning, which is unmeasured.

    With more than eight vectors, a lane has four rows; with one vector and a small matrix, one; otherwise, two.
    """
    if vectors > MOST_VECTORS:
        return Tuning(rows=4, simdgroups=4)
    return Tuning(rows=1 if vectors == 1 and n_rows <= 2048 else 2, simdgroups=4)


@dataclass(frozen=True)
class Work:
    """The work of one SIMD-group, for tests: rows [first, stop) of a matrix times vectors [first_vector, stop_vector).

    The SIMD-group multiplies the column segments `part`, `part + KS`, ...
    """

    matrix: int
    first: int
    stop: int
    first_vector: int
    stop_vector: int
    part: int


def work(n_rows: tuple[int, ...], vectors: int, g: Geometry, simdgroup: int) -> Work | None:
    """Return the work of SIMD-group number `simdgroup` of the grid, as in the kernels; None if it has no work."""
    threadgroup, mine = divmod(simdgroup, g.simdgroups)
    block, tile = divmod(threadgroup, g.tiles)
    group, part = divmod(block * g.simdgroups + mine, g.split)
    n = LANE_ROWS * g.rows
    for matrix, rows in enumerate(n_rows):
        groups = -(-rows // n)
        if group < groups:
            first, first_vector = group * n, tile * g.tile
            return Work(matrix, first, min(first + n, rows), first_vector, min(first_vector + g.tile, vectors), part)
        group -= groups
    return None
