"""Every block format against the `gguf` package, bit for bit."""

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from mlx_engine import quant
from mlx_engine.errors import FormatError, UnsupportedTypeError
from mlx_engine.quant.low_bit import grid
from mlx_engine.quant.types import BY_ID, BY_NAME, F32, TYPES
from mlx_engine.quant.weight import Weight
from tests.cells import each

READABLE = [type_.name for type_ in quant.readable_types()]
# Types whose scales are searched; the `gguf` package takes those of the largest weights, or cannot write the type. Each
# with the largest magnitude of its quants, and llama.cpp's relative error of the weights `normal()`.
SEARCHED = {
    "Q4_K": (15, 0.07152), "Q5_K": (31, 0.03628), "Q6_K": (32, 0.01775), "Q5_0": (16, 0.04283), "Q5_1": (31, 0.03802),
}  # fmt: skip
WRITABLE = [type_.name for type_ in quant.writable_types() if type_.name not in SEARCHED]


def oracle_dequantize(raw, name):
    with np.errstate(all="ignore"):
        return quants.dequantize(raw.copy(), GGMLQuantizationType[name])


def oracle_quantize(values, name):
    with np.errstate(all="ignore"):
        return np.ascontiguousarray(quants.quantize(values, GGMLQuantizationType[name])).view(np.uint8)


def assert_same_bits(actual, expected):
    """Equal as bits, zero's sign included; NaNs need only both be NaN."""
    assert actual.dtype == expected.dtype == np.float32
    both_nan = np.isnan(actual) & np.isnan(expected)
    different = (actual.view(np.uint32) != expected.view(np.uint32)) & ~both_nan
    assert not different.any(), f"{different.sum()} values differ, first at {np.argwhere(different)[0]}"


