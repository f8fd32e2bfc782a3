"""GGUF files: what we read of the `gguf` package's, what it reads of ours, and the bytes in between."""

import subprocess
import sys
import time
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
import pytest

from mlx_engine.checkpoint import open_gguf, write_gguf
from mlx_engine.checkpoint.gguf import MappedFile
from mlx_engine.checkpoint.gguf_values import DTYPES, ValueType
from mlx_engine.errors import FormatError, SourceError, UnsupportedTypeError
from mlx_engine.quant.types import F32, Q8_0
from mlx_engine.quant.weight import Weight
from tests import gguf_bytes as g


@pytest.fixture
def small(file_of):
    return open_gguf(file_of(g.small_file()))


@pytest.mark.parametrize("version", [2, 3])
def test_both_versions_are_read(file_of, version):
    file = open_gguf(file_of(g.File([g.pair("k", g.U8, b"\x07")], version=version).build()))
    assert (file.version, file.metadata, file.tensors, file.alignment) == (version, {"k": 7}, {}, 32)


def test_scalars_are_python_values(small):
    for kind in ValueType:
        if kind != ValueType.ARRAY:
            value = small.metadata[f"s.{int(kind)}"]
            expected = {ValueType.STRING: str, ValueType.BOOL: bool}.get(kind, float if "FLOAT" in kind.name else int)
            assert type(value) is expected
            assert small.kinds[f"s.{int(kind)}"] == kind


def test_arrays_of_numbers_are_read_only_numpy_arrays(small):
    for kind, dtype in DTYPES.items():
        values = small.metadata[f"a.{int(kind)}"]
        assert values.dtype == dtype
        assert values.tolist() == [1, 0, 1]
        assert not values.flags.writeable


def test_arrays_of_strings_are_lists_and_arrays_of_arrays_tuples(small):
    assert small.metadata["a.text"] == ["", "a", "Ġthe", "中文", "x" * 300, "a\0b", "\0", "end"]
    assert small.metadata["a.empty"] == []
    numbers, texts, inner, empty = small.metadata["a.nested"]
    assert (numbers.tolist(), texts, inner[0].tolist(), empty) == ([1, 2], ["p", "q"], [0.5], ())


def test_any_byte_but_zero_is_true(file_of):
    pairs = [g.pair("one", g.BOOL, b"\x02"), g.pair("many", g.ARRAY, g.array(g.BOOL, [0, 1, 2, 255]))]
    metadata = open_gguf(file_of(g.File(pairs).build())).metadata
    assert metadata["one"] is True
    assert metadata["many"].tolist() == [False, True, True, True]


def test_bytes_that_are_not_utf_8_survive_and_can_be_printed(file_of, tmp_path):
    texts = [b"\xff\xfe", b"good", b"\xe4\xb8"]
    data = g.File([g.pair(b"k\x80", g.ARRAY, g.array(g.STRING, texts))]).build()
    file = open_gguf(file_of(data))
    (read,) = file.metadata.values()
    assert [text.encode("utf-8", "surrogateescape") for text in read] == texts
    repr(file.metadata).encode()
    write_gguf(tmp_path / "copy.gguf", file.typed_metadata(), [])
    assert (tmp_path / "copy.gguf").read_bytes() == data


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "texts",
    [
        ["ab"] * 10_000,
        [""] * 5_000,
        ["a", ""] * 3_000,
        ["\0"] * 3_000,
        ["a\0", "\0a", "\0" * 9] * 1_000,
        ["x" * 255, "y" * 256, "z" * 257] * 100,
        ["short", "l" * 40_000, "short"] * 3,
        ["l" * 32_760, "m" * 32_768, "n" * 32_761],
        [f"Ġ{i}" for i in range(20_000)],
        ["\U0001f600" * (i % 5) + "中" for i in range(5_000)],
    ],
    ids=["even", "empty", "some empty", "zeros", "zeros inside", "near 256", "long", "piece edge", "bpe", "wide"],
)
def test_long_arrays_of_strings_are_read_whole(file_of, texts):
    pairs = [g.pair("before", g.U8, b"\x01"), g.pair("texts", g.ARRAY, g.array(g.STRING, texts))]
    padding = [g.pair("filler", g.ARRAY, g.array(g.U8, bytes(400_000)))]  # so that no memory limit is met
    metadata = open_gguf(file_of(g.File([*pairs, *padding]).build())).metadata
    assert metadata["texts"] == texts


def test_shapes_are_row_major_and_values_float32(small):
    assert small.tensors["a"].shape == (2, 3)
    values = small.load_tensor("a")
    assert (values.dtype, values.shape) == (mx.float32, (2, 3))
    assert values.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert small.load_tensor("b").tolist() == [[n / 2 for n in range(-16, 16)]] * 2


def test_a_weight_is_a_read_only_view_of_the_file(small):
    weight = small.weight("b")
    assert (weight.shape, weight.type, weight.nbytes) == ((2, 32), Q8_0, 68)
    assert not weight.data.flags.writeable
    assert not weight.data.flags.owndata
    info = small.tensors["b"]
    assert weight.data.tobytes() == small.path.read_bytes()[info.offset : info.offset + info.nbytes]


def test_a_tensor_that_cannot_be_read_is_listed_and_refused_by_name(small):
    assert small.tensors["c"].type.name == "I8"
    assert small.weight("c").data.tolist() == [5]
    with pytest.raises(UnsupportedTypeError, match=r"'c'.*Q8_0.*I8"):
        small.load_tensor("c")


