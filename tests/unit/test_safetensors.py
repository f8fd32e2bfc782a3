"""Safetensors files: sound ones against the `safetensors` package, and every way to be damaged."""

import json
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_engine.checkpoint.safetensors import open_safetensors
from mlx_engine.errors import EngineError, FormatError, SourceError, UnsupportedTypeError

VALUES = np.array([[1.0, -2.5, 0.0], [3.25, 65504.0, -0.0]], dtype=np.float32)


def raw(header, data=b"", *, length=None):
    """A file of a header (bytes, or a value for JSON) and data; `length` lies about the header's."""
    if not isinstance(header, bytes):
        header = json.dumps(header).encode()
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def row(dtype="F32", shape=(2, 3), offsets=(0, 24)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


GOOD = raw({"__metadata__": {"format": "pt"}, "a": row(), "b": row("F16", (2,), (24, 28))}, VALUES.tobytes() + bytes(4))


@pytest.fixture
def opened(tmp_path):
    def write_and_open(data):
        path = tmp_path / "model.safetensors"
        path.write_bytes(data)
        return open_safetensors(path)

    return write_and_open


def test_a_sound_file_lists_its_tensors_and_gives_their_values(opened):
    file = opened(GOOD)
    assert {name: (entry.dtype, entry.shape) for name, entry in file.tensors.items()} == {
        "a": ("F32", (2, 3)),
        "b": ("F16", (2,)),
    }
    weight = file.weight("a")
    assert (weight.name, weight.shape, weight.type.name) == ("a", (2, 3), "F32")
    assert np.array_equal(weight.dequantize(), VALUES)


def test_a_weight_is_a_view_of_the_file_not_a_copy(opened):
    weight = opened(GOOD).weight("a")
    assert not weight.data.flags.owndata
    assert not weight.data.flags.writeable


def test_a_weight_outlives_the_object_that_gave_it(opened):
    weight = opened(GOOD).weight("a")
    assert np.array_equal(weight.dequantize(), VALUES)


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [
        ("F32", VALUES.astype("<f4").tobytes()),
        ("F16", VALUES.astype("<f2").tobytes()),
        ("BF16", (VALUES.view(np.uint32) >> 16).astype("<u2").tobytes()),
    ],
)
def test_each_readable_type_is_read(opened, dtype, stored):
    values = opened(raw({"w": row(dtype, (2, 3), (0, len(stored)))}, stored)).weight("w").dequantize()
    assert values.dtype == np.float32
    assert values == pytest.approx(VALUES, rel=2**-8)
    assert values[0].tolist() == [1.0, -2.5, 0.0]


def test_the_safetensors_package_agrees(tmp_path):
    numpy_side = pytest.importorskip("safetensors.numpy")
    rng = np.random.default_rng(3)
    tensors = {
        "matrix": rng.standard_normal((5, 7)).astype(np.float32),
        "half": rng.standard_normal((3, 2, 2)).astype(np.float16),
        "scalar": np.array(2.5, dtype=np.float32),
        "empty": np.zeros((0, 4), dtype=np.float32),
        "ids": np.arange(6, dtype=np.int64),
        "é": np.ones(1, dtype=np.float32),
    }
    path = tmp_path / "model.safetensors"
    numpy_side.save_file(tensors, path, metadata={"made": "here"})
    file = open_safetensors(path)
    assert {name: entry.shape for name, entry in file.tensors.items()} == {n: t.shape for n, t in tensors.items()}
    for name in tensors.keys() - {"ids"}:
        values = file.weight(name).dequantize()
        assert values.shape == tensors[name].shape
        assert np.array_equal(values, tensors[name].astype(np.float32))


def test_a_file_without_tensors_is_sound(opened):
    assert opened(raw({})).tensors == {}
    assert opened(raw({"__metadata__": {}})).tensors == {}


def test_a_header_padded_with_spaces_is_sound(opened):
    assert list(opened(raw(json.dumps({"a": row()}).encode() + b" " * 13, VALUES.tobytes())).tensors) == ["a"]


