"""Compiled linear layers, alone and in blocks, against the NumPy twin and against float64.

A row has the same bits whatever rows are beside it, however its matrix is stored, on any number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba")

from kernels.cpu.build.layout import GEMM_NEAR, GEMM_ROWS, GEMM_TOKENS, SMALL_BATCH, STRETCH
from kernels.cpu.products import order_numpy
from mlx_engine.backends import create_backend
from mlx_engine.backends.cpu.descriptors import address
from mlx_engine.backends.parameters import LayerNorm, Linear, Norm, RMSNorm
from mlx_engine.quant import BY_NAME
from mlx_engine.quant.weight import Weight
from tests import cpu_reference as reference
from tests.random_blocks import SPREAD, random_blocks, random_groups

U = 2.0**-24
EPS = 1e-6
BE = create_backend("parallel", threads=3)

seeds = st.integers(0, 2**32 - 1)
tokens = st.one_of(
    st.integers(1, 70), st.sampled_from([1, 6, 7, SMALL_BATCH, SMALL_BATCH + 1, 12, 13, GEMM_NEAR, GEMM_NEAR + 1])
)
# Rows of weights by their format: what one row holds is a multiple of a block.
columns = st.one_of(
    st.tuples(st.just("F32"), st.one_of(st.integers(1, 90), st.sampled_from([STRETCH - 1, STRETCH, STRETCH + 1]))),
    st.tuples(st.sampled_from(["Q8_0", "Q4_0", "Q4_1", "MXFP4"]), st.integers(1, 20).map(lambda blocks: 32 * blocks)),
    st.tuples(st.sampled_from(["Q2_K", "Q4_K", "Q6_K", "IQ4_XS"]), st.integers(1, 3).map(lambda blocks: 256 * blocks)),
)
heights = st.one_of(st.integers(1, 20), st.sampled_from([GEMM_ROWS - 1, GEMM_ROWS, GEMM_ROWS + 1, 2 * GEMM_ROWS + 7]))


class Layer:
    """Return a linear layer of the backend, and its dense matrix and bias in float64."""

    def __init__(self, rng: np.random.Generator, kind: str, n: int, k: int, *, bias: bool = False) -> None:
        if kind.startswith("AFFINE"):
            weight = random_groups(rng, "w", kind, n, k)
        elif kind in SPREAD and kind not in ("Q4_0", "Q4_1"):
            weight = random_blocks(rng, "w", kind, n, k)
        else:
            weight = Weight.pack("w", rng.standard_normal((n, k)), BY_NAME[kind])
        self.matrix = weight.dequantize().astype(np.float64)
        self.bias = rng.standard_normal(n).astype(np.float32) if bias else None
        self.linear = Linear("w", BE.prepare(weight), self.bias)


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def exact(
    x: np.ndarray, weight: np.ndarray | None, layers: Sequence[Layer], residual: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the result in float64, and the error bound of float32.

    A sum has at most K roundings and its products one each, in a norm as well; bias and residual add one.
    """
    wide = x.astype(np.float64)
    matrices, biases = [layer.matrix for layer in layers], [layer.bias for layer in layers]
    want = reference.project(wide, weight, EPS, matrices, biases, residual, None)
    size = reference.project(
        np.abs(wide), None if weight is None else np.abs(weight), EPS, [np.abs(m) for m in matrices],
        [b if b is None else np.abs(b) for b in biases], None if residual is None else np.abs(residual), None,
    )  # fmt: skip
    return want, (2 * x.shape[1] + 8) * U * size


@settings(max_examples=120)
@given(seed=seeds, t=tokens, n=heights, kind_k=columns, bias=st.booleans())
def test_products(seed: int, t: int, n: int, kind_k: tuple[str, int], bias: bool):
    rng = np.random.default_rng(seed)
    layer, x = Layer(rng, kind_k[0], n, kind_k[1], bias=bias), normal(rng, t, kind_k[1])
    want, bound = exact(x, None, [layer])
    dense = layer.matrix.astype(np.float32)
    twin = reference.project(x, None, EPS, [dense], [layer.bias], None, None)
    for found in (BE.linear(x, layer.linear), twin):
        assert found.shape == want.shape
        assert (np.abs(found - want) <= bound).all()


