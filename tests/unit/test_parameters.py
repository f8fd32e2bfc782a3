"""The tensor table: what a file holds otherwise than the model has it."""

import numpy as np
import pytest

from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.errors import TensorMismatchError
from mlx_engine.quant import BY_NAME
from mlx_engine.quant.weight import Weight
from mlx_engine.weights.plan import Plan, Tensor, check
from mlx_engine.weights.stored import TensorLayout

FUSED = np.random.default_rng(0).standard_normal((96, 64)).astype(np.float32)


def packed(values: np.ndarray, type_: str = "F32") -> Weight:
    return Weight.pack("stored", values, BY_NAME[type_])


@pytest.mark.parametrize("type_", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
def test_rows_are_a_view_of_the_stored_bytes(type_: str):
    whole = packed(FUSED, type_)
    part = TensorLayout("stored", rows=(32, 96)).take(whole, (32, 64))
    assert np.shares_memory(part.data, whole.data)
    assert part.type == whole.type
    np.testing.assert_array_equal(part.dequantize(), whole.dequantize()[32:64])


@pytest.mark.parametrize("type_", ["F32", "F16", "BF16"])
def test_what_is_transposed_is_turned_round_in_its_own_type(type_: str):
    whole = packed(FUSED, type_)
    taken = TensorLayout("stored", transposed=True).take(whole, (64, 96))
    assert taken.type == whole.type
    np.testing.assert_array_equal(taken.dequantize(), whole.dequantize().T)


def test_rows_of_what_is_transposed_are_columns():
    whole = packed(FUSED.T)  # (in, out)
    taken = TensorLayout("stored", rows=(64, 96), transposed=True).take(whole, (32, 64))
    np.testing.assert_array_equal(taken.dequantize(), FUSED[64:])


def test_a_part_of_a_bias():
    bias = np.arange(96, dtype=np.float32)
    taken = TensorLayout("stored", rows=(32, 96)).take(packed(bias), (32,))
    np.testing.assert_array_equal(taken.dequantize(), bias[32:64])


def test_what_is_added_to_is_float32():
    norm_weight = packed(np.array([0.5, -0.25, 1e-3], dtype=np.float32), "BF16")
    taken = TensorLayout("stored", plus=1.0).take(norm_weight, (3,))
    assert taken.type.name == "F32"
    np.testing.assert_array_equal(taken.dequantize(), norm_weight.dequantize() + 1)


def test_what_is_stored_as_the_model_has_it_is_not_copied():
    whole = packed(FUSED)
    assert np.shares_memory(TensorLayout("stored").take(whole, (96, 64)).data, whole.data)


@pytest.mark.parametrize("type_", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("heads", "rotated"), [(None, None), (2, None), (4, None), (2, 12), (4, 4)])
def test_what_is_put_back_is_as_it_was_stored(type_: str, transposed: bool, heads: int | None, rotated: int | None):
    whole = packed(FUSED.T if transposed else FUSED, type_)
    of = [TensorLayout("stored", (32 * i, 96), transposed=transposed, heads=heads, rotated=rotated) for i in range(3)]
    parts = [stored.take(whole, (32, 64)) for stored in of]
    again = of[0].put([stored.in_file_order(part) for stored, part in zip(of, parts, strict=True)])
    assert (again.name, again.shape, again.type) == ("stored", whole.shape, whole.type)
    np.testing.assert_array_equal(again.data, whole.data)


def test_rotated_rows_are_dealt_to_both_halves_of_each_head():
    taken = TensorLayout("stored", heads=2, rotated=4).take(
        packed(np.arange(16, dtype=np.float32).reshape(16, 1)), (16, 1)
    )
    order = [0, 1, 4, 5, 2, 3, 6, 7]
    np.testing.assert_array_equal(taken.dequantize()[:, 0], [*order, *(8 + i for i in order)])


def test_what_was_added_is_taken_off_again():
    norm_weight = packed(np.array([0.5, -0.25, 2.0], dtype=np.float32))
    stored = TensorLayout("stored", plus=1.0)
    np.testing.assert_array_equal(stored.put([stored.take(norm_weight, (3,))]).dequantize(), norm_weight.dequantize())


def test_parts_of_one_tensor_have_one_type():
    with pytest.raises(ValueError, match="one type"):
        TensorLayout("stored").put([packed(FUSED), packed(FUSED, "F16")])


@pytest.mark.parametrize(
    ("stored", "shape"),
    [
        (TensorLayout("x"), (32, 64)),
        (TensorLayout("x", rows=(32, 96)), (96, 64)),
        (TensorLayout("x", transposed=True), (64, 32)),
        (TensorLayout("x", rows=(32, 96), transposed=True), (64, 96)),
    ],
)
def test_the_shape_in_the_file(stored: TensorLayout, shape: tuple[int, int]):
    assert stored.shape((32, 64)) == shape


def of(naming: str, **shapes: tuple[int, ...]) -> Checkpoint:
    return Checkpoint("here", naming, "x", {}, {}, shapes, packed)  # type: ignore[arg-type]


THREE = [
    Tensor(
        f"{name}.weight",
        TensorLayout("fused", (32 * i, 96), transposed=True),
        (32, 64),
        gguf=TensorLayout("qkv", (32 * i, 96)),
    )
    for i, name in enumerate("qkv")
]


def test_a_tensor_of_several_is_found_by_each_name():
    for checkpoint in (of("hf", fused=(64, 96)), of("gguf", qkv=(96, 64))):
        assert list(check(checkpoint, Plan(None, THREE))) == ["q.weight", "k.weight", "v.weight"]


def test_a_wrong_tensor_of_several_is_named_once():
    with pytest.raises(TensorMismatchError) as caught:
        check(of("hf"), Plan(None, THREE))
    assert caught.value.missing == ("fused",)
    with pytest.raises(TensorMismatchError) as caught:
        check(of("gguf", qkv=(96, 63)), Plan(None, THREE))
    assert caught.value.misshapen == ("qkv (expected (96, 64), found (96, 63))",)
    assert caught.value.missing == caught.value.unexpected == ()
