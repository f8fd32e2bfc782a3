"""Kernels as MLX's users write them, none of them for the emulator: what they compute, against NumPy."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kernels.emulator import MetalKernel, metal_kernel, unavailable

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

RNG = np.random.default_rng(7)
BOTH = pytest.mark.parametrize("build", ["spaces", "undefined"])


def normal(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.standard_normal(shape).astype(np.float32)


def run(
    kernel: MetalKernel, inputs: list[Any], shape: tuple[int, ...], dtype: Any = mx.float32, **call: Any
) -> np.ndarray[Any, Any]:
    (y,) = kernel(inputs=inputs, output_shapes=[shape], output_dtypes=[dtype], **call)
    assert isinstance(y, mx.array)
    assert (y.shape, y.dtype) == (shape, dtype)
    return np.array(y.astype(mx.float32) if dtype == mx.bfloat16 else y)


@BOTH
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_elementwise_exponential(dtype: mx.Dtype, build: str):
    source = """
        uint i = thread_position_in_grid.x;
        out[i] = T(metal::exp(float(inp[i])));
    """
    kernel = metal_kernel("elementwise_exp", ["inp"], ["out"], source)
    x = mx.array(normal(5, 33)).astype(dtype)
    call = {"grid": (x.size, 1, 1), "threadgroup": (64, 1, 1), "template": [("T", dtype)], "build": build}
    want = np.array(mx.exp(x.astype(mx.float32)).astype(dtype).astype(mx.float32))
    found = run(kernel, [x], x.shape, dtype, **call).astype(np.float32)
    assert np.allclose(found, want, rtol=2e-7 if dtype == mx.float32 else 2**-7)


def test_types_round_as_they_should():
    source = """
        uint i = thread_position_in_grid.x;
        h[i] = half(x[i]);
        b[i] = bfloat16_t(x[i]);
        hh[i] = half(x[i]) * half(x[i]);
    """
    kernel = metal_kernel("narrow", ["x"], ["h", "b", "hh"], source)
    x = np.concatenate(
        [normal(4000) * 10.0 ** RNG.integers(-9, 6, 4000), [0.0, -0.0, 65504, 65519, 65520, np.inf, 3e38]]
    )
    x = x.astype(np.float32)
    h, b, hh = kernel(
        inputs=[x],
        output_shapes=[x.shape] * 3,
        output_dtypes=[mx.float16, mx.bfloat16, mx.float16],
        grid=(x.size, 1, 1),
        threadgroup=(256, 1, 1),
    )
    with np.errstate(over="ignore"):
        half = x.astype(np.float16)
        assert np.array_equal(np.array(h), half)
        assert np.array_equal(np.array(hh), half * half)
    assert np.array_equal(np.array(b.view(mx.uint16)), np.array(mx.array(x).astype(mx.bfloat16).view(mx.uint16)))


STRIDED = """
    uint elem = thread_position_in_grid.x;
    int64_t loc = elem_to_loc<int64_t>(elem, x_shape, x_strides, x_ndim);
    y[elem] = x[loc] * 2.0f;