@pytest.mark.some(2)
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("t", [GEMM_TOKENS - 1, GEMM_TOKENS, GEMM_TOKENS + 1, 2 * GEMM_TOKENS + 17])
def test_more_tokens_than_a_chunk_has(kind: str, t: int):
    rng = np.random.default_rng(t)
    layer, x, residual = (
        Layer(rng, kind, GEMM_ROWS + 3, 64, bias=True),
        normal(rng, t, 64),
        normal(rng, t, GEMM_ROWS + 3),
    )
    want, bound = exact(x, None, [layer], residual)
    assert (np.abs(BE.project_add(x, layer.linear, residual) - want) <= bound).all()
    gate, up = Layer(rng, kind, GEMM_ROWS + 3, 64), Layer(rng, kind, GEMM_ROWS + 3, 64)
    check_gated(x, np.ones(64, dtype=np.float32), gate, up, "silu")


@pytest.mark.parametrize("t", [GEMM_NEAR + 1, GEMM_TOKENS + 1, 4 * GEMM_TOKENS + 1])
def test_chunks_for_any_number_of_threads_give_the_same_bits(t: int):
    rng = np.random.default_rng(t)
    layer, x = Layer(rng, "Q8_0", 2 * GEMM_ROWS + 3, STRETCH + 64, bias=True), normal(rng, t, STRETCH + 64)
    np.testing.assert_array_equal(create_backend("simd").linear(x, layer.linear), BE.linear(x, layer.linear))


@pytest.mark.some(4)
@pytest.mark.parametrize("t", [1, SMALL_BATCH, SMALL_BATCH + 1, 20])
@pytest.mark.parametrize("n", [700, 4001])
def test_many_chunks_of_stored_rows(t: int, n: int):
    """More than one thread is used: 4,001 rows of 64 weights are 272 KB."""
    rng = np.random.default_rng(n)
    layer, x = Layer(rng, "Q8_0", n, 64), normal(rng, t, 64)
    want, bound = exact(x, None, [layer])
    assert (np.abs(BE.linear(x, layer.linear) - want) <= bound).all()


@settings(max_examples=60)
@given(seed=seeds, t=tokens, n=heights, kind_k=columns, bias=st.booleans())
def test_residuals_are_added_once(seed: int, t: int, n: int, kind_k: tuple[str, int], bias: bool):
    rng = np.random.default_rng(seed)
    layer, x, residual = Layer(rng, kind_k[0], n, kind_k[1], bias=bias), normal(rng, t, kind_k[1]), normal(rng, t, n)
    want, bound = exact(x, None, [layer], residual)
    assert (np.abs(BE.project_add(x, layer.linear, residual) - want) <= bound).all()


@settings(max_examples=60)
@given(seed=seeds, t=tokens, n=st.tuples(heights, heights, heights), kind_k=columns, data=st.data())
def test_several_matrices_of_one_normed_input(
    seed: int, t: int, n: tuple[int, int, int], kind_k: tuple[str, int], data: st.DataObject
):
    """Each matrix has its own format where the width allows it, with or without a bias."""
    rng = np.random.default_rng(seed)
    kind, k = kind_k
    fitting = ["F32", "Q8_0", "Q4_0", "Q4_1", *(["Q4_K", "Q6_K"] if k % 256 == 0 else [])]
    kinds = [data.draw(st.sampled_from(["F32"] if kind == "F32" else fitting)) for _ in n]
    layers = [Layer(rng, kinds[i], n[i], k, bias=data.draw(st.booleans())) for i in range(3)]
    x, weight = normal(rng, t, k), normal(rng, k)
    want, bound = exact(x, weight, layers)
    found = BE.norm_project(x, RMSNorm("n", weight, EPS), [layer.linear for layer in layers])
    for part, layer in zip(found, layers, strict=True):
        np.testing.assert_array_equal(part, BE.norm_project(x, RMSNorm("n", weight, EPS), [layer.linear])[0])
    assert [part.shape for part in found] == [(t, rows) for rows in n]
    assert (np.abs(np.concatenate(found, axis=1) - want) <= bound).all()


