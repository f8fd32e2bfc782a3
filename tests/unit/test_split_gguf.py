"""Split GGUF files, as the gguf package writes them: loaded whole whichever part is named, or refused by name."""

import logging
import shutil
from pathlib import Path

import gguf
import pytest

import mlx_engine
from mlx_engine.checkpoint.gguf import open_gguf, part_files, part_names
from mlx_engine.checkpoint.gguf_values import Value, ValueType
from mlx_engine.checkpoint.gguf_writer import write_gguf
from mlx_engine.checkpoint.identity import digest, identity
from mlx_engine.convert.requantize import requantize
from mlx_engine.convert.verify import Level, verify
from mlx_engine.errors import FormatError, OptionError, SourceError
from mlx_engine.weights.conversion import Conversion

WHOLE = Path(__file__).parents[1] / "data" / "qwen3-micro" / "model-q8_0.gguf"


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """The parts of the micro model, of at most 12 tensors each; the first has the metadata alone, as in large files."""
    folder = tmp_path_factory.mktemp("split")
    reader = gguf.GGUFReader(WHOLE)
    logging.disable()
    writer = gguf.GGUFWriter(folder / "micro.gguf", "qwen3", split_max_tensors=12, small_first_shard=True)
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kind, *element = field.types
            writer.add_key_value(field.name, field.contents(), kind, element[0] if element else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    logging.disable(logging.NOTSET)
    return sorted(folder.glob("*.gguf"))


@pytest.fixture
def copies(parts, tmp_path):
    return [Path(shutil.copy(part, tmp_path)) for part in parts]


def rewritten(path, **changes):
    """Write a part again with other values of its keys `split.*`."""
    with open_part(path) as file:
        metadata = file.typed_metadata()
        for key, value in changes.items():
            metadata[f"split.{key}"] = Value(ValueType.UINT16, value)
        tensors = [file.weight(name) for name in file.tensors]
        write_gguf(path.with_suffix(".new"), metadata, tensors)
    path.with_suffix(".new").replace(path)


def open_part(path):
    from mlx_engine.checkpoint import gguf as module

    return module._open_part(path)


def test_the_example_is_split_as_large_files_are(parts):
    assert [part.name for part in parts] == [f"micro-{i:05}-of-{len(parts):05}.gguf" for i in range(1, len(parts) + 1)]
    assert len(parts) >= 4
    with open_part(parts[0]) as first, open_part(parts[1]) as second:
        assert (len(first.tensors), len(second.tensors)) == (0, 12)
        assert "general.architecture" not in second.metadata


@pytest.mark.parametrize("named", [0, 1, -1])
def test_any_part_loads_the_whole_model(parts, named):
    engine, whole = (mlx_engine.load(path, "simd", jit=False) for path in (parts[named], WHOLE))
    assert (engine.logits([1, 2, 3]) == whole.logits([1, 2, 3])).all()
    assert engine.tokenizer.vocab_size == whole.tokenizer.vocab_size
    assert engine.n_parameters == whole.n_parameters


def test_the_parts_are_one_file_for_every_reader(parts, tmp_path):
    with open_gguf(parts[1]) as file, open_gguf(WHOLE) as whole:
        assert file.kinds == whole.kinds
        assert {n: t.shape for n, t in file.tensors.items()} == {n: t.shape for n, t in whole.tensors.items()}
        assert all((file.weight(n).data == whole.weight(n).data).all() for n in whole.tensors)
    assert {finding.check for finding in verify(parts[0])} == {finding.check for finding in verify(WHOLE)}
    assert not [finding for finding in verify(parts[0]) if finding.level is Level.FAIL]
    for source, name in ((parts[0], "a"), (WHOLE, "b")):
        requantize(source, tmp_path / name, Conversion("q4_0"))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_every_part_counts_for_the_identity_of_a_model(copies):
    before = identity(copies[0]), digest(copies[1])
    assert before == (identity(copies[-1]), digest(copies[0]))
    data = bytearray(copies[2].read_bytes())
    data[-40] ^= 1
    copies[2].write_bytes(data)
    assert identity(copies[0]) != before[0]
    assert digest(copies[0]) != before[1]


def test_missing_parts_are_named(copies):
    copies[0].unlink()
    copies[2].unlink()
    with pytest.raises(SourceError, match=f"{copies[0].name}, {copies[2].name} are missing; download"):
        mlx_engine.load(copies[1], "simd")


def test_a_part_under_another_name_says_what_it_is(copies):
    other = copies[0].rename(copies[0].with_name("model.gguf"))
    with pytest.raises(
        SourceError, match=r"this is one of .* parts, but its name does not end in -00001-of-\d{5}\.gguf"
    ):
        mlx_engine.load(other, "simd")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"no": 2}, "split.no to be 1"),
        ({"count": 2}, "split.count to be"),
        ({"no": -1 % 2**16}, "split.no to be 1"),
    ],
)
def test_parts_that_do_not_fit_are_refused(copies, changes, expected):
    rewritten(copies[1], **changes)
    with pytest.raises(FormatError, match=expected):
        open_gguf(copies[0])


def test_a_wrong_number_of_tensors_is_refused(copies):
    rewritten(copies[0], **{"tensors.count": 3})
    with pytest.raises(FormatError, match="3 tensors in all parts together"):
        open_gguf(copies[0])


def test_a_tensor_in_two_parts_is_refused(copies):
    shutil.copy(copies[1], copies[2])
    rewritten(copies[2], no=2)
    with pytest.raises(FormatError, match="each tensor in one part only"):
        open_gguf(copies[0])


def test_a_file_of_one_part_needs_no_name(copies, tmp_path):
    path = Path(shutil.copy(WHOLE, tmp_path / "alone.gguf"))
    rewritten(path, no=0, count=1, **{"tensors.count": 0})
    with open_gguf(path) as file:
        assert file.files == [path]


def test_names_of_parts():
    assert part_names("a/b-00002-of-00003.gguf") == [f"a/b-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for name in ("b.gguf", "b-00004-of-00003.gguf", "b-00000-of-00003.gguf", "b-1-of-3.gguf"):
        assert part_names(name) == [name]
    assert part_files(Path("b-00001-of-00003.gguf")) == [Path("b-00001-of-00003.gguf")]


def test_no_part_is_written_over_while_it_is_read(copies):
    before = [part.read_bytes() for part in copies]
    for target in copies:
        with pytest.raises(OptionError, match="is the file that is read; write to another one"):
            requantize(copies[0], target, Conversion("q4_0"))
    assert [part.read_bytes() for part in copies] == before
