"""Files written again with smaller matrices: what is in them, what is said about them, and who can read them."""

import os
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import mlx_engine
from mlx_engine.checkpoint.gguf import open_gguf
from mlx_engine.checkpoint.gguf_writer import write_gguf
from mlx_engine.checkpoint.sources import BUILTIN
from mlx_engine.commands import app
from mlx_engine.convert.requantize import kind_of, requantize, total
from mlx_engine.convert.verify import Level, verify
from mlx_engine.errors import FormatError, OptionError, SourceError
from mlx_engine.quant import BY_NAME
from mlx_engine.quant.weight import Weight
from mlx_engine.weights.conversion import Conversion

DATA = Path(__file__).parents[1] / "data"
F32 = DATA / "qwen3-micro" / "model-f32.gguf"


def run(*args: object):
    return CliRunner().invoke(app, ["quantize", *map(str, args)])


@pytest.mark.parametrize(("to", "ratio"), [("q8_0", 34 / 128), ("q4_0", 18 / 128), ("q4_1", 20 / 128)])
def test_matrices_are_quantized_and_the_rest_is_copied(tmp_path: Path, to: str, ratio: float):
    lines = requantize(F32, tmp_path / "out.gguf", Conversion(to))
    wanted = BY_NAME[to.upper()]
    with open_gguf(F32) as old, open_gguf(tmp_path / "out.gguf") as new:
        assert list(new.tensors) == list(old.tensors)
        for name in old.tensors:
            before, after = old.weight(name), new.weight(name)
            if len(before.shape) == 2:
                assert after.type == wanted
                np.testing.assert_array_equal(after.data, Weight.pack(name, before.dequantize(), wanted).data)
            else:
                np.testing.assert_array_equal(after.data, before.data)
        replaced = {"general.file_type", "general.quantization_version"}
        assert set(new.metadata) == set(old.metadata) | replaced
        for key in set(old.metadata) - replaced:
            np.testing.assert_array_equal(new.metadata[key], old.metadata[key])
        assert new.metadata["general.file_type"] == {"q8_0": 7, "q4_0": 2, "q4_1": 3}[to]
    matrices = total([line for line in lines if line.kind != "others"])
    assert matrices.bytes_out / matrices.bytes_in == pytest.approx(ratio)
    assert not [finding for finding in verify(tmp_path / "out.gguf") if finding.level is Level.FAIL]


def test_the_error_is_that_of_all_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mlx_engine.convert.requantize.PIECE", 256)
    (line,) = (x for x in requantize(F32, tmp_path / "out.gguf", Conversion("q4_0")) if x.kind == "ffn_up")
    with open_gguf(F32) as old, open_gguf(tmp_path / "out.gguf") as new:
        names = [name for name in old.tensors if "ffn_up" in name]
        differences = [old.weight(name).dequantize() - new.weight(name).dequantize() for name in names]
    assert line.count == len(names)
    assert line.rmse == pytest.approx(np.sqrt(np.mean(np.square(differences))), rel=1e-5)


def test_the_head_may_stay_and_with_it_the_table_that_is_the_head(tmp_path: Path):
    requantize(F32, tmp_path / "out.gguf", Conversion("q8_0", layers={"output": "keep", "attn_v": "q4_0"}))
    with open_gguf(tmp_path / "out.gguf") as new:
        types = {name: info.type.name for name, info in new.tensors.items()}
    assert types["token_embd.weight"] == "F32"
    assert types["blk.0.attn_v.weight"] == "Q4_0"
    assert types["blk.0.attn_q.weight"] == "Q8_0"


def test_what_is_quantized_already_keeps_every_bit(tmp_path: Path):
    first, second = tmp_path / "first.gguf", tmp_path / "second.gguf"
    requantize(F32, first, Conversion("q8_0"))
    lines = requantize(first, second, Conversion("q8_0"))
    assert first.read_bytes() == second.read_bytes()
    assert total(lines).rmse == 0


def test_the_file_is_the_model_that_loading_makes_of_its_source(tmp_path: Path):
    """But for the lookup, which a file has quantised where it is tied to the head."""
    requantize(F32, tmp_path / "out.gguf", Conversion("q8_0", layers={"output": "keep"}))
    written = mlx_engine.load(tmp_path / "out.gguf", "simd")
    loaded = mlx_engine.load(F32, "simd", "q8_0", quant_layers={"output": "keep"})
    np.testing.assert_array_equal(np.asarray(written.logits([1, 2, 3])), np.asarray(loaded.logits([1, 2, 3])))


@pytest.mark.parametrize(
    ("name", "n_dims", "kind"),
    [
        ("blk.3.attn_qkv.weight", 2, "attn_qkv"),
        ("blk.3.ffn_down.weight", 2, "ffn_down"),
        ("output.weight", 2, "output"),
        ("token_embd.weight", 2, "token_embd"),
        ("position_embd.weight", 2, None),
        ("output_norm.weight", 1, None),
        ("blk.3.attn_q.bias", 1, None),
    ],
)
def test_what_counts_as_a_layer(name: str, n_dims: int, kind: str | None):
    assert kind_of(name, n_dims) == kind


