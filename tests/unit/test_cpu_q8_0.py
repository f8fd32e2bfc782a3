"""Properties of Q8_0 alone: signed bytes and halves of every size. `test_cpu_blocks.py` tests all formats."""

from __future__ import annotations

import numpy as np
import pytest

from kernels import blocks as layout

pytest.importorskip("numba")

from kernels.cpu.build.layout import LANES
from kernels.cpu.build.vectors import PART
from kernels.cpu.formats import q8_0
from mlx_engine.backends import create_backend
from mlx_engine.backends.parameters import Linear
from mlx_engine.quant import BY_NAME
from mlx_engine.quant.weight import Weight


def test_every_quant_of_a_byte_expands_to_itself():
    one = np.empty(8, layout.Q8_0)
    one["d"], one["qs"] = 1, np.arange(-128, 128, dtype=np.int8).reshape(8, 32)
    expanded = np.empty(256, dtype=np.float32)
    q8_0.dequantize(one.view(np.uint8), 0, 8, expanded, 0, LANES, PART, 0)
    np.testing.assert_array_equal(expanded, np.arange(-128, 128))


def test_scales_of_every_size_are_widened_exactly():
    """Return normal, subnormal and zero halves of both signs."""
    bits = np.arange(0, 1 << 16, 37, dtype=np.uint16)
    scales = bits.view(np.float16)[np.isfinite(bits.view(np.float16))]
    made = np.empty(len(scales), layout.Q8_0)
    made["d"], made["qs"] = scales, 1
    expanded = np.empty(32 * len(scales), dtype=np.float32)
    q8_0.dequantize(made.view(np.uint8), 0, len(scales), expanded, 0, LANES, PART, 0)
    np.testing.assert_array_equal(expanded.reshape(-1, 32), np.repeat(scales.astype(np.float32)[:, None], 32, axis=1))


def test_a_product_with_a_unit_vector_is_the_weight_itself():
    """Any bits of a block, scales that underflow included: each weight is the exact product of its two factors."""
    rng = np.random.default_rng(5)
    made = np.empty(4, layout.Q8_0)
    made["d"], made["qs"] = [6e-8, -6.1e-5, 65504, 0.37], rng.integers(-128, 128, (4, 32), dtype=np.int8)
    want = made["d"].astype(np.float64)[:, None] * made["qs"]
    be = create_backend("simd")
    matrix = Linear("w", be.prepare(Weight("w", (4, 32), BY_NAME["Q8_0"], made.view(np.uint8))))
    units = np.eye(32, dtype=np.float32)
    alone = np.concatenate([be.linear(x[None], matrix) for x in units])
    np.testing.assert_array_equal(alone.T, want)
    np.testing.assert_array_equal(be.linear(units, matrix).T, want)
