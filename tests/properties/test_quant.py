"""Properties of the block formats for random bytes and floats."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mlx_engine import quant
from mlx_engine.quant.types import BY_NAME
from tests.unit.test_quant import (
    SEARCHED,
    WRITABLE,
    assert_same_bits,
    oracle_dequantize,
    oracle_quantize,
    there_and_back,
)

READABLE = [type_.name for type_ in quant.readable_types()]
FLOATS = st.floats(width=32, allow_nan=False)


@pytest.mark.some(3)
@pytest.mark.parametrize("name", READABLE)
@settings(max_examples=20)
@given(data=st.data())
def test_any_bytes_mean_what_the_gguf_package_says(name, data):
    type_ = BY_NAME[name]
    raw = data.draw(hnp.arrays(np.uint8, (1, type_.block_bytes)))
    assert_same_bits(quant.dequantize(raw, type_), oracle_dequantize(raw, name).reshape(-1))


@pytest.mark.some(2)
@pytest.mark.parametrize("name", WRITABLE)
@settings(max_examples=30)
@given(values=hnp.arrays(np.float32, (2, 32), elements=FLOATS))
def test_any_floats_are_packed_into_the_bytes_of_the_gguf_package(name, values):
    np.testing.assert_array_equal(quant.quantize(values, BY_NAME[name]), oracle_quantize(values, name).reshape(-1))


@settings(max_examples=100)
@given(values=hnp.arrays(np.float32, (1, 32), elements=st.floats(-1e4, 1e4, width=32)))
def test_q8_0_is_within_half_a_step_and_the_rounding_of_its_scale(values):
    q8_0 = BY_NAME["Q8_0"]
    read = quant.dequantize(quant.quantize(values, q8_0), q8_0)
    step = np.abs(values).max() / 127
    # float16 keeps 11 bits of the scale, and loses all below its smallest subnormal; a quant is at most 127
    scale_error = max(step * 2.0**-11, 2.0**-25)
    assert np.all(np.abs(read - values[0]) <= step / 2 * (1 + 1e-6) + 127 * scale_error)


@pytest.mark.some(2)
@pytest.mark.parametrize("name", ["Q8_0", "F16", "BF16", "F32"])
@settings(max_examples=30)
@given(values=hnp.arrays(np.float32, (1, 32), elements=st.floats(-1e4, 1e4, width=32)))
def test_unpacked_weights_pack_to_weights_as_near(name, values):
    type_ = BY_NAME[name]
    once = quant.dequantize(quant.quantize(values, type_), type_)
    twice = quant.dequantize(quant.quantize(once, type_), type_)
    if name == "Q8_0":  # the scale is recomputed from 127 times its float16 value, which rounds to the same scale
        np.testing.assert_allclose(twice, once, rtol=2e-3, atol=1e-6)
    else:
        assert_same_bits(twice, once)


@pytest.mark.some(2)
@pytest.mark.parametrize("name", list(SEARCHED))
@settings(max_examples=30)
@given(values=hnp.arrays(np.float32, (1, 256), elements=st.floats(-1e4, 1e4, width=32)), factor=st.floats(1e-6, 1))
def test_searched_types_are_within_steps_of_the_grid_of_their_block(name, values, factor):
    """A step is the range of a block by the largest quant. Trial scales cut the largest weights by up to 1.6 steps."""
    values = (values * factor).astype(np.float32)
    error = np.abs(there_and_back(values, name) - values)
    most = SEARCHED[name][0]
    step = float(max(values.max(), 0) - min(values.min(), 0)) / most
    assert error.max() <= 2.2 * step + most * 64 * 2.0**-25  # float16 loses all below its smallest subnormal
    assert np.sqrt(np.square(error).mean()) <= 1.0 * step + most * 64 * 2.0**-25


@pytest.mark.some(2)
@pytest.mark.parametrize("name", list(SEARCHED))
@given(value=st.floats(-1e4, 1e4, width=32))
def test_equal_weights_stay_nearly_equal_to_what_they_were(name, value):
    values = np.full((1, 256), value, np.float32)
    found = there_and_back(values, name)
    np.testing.assert_allclose(found, values, rtol=4e-3, atol=2e-5)
    assert len(np.unique(found)) == 1


@pytest.mark.some(2)
@pytest.mark.parametrize("name", list(SEARCHED))
@given(n=st.integers(1, 1000))
def test_rows_that_do_not_fill_blocks_are_refused(name, n):
    size = BY_NAME[name].block_size
    if n % size:
        with pytest.raises(ValueError, match=f"not a multiple of the block size, {size}"):
            quant.quantize(np.zeros(n, np.float32), BY_NAME[name])