def test_a_source_that_cannot_be_read_leaves_no_file(tmp_path: Path):
    with open_gguf(F32) as file:
        weights = [file.weight(name) for name in file.tensors]
        strange = Weight("blk.0.ffn_up.weight", (1, 256), BY_NAME["Q1_0"], np.zeros(36, np.uint8))
        kept = [weight for weight in weights if weight.name != strange.name]
        write_gguf(tmp_path / "in.gguf", file.typed_metadata(), [*kept, strange])
    with pytest.raises(FormatError, match="Q1_0"):
        requantize(tmp_path / "in.gguf", tmp_path / "out.gguf", Conversion("q8_0"))
    assert [path.name for path in tmp_path.iterdir()] == ["in.gguf"]


def test_no_file_of_the_folder_that_is_read_is_written_over(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(OptionError, match="is a file of the folder that is read"):
        requantize(tmp_path, tmp_path / "model.safetensors", Conversion("q8_0"))
    assert (tmp_path / "model.safetensors").read_bytes() == b"weights"


def test_a_folder_that_cannot_be_listed_is_an_error_of_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(folder: Path):
        raise PermissionError(13, "Permission denied", str(folder))

    (tmp_path / "out.gguf").write_bytes(b"before")
    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(SourceError, match=r"cannot be read \(Permission denied\)"):
        requantize(tmp_path, tmp_path / "out.gguf", Conversion("q8_0"))


def test_an_override_must_mean_something(tmp_path: Path):
    with pytest.raises(OptionError, match="attn_qkv"):
        requantize(F32, tmp_path / "out.gguf", Conversion("q8_0", layers={"attn_qkv": "q4_0"}))
    assert not (tmp_path / "out.gguf").exists()


def test_without_a_type_for_all_there_is_nothing_to_call_the_file(tmp_path: Path):
    with pytest.raises(OptionError, match=r"quant: unknown type 'keep'; choose f32, .*q8_0, .*q6_k"):
        requantize(F32, tmp_path / "out.gguf", Conversion("keep", layers={"ffn": "q4_0"}))
    assert not (tmp_path / "out.gguf").exists()


# ---- the command ----


def test_the_command_says_what_it_did(tmp_path: Path):
    result = run("builtin", tmp_path / "out.gguf", "--to", "q4_0", "--preserve-output")
    assert result.exit_code == 0
    assert result.stdout.strip() == str(tmp_path / "out.gguf")
    assert [line.split()[0] for line in result.stderr.splitlines()][-1] == "total"
    assert "RMSE" in result.stderr


def test_nothing_is_written_over_unless_it_is_asked_for(tmp_path: Path):
    out = tmp_path / "out.gguf"
    out.write_bytes(b"precious")
    assert run("builtin", out).exit_code == 2
    assert out.read_bytes() == b"precious"
    assert run("builtin", out, "--force").exit_code == 0
    assert out.read_bytes()[:4] == b"GGUF"
    before = out.read_bytes()
    assert run(out, out, "--force").exit_code == 2  # which would be read while it is written
    assert out.read_bytes() == before


def test_only_a_file_is_written_over(tmp_path: Path):
    """A pipe, a folder and a link are no files; --force does not make them some."""
    target, link, pipe = tmp_path / "target", tmp_path / "link", tmp_path / "pipe"
    target.write_bytes(b"precious")
    link.symlink_to(target)
    os.mkfifo(pipe)
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    for out in (link, pipe, tmp_path, tmp_path / "dangling"):
        result = run("builtin", out, "--force")
        assert result.exit_code == 2
        assert "exists and is a link, folder, pipe or device" in result.stderr
    assert (link.is_symlink(), pipe.is_fifo(), target.read_bytes()) == (True, True, b"precious")


@pytest.mark.parametrize(
    "options",
    [("--to", "q3_k"), ("--to", "keep"), ("--layer", "attn"), ("--layer", "output=q8_0", "--preserve-output")],
    ids=" ".join,
)
def test_wrong_use_is_exit_2(tmp_path: Path, options: tuple[str, ...]):
    assert run("builtin", tmp_path / "out.gguf", *options).exit_code == 2
    assert list(tmp_path.iterdir()) == []


# ---- llama.cpp ----


@pytest.mark.parametrize("to", ["q8_0", "q4_0", "q4_1"])
def test_llama_cpp_reads_the_file_and_prefers_the_same_tokens(tmp_path: Path, to: str):
    """Its activations have 8 bits, so where two tokens are near each other it may take the other."""
    llama_cpp = pytest.importorskip("llama_cpp")
    path = tmp_path / "out.gguf"
    requantize(BUILTIN, path, Conversion(to))
    ours = mlx_engine.load(path, "simd")
    ids = ours.generate("Once upon a time", 64).prompt_ids
    ids = ids + ours.generate(ids, 64, ignore_eos=True).token_ids
    logits = np.asarray(ours.logits(ids))
    theirs = llama_cpp.Llama(str(path), n_ctx=len(ids), logits_all=True, verbose=False)
    theirs.eval(ids)
    best, second = np.sort(logits, axis=1)[:, :-3:-1].T
    clear = best - second > 0.5
    assert clear.sum() > len(ids) / 2
    np.testing.assert_array_equal(theirs.scores[: len(ids)].argmax(axis=1)[clear], logits.argmax(axis=1)[clear])
