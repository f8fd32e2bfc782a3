"""The types of llama.cpp's mixes, for each matrix of recorded models, and the files written with them."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from mlx_engine.checkpoint.gguf import open_gguf
from mlx_engine.checkpoint.gguf_writer import write_gguf
from mlx_engine.commands import app
from mlx_engine.convert.file_types import MIXES, FileConversion, types_of
from mlx_engine.convert.gguf_form import Part
from mlx_engine.convert.mlx_folder import to_mlx_folder
from mlx_engine.convert.requantize import requantize, total
from mlx_engine.errors import FormatError, OptionError
from mlx_engine.quant.types import BY_NAME, F32
from mlx_engine.quant.weight import Weight
from tests.cells import each
from tests.golden.make_llama_mixes import RECORD, read

RECORDED = json.loads(RECORD.read_text())
# A model with rows of 256, of 288 and of 40 weights.
WIDTHS = {"attn_q": 256, "attn_v": 288, "ffn_up": 40}


def part(name: str, shape: tuple[int, ...]) -> Part:
    return Part(name, shape, F32, lambda: Weight.pack(name, np.zeros(shape), F32))


@each("name", list(RECORDED))
@each("mix", list(MIXES))
def test_every_matrix_gets_the_type_that_llama_cpp_gives_to_it(name, mix):
    record, wanted = RECORDED[name], read(RECORDED[name], mix)
    architecture = record["architecture"]
    metadata = {f"{architecture}.{key}": value for key, value in record["settings"].items()}
    metadata["general.architecture"] = architecture
    parts = {tensor: part(tensor, shape) for tensor, (_, shape) in wanted.items()}
    # The smallest matrix of these models has 2 rows of 40 weights.
    found = types_of(parts, metadata, FileConversion(mix, 0))
    types = {tensor: choice.type.name if choice else "F32" for tensor, choice in found.items()}
    assert types == {tensor: type_.name for tensor, (type_, _) in wanted.items()}


def test_the_record_has_every_rule():
    text = json.dumps(RECORDED)
    letters = {
        letter for record in RECORDED.values() for mix in MIXES for line in record[mix].values() for letter in line
    }
    assert letters >= set("4568abh.-")
    for rule in ("attn_qkv", "_exps", "per_layer", "shortconv", "ssm_", '"expert_count": 8'):
        assert rule in text


def model(path: Path, *, scale: float = 1.0, strange: float | None = None) -> Path:
    rng = np.random.default_rng(3)
    sizes = {"block_count": 4, "context_length": 64, "embedding_length": 256, "feed_forward_length": 64}
    sizes |= {"attention.head_count": 4, "attention.layer_norm_rms_epsilon": 1e-5}
    metadata = {"general.architecture": "llama", **{f"llama.{key}": value for key, value in sizes.items()}}
    tensors = []
    for i in range(4):
        for kind, columns in WIDTHS.items():
            values = (rng.standard_normal((64, columns)) * scale).astype(np.float32)
            if strange is not None and i == 2:
                values[1, 5] = strange
            tensors.append(Weight.pack(f"blk.{i}.{kind}.weight", values, F32))
    write_gguf(path, metadata, tensors)
    return path


def types_in(path: Path) -> dict[str, str]:
    with open_gguf(path) as file:
        return {name: info.type.name for name, info in file.tensors.items()}


def test_layers_may_have_other_types_and_rows_that_do_not_fill_blocks_fall_back(tmp_path):
    source, out, notes = model(tmp_path / "in.gguf"), tmp_path / "out.gguf", []
    layers = {"attn_v": "q5_k", "ffn": "keep"}
    requantize(source, out, FileConversion("q4_k_m", layers=layers), note=notes.append)
    found = types_in(out)
    assert [found[f"blk.0.{kind}.weight"] for kind in WIDTHS] == ["Q4_K", "Q5_1", "F32"]
    assert notes[0] == "blk.0.attn_v.weight: 288 columns do not fill Q5_K blocks of 256; its type is Q5_1"
    assert notes[-1] == "4 of 8 matrices, 53% of their bytes, get another type: 4 Q5_1"


def test_a_file_of_which_most_keeps_its_type_is_refused(tmp_path):
    source, out, notes = model(tmp_path / "in.gguf"), tmp_path / "out.gguf", []
    layers = {"attn_q": "keep", "attn_v": "keep"}
    conversion = FileConversion("q4_0", layers=layers)
    with pytest.raises(
        OptionError, match=r"4 of 4 matrices, 100% of the bytes, cannot have the type of --to; .*--allow-mixed"
    ):
        requantize(source, out, conversion, note=notes.append)
    assert not out.exists()
    assert len(notes) == 5
    requantize(source, out, conversion, allow_mixed=True)
    assert set(types_in(out).values()) == {"F32"}
    # 7 % of the bytes: said, not refused
    notes.clear()
    requantize(source, out, FileConversion("q4_0"), note=notes.append)
    assert re.fullmatch(r"4 of 12 matrices, 7% of their bytes, get another type: 4 F32", notes[-1])


@each("to", ["f16", "bf16"])
@each("scale", [1.0, 1e-6, 1e3])
def test_floats_are_rounded_to_nearest_even(to, scale):
    rng = np.random.default_rng(5)
    values = (rng.standard_normal((2, 4096)) * scale).astype(np.float32)
    values[:, ::3].view(np.uint32)[:] &= np.uint32(0xFFFF8000)  # halves of the last place of BF16
    values[:, 1::3].view(np.uint32)[:] &= np.uint32(0xFFFFF000)  # and of F16
    found = Weight.pack("w", values, BY_NAME[to.upper()]).data.view(np.uint16).reshape(values.shape)
    if to == "f16":
        np.testing.assert_array_equal(found, values.astype(np.float16).view(np.uint16))
        return
    exact = values.astype(np.float64)
    low = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)
    high = ((values.view(np.uint32) & np.uint32(0xFFFF0000)) + np.uint32(0x10000)).view(np.float32).astype(np.float64)
    is_even = (values.view(np.uint32) >> np.uint32(16) & np.uint32(1)) == 0
    down, up = np.abs(exact - low), np.abs(high - exact)
    want = np.where((down < up) | ((down == up) & is_even), low, high).astype(np.float32)
    np.testing.assert_array_equal(found, (want.view(np.uint32) >> np.uint32(16)).astype(np.uint16))
    assert (down == up).sum() > 100


def test_relative_errors_are_those_of_the_matrices_that_were_converted(tmp_path):
    source, out = model(tmp_path / "in.gguf", scale=0.02), tmp_path / "out.gguf"
    lines = {line.kind: line for line in requantize(source, out, FileConversion("q6_k", layers={"ffn": "keep"}))}
    with open_gguf(source) as before, open_gguf(out) as after:
        for kind in ("attn_q", "attn_v"):
            names = [name for name in before.tensors if kind in name]
            old, new = (np.stack([file.weight(name).dequantize() for name in names]) for file in (before, after))
            want = np.sqrt(np.square(old - new).sum(dtype=np.float64) / np.square(old).sum(dtype=np.float64))
            assert lines[kind].relative_rmse == pytest.approx(want, rel=1e-5)
            assert 0 < lines[kind].relative_rmse < 0.03
    whole = total(list(lines.values()))
    assert lines["ffn_up"].relative_rmse == 0
    assert lines["attn_v"].relative_rmse < whole.relative_rmse < lines["attn_q"].relative_rmse
    assert whole.types == {"Q6_K": 4, "Q8_0": 4, "F32": 4}


@each("to", ["q4_k_m", "q8_0", "f16"])
@each("value", [np.nan, np.inf])
def test_a_model_with_values_that_are_not_finite_is_refused(tmp_path, to, value):
    folder = tmp_path / f"{to}-{value}"
    folder.mkdir()
    source = model(folder / "in.gguf", strange=value)
    with pytest.raises(
        FormatError, match=r"in\.gguf: expected finite values, found NaN or infinity in 'blk\.2\..* \(1 of"
    ):
        requantize(source, folder / "out.gguf", FileConversion(to))
    assert [path.name for path in folder.iterdir()] == ["in.gguf"]


def test_a_folder_is_not_written_with_values_that_are_not_finite(tmp_path):
    source = tmp_path / "in.gguf"
    with open_gguf(RECORD.parent / "qwen3-micro" / "model-f32.gguf") as file:
        weights = [file.weight(name) for name in file.tensors]
        values = file.weight("blk.1.attn_q.weight").dequantize().copy()
        values[3, 4] = np.nan
        strange = Weight.pack("blk.1.attn_q.weight", values, F32)
        tensors = [strange if weight.name == strange.name else weight for weight in weights]
        write_gguf(source, file.typed_metadata(), tensors)
    with pytest.raises(FormatError, match=r"in\.gguf: expected finite values, found NaN or infinity in .* \(1 of"):
        to_mlx_folder(source, tmp_path / "out", "mlx-4bit")
    assert [path.name for path in tmp_path.iterdir()] == ["in.gguf"]


def test_values_that_are_too_large_for_the_new_type_are_refused(tmp_path):
    source = model(tmp_path / "in.gguf", strange=65_520)
    with pytest.raises(FormatError, match=r"expected values that F16 can store, found values of 'blk.2.*bf16"):
        requantize(source, tmp_path / "out.gguf", FileConversion("f16"))
    requantize(source, tmp_path / "out.gguf", FileConversion("bf16"))


@pytest.mark.slow
def test_bytes_do_not_depend_on_the_number_of_threads():
    values = np.random.default_rng(1).standard_normal((300, 1024)).astype(np.float32)
    stored = Weight.pack("w", values, F32)
    for to in ("Q4_K", "Q6_K", "Q5_0", "BF16"):
        one, three = (stored.as_type(BY_NAME[to], threads=n) for n in (1, 3))
        np.testing.assert_array_equal(one.data, three.data)


# ---- the command ----


def run(*args: object):
    return CliRunner().invoke(app, ["quantize", *map(str, args)])


def test_a_folder_of_which_less_than_half_gets_4_bits_is_refused(tmp_path):
    """Most of the model's matrices have rows whose lengths are no multiples of 64."""
    source, out = RECORD.parent / "qwen3moe-micro" / "hf", tmp_path / "out"
    result = run(source, out, "--to", "mlx-4bit")
    assert result.exit_code == 2
    assert "14 of 16 matrices, 94% of the bytes, cannot have the type of --to" in result.stderr
    lines = [line for line in result.stderr.splitlines() if "columns do not fill AFFINE4_G64_F32 blocks of 64" in line]
    assert len(lines) == 14
    assert "14 of 16 matrices, 94% of their bytes, get another type: " in result.stderr
    assert list(tmp_path.iterdir()) == []
    result = run(source, out, "--to", "mlx-4bit", "--allow-mixed")
    assert result.exit_code == 0
    assert "2 AFFINE4_G64_F32" in result.stderr.splitlines()[-1]


