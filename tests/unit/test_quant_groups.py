"""MLX's quantised types against `mx.dequantize`, bit for bit, and weights that are stored in three tensors."""

import mlx.core as mx
import numpy as np
import pytest

from kernels.cpu.formats import blocks_numpy
from mlx_engine import quant
from mlx_engine.quant.group_weight import GroupWeight, Parts, join, split
from mlx_engine.quant.groups import GROUP_TYPES, affine, fixed
from mlx_engine.quant.types import BY_NAME, TYPES
from mlx_engine.quant.weight import Weight
from tests.cells import each
from tests.random_blocks import random_groups
from tests.unit.test_quant import assert_same_bits

SHAPE = (6, 256)
DTYPES = {"F16": mx.float16, "BF16": mx.bfloat16, "F32": mx.float32, "U8": mx.uint8}

types = each("type_", GROUP_TYPES)


def random_weight(type_, shape=SHAPE, seed=1):
    data = np.random.default_rng(seed).integers(0, 256, type_.bytes_for(int(np.prod(shape))), dtype=np.uint8)
    return Weight("w", shape, type_, data)


def oracle(weight):
    """`mx.dequantize` on the CPU; scales and biases widened to float32."""
    type_, n = weight.type, weight.shape[0]
    parts = split(weight, type_)

    def floats(stored):
        values = mx.array(stored.reshape(n, -1)).view(DTYPES[type_.scale])
        return values.astype(mx.float32) if type_.has_biases else values

    quants = mx.array(parts.quants.reshape(n, -1)).view(mx.uint32)
    biases = None if parts.biases is None else floats(parts.biases)
    options = {"group_size": type_.block_size, "bits": type_.bits, "mode": type_.mode, "dtype": mx.float32}
    return np.asarray(mx.dequantize(quants, floats(parts.scales), biases, **options, stream=mx.cpu))


@types
@each("seed", range(3))
def test_random_bytes_mean_what_mlx_says(type_, seed):
    weight = random_weight(type_, seed=seed)
    assert_same_bits(weight.dequantize(), oracle(weight))


@types
@each("fill", [0x00, 0xFF, 0x7C, 0x7F, 0x80, 0x01])
def test_blocks_of_one_byte_mean_what_mlx_says(type_, fill):
    weight = Weight("w", SHAPE, type_, np.full(type_.bytes_for(int(np.prod(SHAPE))), fill, np.uint8))
    assert_same_bits(weight.dequantize(), oracle(weight))


def test_every_quant_with_every_scale_of_the_modes_without_biases():
    for mode, quants in (("mxfp4", 16), ("mxfp8", 256), ("nvfp4", 16)):
        type_ = fixed(mode)
        group = np.arange(max(quants, type_.block_size)).reshape(-1, type_.block_size) % quants
        packed = (group[:, ::2] | group[:, 1::2] << 4 if quants == 16 else group).astype(np.uint8)
        scales = np.repeat(np.arange(256, dtype=np.uint8), len(packed))[:, None]
        data = join(type_, Parts(np.tile(packed, (256, 1)), scales, None))
        weight = Weight("w", (256, group.size), type_, data)
        assert_same_bits(weight.dequantize(), oracle(weight))


@types
def test_blocks_are_the_parts_side_by_side(type_, monkeypatch):
    weight = random_weight(type_)
    parts = split(weight, type_)
    np.testing.assert_array_equal(join(type_, parts), weight.data)
    stored = GroupWeight("w", SHAPE, type_, parts)
    with monkeypatch.context() as patch:
        patch.setattr("mlx_engine.quant.group_weight._PIECE", 3)
        # New memory often has what was there before: here the very blocks that were just joined.
        patch.setattr(np, "empty", lambda shape, dtype: np.full(shape, 85, dtype))
        np.testing.assert_array_equal(stored.data, weight.data)
    assert stored.nbytes == weight.nbytes
    assert split(stored, type_) is parts


@types
def test_rows_of_a_weight_in_parts_are_those_of_the_whole(type_):
    weight = random_weight(type_)
    stored = GroupWeight("w", SHAPE, type_, split(weight, type_))
    assert_same_bits(stored.rows([4, 0, 5, 4]), weight.dequantize()[[4, 0, 5, 4]])
    assert "data" not in vars(stored)
    assert stored.rows([]).shape == (0, SHAPE[1])
    for ids in ([6], [-1], [0, 6]):
        with pytest.raises(IndexError, match="rows 0 to 5"):
            stored.rows(ids)


def test_the_parts_of_a_single_group_are_copies():
    weight = random_weight(affine(4, 64, "F16"), (1, 64))
    before = weight.data.copy()
    split(weight, weight.type)
    np.testing.assert_array_equal(weight.data, before)


def test_parts_that_do_not_fit_are_refused():
    type_ = affine(4, 64, "F16")
    parts = split(random_weight(type_), type_)
    with pytest.raises(ValueError, match="expected parts of 24 groups"):
        GroupWeight("w", SHAPE, type_, Parts(parts.quants, parts.scales, None))
    with pytest.raises(ValueError, match="expected parts of 28 groups"):
        GroupWeight("w", (7, 256), type_, parts)


@pytest.mark.parametrize("name", ["F32", "Q8_0"])
def test_weights_of_these_types_convert_to_those_of_gguf(name):
    weight = random_weight(affine(3, 128, "F16"))
    finite = Weight("w", SHAPE, weight.type, weight.data & 0x3B)
    expected = Weight.pack("w", finite.dequantize(), BY_NAME[name])
    np.testing.assert_array_equal(finite.as_type(BY_NAME[name]).data, expected.data)


def test_names_are_unique_and_no_name_of_ggufs():
    names = [type_.name for type_ in GROUP_TYPES]
    assert len({*names, *(type_.name for type_ in TYPES)}) == len(names) + len(TYPES)
    assert affine(4, 64, "BF16").block_bytes == 36
    assert not {type_.id for type_ in GROUP_TYPES} & {type_.id for type_ in TYPES}
    assert not {*quant.readable_types()} & {*GROUP_TYPES}


@each("type_", [type_ for type_ in GROUP_TYPES if type_.has_biases])
def test_the_twin_of_the_kernels_has_the_same_bits(type_):
    weight = random_groups(np.random.default_rng(1), "w", type_.name, *SHAPE)
    blocks = weight.data.reshape(-1, type_.block_bytes)
    found = blocks_numpy.affine(blocks, type_.bits, type_.block_size, type_.scale.lower())
    assert_same_bits(found.reshape(SHAPE), weight.dequantize())


@types
def test_a_part_of_a_weight_reads_no_other(type_):
    shape = (3, 2, 128)
    weight = random_weight(type_, shape)
    stored = GroupWeight("w", shape, type_, split(weight, type_))
    for i in range(3):
        assert_same_bits(stored.part(i, 3).dequantize(), weight.dequantize()[i])
    assert "data" not in vars(stored)
