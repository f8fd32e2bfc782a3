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


@BOTH
@pytest.mark.parametrize("element", [mx.float32, mx.float16])
def test_matrix_product_with_simdgroup_matrices(element: mx.Dtype, build: str):
    source = """
        simdgroup_matrix<float, 8, 8> sum = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        const uint2 at = threadgroup_position_in_grid.xy * 8;
        for (uint k = 0; k < K; k += 8) {
          simdgroup_matrix<T, 8, 8> left, right;
          simdgroup_load(left, a + at.y * K + k, K);
          simdgroup_load(right, b + at.x * K + k, K, ulong2(0, 0), true);
          simdgroup_multiply_accumulate(sum, left, right, sum);
        }
        simdgroup_store(sum, y + at.y * N + at.x, N);
    """
    kernel = metal_kernel("matmul", ["a", "b"], ["y"], source, header="#include <metal_simdgroup_matrix>\n")
    a, b = (mx.array(normal(n, 24)).astype(element) for n in (16, 40))
    call = {"grid": (5 * 32, 2, 1), "threadgroup": (32, 1, 1), "template": [("T", element), ("K", 24), ("N", 40)]}
    want = np.array(a.astype(mx.float32)).astype(np.float64) @ np.array(b.astype(mx.float32)).astype(np.float64).T
    assert np.allclose(run(kernel, [a, b], (16, 40), build=build, **call), want, atol=1e-5)


@BOTH
def test_shuffles_and_votes(build: str):
    source = """
        ushort lane = thread_index_in_simdgroup;
        int v = x[thread_position_in_grid.x];
        int row[] = {
          simd_shuffle_xor(v, 5), simd_broadcast(v, 7), simd_shuffle(v, ushort(31 - lane)),
          simd_shuffle_and_fill_down(v, -1 - v, 3), simd_shuffle_and_fill_up(v, -1 - v, 3),
          simd_shuffle_rotate_down(v, 4), quad_sum(v), quad_shuffle_xor(v, 1), quad_broadcast(v, 2),
          int(simd_ballot(v > 50).operator ulong() & 0xFFFF), int(simd_any(v == 99)) + 2 * int(simd_all(v >= 0)),
          simd_min(v), simd_xor(v), simd_broadcast_first(v),
        };
        for (int i = 0; i < 14; i++) y[i * 32 + lane] = row[i];
    """
    kernel = metal_kernel("shuffles", ["x"], ["y"], source)
    x = RNG.integers(0, 100, 32).astype(np.int32)
    found = run(kernel, [x], (14, 32), mx.int32, grid=(32, 1, 1), threadgroup=(32, 1, 1), seed=3, build=build)
    lane, quads = np.arange(32), x.reshape(8, 4)
    fill = -1 - x
    want = [
        x[lane ^ 5], x[7], x[::-1],
        np.concatenate([x[3:], fill[:3]]), np.concatenate([fill[-3:], x[:-3]]),
        np.roll(x, -4), np.repeat(quads.sum(1), 4), x[lane ^ 1], np.repeat(quads[:, 2], 4),
        sum(1 << i for i in range(16) if x[i] > 50), int((x == 99).any()) + 2,
        x.min(), np.bitwise_xor.reduce(x), x[0],
    ]  # fmt: skip
    for i, row in enumerate(want):
        assert np.array_equal(found[i], np.broadcast_to(row, 32)), i


def test_vectors_integers_and_mathematics():
    source = """
        float4 v = float4(x[0], float2(x[1], x[2]), x[3]);
        int4 whole = int4(v * 10.0f);
        half2 narrow = half2(v.xz);
        const float pi = M_PI_F;
        uint bits = as_type<uint>(x[0]);
        float results[] = {
          dot(v, v), length(v.xyz), float(whole.w), float(narrow.y), clamp(x[1], -0.5f, 0.5f), mix(x[0], x[1], 0.25f),
          float(popcount(bits)), float(clz(uint(40))), float(ctz(uint(40))), rsqrt(4.0f), metal::precise::tanh(x[2]),
          fma(x[0], x[1], x[2]), sin(pi / 6.0f), select(1.0f, 2.0f, x[0] > x[1]), float(all(v > -100.0f)),
          pow(2.0f, 0.5f), fract(2.75f), sign(-3.0f), float(reverse_bits(1u) >> 31), float(extract_bits(0xF0u, 4, 4)),
          float(ceildiv(10, 4)), float(mulhi(1u << 31, 4u)), log1p(1e-5f), float(max(3, 5)), step(0.5f, 0.25f),
        };
        for (int i = 0; i < 25; i++) y[i] = results[i];
    """
    kernel = metal_kernel("library", ["x"], ["y"], source)
    x = np.array([0.5, -1.25, 2.0, -0.75], np.float32)
    found = run(kernel, [x], (25,), grid=(1, 1, 1), threadgroup=(1, 1, 1))
    want = [
        x @ x, np.sqrt(x[:3] @ x[:3]), -7, 2.0, -0.5, 0.5 + 0.25 * -1.75,
        bin(int(x[:1].view(np.uint32)[0])).count("1"), 26, 3, 0.5, np.tanh(2.0),
        0.5 * -1.25 + 2, 0.5, 2.0, 1.0, 2**0.5, 0.75, -1.0, 1.0, 15.0, 3.0, 2.0, 1e-5, 5.0, 0.0,
    ]  # fmt: skip
    assert np.allclose(found, want, rtol=1e-6)