@pytest.mark.parametrize("dtype", ["I64", "F64", "BOOL", "F8_E5M2", "a type of the future"])
def test_a_type_that_cannot_be_read_is_refused_only_when_it_is_needed(opened, dtype):
    file = opened(raw({"a": row(dtype, (2,), (0, 16)), "b": row("F32", (1,), (16, 20))}, bytes(20)))
    assert file.tensors["a"].dtype == dtype
    assert file.weight("b").dequantize().tolist() == [0.0]
    with pytest.raises(UnsupportedTypeError) as caught:
        file.weight("a")
    assert dtype in str(caught.value)
    assert "a" in caught.value.where


HOSTILE = {
    "empty file": b"",
    "seven bytes": bytes(7),
    "length zero": bytes(8),
    "length beyond the file": raw({"a": row()}, VALUES.tobytes(), length=1000),
    "length of 2**64 - 1": raw({"a": row()}, VALUES.tobytes(), length=2**64 - 1),
    "length one too short": raw({"a": row()}, VALUES.tobytes(), length=len(json.dumps({"a": row()})) - 1),
    "length one too long": raw({"a": row()}, VALUES.tobytes(), length=len(json.dumps({"a": row()})) + 1),
    "not JSON": raw(b"hello"),
    "not UTF-8": raw(b'{"\xff\xfe": 1}'),
    "a GGUF file": b"GGUF" + bytes(100),
    "nested deep": raw(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "lists nested deep": raw(b"[" * 100_000),
    "a number of 10,000 digits": raw(
        b'{"a": {"dtype": "F32", "shape": [%s], "data_offsets": [0, 4]}}' % (b"9" * 10_000)
    ),
    "a list": raw([1, 2]),
    "null": raw(None),
    "a string": raw("model"),
    "a tensor that is a list": raw({"a": [1]}),
    "a tensor that is null": raw({"a": None}),
    "no dtype": raw({"a": {"shape": [1], "data_offsets": [0, 4]}}, bytes(4)),
    "no shape": raw({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, bytes(4)),
    "no offsets": raw({"a": {"dtype": "F32", "shape": [1]}}, bytes(4)),
    "dtype a number": raw({"a": row(dtype=7)}, VALUES.tobytes()),
    "dtype null": raw({"a": row(dtype=None)}, VALUES.tobytes()),
    "shape a string": raw({"a": {**row(), "shape": "23"}}, VALUES.tobytes()),
    "shape an object": raw({"a": {**row(), "shape": {"2": 3}}}, VALUES.tobytes()),
    "shape negative": raw({"a": row(shape=(-2, -3))}, VALUES.tobytes()),
    "shape a bool": raw({"a": row(shape=(True, 6))}, VALUES.tobytes()),
    "shape a float": raw({"a": row(shape=(2.0, 3.0))}, VALUES.tobytes()),
    "shape NaN": raw(b'{"a": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 0]}}'),
    "shape in strings": raw({"a": row(shape=("2", "3"))}, VALUES.tobytes()),
    "shape nested": raw({"a": row(shape=([2], [3]))}, VALUES.tobytes()),
    "shape too small": raw({"a": row(shape=(2, 2))}, VALUES.tobytes()),
    "shape too large": raw({"a": row(shape=(2, 4))}, VALUES.tobytes()),
    "shape of 2**62 elements": raw({"a": row(shape=(2**62,))}, VALUES.tobytes()),
    "shape that wraps to its size in 64 bits": raw({"a": row(shape=(2**62, 16), offsets=(0, 0))}),
    "shape product beyond 64 bits": raw({"a": row(shape=(2**62, 2**62, 2**62))}, VALUES.tobytes()),
    "one offset": raw({"a": row(offsets=(0,))}, VALUES.tobytes()),
    "three offsets": raw({"a": row(offsets=(0, 12, 24))}, VALUES.tobytes()),
    "offsets reversed": raw({"a": row(offsets=(24, 0))}, VALUES.tobytes()),
    "offsets negative": raw({"a": row(offsets=(-24, 0))}, VALUES.tobytes()),
    "offsets bool": raw({"a": row("F16", (), (False, True))}, VALUES.tobytes()),
    "offsets floats": raw({"a": row(offsets=(0.0, 24.0))}, VALUES.tobytes()),
    "offsets out of the file": raw({"a": row(offsets=(8, 32))}, VALUES.tobytes()),
    "offsets far out of the file": raw({"a": row(offsets=(2**62, 2**62 + 24))}, VALUES.tobytes()),
    "offsets beyond 64 bits": raw({"a": row(offsets=(2**64, 2**64 + 24))}, VALUES.tobytes()),
    "tensors that overlap": raw({"a": row(), "b": row("F32", (1,), (20, 24))}, VALUES.tobytes()),
    "tensors that overlap, in other order": raw({"b": row("F32", (1,), (20, 24)), "a": row()}, VALUES.tobytes()),
    "one tensor twice": raw({"a": row(), "b": row()}, VALUES.tobytes()),
    "a hole between tensors": raw({"a": row(), "b": row("F32", (1,), (28, 32))}, VALUES.tobytes() + bytes(8)),
    "a hole before the first tensor": raw({"a": row(offsets=(4, 28))}, bytes(4) + VALUES.tobytes()),
    "bytes after the last tensor": raw({"a": row()}, VALUES.tobytes() + bytes(4)),
    "bytes and no tensor": raw({}, bytes(4)),
    "a name twice": raw(b'{"a": %s, "a": %s}' % ((json.dumps(row()).encode(),) * 2), VALUES.tobytes()),
    "a key of a tensor twice": raw(
        b'{"a": {"dtype": "F32", "dtype": "F16", "shape": [6], "data_offsets": [0, 24]}}', VALUES.tobytes()
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_damaged_file_is_one_format_error(opened, tmp_path, case):
    with pytest.raises(FormatError) as caught:
        opened(HOSTILE[case])
    error = caught.value
    assert str(tmp_path) in error.where
    assert error.expected
    assert error.found
    assert error.hint
    assert len(str(error)) < len(str(tmp_path)) + 500, "the message repeats the file"
    assert not isinstance(error, UnsupportedTypeError)


def test_an_overlap_and_a_hole_are_named_with_both_tensors(opened):
    for offsets, found in (((20, 24), "an overlap"), ((32, 36), "a hole of 8 bytes")):
        with pytest.raises(FormatError) as caught:
            opened(raw({"before": row(), "after": row("F32", (1,), offsets)}, bytes(36)))
        assert "tensor 'after' to begin at byte" in caught.value.expected
        assert "where tensor 'before' ends" in caught.value.expected
        assert caught.value.found.endswith(found)


def test_tensors_may_be_in_any_order_and_empty(opened):
    rows = {"b": row("F32", (1,), (24, 28)), "empty": row("F32", (0, 4), (24, 24)), "a": row()}
    assert list(opened(raw(rows, VALUES.tobytes() + bytes(4))).tensors) == ["b", "empty", "a"]


def test_a_file_cut_at_any_byte_is_one_format_error(opened):
    for n in range(len(GOOD)):
        with pytest.raises(FormatError):
            opened(GOOD[:n])
    assert opened(GOOD).tensors


@given(st.data())
@settings(max_examples=150)
def test_a_file_with_any_bytes_changed_opens_or_is_one_error(tmp_path_factory, data):
    damaged = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(GOOD) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "changed.safetensors"
    path.write_bytes(damaged)
    try:
        file = open_safetensors(path)
        for name in file.tensors:
            file.weight(name).dequantize()
    except EngineError:
        pass


def test_a_missing_file_and_a_folder_are_source_errors(tmp_path):
    for path in (tmp_path / "nothing.safetensors", tmp_path):
        with pytest.raises(SourceError) as caught:
            open_safetensors(path)
        assert str(path) in str(caught.value)


def test_numbers_are_little_endian(opened):
    stored = struct.pack("<3f", 1.0, 2.0, -3.0)
    assert opened(raw({"w": row("F32", (3,), (0, 12))}, stored)).weight("w").dequantize().tolist() == [1.0, 2.0, -3.0]
