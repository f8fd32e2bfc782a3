"""Parts of the Metal language, one kernel each: what it computes, against NumPy."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from kernels.emulator import metal_kernel, unavailable
from tests.emulator.test_bodies import BOTH, RNG, normal, run

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))


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