def test_every_matrix_of_the_built_in_model_gets_4_bits(tmp_path):
    result = run("builtin", tmp_path / "out", "--to", "mlx-4bit")
    assert result.exit_code == 0
    assert "columns do not fill" not in result.stderr
    assert re.search(r"total +\d+  \d+ AFFINE4_G64_F32, \d+ F32 ", result.stderr)


def test_a_folder_says_which_matrices_have_more_bits(tmp_path):
    notes = []
    to_mlx_folder(RECORD.parent / "qwen3-micro" / "hf", tmp_path / "out", "mlx-4bit", note=notes.append)
    assert notes[0].startswith("model.layers.0.mlp.down_proj.weight: 160 columns do not fill AFFINE4_G64_")
    assert "matrices" in notes[-1]


@pytest.mark.slow
@each("to", ["q4_K_M", "q5_K_M", "q6_K", "f16", "bf16"])
def test_the_command_writes_the_mixes(tmp_path, to):
    out = tmp_path / f"{to}.gguf"
    result = run("builtin", out, "--to", to)
    assert result.exit_code == 0
    assert result.stderr.splitlines()[-1].endswith("%")
    # All rows fill blocks of 256.
    assert set(types_in(out).values()) == {
        "q4_K_M": {"F32", "Q4_K", "Q6_K"}, "q5_K_M": {"F32", "Q5_K", "Q6_K"},
        "q6_K": {"F32", "Q6_K"}, "f16": {"F32", "F16"}, "bf16": {"F32", "BF16"},
    }[to]  # fmt: skip


