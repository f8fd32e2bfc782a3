"""What an experiment understands, and what it refuses."""

import mlx.core as mx
import numpy as np
import pytest

from kernels.lab.arrays import parse
from tests.kernels_lab.toys import PRODUCT, SCALE, changed


@pytest.mark.parametrize(
    ("text", "type_", "shape"),
    [
        ("", "float32", ()),
        ("N", "float32", (6,)),
        ("T V N", "T", (4, 6)),
        ("uint32 N/2*3 5", "uint32", (9, 5)),
        ("float16 N*2", "float16", (12,)),
    ],
)
def test_arrays_are_described_by_type_and_axes(text, type_, shape):
    array = parse("x", text, "toy")
    assert (array.type, array.shape({"N": 6, "V": 4})) == (type_, shape)


@pytest.mark.parametrize("text", ["N K T", "N, K", "2N", "N+1", "float16 q8_0 N K", "q8_0 N", "N/K"])
def test_what_cannot_be_understood_is_refused(text):
    with pytest.raises(ValueError, match="toy: x: expected"):
        parse("x", text, "toy")


def test_a_q8_0_matrix_is_two_arrays_and_float64_to_the_reference():
    launch, numbers = PRODUCT.launch({"N": 3, "K": 64})
    assert launch.kernel.input_names == ("x", "wq", "ws")
    x, wq, ws = launch.inputs
    assert (wq.shape, wq.dtype, ws.dtype) == ((3, 16), mx.uint32, mx.float16)
    assert ws.size >= 8  # fewer would lie in another address space
    codes = np.array(wq).view(np.uint8).astype(np.float64) - 128
    assert np.array_equal(numbers["w"], codes * np.repeat(np.array(ws)[:6].reshape(3, 2), 32, axis=1))
    assert numbers["w"].min() < 0 < numbers["w"].max()
    assert np.array_equal(np.array(x), numbers["x"].astype(np.float32))


def test_t_is_what_was_chosen_and_axes_and_constants_are_numbers_of_the_text():
    launch, _ = changed(SCALE, constants={"R": 2}).launch({"N": 5}, "float16")
    assert list(launch.template) == [("N", 5), ("R", 2), ("T", mx.float16)]
    assert launch.inputs[0].dtype == mx.float16
    assert launch.output_dtypes == [mx.float16]


def test_threads_are_rounded_up_to_whole_threadgroups():
    assert SCALE.geometry({"N": 33}) == ((64, 1, 1), (32, 1, 1))
    grid = changed(SCALE, threads=lambda N: (N, 3), threadgroup=(16, 2)).geometry({"N": 17})
    assert grid == ((32, 4, 1), (16, 2, 1))


def test_ragged_sizes_are_24_smallest_first_and_fit():
    sizes = PRODUCT.ragged()
    assert len(sizes) == len({tuple(one.values()) for one in sizes}) == 24
    assert sizes[0] == {"K": 32, "N": 1}
    assert all(one["K"] % 32 == 0 for one in sizes)
    assert any(one["N"] % 2 and one["N"] > 32 for one in sizes)
    volumes = [one["K"] * one["N"] for one in sizes]
    assert volumes == sorted(volumes)
    assert PRODUCT.ragged() == sizes


def test_data_replaces_what_is_random():
    fixed = changed(SCALE, data=lambda N, rng: {"x": np.arange(N) + rng.integers(1), "a": [2]})
    _, numbers = fixed.launch({"N": 4})
    assert list(numbers["x"]) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match=r"scale.data: expected x \(4,\), found \(5,\)"):
        changed(SCALE, data=lambda: {"x": np.zeros(5)}).launch({"N": 4})


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"N": 3}, "expected sizes >= 1 of K, a multiple of 32; N, found N=3"),
        ({"N": 3, "K": 33}, "found K=33"),
        ({"N": 0, "K": 32}, "found N=0"),
        ({"N": 1, "K": 32, "Z": 1}, "found N=1, K=32, Z=1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        PRODUCT.launch(sizes)


def test_mistakes_of_the_definition_are_said_when_it_is_made():
    with pytest.raises(ValueError, match="expected outputs of numbers, found a q8_0 matrix"):
        changed(SCALE, outputs={"y": "q8_0 N K"})
    with pytest.raises(ValueError, match="expected constants beside the axes, found N as both"):
        changed(SCALE, constants={"N": 1})
    with pytest.raises(ValueError, match="expected a name that C accepts"):
        changed(SCALE, name="two words")


def test_a_function_that_asks_for_what_nobody_knows_is_refused():
    with pytest.raises(ValueError, match=r"scale.threads: expected parameters among N, found M"):
        changed(SCALE, threads=lambda M: M).launch({"N": 1})
    wrong = changed(SCALE, reference=lambda x, b: x)
    with pytest.raises(ValueError, match=r"scale.reference: expected parameters among N, x, a, found b"):
        list(wrong.expected({"N": 4}, wrong.launch({"N": 4})[1]))


def test_a_reference_of_the_wrong_shape_is_refused():
    wrong = changed(SCALE, reference=lambda x: x[:-1])
    with pytest.raises(ValueError, match=r"scale.reference: expected y \(4,\), found \(3,\)"):
        list(wrong.expected({"N": 4}, wrong.launch({"N": 4})[1]))
