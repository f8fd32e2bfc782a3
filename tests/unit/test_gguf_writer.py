"""Writing GGUF files: what comes back, what is refused, and what a failed write leaves."""

import numpy as np
import pytest

from mlx_engine.checkpoint import open_gguf, write_gguf
from mlx_engine.checkpoint.gguf_values import Value, ValueType
from mlx_engine.errors import OptionError, SourceError
from mlx_engine.quant.types import BY_NAME, F32
from mlx_engine.quant.weight import Weight
from tests import gguf_bytes as g
from tests.unit.test_gguf import packed_by_the_gguf_package

# ---- writing ----


@pytest.mark.parametrize("make", [g.small_file, lambda: g.File(g.every_kind_of_pair(), version=2).build()])
def test_reading_and_writing_again_gives_the_same_bytes(file_of, tmp_path, make):
    data = make()
    file = open_gguf(file_of(data))
    weights = [file.weight(name) for name in file.tensors]
    write_gguf(tmp_path / "copy.gguf", file.typed_metadata(), weights, version=file.version)
    assert (tmp_path / "copy.gguf").read_bytes() == data


def test_a_file_of_the_gguf_package_is_written_again_with_the_same_bytes(tmp_path):
    packed_by_the_gguf_package(tmp_path / "theirs.gguf")
    file = open_gguf(tmp_path / "theirs.gguf")
    write_gguf(tmp_path / "copy.gguf", file.typed_metadata(), [file.weight(name) for name in file.tensors])
    assert (tmp_path / "copy.gguf").read_bytes() == (tmp_path / "theirs.gguf").read_bytes()


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (True, "BOOL"), (0, "UINT32"), (2**32 - 1, "UINT32"), (-1, "INT32"), (2**32, "INT64"), (2**63, "UINT64"),
        (-(2**31) - 1, "INT64"), (0.5, "FLOAT32"), ("", "STRING"), (np.int8(3), "INT8"), (np.float64(2), "FLOAT64"),
        (np.bool_(True), "BOOL"), (Value(ValueType.UINT16, 9), "UINT16"),
    ],
)  # fmt: skip
def test_a_value_is_stored_as_the_type_that_suits_it(tmp_path, value, kind):
    write_gguf(tmp_path / "f.gguf", {"k": value}, [])
    file = open_gguf(tmp_path / "f.gguf")
    assert file.kinds["k"].name == kind
    assert file.metadata["k"] == (value.value if isinstance(value, Value) else value)


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([1, 2], "u4"), ([1, -2], "i4"), ([1, 2**40], "i8"), ([True, False], "?"), ([1, 0.5], "f4"),
        ((1, 2), "u4"), (np.arange(3, dtype=np.int16), "i2"), (np.array([True]), "?"),
    ],
)  # fmt: skip
def test_an_array_is_stored_as_the_type_that_suits_all(tmp_path, values, dtype):
    write_gguf(tmp_path / "f.gguf", {"k": values}, [])
    read = open_gguf(tmp_path / "f.gguf").metadata["k"]
    assert read.dtype == np.dtype(dtype)
    assert read.tolist() == list(values)


def test_nested_lists_are_arrays_of_arrays(tmp_path):
    write_gguf(tmp_path / "f.gguf", {"k": [[1, 2], ["a"], []]}, [])
    numbers, *texts = open_gguf(tmp_path / "f.gguf").metadata["k"]
    assert (numbers.tolist(), texts) == ([1, 2], [["a"], []])


@pytest.mark.parametrize(
    "metadata",
    [
        {"k": None}, {"k": 2**64}, {"k": [1, "a"]}, {"k": [True, 1]}, {"": 1}, {"k" * 70_000: 1},
        {"k": Value(ValueType.UINT8, 300)}, {"k": Value(ValueType.FLOAT32, 1e300)}, {"k": Value(ValueType.STRING, 5)},
        {"k": np.zeros((2, 2))}, {"k": np.zeros(2, np.float16)}, {"k": "\ud800"}, {"k": [[[[[[[[[1]]]]]]]]]},
        {"k": Value(ValueType.ARRAY, 5)}, {"general.alignment": 13}, {"general.alignment": Value(ValueType.INT32, 32)},
        {"k": {}}, {"k": b"bytes"}, {"k": [2**63, -1]},
    ],
)  # fmt: skip
def test_what_the_format_cannot_hold_is_refused_and_leaves_no_file(tmp_path, metadata):
    with pytest.raises(OptionError):
        write_gguf(tmp_path / "f.gguf", metadata, [])
    assert list(tmp_path.iterdir()) == []


def test_an_empty_key_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(OptionError, match="metadata '': the key is empty"):
        write_gguf(tmp_path / "f.gguf", {"": 1}, [])


@pytest.mark.parametrize(
    "weights",
    [
        [Weight.pack("same", [1.0], F32)] * 2,
        [Weight.pack("n" * 64, [1.0], F32)],
        [Weight.pack("w", np.zeros((1, 1, 1, 1, 1)), F32)],
    ],
    ids=["same name", "long name", "five dimensions"],
)
def test_tensors_that_the_format_cannot_hold_are_refused(tmp_path, weights):
    with pytest.raises(OptionError):
        write_gguf(tmp_path / "f.gguf", {}, weights)


def test_other_versions_and_alignments_are_refused(tmp_path):
    with pytest.raises(OptionError, match="version"):
        write_gguf(tmp_path / "f.gguf", {}, [], version=1)
    with pytest.raises(OptionError, match="alignment"):
        write_gguf(tmp_path / "f.gguf", {}, [], alignment=48)


@pytest.mark.parametrize("alignment", [1, 8, 64, 4096])
def test_tensors_are_aligned_as_asked(tmp_path, alignment):
    weights = [Weight.pack(name, np.full(5, 2.0), F32) for name in "abc"]
    write_gguf(tmp_path / "f.gguf", {"k": "v"}, weights, alignment=alignment)
    file = open_gguf(tmp_path / "f.gguf")
    assert file.alignment == alignment
    for name in "abc":
        assert file.tensors[name].offset % alignment == 0
        assert file.load_tensor(name).tolist() == [2.0] * 5


def test_a_file_is_replaced_while_it_is_mapped(tmp_path):
    path = tmp_path / "f.gguf"
    write_gguf(path, {"k": 1}, [Weight.pack("w", [1.0, 2.0], F32)])
    old = open_gguf(path)
    write_gguf(path, {"k": 2}, [old.weight("w")])
    assert (old.metadata["k"], open_gguf(path).metadata["k"]) == (1, 2)
    assert old.load_tensor("w").tolist() == open_gguf(path).load_tensor("w").tolist() == [1.0, 2.0]


def test_a_folder_that_is_not_there_is_said_so(tmp_path):
    with pytest.raises(SourceError, match="cannot be written"):
        write_gguf(tmp_path / "no" / "f.gguf", {}, [])


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "f.gguf"
    write_gguf(path, {"k": 1}, [])
    with pytest.raises(OptionError):
        write_gguf(path, {"k": None}, [])
    assert open_gguf(path).metadata == {"k": 1}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["Q2_K", "IQ4_XS", "MXFP4"])
def test_types_that_cannot_be_packed_can_still_be_copied(tmp_path, name):
    type_ = BY_NAME[name]
    raw = np.arange(2 * type_.block_bytes, dtype=np.uint8)
    write_gguf(tmp_path / "f.gguf", {}, [Weight("w", (2, type_.block_size), type_, raw)])
    np.testing.assert_array_equal(open_gguf(tmp_path / "f.gguf").weight("w").data, raw)