def rows_of(kind, n=256):
    rng = np.random.default_rng(7)
    normal = rng.standard_normal((6, n)).astype(np.float32)
    tiny = np.float32(1e-44)
    with np.errstate(all="ignore"):
        rows = {
            "normal": normal,
            "large": normal * np.float32(1e6),
            "overflowing half": normal * np.float32(1e30),
            "near the largest float": np.sign(normal) * np.finfo(np.float32).max,
            "subnormal": np.sign(normal) * tiny,
            "small": normal * np.float32(1e-39),
            "zeros": np.zeros_like(normal),
            "negative zeros": -np.zeros_like(normal),
            "all equal": np.full_like(normal, -0.37),
            "halves": np.tile(np.arange(-128, 128, dtype=np.float32) / 2, (6, 1))[:, :n],
            "one infinity": np.where(np.arange(n) == 5, np.inf, normal).astype(np.float32),
            "both infinities": np.where(np.arange(n) % 9 == 5, np.inf * np.sign(normal), normal).astype(np.float32),
            "one NaN": np.where(np.arange(n) == 40, np.nan, normal).astype(np.float32),
            "ties for the largest": np.tile(np.array([1, -1], np.float32), (6, n // 2)),
            "integers": np.rint(normal * 50).astype(np.float32),
        }
    return rows[kind]


KINDS = [
    "normal", "large", "overflowing half", "near the largest float", "subnormal", "small", "zeros", "negative zeros",
    "all equal", "halves", "one infinity", "both infinities", "one NaN", "ties for the largest", "integers",
]  # fmt: skip


def test_the_type_table_is_that_of_the_gguf_package():
    ours = {type_.id: (type_.name, type_.block_size, type_.block_bytes) for type_ in TYPES}
    theirs = {type_.value: (type_.name, *gguf.GGML_QUANT_SIZES[type_]) for type_ in GGMLQuantizationType}
    theirs[9] = ("Q8_1", 32, 36)  # ggml's struct has two halves; the package counts two floats
    assert {number: ours[number] for number in theirs} == theirs


@each("number", [4, 5, 31, 32, 33, 36, 37, 38])
def test_removed_types_are_not_in_the_table(number):
    assert number not in BY_ID


@each("name", READABLE)
def test_random_bytes_mean_what_the_gguf_package_says(name):
    type_ = BY_NAME[name]
    raw = np.random.default_rng(1).integers(0, 256, (40, 8 * type_.block_bytes), dtype=np.uint8)
    assert_same_bits(quant.dequantize(raw, type_), oracle_dequantize(raw, name).reshape(-1))


@each("name", READABLE)
@each("fill", [0x00, 0xFF, 0x7C, 0x7F, 0x80, 0x01])
def test_blocks_of_one_byte_mean_what_the_gguf_package_says(name, fill):
    type_ = BY_NAME[name]
    raw = np.full((2, type_.block_bytes), fill, np.uint8)
    assert_same_bits(quant.dequantize(raw, type_), oracle_dequantize(raw, name).reshape(-1))


@pytest.mark.parametrize(("name", "scales"), [("MXFP4", slice(0, 1)), ("NVFP4", slice(0, 4))])
def test_scales_of_one_byte_mean_what_the_gguf_package_says(name, scales):
    raw = np.random.default_rng(6).integers(0, 256, (256, BY_NAME[name].block_bytes), dtype=np.uint8)
    raw[:, scales] = np.arange(256, dtype=np.uint8)[:, None]
    assert_same_bits(quant.dequantize(raw, BY_NAME[name]), oracle_dequantize(raw, name).reshape(-1))


@each("name", ["IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"])
def test_grids_are_those_of_the_gguf_package(name):
    theirs = getattr(quants, name)
    theirs.init_grid()
    np.testing.assert_array_equal(grid("IQ1" if name == "IQ1_S" else name), theirs.grid.reshape(theirs.grid_shape))


@each("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16"])
@each("kind", KINDS)
def test_packed_floats_read_back_as_the_gguf_package_does(name, kind):
    raw = oracle_quantize(rows_of(kind), name)
    assert_same_bits(quant.dequantize(raw, BY_NAME[name]), oracle_dequantize(raw, name).reshape(-1).astype(np.float32))


@each("name", WRITABLE)
@each("kind", KINDS)
def test_floats_are_packed_into_the_bytes_of_the_gguf_package(name, kind):
    values = rows_of(kind)
    actual = quant.quantize(values, BY_NAME[name])
    expected = oracle_quantize(values, name).reshape(-1)
    if kind == "one NaN":  # which NaN a scale becomes is nobody's decision; the weights must agree
        type_ = BY_NAME[name]
        assert_same_bits(quant.dequantize(actual, type_), quant.dequantize(expected, type_))
    else:
        np.testing.assert_array_equal(actual, expected)


@each("name", WRITABLE)
def test_many_random_rows_are_packed_into_the_bytes_of_the_gguf_package(name):
    rng = np.random.default_rng(3)
    values = (rng.standard_normal((3000, 64)) * 10.0 ** rng.uniform(-12, 8, (3000, 1))).astype(np.float32)
    np.testing.assert_array_equal(quant.quantize(values, BY_NAME[name]), oracle_quantize(values, name).reshape(-1))


@each("name", READABLE)
def test_pieces_join_without_a_seam(name, monkeypatch):
    type_ = BY_NAME[name]
    raw = np.random.default_rng(2).integers(0, 128, 13 * type_.block_bytes, dtype=np.uint8)
    whole = quant.dequantize(raw, type_)
    with monkeypatch.context() as patch:
        patch.setattr(quant, "_PIECE", 4 * type_.block_size)
        assert_same_bits(quant.dequantize(raw, type_), whole)


def test_a_type_that_cannot_be_read_is_named_with_those_that_can():
    weight = Weight("blk.0.ffn_up.weight", (1, 128), BY_NAME["Q1_0"], np.zeros(18, np.uint8))
    with pytest.raises(UnsupportedTypeError) as caught:
        weight.dequantize()
    assert isinstance(caught.value, FormatError)
    for word in ("blk.0.ffn_up.weight", "Q1_0", "Q8_0", "Q6_K"):
        assert word in str(caught.value)


def test_a_type_that_cannot_be_written_is_named_with_those_that_can():
    with pytest.raises(UnsupportedTypeError, match=r"'w'.*Q4_1.*Q6_K.*Q3_K"):
        Weight.pack("w", np.zeros((1, 256)), BY_NAME["Q3_K"])


def normal():
    return np.random.default_rng(0).standard_normal((100, 1024)).astype(np.float32)


def there_and_back(values, name):
    return quant.dequantize(quant.quantize(values, BY_NAME[name]), BY_NAME[name]).reshape(values.shape)


@each("name", list(SEARCHED))
def test_errors_are_smaller_than_those_of_llama_cpp(name):
    values = normal()
    found = there_and_back(values, name)
    assert np.sqrt(np.square(found - values).sum() / np.square(values).sum()) < SEARCHED[name][1] * 0.995
    np.testing.assert_array_equal(there_and_back(values * np.float32(16), name), found * np.float32(16))


@each("name", list(SEARCHED))
def test_weights_of_a_searched_type_are_found_again(name):
    """All weights lie on grids that the type can have, so that the search has to find one at least as good."""
    rng = np.random.default_rng(2)
    values = there_and_back((rng.standard_normal((64, 1024)) * 0.02).astype(np.float32), name)
    error = np.square(there_and_back(values, name) - values).sum() / np.square(values).sum()
    assert np.sqrt(error) < SEARCHED[name][1] / 8


def test_blocks_of_q6_k_with_a_weight_far_from_the_others_are_found_again():
    """The far weight is in the group that decides the factor of its block, and counts far more than the others."""
    rng = np.random.default_rng(5)
    quants = rng.integers(-32, 32, (500, 16, 16))
    quants[:, 0] = rng.integers(-2, 3, (500, 16))
    quants[:, :, 0] = -32
    scales = rng.integers(5, 26, (500, 16, 1)) * rng.choice([-1, 1], (500, 16, 1))
    scales[:, 0] = -128
    values = (quants * scales * np.float32(2.0**-14)).astype(np.float32).reshape(-1, 256)
    np.testing.assert_allclose(there_and_back(values, "Q6_K"), values, rtol=1e-6)


@each("name", list(SEARCHED))
@each("kind", KINDS)
def test_strange_weights_of_a_searched_type(name, kind):
    values = rows_of(kind)
    if not np.isfinite(values).all():
        with pytest.raises(ValueError, match="expected finite weights"):
            quant.quantize(values, BY_NAME[name])
        return
    found = there_and_back(values, name)
    assert np.isfinite(found).all()
    largest = np.abs(values).max()
    if largest < 1e-30:
        np.testing.assert_array_equal(found, 0 * found)
    elif largest < 6e4:  # larger scales are not float16 numbers
        assert np.abs(found - values).max() <= float(largest) * 3 / SEARCHED[name][0]
    else:
        assert float(np.abs(found).max()) <= float(largest) * 1.1


@each("name", READABLE)
def test_rows_are_those_of_the_whole_matrix(name):
    type_ = BY_NAME[name]
    raw = np.random.default_rng(4).integers(0, 128, 5 * 2 * type_.block_bytes, dtype=np.uint8)
    weight = Weight("w", (5, 2 * type_.block_size), type_, raw)
    assert_same_bits(weight.rows([4, 0, 4, 2]), weight.dequantize()[[4, 0, 4, 2]])
    assert weight.rows([]).shape == (0, 2 * type_.block_size)


@pytest.mark.parametrize("ids", [[5], [-1], [0, 5]])
def test_rows_that_do_not_exist_are_refused(ids):
    with pytest.raises(IndexError, match="rows 0 to 4"):
        Weight.pack("w", np.zeros((5, 32)), F32).rows(ids)


def test_rows_are_taken_of_matrices_only():
    with pytest.raises(ValueError, match="matrix"):
        Weight.pack("w", np.zeros(32), F32).rows([0])


def test_a_weight_whose_bytes_do_not_fit_its_shape_is_refused():
    with pytest.raises(ValueError, match="takes 34 bytes"):
        Weight("w", (1, 32), BY_NAME["Q8_0"], np.zeros(33, np.uint8))
    with pytest.raises(ValueError, match="do not fill"):
        Weight("w", (32, 1), BY_NAME["Q8_0"], np.zeros(34, np.uint8))
    with pytest.raises(ValueError, match="do not fill"):
        Weight.pack("w", np.zeros((2, 16)), BY_NAME["Q8_0"])


@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3, 4)])
def test_floats_of_any_shape_can_be_packed_and_read(shape):
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    weight = Weight.pack("w", values, F32)
    assert weight.nbytes == values.nbytes
    np.testing.assert_array_equal(weight.dequantize(), values)


@pytest.mark.parametrize("n", [33, 255])
def test_weights_that_do_not_fill_blocks_are_refused(n):
    with pytest.raises(ValueError, match="multiple"):
        quant.quantize(np.zeros(n, np.float32), BY_NAME["Q8_0"])
    with pytest.raises(ValueError, match="multiple"):
        quant.dequantize(np.zeros(n, np.uint8), BY_NAME["Q8_0"])
    with pytest.raises(ValueError, match="per block"):
        BY_NAME["Q8_0"].bytes_for(n)
