"""Which thread makes what: arithmetic, checked for any size without running a kernel."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.metal import (
    attention,
    dequantize,
    embed_rows,
    head_norm_rope,
    norm_rows,
    simd_per_row,
    thread_per_output,
    tiles,
)
from kernels.metal.rows import LANE_ROWS, MOST_VECTORS, Tuning, default_tuning, geometry, k_split, segments, work

any_size = settings(max_examples=80)
tunings = st.builds(Tuning, st.integers(1, 8), st.sampled_from([4, 8, 16]))


def whole(grid: tuple[int, int, int], threadgroup: tuple[int, int, int]) -> bool:
    """Whole threadgroups, of whole SIMD-groups and not too many threads."""
    return (
        all(g % t == 0 and g >= t >= 1 for g, t in zip(grid, threadgroup, strict=True))
        and threadgroup[0] % 32 == 0
        and threadgroup[1:] == (1, 1)
        and threadgroup[0] <= 1024
    )


@any_size
@given(st.lists(st.integers(1, 90), min_size=1, max_size=3), st.integers(1, 30), tunings, st.sampled_from([1, 2, 4]))
def test_each_row_and_vector_belongs_to_one_simdgroup(n_rows: list[int], vectors: int, tuning: Tuning, split: int):
    rows = tuple(n_rows)
    g = geometry(rows, vectors, tuning, split)
    assert whole(g.grid, g.threadgroup)
    assert g.threadgroup == (32 * g.simdgroups, 1, 1)
    assert g.tile <= MOST_VECTORS
    owners: Counter[tuple[int, int, int, int]] = Counter()
    for simdgroup in range(g.grid[0] // 32):
        own = work(rows, vectors, g, simdgroup)
        if own is None:
            continue
        # None straddles two matrices, and those that share rows are in one threadgroup.
        assert 0 <= own.first < own.stop <= rows[own.matrix]
        assert own.stop - own.first <= LANE_ROWS * g.rows
        assert own.part == simdgroup % g.simdgroups % split
        owners.update(
            (own.matrix, row, vector, own.part)
            for row in range(own.first, own.stop)
            for vector in range(own.first_vector, own.stop_vector)
        )
    assert set(owners.values()) == {1}
    assert len(owners) == sum(rows) * vectors * split


@any_size
@given(st.integers(1, 60), st.integers(9, 16), tunings)
def test_neighboring_threadgroups_have_the_same_rows_and_other_vectors(n_rows: int, vectors: int, tuning: Tuning):
    g = geometry((n_rows,), vectors, tuning)
    assert g.tiles == 2
    for simdgroup in range(0, g.grid[0] // 32, 2 * g.simdgroups):
        first, second = (work((n_rows,), vectors, g, simdgroup + i * g.simdgroups) for i in range(2))
        assert first is not None
        assert second is not None
        assert (first.first, first.stop) == (second.first, second.stop)
        assert first.stop_vector == second.first_vector


@any_size
@given(st.integers(1, 200_000), st.integers(1, 1024).map(lambda blocks: 32 * blocks), st.integers(1, 8))
def test_the_split_keeps_every_simdgroup_busy_and_the_default_tuning_fits(n_rows: int, n_columns: int, vectors: int):
    split = k_split(n_rows, n_columns)
    assert split in (1, 2, 4)
    assert split in (1, segments(n_columns))
    if split > 1:
        assert n_columns >= 1024 * split
        assert n_rows * split <= 8192
    assert k_split(n_rows, n_columns, MOST_VECTORS + 1) == 1
    assert geometry((n_rows,), vectors, default_tuning(n_rows, vectors), split).split == split


def test_the_matrices_of_a_small_model_are_split_where_they_have_few_rows():
    shapes = {(4096, 1024): 1, (1024, 2048): 2, (6144, 1024): 1, (1024, 3072): 2, (151_936, 1024): 1, (512, 4096): 4}
    assert {shape: k_split(*shape) for shape in shapes} == shapes


@any_size
@given(st.integers(1, 4096).map(lambda blocks: 32 * blocks))
def test_every_segment_has_columns(n_columns: int):
    """As `Order` in the kernels' header cuts them: whole steps of 128 columns, none left over."""
    n = segments(n_columns)
    length = -(-n_columns // (128 * n)) * 128
    assert (n - 1) * length < n_columns <= n * length


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [((16, 8, 128), 2), ((8, 1, 128), 2), ((32, 8, 64), 4), ((8, 1, 8), 4), ((4, 4, 64), 1), ((6, 2, 64), 3),
     ((4, 1, 256), 1), ((7, 1, 40), 1), ((10, 2, 64), 1)],
)  # fmt: skip
def test_query_heads_that_share_keys_share_a_threadgroup_as_far_as_registers_go(
    sizes: tuple[int, int, int], expected: int
):
    assert attention.heads(*sizes) == expected
    grid, group = attention.grid(5, *sizes)
    assert whole(grid, group)
    assert grid[0] // group[0] * expected == 5 * sizes[0]


def test_simdgroups_that_share_a_row_are_in_one_threadgroup():
    with pytest.raises(ValueError, match=r"4 SIMD-groups share a row here: expected a multiple .* found 2"):
        geometry((10,), 1, Tuning(4, 2), split=4)


@pytest.mark.parametrize("numbers", [(0, 2), (17, 2), (4, 0), (4, 33)])
def test_a_tuning_that_no_gpu_can_run_is_refused(numbers: tuple[int, int]):
    with pytest.raises(ValueError, match="expected 1 to 16 rows and 1 to 32 SIMD-groups"):
        Tuning(*numbers)


@any_size
@given(st.integers(1, 300_000), st.integers(1, 600), st.integers(1, 300).map(lambda blocks: 32 * blocks))
def test_the_other_grids_have_a_thread_for_each_output(n_rows: int, vectors: int, n_columns: int):
    grid, group = thread_per_output.grid(n_rows, vectors)
    assert whole(grid, group)
    assert n_rows <= grid[0] < n_rows + group[0]
    assert grid[1] == vectors
    grid, group = simd_per_row.grid(n_rows, vectors)
    assert whole(grid, group)
    assert n_rows <= grid[0] // 32 < n_rows + group[0] // 32
    assert grid[1] == vectors
    tile, grid, group = tiles.grid(n_rows, vectors)
    assert whole(grid, group)
    assert n_rows <= grid[0] // group[0] * tiles.ROWS < n_rows + tiles.ROWS
    assert vectors <= grid[1] * tile < vectors + tile
    grid, group = dequantize.grid(n_rows * n_columns)
    assert whole(grid, group)
    assert 0 <= 16 * grid[0] - n_rows * n_columns < 16 * group[0]
    grid, group = embed_rows.grid(vectors, n_columns)
    assert whole(grid, group)
    assert 0 <= 16 * grid[0] - n_columns < 16 * group[0]
    grid, group = norm_rows.grid(vectors)
    assert whole(grid, group)
    assert vectors <= grid[0] // 8 < vectors + group[0] // 8
    grid, group = head_norm_rope.grid(vectors, 3, 2)
    assert whole(grid, group)
    assert 7 * vectors <= grid[0] // 32 < 7 * vectors + group[0] // 32