@settings(max_examples=80)
@given(
    seed=seeds, t=tokens, n=heights, kind_k=columns, activation=st.sampled_from(["silu", "gelu"]),
    scale=st.sampled_from([1.0, 30.0]),
)  # fmt: skip
def test_gates(seed: int, t: int, n: int, kind_k: tuple[str, int], activation: str, scale: float):
    rng = np.random.default_rng(seed)
    gate, up = (Layer(rng, kind_k[0], n, kind_k[1]) for _ in range(2))
    x, weight = normal(rng, t, kind_k[1]), normal(rng, kind_k[1]) * np.float32(scale)
    check_gated(x, weight, gate, up, activation)


@pytest.mark.parametrize("t", [1, 2, SMALL_BATCH + 1])
@pytest.mark.parametrize("kinds", [("Q8_0", "F32"), ("F32", "Q8_0"), ("Q4_0", "Q8_0"), ("Q8_0", "Q6_K")])
def test_a_gate_in_another_format_than_what_it_gates(kinds: tuple[str, str], t: int):
    rng = np.random.default_rng(t)
    gate, up = (Layer(rng, kind, 203, 256) for kind in kinds)
    check_gated(normal(rng, t, 256), normal(rng, 256), gate, up, "silu")


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("n", [*range(1, 10), 201])
def test_rows_that_cannot_be_dealt_to_four_stretches_alike(kind: str, n: int):
    """Memory after the ends of the bias and the residual must not be read or written."""
    rng = np.random.default_rng(n)
    layer, x, residual = Layer(rng, kind, n, 64, bias=True), normal(rng, 1, 64), normal(rng, 1, n)
    want, bound = exact(x, None, [layer], residual)
    assert (np.abs(BE.project_add(x, layer.linear, residual) - want) <= bound).all()
    check_gated(x, normal(rng, 64), Layer(rng, kind, n, 64), Layer(rng, kind, n, 64), "gelu")


@pytest.mark.parametrize("t", [1, 3])
@pytest.mark.parametrize("n", [*range(1, 10), 201])
def test_nothing_is_written_behind_the_last_row(n: int, t: int):
    rng = np.random.default_rng(n)
    layer, x, y = Layer(rng, "Q8_0", n, 64), normal(rng, t, 64), np.full(t * n + 300, np.nan, dtype=np.float32)
    block, scratch = BE._block((layer.linear,)), BE.scratch_address(t * 64)
    BE.run_entry(BE.library.project, block.address, t, address(x), 0, scratch, address(y))
    np.testing.assert_array_equal(y[: t * n].reshape(t, n), BE.linear(x, layer.linear))
    assert np.isnan(y[t * n :]).all()


def check_gated(x: np.ndarray, weight: np.ndarray, gate: Layer, up: Layer, activation: str) -> None:
    twin = getattr(reference, activation)
    want = reference.project(x.astype(np.float64), weight, EPS, [gate.matrix, up.matrix], [None] * 2, None, twin)
    (gates, off_gates), (ups, off_ups) = exact(x, weight, [gate]), exact(x, weight, [up])
    # Neither activation is steeper than 1.13; what it makes of its own roundings is bounded as in test_cpu_norms.
    argument = np.abs(gates) if activation == "silu" else 1.6 * np.abs(gates) * (1 + 0.044715 * gates**2)
    own = (8 + 8 * argument) * U * np.abs(want) + 2.0**-121 * (1 + np.abs(ups))
    bound = 1.2 * off_gates * (np.abs(ups) + off_ups) + np.abs(twin(gates)) * off_ups + own
    found = BE.norm_gate_up(x, RMSNorm("n", weight, EPS), gate.linear, up.linear, activation)
    assert found.shape == want.shape
    assert (np.abs(found - want) <= bound).all()


