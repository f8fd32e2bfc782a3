"""Kernels of MLX and of mlx-kquant for the accelerators of an M5, and what they must compute.

The headers of MLX's kernels come with its package. Those of mlx-kquant are in the folder `metal` of its source, which
the environment names in MLX_KQUANT. Most of these kernels place their operands in registers as on an M5, so that they
run with `layout="m5"`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from kernels.emulator import Unwritten
from tests.random_blocks import random_blocks

HEADERS = Path(mx.__file__).parent / "include"
_FOLDER = "mlx/backend/metal/kernels"
Array = NDArray[Any]


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    Attributes:
        buffers: by index.
        groups: threadgroups per axis.
        threads: of a threadgroup, per axis.
        written: the index of the buffer that is compared.
        expected: what it must be, in float64; NaN where nothing is expected.
        constants: function constants.
    """

    buffers: Mapping[int, Any]
    groups: tuple[int, int, int]
    threads: tuple[int, int, int]
    written: int
    expected: Array
    constants: Mapping[int | str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A kernel, and its launch for some sizes.

    Attributes:
        name: of the case and of the kernel.
        headers: that the kernel needs, after utils.h, below MLX's folder of kernels.
        template: the instantiation: `gemm<half, 64, ...>`.
        launch: function of a size and a generator.
        sizes: ragged ones.
        tolerance: the largest error, as a share of the largest expected number.
        layout: "any" for a kernel that asks where its elements are.
        races: the line of a race that the kernel has; "" if it has none.
    """

    name: str
    headers: tuple[str, ...]
    template: str
    launch: Callable[[Any, np.random.Generator], Launch]
    sizes: tuple[Any, ...]
    tolerance: float = 2e-3
    layout: str = "m5"
    races: str = ""

    @property
    def text(self) -> str:
        """A file with the kernel."""
        included = "".join(f'#include "{_FOLDER}/{one}"\n' for one in ("utils.h", *self.headers))
        instance = f'template [[host_name("{self.name}")]] [[kernel]] decltype({self.template}) {self.template};\n'
        return f"#include <metal_stdlib>\n{included}{instance}"


def structure(**fields: tuple[str, Any]) -> Array:
    """Return a C structure as a NumPy value."""
    kind = np.dtype([(name, form) for name, (form, _) in fields.items()], align=True)
    return np.array(tuple(value for _, value in fields.values()), kind)


def _numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> tuple[Any, Array]:
    """Return random numbers as a buffer of a type, and the same in float64."""
    x = rng.uniform(-1, 1, shape).astype(np.float32)
    if dtype == "bfloat16":
        array = mx.array(x).astype(mx.bfloat16)
        return array, np.array(array.astype(mx.float32)).astype(np.float64)
    short = x.astype(dtype)
    return short, short.astype(np.float64)


def _out(shape: tuple[int, ...], dtype: str) -> Unwritten:
    return Unwritten(shape, mx.bfloat16 if dtype == "bfloat16" else np.dtype(dtype))


def _up(n: int, to: int) -> int:
    return -(-n // to)


# ---- products of matrices ----


def _gemm_params(m: int, n: int, k: int, ta: bool, tb: bool, tile: tuple[int, int, int], **more: Any) -> Array:
    bm, bn, bk = tile
    i4 = {"M": m, "N": n, "K": k, "lda": m if ta else k, "ldb": k if tb else n, "ldd": n}
    tiles = {"tiles_n": _up(n, bn), "tiles_m": _up(m, bm)}
    strides = {
        "batch_stride_a": more.get("a", 0),
        "batch_stride_b": more.get("b", 0),
        "batch_stride_d": more.get("d", 0),
    }
    last = {"swizzle_log": 0, "gemm_k_iterations_aligned": more.get("iterations", k // bk), "batch_ndim": 1}
    return structure(
        **{name: ("i4", value) for name, value in (i4 | tiles).items()},
        **{name: ("i8", value) for name, value in strides.items()},
        **{name: ("i4", value) for name, value in last.items()},
    )


def _aligned(m: int, n: int, k: int, tile: tuple[int, int, int]) -> dict[int | str, float]:
    return {200: m % tile[0] == 0, 201: n % tile[1] == 0, 202: k % tile[2] == 0}


def fused(
    ta: bool, tb: bool, dtype: str, tile: tuple[int, int, int], groups: tuple[int, int], axpby: bool = False
) -> Any:
    """Return the launches of a product of two matrices, and of one that is added to a third."""

    def launch(size: tuple[int, int, int], rng: np.random.Generator) -> Launch:
        m, n, k = size
        a, wide_a = _numbers(rng, (k, m) if ta else (m, k), dtype)
        b, wide_b = _numbers(rng, (n, k) if tb else (k, n), dtype)
        c, wide_c = _numbers(rng, (m, n), dtype)
        product = (wide_a.T if ta else wide_a) @ (wide_b.T if tb else wide_b)
        add = structure(ldc=("i4", n), fdc=("i4", 1), batch_stride_c=("i8", 0), alpha=("f4", 2.0), beta=("f4", -0.5))
        buffers = {
            0: a,
            1: b,
            2: c if axpby else None,
            3: _out((m, n), dtype),
            5: add if axpby else None,
            6: None,
            7: None,
        }
        buffers[4] = _gemm_params(m, n, k, ta, tb, tile)
        constants = {**_aligned(m, n, k, tile), 10: False, 100: axpby, 110: axpby}
        expected = 2 * product - 0.5 * wide_c if axpby else product
        grid = (_up(n, tile[1]), _up(m, tile[0]), 1)
        return Launch(buffers, grid, (32, groups[1], groups[0]), 3, expected, constants)

    return launch


def splitk(size: tuple[int, int, int], rng: np.random.Generator) -> Launch:
    """A product whose sums are split over two parts of K, which are added afterwards."""
    m, n, k = size
    (a, wide_a), (b, wide_b) = _numbers(rng, (m, k), "float16"), _numbers(rng, (n, k), "float16")
    part = _up(k, 2)
    values = {"M": m, "N": n, "K": k, "lda": k, "ldb": k, "ldc": n, "tiles_n": _up(n, 64), "tiles_m": _up(m, 64)}
    values |= {"split_k_partitions": 2, "split_k_partition_stride": m * n, "split_k_partition_size": part}
    values |= {"swizzle_log": 0, "gemm_k_iterations_aligned": part // 256}
    parts = [wide_a[:, at : at + part] @ wide_b[:, at : at + part].T for at in (0, part)]
    params = structure(**{name: ("i4", value) for name, value in values.items()})
    constants: dict[int | str, float] = {200: m % 64 == 0, 201: n % 64 == 0}
    grid = (_up(n, 64) * _up(m, 64) * 2, 1, 1)
    buffers = {0: a, 1: b, 2: _out((2, m, n), "float32"), 3: params}
    return Launch(buffers, grid, (32, 2, 2), 2, np.stack(parts), constants)


def gathered(size: tuple[int, int, int], rng: np.random.Generator) -> Launch:
    """Rows that are sorted by expert, each multiplied by the expert's matrix."""
    m, n, k = size
    experts = 3
    (a, wide_a), (b, wide_b) = _numbers(rng, (m, k), "float16"), _numbers(rng, (experts, k, n), "float16")
    offsets = np.array([0, m // 3, m // 3, m], np.int32)  # the second expert has no row
    expected = np.concatenate([wide_a[offsets[i] : offsets[i + 1]] @ wide_b[i] for i in range(experts)])
    buffers = {0: a, 1: b, 2: offsets, 3: _out((m, n), "float16"), 5: experts}
    buffers[4] = _gemm_params(m, n, k, False, False, (16, 128, 128), b=k * n)
    grid = (_up(n, 128), _up(m, 16) + experts, 1)
    return Launch(buffers, grid, (32, 4, 1), 3, expected, _aligned(m, n, k, (16, 128, 128)))


def segmented(size: tuple[int, int, int], rng: np.random.Generator) -> Launch:
    """Products over parts of K of different lengths, one of them empty."""
    m, n, k = size
    (a, wide_a), (b, wide_b) = _numbers(rng, (m, k), "float16"), _numbers(rng, (k, n), "float16")
    ends = [(0, k // 2), (k // 3, k), (4, 4)]
    expected = np.stack([wide_a[:, i:j] @ wide_b[i:j] for i, j in ends])
    buffers = {0: a, 1: b, 2: np.array(ends, np.uint32), 3: _out((3, m, n), "float16")}
    buffers[4] = _gemm_params(m, n, k, False, False, (64, 64, 64), d=m * n)
    constants = {199: True, **_aligned(m, n, k, (64, 64, 64))}
    del constants[202]
    return Launch(buffers, (3, _up(n, 64), _up(m, 64)), (32, 2, 2), 3, expected, constants)


def thin(tb: bool) -> Any:
    """Return the launches of products with few rows: A in registers, B read by the operation itself."""

    def launch(size: tuple[int, int, int], rng: np.random.Generator) -> Launch:
        m, n, k = size
        (a, wide_a), (b, wide_b) = _numbers(rng, (m, k), "float16"), _numbers(rng, (n, k) if tb else (k, n), "float16")
        tile = (16, 64, 64)  # one SIMD-group along M, two along N of 32, and two that share K
        buffers = {0: a, 1: b, 2: None, 3: _out((m, n), "float16"), 5: None}
        buffers[4] = _gemm_params(m, n, k, False, tb, tile, iterations=_up(k, 128))
        constants = {**_aligned(m, n, k, tile), 100: False, 110: False}
        grid = (_up(m, 16) * _up(n, 64), 1, 1)
        return Launch(buffers, grid, (128, 1, 1), 3, wide_a @ (wide_b.T if tb else wide_b), constants)

    return launch


# ---- attention ----


def attention(d: int, bq: int, bk: int, threads: tuple[int, int, int], causal: bool, masked: bool) -> Any:
    """Return the launches of attention with two heads that share keys and values."""

    def launch(size: tuple[int, int], rng: np.random.Generator) -> Launch:
        q_len, k_len = size
        q, wide_q = _numbers(rng, (1, 2, q_len, d), "float16")
        k, wide_k = _numbers(rng, (1, 1, k_len, d), "float16")
        v, wide_v = _numbers(rng, (1, 1, k_len, d), "float16")
        mask = rng.random((1, 1, q_len, k_len)) < 0.8
        mask[..., 0] = True
        numbers = {"B": 1, "H": 2, "D": d, "qL": q_len, "kL": k_len, "gqa_factor": 2}
        counts = {"NQ": _up(q_len, bq), "NK": _up(k_len, bk), "NQ_aligned": q_len // bq, "NK_aligned": k_len // bk}
        counts |= {"qL_rem": q_len % bq, "kL_rem": k_len % bk, "qL_off": k_len - q_len}
        strides = dict.fromkeys(("Q", "O"), ("3i8", (2 * q_len * d, q_len * d, d)))
        strides |= dict.fromkeys(("K", "V"), ("3i8", (k_len * d, k_len * d, d)))
        params = structure(
            **{name: ("i4", value) for name, value in numbers.items()},
            scale=("f4", d**-0.5),
            **{name: ("i4", value) for name, value in counts.items()},
            **{name: strides[name] for name in "QKVO"},
        )
        scores = wide_q[0] @ wide_k[0, 0].T * d**-0.5
        if causal:
            scores = np.where(np.arange(k_len) <= np.arange(q_len)[:, None] + k_len - q_len, scores, -np.inf)
        if masked:
            scores = np.where(mask[0], scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        expected = (weights / weights.sum(axis=-1, keepdims=True)) @ wide_v[0, 0]
        buffers = {0: q, 1: k, 2: v, 3: _out((1, 2, q_len, d), "float16"), 4: params, 7: None, 8: None}
        buffers[5] = structure(M=("3i8", (0, 0, k_len))) if masked else None
        buffers[6] = mask if masked else None
        constants: dict[int | str, float] = {200: q_len % bq == 0, 201: k_len % bk == 0}
        constants |= {300: masked, 301: causal, 302: False, 303: False}
        return Launch(buffers, (_up(q_len, bq), 2, 1), threads, 3, expected[None], constants)

    return launch


# ---- quantised weights ----


def _affine(rng: np.random.Generator, n: int, k: int, bits: int) -> tuple[tuple[Any, ...], Array]:
    """Return weights of MLX, their scales and biases, and their values."""
    found = mx.quantize(mx.array(rng.uniform(-1, 1, (n, k)).astype(np.float16)), group_size=32, bits=bits)
    packed = tuple(np.array(one) for one in found)
    return packed, np.array(mx.dequantize(*found, group_size=32, bits=bits).astype(mx.float32)).astype(np.float64)


def _batchless(first: int) -> dict[int, Any]:
    none = np.zeros(1, np.int32)
    wide = np.zeros(1, np.int64)
    return {first: 0, first + 1: none, first + 2: wide, first + 3: 0, first + 4: none, first + 5: wide, first + 6: wide}


def affine(bits: int, transposed: bool) -> Any:
    """Return the launches of products with quantised weights, [N, K] or [K, N]."""

    def launch(size: tuple[int, int, int], rng: np.random.Generator) -> Launch:
        m, n, k = size
        (w, scales, biases), values = _affine(rng, *((n, k) if transposed else (k, n)), bits)
        x, wide = _numbers(rng, (m, k), "float16")
        buffers = {0: w, 1: scales, 2: biases, 3: x, 4: _out((m, n), "float16"), 5: k, 6: n, 7: m}
        buffers |= {**_batchless(8), 15: np.zeros(1, np.int64)}
        constants: dict[int | str, float] = {200: False, 201: False, 202: False}
        expected = wide @ (values.T if transposed else values)
        return Launch(buffers, (_up(n, 64), _up(m, 64), 1), (32, 2, 2), 4, expected, constants)

    return launch


def mxfp4(size: tuple[int, int, int], rng: np.random.Generator) -> Launch:
    """Weights of four bits with shared exponents."""
    m, n, k = size
    w = rng.integers(0, 256, (n, k // 2)).astype(np.uint8)
    exponents = rng.integers(124, 130, (n, k // 32)).astype(np.uint8)
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = np.stack([w & 15, w >> 4], axis=-1).reshape(n, k)
    values = table[codes & 7] * np.where(codes & 8, -1, 1) * 2.0 ** (np.repeat(exponents, 32, axis=1) - 127.0)
    x, wide = _numbers(rng, (m, k), "bfloat16")
    buffers = {0: w.view(np.uint32), 1: exponents, 2: np.ones(1, np.float32), 3: x, 4: _out((m, n), "bfloat16")}
    buffers |= {5: k, 6: n, 7: m, **_batchless(8)}
    constants: dict[int | str, float] = {200: False, 201: False, 202: False}
    return Launch(buffers, (_up(n, 64), _up(m, 64), 1), (32, 2, 2), 4, wide @ values.T, constants)


# ---- gated delta ----


def gated_delta(size: int, rng: np.random.Generator) -> Launch:
    """The recurrence of gated delta networks in chunks of 16 steps: two heads of values, one of keys."""
    steps, dk, dv, heads = size, 32, 32, 2
    q, wide_q = _numbers(rng, (1, steps, 1, dk), "float32")
    k, wide_k = _numbers(rng, (1, steps, 1, dk), "float32")
    v, wide_v = _numbers(rng, (1, steps, heads, dv), "float32")
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    wide_k = k.astype(np.float64)
    g, beta = (rng.uniform(low, high, (1, steps, heads)).astype(np.float32) for low, high in ((0.6, 1), (0.1, 0.9)))
    state = rng.uniform(-1, 1, (1, heads, dv, dk)).astype(np.float32)
    expected = np.zeros((1, steps, heads, dv))
    for h in range(heads):
        s = state[0, h].astype(np.float64)
        for t in range(steps):
            s = s * g[0, t, h]
            s = s + beta[0, t, h] * np.outer(wide_v[0, t, h] - s @ wide_k[0, t, 0], wide_k[0, t, 0])
            expected[0, t, h] = s @ wide_q[0, t, 0]
    buffers = {0: q, 1: k, 2: v, 3: state, 4: g, 5: beta, 6: _out((1, steps, heads, dv), "float32")}
    one = _out((1,), "float32")
    buffers |= {
        7: _out((1, heads, dv, dk), "float32"),
        8: steps,
        9: one,
        10: _out((1,), "float32"),
        11: _out((1,), "float32"),
    }
    return Launch(buffers, (1, 1, heads), (32, dv // 16, 1), 6, expected, {200: False})


_GEMM = ("steel/gemm/gemm_nax.h",)
_QUANTIZED = ("steel/gemm/gemm.h", "steel/gemm/nax.h", "steel/gemm/loader.h")
_RAGGED = ((64, 64, 256), (70, 90, 100), (3, 130, 33))


def _fused(name: str, ta: bool, tb: bool, metal: str, dtype: str, *, axpby: bool = False) -> Case:
    template = f"gemm<{metal}, 64, 128, 64, 2, 4, {str(ta).lower()}, {str(tb).lower()}, float>"
    headers = (*_GEMM, "steel/gemm/kernels/steel_gemm_fused_nax.h")
    tolerance = 1e-2 if dtype == "bfloat16" else 2e-3
    return Case(name, headers, template, fused(ta, tb, dtype, (64, 128, 64), (2, 4), axpby), _RAGGED, tolerance)


CASES = [
    _fused("gemm_nn", False, False, "half", "float16"),
    _fused("gemm_nt", False, True, "half", "float16"),
    _fused("gemm_tn", True, False, "half", "float16"),
    _fused("gemm_tt_bf16", True, True, "bfloat", "bfloat16"),
    _fused("gemm_f32", False, True, "float", "float32"),
    _fused("gemm_added", False, False, "half", "float16", axpby=True),
    Case(
        "gemm_splitk", (*_GEMM, "steel/gemm/kernels/steel_gemm_splitk_nax.h"),
        "gemm_splitk_nax<half, 64, 64, 256, 2, 2, false, true, float>", splitk,
        ((64, 64, 512), (70, 90, 600), (3, 65, 70)),
    ),
    Case(
        "gemm_gathered", (*_GEMM, "steel/gemm/kernels/steel_gemm_gather_nax.h"),
        "gather_mm_rhs_nax<half, 16, 128, 128, 1, 4, false, false, float>", gathered,
        ((48, 128, 128), (37, 130, 70), (5, 40, 33)),
    ),
    Case(
        "gemm_segmented", (*_GEMM, "steel/gemm/kernels/steel_gemm_segmented_nax.h"),
        "segmented_mm_nax<half, 64, 64, 64, 2, 2, false, false, float>", segmented,
        ((64, 64, 128), (70, 90, 100), (3, 130, 33)),
    ),
    *(
        Case(
            f"gemm_thin_{'nt' if tb else 'nn'}", (*_GEMM, "steel/gemm/kernels/steel_gemm_thin_nax.h"),
            f"gemm_thin_nax<half, 1, 2, 1, 2, 2, {str(tb).lower()}>", thin(tb),
            ((16, 64, 128), (16, 70, 100), (9, 40, 33), (20, 128, 256)),
        )
        for tb in (True, False)
    ),
    Case(
        "attention", ("steel/attn/kernels/steel_attention_nax.h",),
        "attention_nax<half, 64, 32, 64, 64, 4, 1, bool, float>",
        attention(64, 64, 32, (32, 4, 1), True, False), ((64, 64), (70, 90), (33, 33)),
    ),
    Case(
        "attention_masked", ("steel/attn/kernels/steel_attention_nax.h",),
        "attention_nax<half, 64, 32, 128, 128, 4, 1, bool, float>",
        attention(128, 64, 32, (32, 4, 1), False, True), ((64, 32), (70, 45), (9, 33)),
    ),
    Case(
        "attention_dsplit", ("steel/attn/kernels/steel_attention_nax.h",),
        "attention_nax_dsplit<half, 64, 32, 256, 4, 2, bool, float>",
        attention(256, 64, 32, (32, 4, 2), False, True), ((64, 32), (70, 45), (9, 33)),
    ),
    *(
        Case(
            f"affine_qmm_t_{bits}", (*_QUANTIZED, "quantized_nax.h"),
            f"affine_qmm_t_nax<half, 32, {bits}, false, false, 64, 64, 64, 2, 2>", affine(bits, True),
            ((64, 64, 64), (70, 90, 128), (5, 33, 192)),
        )
        for bits in (4, 6, 8)
    ),
    Case(
        "affine_qmm_n", (*_QUANTIZED, "quantized_nax.h"),
        "affine_qmm_n_nax<half, 32, 4, false, 64, 64, 64, 2, 2>", affine(4, False),
        ((64, 64, 64), (70, 128, 128), (5, 192, 64)),
    ),
    Case(
        "mxfp4_qmm_t", (*_QUANTIZED, "fp_quantized_nax.h"),
        "fp_qmm_t_nax<bfloat, 32, 4, false, false, 64, 64, 64, 2, 2, false, bfloat>", mxfp4,
        ((64, 64, 64), (70, 90, 128), (5, 33, 192)), 1e-2,
    ),
    Case(
        "gated_delta", ("gated_delta_update_nax.h",), "gated_delta_fused_nax<float, 32, 32, 1, 2, 16, 1>", gated_delta,
        (32, 23, 5), 5e-3, races="SCALE_ROW_NAX(W_tile, gamma)",
    ),
]  # fmt: skip


# ---- mlx-kquant ----

KQUANT = os.environ.get("MLX_KQUANT")


def _stored(rng: np.random.Generator, type_name: str, n: int, k: int) -> tuple[Array, Array]:
    """Return a matrix in blocks of llama.cpp, [N, bytes], and its values."""
    from gguf import GGMLQuantizationType, quants

    if type_name == "Q8_0":
        data = quants.quantize(rng.uniform(-0.5, 0.5, (n, k)).astype(np.float32), GGMLQuantizationType.Q8_0)
    else:
        data = np.asarray(random_blocks(rng, "w", type_name, n, k, 0.5).data).view(np.uint8).reshape(n, -1)
    return data, quants.dequantize(data, GGMLQuantizationType[type_name]).reshape(n, k).astype(np.float64)


def verified(type_name: str) -> Any:
    """Return the launches of a product with up to eight rows, whose weights go into registers block by block."""

    def launch(size: tuple[int, int, int], rng: np.random.Generator) -> Launch:
        m, n, k = size
        (w, values), (x, wide) = _stored(rng, type_name, n, k), _numbers(rng, (m, k), "float16")
        buffers = {0: w, 1: None, 2: x, 3: _out((m, n), "float16"), 4: k, 5: n, 6: m, 7: k, 8: m * n}
        return Launch(buffers, (_up(n, 128), 1, 1), (128, 1, 1), 3, wide @ values.T)

    return launch


def multiplied(type_name: str) -> Any:
    """Return the launches of a product whose weights go through threadgroup memory."""

    def launch(size: tuple[int, int, int], rng: np.random.Generator) -> Launch:
        m, n, k = size
        (w, values), (x, wide) = _stored(rng, type_name, n, k), _numbers(rng, (m, k), "float16")
        buffers = {0: w, 1: None, 2: x, 3: _out((m, n), "float16"), 4: k, 5: n, 6: m}
        return Launch(buffers | _batchless(7), (_up(n, 64), _up(m, 64), 1), (32, 2, 2), 3, wide @ values.T)

    return launch


def convolution(size: tuple[int, int, int, int], rng: np.random.Generator) -> Launch:
    """A convolution of three by three, channels last."""
    height, width, channels, outputs = size
    x, wide = _numbers(rng, (1, height, width, channels), "bfloat16")
    w, wide_w = _numbers(rng, (outputs, 3, 3, channels), "bfloat16")
    bias, wide_bias = _numbers(rng, (outputs,), "bfloat16")
    padded = np.pad(wide[0], ((1, 1), (1, 1), (0, 0)))
    expected = np.zeros((height, width, outputs)) + wide_bias
    for dy in range(3):
        for dx in range(3):
            expected += padded[dy : dy + height, dx : dx + width] @ wide_w[:, dy, dx].T
    m = height * width
    buffers = {0: x, 1: w, 2: bias, 3: _out((m, outputs), "bfloat16"), 4: height, 5: width, 6: channels, 7: outputs}
    buffers |= {8: m, 9: 1}
    return Launch(buffers, (_up(outputs, 64), _up(m, 64), 1), (32, 2, 2), 3, expected.reshape(m, outputs))


def scores(size: tuple[int, int, int], rng: np.random.Generator) -> Launch:
    """Sums over heads of weighted positive scores, by the operation itself from tensors in memory."""
    m, n, heads = size
    q, wide_q = _numbers(rng, (heads, m, 128), "float16")
    k, wide_k = _numbers(rng, (n, 128), "float16")
    w, wide_w = _numbers(rng, (heads, m), "float16")
    expected = (np.maximum(wide_q @ wide_k.T, 0) * wide_w[:, :, None]).sum(axis=0)
    buffers = {0: q, 1: k, 2: w, 3: _out((m, n), "float16"), 4: m, 5: n, 6: heads, 7: 0, 8: False, 9: -1}
    return Launch(buffers, (_up(n, 32), _up(m, 64), 1), (128, 1, 1), 3, expected, {310: False, 311: False})


def byte_scores(size: tuple[int, int, int], rng: np.random.Generator) -> Launch:
    """The same with codes of a byte and a scale for 32 of them."""
    m, n, heads = size
    q, k = (rng.integers(-12, 13, shape).astype(np.int8) for shape in ((heads, m, 128), (n, 128)))
    sq, sk = (rng.uniform(0.1, 1, shape).astype(np.float32) for shape in ((heads, m, 4), (n, 4)))
    w = rng.uniform(-1, 1, (heads, m)).astype(np.float32)
    wide_q, wide_k = (x.astype(np.float64) * np.repeat(s, 32, axis=-1) for x, s in ((q, sq), (k, sk)))
    expected = (np.maximum(wide_q @ wide_k.T, 0) * w[:, :, None]).sum(axis=0)
    buffers = {0: q, 1: sq, 2: k, 3: sk, 4: w, 5: _out((m, n), "float16"), 6: m, 7: n, 8: heads, 9: 0, 10: False}
    buffers[11] = -1
    return Launch(buffers, (_up(n, 32), _up(m, 64), 1), (128, 1, 1), 5, expected, {310: False, 311: False})


_KQ = ("steel/gemm/gemm.h", "quantized_utils.h", "steel/gemm/nax.h", "steel/gemm/loader.h", "kq_quantized_nax.h")
_VERIFIED = {
    "q4_0": (32, 4), "q4_1": (32, 4), "q8_0": (32, 8), "q2_k": (256, 2), "q3_k": (256, 3), "q4_k": (256, 4),
    "q5_k": (256, 5), "q6_k": (256, 6), "iq4_nl": (32, 4), "iq4_xs": (256, 4),
}  # fmt: skip

KQUANT_CASES = [
    *(
        Case(
            f"{codec}_verify", (*_KQ, "kq_verify_nax.h"), f"kq_{codec}_verify_nax<half, {group}, {bits}>",
            verified(codec.upper()), ((8, 128, 256), (5, 70, 512), (1, 33, 768)), 4e-3,
        )
        for codec, (group, bits) in _VERIFIED.items()
    ),
    *(
        Case(
            f"{codec}_qmm_t", _KQ, f"kq_{codec}_qmm_t_nax<half, {group}, {bits}, false, false, 64, 64, 2, 2>",
            multiplied(codec.upper()), ((64, 64, 256), (70, 90, 512), (5, 33, 256)), 4e-3,
        )
        for codec, (group, bits) in (("q8_0", (32, 8)), ("q4_k", (256, 4)), ("q6_k", (256, 6)))
    ),
    Case(
        "convolution", ("kq_conv_nax.h",), "kq_conv3x3_nax<bfloat, 64, 64, 2, 2>", convolution,
        ((8, 8, 32, 64), (7, 9, 48, 70), (3, 5, 16, 8)), 1e-2,
    ),
    Case(
        "scores", ("kq_dsa_indexer_mma.h",), "kq_dsa_indexer_score_mma<half>", scores,
        ((64, 64, 2), (128, 64, 3), (64, 128, 1)), 4e-3, layout="any",
    ),
    Case(
        "byte_scores", ("kq_dsa_indexer_mma.h",), "kq_dsa_indexer_score_i8mx<half>", byte_scores,
        ((64, 64, 2), (128, 64, 3), (64, 128, 1)), layout="any",
    ),
]  # fmt: skip
