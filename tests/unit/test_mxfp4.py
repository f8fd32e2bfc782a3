"""MXFP4 in the two orders of its quants."""

import numpy as np
import pytest

from mlx_engine.quant import BY_NAME
from mlx_engine.quant.group_weight import GGUF, MLX, in_gguf_order, in_mlx_order
from mlx_engine.quant.weight import Weight


def random_weight(seed: int, scales: range) -> Weight:
    blocks = np.random.default_rng(seed).integers(0, 256, (6 * 2, 17), dtype=np.uint8)
    blocks[:, 0] = np.resize(np.arange(scales.start, scales.stop), len(blocks))
    return Weight("w", (6, 64), GGUF, blocks.reshape(-1))


@pytest.mark.parametrize("scales", [range(0, 4), range(120, 134), range(251, 255)], ids=str)
def test_both_orders_have_the_same_values(scales: range):
    of = random_weight(1, scales)
    there = in_mlx_order(of)
    assert there.type == MLX
    np.testing.assert_array_equal(there.dequantize(), of.dequantize())
    back = in_gguf_order(there)
    assert back.type == GGUF
    np.testing.assert_array_equal(back.data, of.data)


def test_quants_of_a_group_by_hand():
    """GGUF: byte j has quants j and j + 16. MLX: byte j has quants 2j and 2j + 1."""
    quants = np.arange(32) % 16
    blocks = np.concatenate([[127], quants[:16] | quants[16:] << 4]).astype(np.uint8)
    there = in_mlx_order(Weight("w", (1, 32), GGUF, blocks))
    np.testing.assert_array_equal(there.data, [127, *(quants[::2] | quants[1::2] << 4)])


def test_an_infinite_scale_and_other_types_stay_as_they_are():
    for of in (random_weight(2, range(255, 256)), Weight.pack("w", np.ones((2, 32)), BY_NAME["Q8_0"])):
        assert in_mlx_order(of) is of
        assert in_gguf_order(of) is of
    infinite = Weight("w", (1, 32), MLX, np.full(17, 255, dtype=np.uint8))
    assert in_gguf_order(infinite) is infinite
