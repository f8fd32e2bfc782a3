"""What an experiment understands, and what it refuses."""

import mlx.core as mx
import numpy as np
import pytest

import kernels
from kernels import check
from kernels.blocks import Q4_0
from kernels.emulator import unavailable
from kernels.lab.arrays import AS_BLOCKS, SPLIT, parse
from mlx_engine.quant import BY_NAME, dequantize
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
    with pytest.raises(ValueError, match="expected one meaning per name, found N for two"):
        changed(SCALE, constants={"N": 1})
    with pytest.raises(ValueError, match="expected a name that C accepts"):
        changed(SCALE, name="two words")


def test_a_function_that_asks_for_what_nobody_knows_is_refused():
    with pytest.raises(ValueError, match=r"scale.threads: expected parameters among N, found M"):
        changed(SCALE, threads=lambda M: M).launch({"N": 1})
    with pytest.raises(ValueError, match=r"scale.reference: expected parameters among N, x, a, found b"):
        changed(SCALE, reference=lambda x, b: x)


def test_a_reference_of_the_wrong_shape_is_refused():
    wrong = changed(SCALE, reference=lambda x: x[:-1])
    with pytest.raises(ValueError, match=r"scale.reference for N=4: expected y \(4,\), found \(3,\); if"):
        list(wrong.expected({"N": 4}, wrong.launch({"N": 4})[1]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": lambda: {"z": [1]}}, r"scale.data: expected inputs among x, a, found z"),
        ({"data": lambda: [1]}, r"scale.data: expected a dict of arrays by name, found list"),
        ({"data": lambda seed: {}}, r"scale.data: expected parameters among N, rng, found seed"),
        ({"inputs": {"x": "float N", "a": "1"}}, r"scale: x: .*found 'float' in 'float N'; write float32; types are"),
        ({"inputs": {"x": "half N", "a": "1"}}, "write float16"),
        ({"inputs": {"x": "f16 N", "a": "1"}}, "found 'f16' in 'f16 N'; types are"),
        ({"inputs": {"x": "q9_k N 32", "a": "1"}}, "found 'q9_k'"),
        (
            {"constants": {"eps": 1e-5}},
            "expected int or bool constants, found eps=1e-05; write a float",
        ),
        ({"constants": {"x": 1}}, "expected one meaning per name, found x"),
        ({"constants": {"two words": 1}}, "expected names of letters, digits and _, found 'two words'"),
        ({"threadgroup": 1025}, r"scale.threadgroup: expected at most 1,024 threads, found 1,025: \(1025, 1, 1\)"),
        ({"threadgroup": (32, 8, 8)}, "expected at most 1,024 threads, found 2,048"),
        ({"threadgroup": 0}, "scale.threadgroup: expected one to three whole numbers >= 1, found 0"),
        ({"threadgroup": (32, 1, 1, 1)}, "expected one to three whole numbers"),
        (
            {"threads": lambda N: N / 32},
            r"scale.threads: expected .* numbers >= 0, found 0.03125; divide with //",
        ),
        ({"threads": lambda N: (N, 1.0)}, "divide with //"),
        ({"threads": 64}, "scale.threads: expected a function, found 64"),
        ({"lanes": "some"}, "expected lanes to be one of active, all, found 'some'"),
        ({"suffixes": "no"}, "expected suffixes to be True or False, found 'no'"),
        ({"outputs": {}}, "expected at least one output, found none"),
    ],
)
def test_every_trap_is_one_line_when_the_experiment_is_made(changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        changed(SCALE, **changes)
    assert "\n" not in str(caught.value)


def test_functions_that_need_larger_sizes_than_the_smallest_are_not_refused():
    late = changed(SCALE, threads=lambda N: {4: 4}[N], data=lambda N: {"x": [1, 2, 3, 4][: 4 if N == 4 else 1 // 0]})
    assert late.geometry({"N": 4}) == ((32, 1, 1), (32, 1, 1))
    with pytest.raises(ValueError, match=r"scale.threads: expected one to three whole numbers >= 1, found 0"):
        changed(SCALE, threads=lambda N: N // 2).geometry({"N": 1})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"builds": ["race"]}, r"expected builds, a list of spaces, undefined, races, found \['race'\]"),
        ({"builds": "races"}, "expected builds, a list of spaces, undefined, races, found 'races'"),
        ({"seeds": 3}, "expected seeds, a list of numbers from 0 on, below .*, found 3"),
        ({"seeds": [-1]}, r"found \[-1\]"),
        ({"lanes": "both"}, "expected lanes to be one of active, all"),
        ({"dtypes": "float32"}, "expected dtypes, a list of float32, float16, bfloat16, found 'float32'"),
        ({"sizes": [1, 33]}, r"expected sizes such as .*, found \[1, 33\]"),
        ({"sizes": {"N": 1.5}}, "expected sizes such as"),
        ({"sizes": {"N": "33"}}, "expected sizes such as"),
        ({"sizes": 33}, "expected sizes such as .*, found 33"),
        ({"sizes": {"M": [33]}}, "expected sizes >= 1 of N, found M=33"),
    ],
)
def test_every_trap_of_a_check_is_one_line(arguments, message):
    with pytest.raises(ValueError, match=message) as caught:
        check(SCALE, **{"sizes": [{"N": 1}], **arguments})
    assert "\n" not in str(caught.value)


def test_switches_of_an_experiment_are_those_of_its_checks():
    some = changed(SCALE, source="if (thread_position_in_grid.x < N) y[0] = simd_max(T(1.0));", outputs={"y": "T 1"},
                   reference=lambda: np.ones(1))  # fmt: skip
    assert check(some, [{"N": 3}])
    held = check(some, [{"N": 3}], lanes="all")
    assert "29 lane(s) of the SIMD-group have returned" in str(held)
    assert held.again == "kernels.check(scale, [{'N': 3}], dtypes=[\"float32\"], lanes='all', seeds=[0])"
    assert "`1.0` has no suffix" in str(check(changed(some, suffixes=True), [{"N": 3}]))
    assert check(changed(some, suffixes=True), [{"N": 3}], suffixes=False)


def test_one_shape_is_beyond_indices_of_16_bits():
    assert SCALE.ragged()[-1] == {"N": 65537}
    assert max(sizes["N"] * sizes["K"] for sizes in PRODUCT.ragged()) > 65536
    narrow = changed(SCALE, source=SCALE.source.replace("uint i", "ushort i"))
    assert narrow.source != SCALE.source
    found = check(narrow, [{"N": 65537}], dtypes=["float32"], builds=["undefined"], executor="emulator")
    assert not found
    assert any(note.kind == "truncation" for note in found.notes)


# ---- stored types ----


@pytest.mark.parametrize("type_", SPLIT)
def test_every_type_of_the_kernels_is_packed_quants_and_scales(type_):
    of = SPLIT[type_]
    matrix = changed(PRODUCT, inputs={"x": "1 K", "w": f"{type_} N K"})
    assert matrix.axes["K"] == of.group
    launch, numbers = matrix.launch({"N": 3, "K": 2 * of.group})
    wq, ws = launch.inputs[1:]
    assert (wq.shape, wq.dtype) == ((3, 2 * of.group * of.bits // 32), mx.uint32)
    assert ws.dtype == of.dtype
    assert numbers["w"].shape == (3, 2 * of.group)
    assert len(np.unique(numbers["w"])) > of.group // 2


@pytest.mark.parametrize("type_", AS_BLOCKS)
def test_other_types_are_the_bytes_of_a_file(type_):
    kind, size = AS_BLOCKS[type_]
    matrix = changed(PRODUCT, inputs={"x": "1 K", "w": f"{type_} N K"})
    launch, numbers = matrix.launch({"N": 3, "K": 2 * size})
    raw = np.array(launch.inputs[1])
    assert (raw.shape, raw.dtype) == ((3, 2 * kind.itemsize), np.uint8)
    weights = dequantize(raw.reshape(-1), BY_NAME[type_.upper()]).reshape(3, -1)
    assert np.array_equal(numbers["w"], weights)
    assert np.isfinite(weights).all()


def test_blocks_of_a_file_can_be_given():
    blocks = np.zeros((2, 3), Q4_0)
    blocks["d"], blocks["qs"] = [[1], [2]], 0x19
    _, numbers = changed(PRODUCT, inputs={"x": "1 K", "w": "q4_0 N K"}, data=lambda: {"w": blocks}).launch(
        {"N": 2, "K": 96}
    )
    assert numbers["w"][:, [0, 16, 95]].tolist() == [[1, -7, -7], [2, -14, -14]]
    with pytest.raises(ValueError, match=r"expected a kernels.StoredMatrix for a matrix of affine4_g32_f16"):
        changed(PRODUCT, inputs={"x": "1 K", "w": "affine4_g32_f16 N K"}, data=lambda: {"w": blocks}).launch(
            {"N": 2, "K": 96}
        )


@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
def test_a_kernel_multiplies_q4_0():
    source = PRODUCT.source.replace(
        "int(wq[(row * K + k) / 4] >> (k % 4 * 8) & 0xffu) - 128",
        "int(wq[(row * K + k) / 8] >> (k % 8 * 4) & 0xfu) - 8",
    )
    four = changed(PRODUCT, source=source, inputs={"x": "1 K", "w": "q4_0 N K"})
    assert kernels.check(four, {"N": [1, 5], "K": [32, 96]}, executor="emulator", seeds=(0, 1))


def test_errors_of_a_reference_name_the_sizes():
    wrong = changed(SCALE, reference=lambda x: np.partition(x, 9))
    with pytest.raises(ValueError, match=r"scale.reference for N=4: ValueError: kth\(=9\) out of bounds"):
        list(wrong.expected({"N": 4}, wrong.launch({"N": 4})[1]))


@pytest.mark.parametrize("least", [{"M": 2}, {"N": 0}, {"N": "2"}, 4])
def test_least_sizes_are_of_axes(least):
    with pytest.raises(ValueError, match=r"scale.least: expected a number from 1 on for any of N, found"):
        changed(SCALE, least=least)