@settings(max_examples=80)
@given(
    seed=seeds, t=tokens, n=heights, kind_k=columns, activation=st.sampled_from(["silu", "gelu"]), bias=st.booleans()
)
def test_activations_without_a_gate(seed: int, t: int, n: int, kind_k: tuple[str, int], activation: str, bias: bool):
    rng = np.random.default_rng(seed)
    up, x, weight = Layer(rng, kind_k[0], n, kind_k[1], bias=bias), normal(rng, t, kind_k[1]), normal(rng, kind_k[1])
    twin = getattr(reference, activation)
    products, off = exact(x, weight, [up])
    want = reference.project(x.astype(np.float64), weight, EPS, [up.matrix], [up.bias], None, twin)
    argument = np.abs(products) if activation == "silu" else 1.6 * np.abs(products) * (1 + 0.044715 * products**2)
    bound = 1.2 * off + (8 + 8 * argument) * U * np.abs(want) + 2.0**-121
    found = BE.norm_up(x, RMSNorm("n", weight, EPS), up.linear, activation)
    assert found.shape == want.shape
    assert (np.abs(found - want) <= bound).all()


def whole(norm: Norm, x: np.ndarray) -> np.ndarray:
    """Return the norm of (T, N) in float64, by the twins."""
    out, n = np.empty(x.size), x.shape[1]
    for t in range(len(x)):
        if isinstance(norm, LayerNorm):
            reference.layer_norm(x.reshape(-1), t * n, n, norm.weight, norm.bias, norm.eps, out, t * n)
        else:
            reference.rms_norm(x.reshape(-1), t * n, n, norm.weight, norm.eps, out, t * n)
    return out.reshape(x.shape)


@settings(max_examples=80)
@given(
    seed=seeds, t=tokens, n=st.one_of(st.integers(2, 40), st.sampled_from([GEMM_ROWS + 1, 300])), kind_k=columns,
    layer=st.tuples(st.booleans(), st.booleans()), bias=st.booleans(),
)  # fmt: skip
def test_norms_before_and_behind(
    seed: int, t: int, n: int, kind_k: tuple[str, int], layer: tuple[bool, bool], bias: bool
):
    """A norm of either kind equals its twin, applied to the plain product."""
    rng = np.random.default_rng(seed)
    of, x, residual = Layer(rng, kind_k[0], n, kind_k[1], bias=bias), normal(rng, t, kind_k[1]), normal(rng, t, n)
    before, behind = (
        LayerNorm("n", normal(rng, width), normal(rng, width), 0.1)
        if shifted
        else RMSNorm("n", normal(rng, width), 0.1)
        for shifted, width in zip(layer, (kind_k[1], n), strict=True)
    )
    found = BE.norm_project(x, before, (of.linear,))[0]
    want = BE.linear(whole(before, x.astype(np.float64)).astype(np.float32), of.linear)
    np.testing.assert_allclose(found, want, rtol=0, atol=2e-5 * max(1, np.abs(want).max()))
    found = BE.project_norm_add(x, of.linear, behind, residual)
    want = residual + whole(behind, BE.linear(x, of.linear).astype(np.float64))
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-5 * max(1, np.abs(want).max()))


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("t", [1, 3, SMALL_BATCH + 1, 40])
def test_the_head_is_a_norm_and_a_product_and_a_row_has_the_bits_that_it_has_alone(kind: str, t: int):
    rng = np.random.default_rng(t)
    head, x, weight = Layer(rng, kind, 201, 96), normal(rng, t, 96), normal(rng, 96)
    want, bound = exact(x, weight, [head])
    found = BE.norm_head(x, RMSNorm("n", weight, EPS), head.linear)
    last = BE.norm_head(x[-1:], RMSNorm("n", weight, EPS), head.linear)
    assert (np.abs(found - want) <= bound).all()
    np.testing.assert_array_equal(last, found[-1:])


# ---- bits ----

AFFINE = ("AFFINE4_G64_BF16", "AFFINE3_G64_F16", "AFFINE4_G64_F32")
FORMATS = ("F32", "Q8_0", *SPREAD, *AFFINE)
# Beyond one stretch of columns, and beyond the rows that are expanded together.
K, N = STRETCH + 256, GEMM_ROWS + 3
PASSES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 16, 18, 19, 49, 129)