def test_an_unknown_tensor_is_answered_with_names_that_are_close(file_of):
    data = g.File([], [g.record("blk.0.attn_q.weight", [1], 0, 0)], g.pad(bytes(4))).build()
    with pytest.raises(FormatError, match=r"blk\.0\.attn_q\.weight") as caught:
        open_gguf(file_of(data)).weight("blk.0.attn_qq.weight")
    assert "attn_qq" in caught.value.expected


def test_an_empty_tensor_is_allowed(file_of):
    records = [g.record("e", [32, 0], g.GGML_Q8_0, 0), g.record("f", [2], 0, 0)]
    file = open_gguf(file_of(g.File([], records, g.pad(bytes(8))).build()))
    assert file.load_tensor("e").shape == (0, 32)
    assert file.load_tensor("f").tolist() == [0, 0]


def test_a_tensor_without_dimensions_is_one_value(file_of):
    data = g.File([], [g.record("s", [], 0, 0)], g.pad(b"\0\0\x80\x3f")).build()
    assert open_gguf(file_of(data)).load_tensor("s").item() == 1.0


def test_a_closed_file_gives_no_more_weights_but_keeps_those_it_gave(file_of):
    with open_gguf(file_of(g.small_file())) as file:
        weight = file.weight("a")
    assert weight.dequantize().sum() == 15
    del weight
    file.close()
    with pytest.raises(SourceError, match="closed"):
        file.weight("a")
    assert file.metadata["s.8"] == "text"


def test_what_is_not_a_file_is_said_to_be_none(tmp_path, monkeypatch):
    with pytest.raises(SourceError, match="no such file"):
        open_gguf(tmp_path / "missing.gguf")
    with pytest.raises(SourceError, match="folder"):
        open_gguf(tmp_path)
    with pytest.raises(SourceError):
        open_gguf("nul\0byte.gguf")
    (tmp_path / "locked.gguf").write_bytes(g.small_file())

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(MappedFile, "__new__", refuse)  # a superuser may open anything
    with pytest.raises(SourceError, match="Permission denied"):
        open_gguf(tmp_path / "locked.gguf")


def test_an_error_says_where_what_was_expected_and_what_to_do(file_of):
    path = file_of(g.File([g.pair("k", 99, bytes(8))]).build())
    with pytest.raises(FormatError) as caught:
        open_gguf(path)
    error = caught.value
    assert error.where == f"{path}: metadata 'k', type, at byte 33"
    assert (error.expected, error.found) == ("a value type from 0 to 12", "99")
    assert error.hint


def test_opening_reads_the_header_alone(tmp_path):
    n = 3 << 30
    path = tmp_path / "sparse.gguf"
    path.write_bytes(g.File([], [g.record("big", [n], g.GGML_I8, 0)]).build())
    with path.open("r+b") as stream:
        stream.truncate(path.stat().st_size + n)
    start = time.process_time()
    file = open_gguf(path)
    assert time.process_time() - start < 1.0  # to read all of it takes five
    assert file.weight("big").nbytes == n
    assert path.stat().st_blocks * 512 < 1 << 20


def test_opening_does_not_wait_for_mlx(file_of):
    path = file_of(g.small_file())
    # Empty packages stand in for ours, whose __init__ files are free to import what they like.
    code = f"""
import sys, types
sys.modules["mlx"] = sys.modules["mlx.core"] = None
for name in ("mlx_engine", "mlx_engine.checkpoint"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [name.replace(".", "/")]
from mlx_engine.checkpoint.gguf import open_gguf
print(len(open_gguf({str(path)!r}).tensors))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "3", done.stderr


# ---- the gguf package ----


def packed_by_the_gguf_package(path):
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_uint8("u8", 200)
    writer.add_int64("i64", -(2**40))
    writer.add_float64("f64", 0.1)
    writer.add_bool("flag", True)
    writer.add_string("text", "Ġ中文")
    writer.add_array("names", ["a", "", "ccc"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("reals", [0.5, 1.5])
    values = np.random.default_rng(0).standard_normal((4, 256)).astype(np.float32)
    for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"):
        type_ = gguf.GGMLQuantizationType[name]
        writer.add_tensor(f"t.{name}", gguf.quants.quantize(values, type_), raw_dtype=type_)
    writer.add_tensor("vector", values[0, :3])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def test_files_of_the_gguf_package_are_read_as_it_reads_them(tmp_path):
    path = tmp_path / "theirs.gguf"
    packed_by_the_gguf_package(path)
    ours, theirs = open_gguf(path), gguf.GGUFReader(path)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            value = ours.metadata[key]
            assert (value.tolist() if isinstance(value, np.ndarray) else value) == field.contents()
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
        assert (info.offset, info.nbytes) == (tensor.data_offset, tensor.n_bytes)
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(np.asarray(ours.load_tensor(tensor.name)), expected)


def test_our_files_are_read_by_the_gguf_package(tmp_path):
    path = tmp_path / "ours.gguf"
    values = np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)
    metadata = {"general.architecture": "qwen3", "n": 5, "x": 0.5, "yes": True, "names": ["a", "Ġb"], "ids": [1, 2]}
    write_gguf(path, metadata, [Weight.pack("w", values, Q8_0), Weight.pack("v", values[0, :5], F32)])
    theirs = gguf.GGUFReader(path)
    assert {key: theirs.fields[key].contents() for key in metadata} == metadata
    assert theirs.fields["n"].types == [gguf.GGUFValueType.UINT32]
    w, v = theirs.tensors
    np.testing.assert_array_equal(w.data.reshape(-1), Weight.pack("w", values, Q8_0).data)
    assert v.shape.tolist() == [5]
    np.testing.assert_array_equal(v.data, values[0, :5])
