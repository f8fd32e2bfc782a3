"""Split matrices: the same weights, and what else can read them."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.blocks import Q8_0
from kernels.metal import matvec
from kernels.metal.cases import matrix, numbers
from kernels.metal.formats import Q8_0Matrix, joined, split_q8_0
from kernels.metal.layout import expanded, in_device_memory
from mlx_engine.quant import legacy


def blocks(seed: int, n: int) -> np.ndarray:
    """Bytes of n blocks, at an odd address, as they lie in a file: any codes, any finite scales."""
    rng = np.random.default_rng(seed)
    made = np.empty(n, Q8_0)
    made["qs"] = rng.integers(-128, 128, (n, 32))
    bits = rng.integers(0, 1 << 16, n).astype(np.uint16)
    made["d"] = np.where(np.isfinite(bits.view(np.float16)), bits.view(np.float16), 0)
    shifted = np.empty(made.nbytes + 1, dtype=np.uint8)
    shifted[1:] = made.view(np.uint8)
    shifted.flags.writeable = False
    return shifted[1:]


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(1, 5))
def test_no_weight_changes(seed: int, n_rows: int, n_blocks: int):
    raw = blocks(seed, n_rows * n_blocks)
    split = split_q8_0(raw, (n_rows, 32 * n_blocks))
    assert split.shape == (n_rows, 32 * n_blocks)
    assert split.nbytes == raw.nbytes
    want = legacy.dequantize_q8_0(raw.reshape(-1, 34)).reshape(split.shape)
    np.testing.assert_array_equal(expanded(split), want)
    codes, scales = joined(split)
    stored = raw.view(Q8_0)
    np.testing.assert_array_equal(codes, stored["qs"].reshape(codes.shape))
    np.testing.assert_array_equal(scales, stored["d"].reshape(scales.shape))


@pytest.mark.parametrize("V", [1, 8])
def test_mlx_multiplies_the_same_arrays(V: int):
    rng = np.random.default_rng(3)
    weight, x = matrix(rng, 41, 544), numbers(rng, (V, 544))
    # MLX takes scales and biases of the type of x; both are exact in float32.
    scales, biases = weight.ws.astype(mx.float32), weight.biases().astype(mx.float32)
    found = mx.quantized_matmul(x, weight.wq, scales, biases, transpose=True, group_size=32, bits=8)
    wanted = matvec.reference(x, weight)
    # MLX adds d * (q + 128) and takes 128 * d away again, which costs up to 256 of 128 for the smallest codes.
    slack = 16 * 2.0**-24 * (np.abs(np.array(x)) @ (256.0 * np.repeat(np.abs(np.array(scales)), 32, axis=1)).T)
    assert (np.abs(np.array(found) - wanted.value) <= slack).all()


def test_codes_and_biases_are_exactly_an_affine_matrix():
    """Every code with scales of every size: what MLX expands is `d * q`, bit for bit."""
    bits = np.arange(1, 0x5FFF, 97, dtype=np.uint16)
    made = np.empty(8 * len(bits), Q8_0)
    made["d"] = np.repeat(bits.view(np.float16), 8)
    made["d"][made["d"] > 511.75] = 511.75
    made["qs"] = np.tile(np.arange(-128, 128, dtype=np.int8).reshape(8, 32), (len(bits), 1))
    split = split_q8_0(made.view(np.uint8), (len(bits), 256))
    scales, biases = split.ws.astype(mx.float32), split.biases().astype(mx.float32)
    np.testing.assert_array_equal(
        np.array(mx.dequantize(split.wq, scales, biases, group_size=32, bits=8)), expanded(split).astype(np.float32)
    )


def test_scales_without_a_bias_are_refused():
    made = np.zeros(1, Q8_0)
    made["d"] = 512
    with pytest.raises(ValueError, match=r"biases: expected scales up to 511.75, found 512"):
        split_q8_0(made.view(np.uint8), (1, 32)).biases()


@pytest.mark.parametrize(
    ("n_bytes", "shape"), [(34, (2, 32)), (68, (1, 32)), (34, (1, 34)), (0, (0, 32)), (34 * 2, (1, 48))]
)
def test_bytes_of_another_matrix_are_refused(n_bytes: int, shape: tuple[int, int]):
    with pytest.raises(ValueError, match=r"split_q8_0: expected .* bytes for"):
        split_q8_0(np.zeros(n_bytes, np.uint8), shape)


@pytest.mark.parametrize(
    ("wq", "ws"),
    [
        (mx.zeros((2, 8), mx.int32), mx.zeros((2, 1), mx.float16)),
        (mx.zeros((2, 8), mx.uint32), mx.zeros((2, 1))),
        (mx.zeros((2, 8), mx.uint32), mx.zeros((2, 2), mx.float16)),
        (mx.zeros((2, 9), mx.uint32), mx.zeros((2, 1), mx.float16)),
        (mx.zeros((16,), mx.uint32), mx.zeros((2, 1), mx.float16)),
    ],
)
def test_arrays_that_do_not_belong_together_are_refused(wq: mx.array, ws: mx.array):
    with pytest.raises(ValueError, match="Q8_0 matrix: expected"):
        Q8_0Matrix(wq, ws)


def test_only_tiny_arrays_are_padded():
    assert in_device_memory(mx.arange(3, dtype=mx.float16)).tolist() == [0, 1, 2, 0, 0, 0, 0, 0]
    large = mx.zeros((2, 4))
    assert in_device_memory(large) is large
