"""MLX's own .metal files, compared with NumPy and with MLX on the CPU."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from kernels.emulator import Unwritten
from tests.collection.case import Checkout, Results, case
from tests.collection.whole import launch

MLX = "ml-explore/mlx"
KERNELS = "mlx/backend/metal/kernels"
Array = NDArray[Any]


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def out(*shape: int, dtype: Any = np.float32) -> Unwritten:
    return Unwritten(shape, dtype)


def ints(*values: int) -> Array:
    return np.array(values, np.int32)


def longs(*values: int) -> Array:
    return np.array(values, np.int64)


def run(checkout: Checkout, file: str, kernel: str, buffers: Any, **how: Any) -> list[Any]:
    return launch(checkout, f"{KERNELS}/{file}.metal", kernel, buffers, **how)


@case(MLX)
def metal_arange(checkout: Checkout) -> Results:
    found = run(
        checkout,
        "arange",
        "arangefloat32",
        [np.float32(1), np.float32(0.5), out(50)],
        grid=(50, 1, 1),
        threadgroup=(32, 1, 1),
    )
    return found, [1 + 0.5 * np.arange(50)]


@case(MLX)
def metal_unary(checkout: Checkout) -> Results:
    x = normal(101)
    expected = {"Exp": np.exp(x), "Tanh": np.tanh(x), "Square": x * x, "Erf": mx.erf(mx.array(x)), "Abs": abs(x)}
    grid = {"grid": (101, 1, 1), "threadgroup": (32, 1, 1)}
    found = [run(checkout, "unary", f"v_{op}float32float32", [x, out(101), 101], **grid)[0] for op in expected]
    return found, list(expected.values())


@case(MLX, tolerance=1e-2)
def metal_unary_bfloat(checkout: Checkout) -> Results:
    x = mx.array(normal(64)).astype(mx.bfloat16)
    found = run(
        checkout, "unary", "v_Expbfloat16bfloat16", [x, out(64, dtype=mx.bfloat16), 64],
        grid=(64, 1, 1), threadgroup=(16, 1, 1),
    )  # fmt: skip
    return found, [mx.exp(x)]


@case(MLX)
def metal_binary(checkout: Checkout) -> Results:
    a, b = normal(99), abs(normal(99, seed=1)) + 0.5
    expected = {"Add": a + b, "Multiply": a * b, "Divide": a / b, "Maximum": np.maximum(a, b), "Power": abs(a) ** b}
    found = []
    for op in expected:
        given = [abs(a) if op == "Power" else a, b, out(99), 99]
        found += run(checkout, "binary", f"vv_{op}float32", given, grid=(99, 1, 1), threadgroup=(32, 1, 1))
    return found, list(expected.values())


@case(MLX)
def metal_binary_two(checkout: Checkout) -> Results:
    a, b = np.arange(40, dtype=np.int32), np.full(40, 7, np.int32)
    found = run(
        checkout, "binary_two", "vv_DivModint32", [a, b, out(40, dtype=np.int32), out(40, dtype=np.int32), 40],
        grid=(40, 1, 1), threadgroup=(20, 1, 1),
    )  # fmt: skip
    return found, [a // b, a % b]


@case(MLX)
def metal_ternary(checkout: Checkout) -> Results:
    a, b = normal(64), normal(64, seed=1)
    condition = a > 0
    found = run(
        checkout, "ternary", "v_Selectfloat32", [condition, a, b, out(64), 64], grid=(64, 1, 1), threadgroup=(32, 1, 1)
    )
    return found, [np.where(condition, a, b)]


@case(MLX)
def metal_copy(checkout: Checkout) -> Results:
    x = normal(64)
    found = run(
        checkout, "copy", "v_copyfloat32float16", [x, out(64, dtype=np.float16), 64],
        grid=(64, 1, 1), threadgroup=(32, 1, 1),
    )  # fmt: skip
    return found, [x.astype(np.float16)]


@case(MLX)
def metal_softmax(checkout: Checkout) -> Results:
    x = normal(3, 300)
    e = np.exp(x - x.max(-1, keepdims=True))
    found = run(
        checkout, "softmax", "block_softmax_float32", [x, out(3, 300), 300], grid=(96 * 3, 1, 1), threadgroup=(96, 1, 1)
    )
    looped = run(
        checkout, "softmax", "looped_softmax_float32", [x, out(3, 300), 300], grid=(1024 * 3, 1, 1),
        threadgroup=(1024, 1, 1),
    )  # fmt: skip
    return found + looped, [e / e.sum(-1, keepdims=True)] * 2


@case(MLX)
def metal_logsumexp(checkout: Checkout) -> Results:
    x = normal(3, 300)
    found = run(
        checkout, "logsumexp", "block_logsumexp_float32", [x, out(3), 300], grid=(96 * 3, 1, 1), threadgroup=(96, 1, 1)
    )
    return found, [np.log(np.exp(x).sum(-1))]


@case(MLX)
def metal_rms_norm(checkout: Checkout) -> Results:
    x, w = normal(3, 300), normal(300, seed=1)
    expected = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w
    buffers = [x, w, out(3, 300), 1e-5, 300, 1]
    found = run(checkout, "rms_norm", "rmsfloat32", buffers, grid=(96 * 3, 1, 1), threadgroup=(96, 1, 1))
    found += run(checkout, "rms_norm", "rms_loopedfloat32", buffers, grid=(64 * 3, 1, 1), threadgroup=(64, 1, 1))
    return found, [expected] * 2


def layer_norm(checkout: Checkout, width: int) -> Results:
    x, w, b = normal(3, width), normal(width, seed=1), normal(width, seed=2)
    centred = x - x.mean(-1, keepdims=True)
    expected = centred / np.sqrt((centred * centred).mean(-1, keepdims=True) + 1e-5) * w + b
    buffers = [x, w, b, out(3, width), 1e-5, width, 1, 1]
    found = run(checkout, "layer_norm", "layer_normfloat32", buffers, grid=(64 * 3, 1, 1), threadgroup=(64, 1, 1))
    return found, [expected]


@case(MLX)
def metal_layer_norm(checkout: Checkout) -> Results:
    return layer_norm(checkout, 512)


@case(MLX, bug="threads behind the row's end write before the start of thread_x: n is negative")
def metal_layer_norm_ragged(checkout: Checkout) -> Results:
    return layer_norm(checkout, 300)


@case(MLX)
def metal_rope(checkout: Checkout) -> Results:
    heads, width = 3, 64
    x = normal(1, heads, 1, width)
    buffers = {0: x, 1: out(*x.shape), 2: ints(7), 3: 1.0, 4: longs(width), 10: float(np.log2(10000.0))}
    found = run(
        checkout, "rope", "rope_single_float32", buffers, grid=(width // 2, heads, 1), threadgroup=(32, 1, 1),
        constants={1: True, 2: False, 3: False},
    )  # fmt: skip
    expected = mx.fast.rope(mx.array(x), width, traditional=False, base=10000.0, scale=1.0, offset=7)
    return found, [expected]


@case(MLX)
def metal_arg_reduce(checkout: Checkout) -> Results:
    x = normal(5, 77)
    buffers = [x, out(5, dtype=np.uint32), ints(5), longs(77), longs(1), 1, 1, 77]
    found = run(checkout, "arg_reduce", "argmax_float32", buffers, grid=(32, 5, 1), threadgroup=(32, 1, 1))
    return found, [x.argmax(-1)]


@case(MLX)
def metal_sort(checkout: Checkout) -> Results:
    x = normal(2, 100)
    buffers = [x, out(2, 100), 100, 1, 1, 100, 100]
    found = run(
        checkout, "sort", "carg_block_sort_float32_uint32_bn128_tn4", [x, out(2, 100, dtype=np.uint32), *buffers[2:]],
        grid=(128, 2, 1), threadgroup=(128, 1, 1),
    )  # fmt: skip
    found += run(
        checkout, "sort", "c_block_sort_float32_float32_bn128_tn4", buffers, grid=(128, 2, 1), threadgroup=(128, 1, 1)
    )
    return found, [x.argsort(-1), np.sort(x, -1)]


@case(MLX)
def metal_scan(checkout: Checkout) -> Results:
    x = normal(3, 200)
    found = run(
        checkout, "scan", "contig_scan_inclusive_sum_float32_float32", [x, out(3, 200), 200], grid=(64, 3, 1),
        threadgroup=(64, 1, 1),
    )  # fmt: skip
    return found, [x.cumsum(-1)]


@case(MLX)
def metal_reduce(checkout: Checkout) -> Results:
    x = normal(4, 300)
    found = run(
        checkout, "reduce", "row_reduce_simple_sumfloat32", [x, out(4), 300, 4], grid=(64, 1, 1), threadgroup=(64, 1, 1)
    )
    return found, [x.sum(-1)]


@case(MLX)
def metal_random(checkout: Checkout) -> Results:
    key, n = mx.random.key(3), 16
    buffers = [np.array(key), out(4 * n, dtype=np.int8), False, 4 * n]
    found = run(checkout, "random", "rbitsc", buffers, grid=(1, n // 2, 1), threadgroup=(1, n // 2, 1))
    bits = np.array(found[0]).view(np.uint32)
    return [bits / 2.0**32], [mx.random.uniform(shape=(n,), key=key)]


@case(MLX)
def metal_searchsorted(checkout: Checkout) -> Results:
    edges, x = np.sort(normal(40)), normal(60, seed=1)
    buffers = [edges, x, out(60, dtype=np.uint32), 40, 1]
    found = run(checkout, "searchsorted", "searchsorted_float32_left", buffers, grid=(60, 1, 1), threadgroup=(60, 1, 1))
    return found, [np.searchsorted(edges, x)]


@case(MLX)
def metal_quantized_qmv(checkout: Checkout) -> Results:
    rows, columns = 16, 512
    w, x = mx.array(normal(rows, columns)), mx.array(normal(columns, seed=1))
    quants, scales, biases = mx.quantize(w, group_size=64, bits=4)
    buffers = dict(enumerate([quants, scales, biases, x, out(rows), columns, rows, *[None] * 8]))
    found = run(
        checkout, "quantized", "affine_qmv_fast_float_gs_64_b_4_batch_0", buffers | {7: 0, 10: 0},
        grid=(32, 2 * rows // 8, 1), threadgroup=(32, 2, 1),
    )  # fmt: skip
    return found, [mx.quantized_matmul(x, quants, scales, biases, group_size=64, bits=4)]


@case(MLX)
def metal_dequantize(checkout: Checkout) -> Results:
    quants, scales, biases = mx.quantize(mx.array(normal(4, 128)), group_size=64, bits=8)
    buffers = [np.array(quants).view(np.uint8), scales, biases, out(4, 128)]
    found = run(
        checkout, "quantized", "affine_dequantize_float_gs_64_b_8", buffers, grid=(128, 4, 1), threadgroup=(32, 1, 1)
    )
    return found, [mx.dequantize(quants, scales, biases, group_size=64, bits=8)]


@case(MLX)
def metal_sdpa_vector(checkout: Checkout) -> Results:
    heads, groups, tokens, width = 4, 2, 50, 64
    q, k, v = normal(1, heads, 1, width), normal(1, groups, tokens, width, seed=1), normal(1, groups, tokens, width)
    stride = [tokens * width, width]
    buffers = [q, k, v, out(*q.shape), heads // groups, tokens, *stride, *stride, 0.125, *[None] * 7]
    found = run(
        checkout, "scaled_dot_product_attention", "sdpa_vector_float_64_64", buffers, grid=(1024 * heads, 1, 1),
        threadgroup=(1024, 1, 1), constants=dict.fromkeys(range(20, 26), False) | {26: 1},
    )  # fmt: skip
    expected = mx.fast.scaled_dot_product_attention(mx.array(q), mx.array(k), mx.array(v), scale=0.125)
    return found, [expected]


@case(MLX, bug="only the first lane of each SIMD group comes to a barrier, whose flags are mem_none")
def metal_gemv(checkout: Checkout) -> Results:
    rows, columns = 64, 256
    w, x = normal(rows, columns), normal(columns, seed=1)
    buffers = {0: w, 1: x, 2: None, 3: out(rows), 4: columns, 5: rows, 6: columns, 7: 1.0, 8: 0.0, 9: 1}
    buffers |= {10: ints(1), 11: longs(0), 12: longs(0), 13: None, 14: 1}
    found = run(
        checkout, "gemv", "gemv_float32_bm1_bn8_sm1_sn32_tm4_tn4_nc0_axpby0", buffers, grid=(32 * rows // 4, 8, 1),
        threadgroup=(32, 8, 1), memory={0: 4 * 8 * 4},
    )  # fmt: skip
    return found, [w @ x]


GEMM = np.dtype(
    [(name, "i4") for name in ("M", "N", "K", "lda", "ldb", "ldd", "tiles_n", "tiles_m")]
    + [(f"batch_stride_{which}", "i8") for which in "abd"]
    + [(name, "i4") for name in ("swizzle_log", "gemm_k_iterations_aligned", "batch_ndim")],
    align=True,
)


@case(MLX)
def metal_steel_gemm(checkout: Checkout) -> Results:
    m, n, k = 70, 50, 40
    a, b = normal(m, k), normal(n, k, seed=1)
    params = np.array((m, n, k, k, k, n, 1, 2, 0, 0, 0, 0, k // 16, 0), GEMM)
    buffers = [a, b, None, out(m, n), params, None, None, None]
    off = dict.fromkeys((10, 100, 110, 200, 201, 202), False)
    found = run(
        checkout, "steel/gemm/kernels/steel_gemm_fused", "steel_gemm_fused_nt_float32_float32_bm64_bn64_bk16_wm2_wn2",
        buffers, grid=(32, 2 * 2, 2), threadgroup=(32, 2, 2), constants=off,
    )  # fmt: skip
    return found, [a @ b.T]