def operations(
    kind: str, seed: int, k: int = K, n: int = N
) -> dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]]:
    """Return all operations with linear layers, as functions of the input and of the residual, (T, n)."""
    rng = np.random.default_rng(seed)
    other = "Q4_1" if kind == "Q8_0" else "Q8_0"
    a, b, c = (
        Layer(rng, kind, n, k, bias=True),
        Layer(rng, kind, n, k),
        Layer(rng, other if k % 32 == 0 else kind, n, k),
    )
    rms, shifted = RMSNorm("n", normal(rng, k), EPS), LayerNorm("n", normal(rng, k), normal(rng, k), EPS)
    post = RMSNorm("n", normal(rng, n), EPS)
    return {
        "linear": lambda x, r: BE.linear(x, a.linear),
        "residual": lambda x, r: BE.project_add(x, a.linear, r),
        "post norm": lambda x, r: BE.project_norm_add(x, b.linear, post, r),
        "norm and three": lambda x, r: np.concatenate(
            BE.norm_project(x, rms, [layer.linear for layer in (a, b, c)]), axis=1
        ),
        "layer norm": lambda x, r: BE.norm_project(x, shifted, [a.linear])[0],
        "gate": lambda x, r: BE.norm_gate_up(x, rms, b.linear, b.linear, "silu"),
        "gate of another format": lambda x, r: BE.norm_gate_up(x, rms, b.linear, c.linear, "gelu"),
        "activation": lambda x, r: BE.norm_up(x, shifted, a.linear, "gelu"),
    }


@pytest.mark.some(2)
@pytest.mark.parametrize("kind", FORMATS)
def test_a_row_has_the_same_bits_in_any_pass(kind: str):
    rng = np.random.default_rng(11)
    x, residual = normal(rng, max(PASSES), K), normal(rng, max(PASSES), N)
    for name, run in operations(kind, 7).items():
        alone = np.concatenate([run(x[t : t + 1], residual[t : t + 1]) for t in range(len(x))])
        for n in PASSES:
            # From the end, so that a row is not always at the same place of a tile.
            found = run(x[-n:], residual[-n:])
            assert np.array_equal(found, alone[-n:]), f"{name}, {n} tokens"


@pytest.mark.parametrize("k", [1, 15, 17, 90, STRETCH - 1, STRETCH + 1])
def test_rows_of_any_length_have_the_same_bits_in_any_pass(k: int):
    rng = np.random.default_rng(k)
    x, residual = normal(rng, 17, k), normal(rng, 17, 21)
    for name, run in operations("F32", k, k, 21).items():
        alone = np.concatenate([run(x[t : t + 1], residual[t : t + 1]) for t in range(len(x))])
        for n in (2, 7, 9, 17):
            assert np.array_equal(run(x[:n], residual[:n]), alone[:n]), f"{name}, {n} tokens"


@pytest.mark.some(4)
@pytest.mark.parametrize("kind", FORMATS)
def test_products_are_those_of_the_order_in_numpy(kind: str):
    rng = np.random.default_rng(4)
    layer, x = Layer(rng, kind, 21, K), normal(rng, 20, K)
    want = order_numpy.dot(layer.matrix.astype(np.float32), x[:, None])
    for t in (1, 4, 9, 16, 20):
        np.testing.assert_array_equal(BE.linear(x[:t], layer.linear), want[:t], err_msg=f"{t} tokens")


@pytest.mark.parametrize("kind", FORMATS[1:])
def test_a_stored_matrix_has_the_bits_of_the_expanded_one(kind: str):
    rng = np.random.default_rng(3)
    stored = Layer(rng, kind, N, K)
    dense = Linear("w", BE.prepare(Weight.pack("w", stored.matrix, BY_NAME["F32"])), None)
    x = normal(rng, 70, K)
    for n in (1, 2, 9, 70):
        np.testing.assert_array_equal(BE.linear(x[:n], stored.linear), BE.linear(x[:n], dense))


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_K"])
def test_any_number_of_threads_gives_the_same_bits(kind: str):
    """1,001 rows are many chunks."""
    rng, alone = np.random.default_rng(5), create_backend("parallel", threads=1)
    layer, x = Layer(rng, kind, 1001, 256, bias=True), normal(rng, 200, 256)
    for n in (1, 2, 9, 200):
        np.testing.assert_array_equal(BE.linear(x[:n], layer.linear), alone.linear(x[:n], layer.linear))