def test_constants_and_structures_in_the_header():
    header = """
        constant float weights[3] = {0.25f, 0.5f, 0.25f};
        struct Window { int first; int last; };
        template <typename T>
        T smooth(const device T* x, Window window, int n) {
          T sum = 0;
          for (int i = window.first; i <= window.last; i++) sum += x[clamp(i, 0, n - 1)] * weights[i - window.first];
          return sum;
        }
    """
    source = "int i = thread_position_in_grid.x; y[i] = smooth<float>(x, Window{i - 1, i + 1}, x_shape[0]);"
    kernel = metal_kernel("smooth", ["x"], ["y"], source, header)
    x = normal(20)
    padded = np.pad(x, 1, mode="edge")
    want = 0.25 * padded[:-2] + 0.5 * padded[1:-1] + 0.25 * padded[2:]
    assert np.allclose(run(kernel, [x], (20,), grid=(20, 1, 1), threadgroup=(8, 1, 1)), want, atol=1e-6)


def test_every_attribute_at_the_edge_of_a_grid():
    """Threadgroups of 5 x 4 x 2 on a grid of 12 x 7 x 3: those at the edge are smaller."""
    source = """
        uint i = (thread_position_in_grid.z * 7 + thread_position_in_grid.y) * 12 + thread_position_in_grid.x;
        uint row[] = {
          dispatch_quadgroups_per_threadgroup, dispatch_simdgroups_per_threadgroup,
          dispatch_threads_per_threadgroup.x, grid_origin.x, grid_size.y, quadgroup_index_in_threadgroup,
          quadgroups_per_threadgroup, simdgroup_index_in_threadgroup, simdgroups_per_threadgroup,
          thread_execution_width, thread_index_in_quadgroup, thread_index_in_simdgroup, thread_index_in_threadgroup,
          thread_position_in_threadgroup.x, thread_position_in_threadgroup.y, thread_position_in_threadgroup.z,
          threadgroup_position_in_grid.x, threadgroups_per_grid.y, threads_per_grid.z, threads_per_simdgroup,
          threads_per_threadgroup.x, threads_per_threadgroup.y, threads_per_threadgroup.z,
        };
        for (int k = 0; k < 23; k++) y[i * 23 + k] = row[k];
    """
    kernel = metal_kernel("attributes", [], ["y"], source)
    found = run(kernel, [], (3, 7, 12, 23), mx.uint32, grid=(12, 7, 3), threadgroup=(5, 4, 2))
    for z, y, x in np.ndindex(3, 7, 12):
        size = [min(5, 12 - x // 5 * 5), min(4, 7 - y // 4 * 4), min(2, 3 - z // 2 * 2)]
        inside = [x % 5, y % 4, z % 2]
        index, threads = (inside[2] * size[1] + inside[1]) * size[0] + inside[0], int(np.prod(size))
        want = [10, 2, 5, 0, 7, index // 4, -(-threads // 4), index // 32, -(-threads // 32), 32, index % 4, index % 32,
                index, *inside, x // 5, 2, 3, 32, *size]  # fmt: skip
        assert found[z, y, x].tolist() == want


def test_a_threadgroup_larger_than_the_grid_is_cut():
    kernel = metal_kernel("cut", [], ["y"], "y[thread_position_in_grid.x] = threads_per_threadgroup.x;")
    assert run(kernel, [], (5,), mx.uint32, grid=(5, 1, 1), threadgroup=(1024, 1, 1)).tolist() == [5] * 5


def test_small_floats_become_zero_as_on_a_gpu():
    kernel = metal_kernel("tiny", ["x"], ["y"], "y[thread_position_in_grid.x] = x[thread_position_in_grid.x] * 0.5f;")
    x = np.array([2.0**-126, 2.0**-125, 1.0] * 3, np.float32)
    call = {"grid": (9, 1, 1), "threadgroup": (9, 1, 1)}
    assert run(kernel, [x], (9,), **call).tolist() == [0.0, 2.0**-126, 0.5] * 3
    assert (x * np.float32(0.5))[0] != 0  # and nobody else is bothered


def test_complex_numbers():
    kernel = metal_kernel(
        "square",
        ["x"],
        ["y"],
        "uint i = thread_position_in_grid.x; y[i] = x[i].real - 2.0f * x[i].imag;",
    )
    x = (normal(9) + 1j * normal(9)).astype(np.complex64)
    assert np.allclose(run(kernel, [x], (9,), grid=(9, 1, 1), threadgroup=(9, 1, 1)), x.real - 2 * x.imag, atol=1e-6)


def test_an_output_starts_as_nan_or_as_told():
    kernel = metal_kernel("nothing", [], ["y"], "")
    call = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1)}
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        assert np.isnan(run(kernel, [], (3,), dtype, **call)).all()
        assert run(kernel, [], (3,), dtype, init_value=-2, **call).tolist() == [-2] * 3
    assert run(kernel, [], (2, 2), mx.int32, init_value=7, **call).tolist() == [[7, 7], [7, 7]]
    assert run(kernel, [], (0,), mx.int32, **call).tolist() == []