def test_types_of_layers_are_written_in_either_case_too(tmp_path):
    out = tmp_path / "out.gguf"
    assert run("builtin", out, "--to", "q8_0", "--layer", "attn_v=Q4_0").exit_code == 0
    assert types_in(out)["blk.0.attn_v.weight"] == "Q4_0"


@pytest.mark.slow
@pytest.mark.parametrize("mix", list(MIXES))
def test_types_and_errors_are_at_least_those_of_a_file_that_llama_cpp_writes(tmp_path, mix):
    llama_cpp = pytest.importorskip("llama_cpp")
    from tests.golden.make_llama_mixes import FILE_TYPES

    source, ours, theirs = model(tmp_path / "in.gguf", scale=0.02), tmp_path / "ours.gguf", tmp_path / "theirs.gguf"
    wanted = llama_cpp.llama_model_quantize_default_params()
    wanted.ftype = FILE_TYPES[mix]
    assert llama_cpp.llama_model_quantize(bytes(source), bytes(theirs), wanted) == 0
    requantize(source, ours, FileConversion(mix))
    assert types_in(ours) == types_in(theirs)
    with open_gguf(source) as exact, open_gguf(ours) as one, open_gguf(theirs) as other:
        for name in exact.tensors:
            want = exact.weight(name).dequantize()
            errors = [np.square(file.weight(name).dequantize() - want).sum() for file in (one, other)]
            assert errors[0] <= errors[1] * 1.01**2