"""


@pytest.mark.parametrize(
    "view",
    [
        lambda a: a,
        lambda a: a.T,
        lambda a: a[:, ::2, 1:],
        lambda a: a[::-1, :, ::-3],
        lambda a: mx.broadcast_to(a[:1], (4, 6, 7)),
        lambda a: a[1],
    ],
    ids=["plain", "transposed", "slices", "backwards", "broadcast", "row"],
)
def test_strided_inputs(view: Any):
    kernel = metal_kernel("strided", ["x"], ["y"], STRIDED, ensure_row_contiguous=False)
    x = view(mx.array(normal(3, 6, 7)))
    found = run(kernel, [x], x.shape, grid=(x.size, 1, 1), threadgroup=(32, 1, 1))
    assert np.array_equal(found, np.array(x) * 2)


def test_strided_inputs_are_copied_unless_told_otherwise():
    kernel = metal_kernel("dense", ["x"], ["y"], "uint i = thread_position_in_grid.x; y[i] = x[i] + x_strides[0];")
    x = mx.array(normal(6, 5)).T
    assert np.array_equal(run(kernel, [x], (5, 6), grid=(30, 1, 1), threadgroup=(30, 1, 1)), np.array(x) + 6)


@BOTH
def test_softmax_of_rows(build: str):
    source = """
        constexpr int lanes = 32;
        const uint row = threadgroup_position_in_grid.x;
        const uint lane = thread_index_in_simdgroup;
        const device T* in = x + row * C;
        T largest = Limits<T>::min;
        for (uint c = lane; c < C; c += lanes) largest = metal::max(largest, in[c]);
        largest = simd_max(largest);
        T total = 0;
        for (uint c = lane; c < C; c += lanes) total += metal::fast::exp(in[c] - largest);
        total = simd_sum(total);
        for (uint c = lane; c < C; c += lanes) y[row * C + c] = metal::fast::exp(in[c] - largest) / total;
    """
    kernel = metal_kernel("softmax", ["x"], ["y"], source)
    x = normal(9, 77) * 5
    call = {"grid": (9 * 32, 1, 1), "threadgroup": (32, 1, 1), "template": [("T", mx.float32), ("C", 77)]}
    e = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    assert np.allclose(run(kernel, [x], x.shape, build=build, **call), e / e.sum(1, keepdims=True), rtol=3e-6)


@BOTH
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_transposition_through_threadgroup_memory(seed: int, build: str):
    source = """
        threadgroup float tile[16][17];
        uint2 at = thread_position_in_threadgroup.xy;
        uint2 block = threadgroup_position_in_grid.xy * 16;
        if (block.y + at.y < uint(x_shape[0]) && block.x + at.x < uint(x_shape[1]))
          tile[at.y][at.x] = x[(block.y + at.y) * x_shape[1] + block.x + at.x];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        uint2 to = uint2(block.y, block.x) + at;
        if (to.y < uint(x_shape[1]) && to.x < uint(x_shape[0])) y[to.y * x_shape[0] + to.x] = tile[at.x][at.y];
    """
    kernel = metal_kernel("transpose", ["x"], ["y"], source)
    x = normal(35, 50)
    found = run(kernel, [x], (50, 35), grid=(64, 48, 1), threadgroup=(16, 16, 1), seed=seed, build=build)
    assert np.array_equal(found, x.T)
    assert kernel.statistics is not None
    assert kernel.statistics.threadgroup_bytes == 16 * 17 * 4


@BOTH
def test_running_sum(build: str):
    source = """
        threadgroup int totals[32];
        uint i = thread_position_in_threadgroup.x;
        int sum = simd_prefix_inclusive_sum(x[i]);
        if (thread_index_in_simdgroup == 31) totals[simdgroup_index_in_threadgroup] = sum;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (simdgroup_index_in_threadgroup == 0) {
          uint lane = thread_index_in_simdgroup;
          int total = lane < simdgroups_per_threadgroup ? totals[lane] : 0;
          totals[lane] = simd_prefix_exclusive_sum(total);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        y[i] = sum + totals[simdgroup_index_in_threadgroup];
    """
    kernel = metal_kernel("running_sum", ["x"], ["y"], source)
    x = RNG.integers(-99, 99, 1024).astype(np.int32)
    for seed in (0, 1, 5):
        found = run(kernel, [x], (1024,), mx.int32, grid=(1024, 1, 1), threadgroup=(1024, 1, 1), seed=seed, build=build)
        assert np.array_equal(found, np.cumsum(x))


@BOTH
def test_histogram_with_atomics(build: str):
    source = """
        uint i = thread_position_in_grid.x;
        if (i < x_shape[0]) atomic_fetch_add_explicit(&counts[x[i]], 1u, memory_order_relaxed);
    """
    kernel = metal_kernel("histogram", ["x"], ["counts"], source, atomic_outputs=True)
    x = RNG.integers(0, 10, 1000).astype(np.uint8)
    call = {"grid": (1024, 1, 1), "threadgroup": (128, 1, 1), "init_value": 0, "build": build}
    assert np.array_equal(run(kernel, [x], (10,), mx.uint32, **call), np.bincount(x, minlength=10))


def test_scatter_add_and_maximum_of_floats():
    source = """
        uint i = thread_position_in_grid.x;
        atomic_fetch_add_explicit(&total[where[i]], x[i], memory_order_relaxed);
        float seen = atomic_load_explicit(&largest[0], memory_order_relaxed);
        while (seen < x[i] && !atomic_compare_exchange_weak_explicit(
            &largest[0], &seen, x[i], memory_order_relaxed, memory_order_relaxed)) {}
    """
    kernel = metal_kernel("scatter", ["x", "where"], ["total", "largest"], source, atomic_outputs=True)
    x, where = normal(64), RNG.integers(0, 4, 64).astype(np.int32)
    total, largest = kernel(
        inputs=[x, where],
        output_shapes=[(4,), (1,)],
        output_dtypes=[mx.float32, mx.float32],
        grid=(64, 1, 1),
        threadgroup=(64, 1, 1),
        init_value=0,
    )
    assert np.allclose(np.array(total), [x[where == i].sum() for i in range(4)], atol=1e-5)
    assert largest.item() == x.max()


BILINEAR = """
    const uint elem = thread_position_in_grid.x;
    const int H = x_shape[1], W = x_shape[2], C = x_shape[3];
    const int gN = grid_shape[1] * grid_shape[2];
    const int c = elem % C;
    const int point = elem / C;
    const int n = point / gN;
    const float ix = ((grid[point * 2] + 1) * W - 1) / 2;
    const float iy = ((grid[point * 2 + 1] + 1) * H - 1) / 2;
    const int left = int(metal::floor(ix)), top = int(metal::floor(iy));
    const float right_part = ix - left, lower_part = iy - top;
    float sum = 0;
    for (int dy = 0; dy < 2; dy++)
      for (int dx = 0; dx < 2; dx++) {
        const int px = left + dx, py = top + dy;
        const float weight = (dx ? right_part : 1 - right_part) * (dy ? lower_part : 1 - lower_part);
        if (px >= 0 && px < W && py >= 0 && py < H) sum += weight * x[((n * H + py) * W + px) * C + c];
      }
    out[elem] = sum;
"""


def bilinear(x: np.ndarray[Any, Any], grid: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    n, h, w, c = x.shape
    padded = np.zeros((n, h + 4, w + 4, c))
    padded[:, 2:-2, 2:-2] = x
    out = np.zeros((*grid.shape[:3], c))
    for at in np.ndindex(grid.shape[:3]):
        ix, iy = ((grid[at][0] + 1) * w - 1) / 2, ((grid[at][1] + 1) * h - 1) / 2
        left, top = int(np.floor(ix)), int(np.floor(iy))
        fx, fy = ix - left, iy - top
        block = padded[at[0], top + 2 : top + 4, left + 2 : left + 4]
        out[at] = np.einsum("yxc,y,x->c", block, [1 - fy, fy], [1 - fx, fx])
    return out


@BOTH
def test_sampling_of_an_image(build: str):
    kernel = metal_kernel("grid_sample", ["x", "grid"], ["out"], BILINEAR)
    x, grid = normal(2, 6, 5, 3), RNG.uniform(-1, 1, (2, 4, 7, 2)).astype(np.float32)
    size = 2 * 4 * 7 * 3
    found = run(kernel, [x, grid], (2, 4, 7, 3), grid=(size, 1, 1), threadgroup=(64, 1, 1), build=build)
    assert np.allclose(found, bilinear(x, grid), atol=2e-6)


@pytest.mark.parametrize("add", [False, True])
def test_scalars_and_flags(add: bool):
    source = """
        uint i = thread_position_in_grid.x;
        float scaled = x[i] * scale;
        if (ADD) scaled += offset[0];
        y[i] = MODE == -1 ? -scaled : scaled;
    """
    kernel = metal_kernel("scaled", ["x", "scale", "offset"], ["y"], source)
    x = normal(10)
    template = [("ADD", add), ("MODE", -1)]
    found = run(kernel, [x, mx.array(3.0), [0.5]], (10,), grid=(10, 1, 1), threadgroup=(10, 1, 1), template=template)
    assert np.allclose(found, -(x * np.float32(3) + (0.5 if add else 0)))
