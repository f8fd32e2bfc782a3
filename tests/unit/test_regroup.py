"""GGUF types in MLX's groups: the same weights, also as MLX computes them."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_engine.quant.group_weight import EXACT, in_groups
from mlx_engine.quant.types import BY_NAME
from mlx_engine.quant.weight import Weight


def packed(name, n, k):
    return Weight.pack("w", np.random.default_rng(n).standard_normal((n, k)), BY_NAME[name])


@pytest.mark.parametrize("name", EXACT)
def test_weights_are_the_same(name):
    weight = packed(name, 24, 96)
    made = in_groups(weight)
    assert made.type == EXACT[name]
    np.testing.assert_array_equal(made.dequantize(), weight.dequantize())
    quants = mx.array(made.parts.quants).view(mx.uint32).reshape(24, -1)
    scales, biases = (
        mx.array(part).view(mx.float32).reshape(24, -1) for part in (made.parts.scales, made.parts.biases)
    )
    theirs = mx.dequantize(quants, scales, biases, group_size=32, bits=made.type.bits, stream=mx.cpu)
    np.testing.assert_array_equal(np.asarray(theirs), weight.dequantize())


def test_pieces_join(monkeypatch):
    weight = packed("Q4_0", 10, 64)
    whole = in_groups(weight).data
    monkeypatch.setattr("mlx_engine.quant.group_weight._PART", 3)
    np.testing.assert_array_equal(in_groups(weight).data, whole)


def test_other_types_and_scales_that_are_not_finite_stay():
    other = packed("F16", 4, 32)
    assert in_groups(other) is other
    weight = packed("Q8_0", 4, 32)
    data = weight.data.copy()
    data[:2] = np.array([np.inf], np.float16).view(np.uint8)
    damaged = Weight("w", weight.shape, weight.type, data)
    assert in_groups(damaged) is damaged
