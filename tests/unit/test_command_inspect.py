"""`inspect`: what it prints, what it finds, and how it ends."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from mlx_engine.checkpoint import open_gguf, write_gguf
from mlx_engine.checkpoint.gguf_values import Value, ValueType
from mlx_engine.commands import app
from mlx_engine.quant.statistics import first_values, statistics
from mlx_engine.quant.types import BY_NAME, F16, F32, Q8_0
from mlx_engine.quant.weight import Weight

REPOSITORY = Path(__file__).parent.parent.parent
MICRO = REPOSITORY / "tests/data/qwen3-micro/model-q8_0.gguf"
HF_FOLDER = REPOSITORY / "tests/data/qwen3-micro/hf"

GOLDEN = """\
file          tiny.gguf
format        GGUF version 3, 9 metadata values, 3 tensors
size          800 B (800 bytes)
data          from byte 544, aligned to 32
architecture  toy
parameters    100
layers        2
hidden size   64
heads         4
head width    16
vocabulary    3
rope theta    10000
norm epsilon  1e-06

metadata (9)
  general.architecture                  string   'toy'
  toy.block_count                       uint32   2
  toy.embedding_length                  uint32   64
  toy.attention.head_count              uint32   4
  toy.attention.layer_norm_rms_epsilon  float32  1e-06
  toy.rope.freq_base                    float32  10000
  toy.flag                              bool     true
  tokenizer.ggml.tokens                 array    3 x string
  tokenizer.ggml.scores                 array    3 x float32

tensors (3)
  a.weight  2 x 32  Q8_0   68   68 B
  b.weight  32      F32   128  128 B
  c.weight  4       F16     8    8 B

totals
  Q8_0  1 tensors   64 values   68   68 B
  F32   1 tensors   32 values  128  128 B
  F16   1 tensors    4 values    8    8 B
  all   3 tensors  100 values  204  204 B
"""


def run(*args):
    return CliRunner().invoke(app, ["inspect", *map(str, args)])


def run_json(*args, exit_code=0):
    result = run(*args, "--json")
    assert result.exit_code == exit_code, result.output
    return json.loads(result.stdout)


def process(*args):
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "80"}
    command = [sys.executable, REPOSITORY / "cli.py", "inspect", *args]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path("tiny.gguf")
    values = np.linspace(-1, 1, 64, dtype=np.float32)
    metadata = {
        "general.architecture": "toy",
        "toy.block_count": 2,
        "toy.embedding_length": 64,
        "toy.attention.head_count": 4,
        "toy.attention.layer_norm_rms_epsilon": 1e-6,
        "toy.rope.freq_base": 10000.0,
        "toy.flag": True,
        "tokenizer.ggml.tokens": ["a", "b\n", "\udc80"],
        "tokenizer.ggml.scores": np.array([1, 2, 3], np.float32),
    }
    tensors = [
        Weight.pack("a.weight", values.reshape(2, 32), Q8_0),
        Weight.pack("b.weight", values[:32], F32),
        Weight.pack("c.weight", values[:4], F16),
    ]
    write_gguf(path, metadata, tensors)
    return path


def rewritten(path, *, drop=(), replace=(), add=(), metadata=None):
    """The micro model with some of its tensors or metadata changed."""
    with open_gguf(MICRO) as file:
        weights = {name: file.weight(name) for name in file.tensors if name not in drop}
        weights |= {weight.name: weight for weight in [*replace, *add]}
        write_gguf(path, {**file.typed_metadata(), **(metadata or {})}, weights.values())
    return path


def failures(path, *, exit_code=1):
    found = run_json(path, "--verify", exit_code=exit_code)
    return [row["detail"] for row in found["findings"] if row["level"] == "FAIL"]


def test_everything_of_a_small_file(tiny):
    lines = run(tiny).stdout.splitlines(keepends=True)
    (about_run,) = [line for line in lines if line.startswith("runs here")]
    assert "no: tiny.gguf: expected an architecture among" in about_run
    assert "".join(line for line in lines if line != about_run) == GOLDEN


def test_json_equals_the_reader():
    found = run_json(MICRO)
    with open_gguf(MICRO) as file:
        assert found["header"] == {
            "file_bytes": MICRO.stat().st_size,
            "version": 3,
            "n_metadata": len(file.metadata),
            "n_tensors": len(file.tensors),
            "alignment": 32,
            "data_offset": file.data_offset,
        }
        expected = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in file.metadata.items()}
        assert found["metadata"] == expected
        assert found["tensors"] == [
            {"name": t.name, "shape": list(t.shape), "type": t.type.name, "nbytes": t.nbytes}
            for t in file.tensors.values()
        ]
    assert found["totals"]["all"] == {"n_tensors": 35, "n_elements": 199_296, "nbytes": 213_632}
    assert found["model"] == {
        "architecture": "qwen3",
        "n_parameters": 199_296,
        "n_layers": 3,
        "hidden_size": 64,
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_dim": 32,
        "intermediate_size": 160,
        "vocab_size": 512,
        "context_length": 4096,
        "rope_theta": 1e6,
        "norm_eps": pytest.approx(1e-6),
    }


def test_a_folder_says_the_same_of_its_model():
    gguf, folder = run_json(MICRO), run_json(HF_FOLDER)
    assert folder["model"] == gguf["model"] | {"norm_eps": 1e-6}
    assert folder["metadata"] == json.loads((HF_FOLDER / "config.json").read_text())
    assert "model.norm.weight" in run(HF_FOLDER).stdout


def test_a_single_safetensors_file():
    found = run_json(HF_FOLDER / "model.safetensors", "--filter", "model.norm.weight")
    assert found["tensors"] == [{"name": "model.norm.weight", "shape": [64], "type": "F32", "nbytes": 256}]


def test_long_strings_are_cut_and_bad_ones_escaped(tmp_path):
    path = tmp_path / "strings.gguf"
    write_gguf(path, {"long": "x" * 201, "just": "y" * 200, "bad\udc80": "a\udcffb\x1b", "nan": float("nan")}, [])
    out = run(path).stdout
    assert f"'{'x' * 200}'... (201 characters)\n" in out
    assert f"'{'y' * 200}'\n" in out
    assert "'a\\udcffb\\x1b'" in out
    assert "bad\\udc80" in out
    assert run_json(path)["metadata"]["bad\udc80"] == "a\udcffb\x1b"
    assert run_json(path, "--meta", "nan")["value"] is None
    assert run(path, "--meta", "bad\udc80").stdout == "a\\udcffb\x1b\n"


def test_one_metadata_value_is_whole(tiny):
    template = open_gguf(MICRO).metadata["tokenizer.chat_template"]
    assert run(MICRO, "--meta", "tokenizer.chat_template").stdout == template + "\n"
    assert run(tiny, "--meta", "tokenizer.ggml.tokens").stdout == "a\nb\\n\n\\udc80\n"
    assert run(tiny, "--meta", "tokenizer.ggml.scores").stdout == "1.0\n2.0\n3.0\n"
    assert run(tiny, "--meta", "toy.flag").stdout == "true\n"
    assert run_json(tiny, "--meta", "toy.block_count") == {"key": "toy.block_count", "type": "uint32", "value": 2}
    assert run_json(HF_FOLDER, "--meta", "rope_parameters")["value"]["rope_theta"] == 1e6


@pytest.mark.parametrize("key", ["eos", "tokenizer.ggml.eos_token"])
def test_an_unknown_key_names_those_that_are_close(key):
    result = run(MICRO, "--meta", key)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "'tokenizer.ggml.eos_token_id'" in result.stderr
    assert result.stderr.count("\n") == 1


def test_tensors_are_chosen_by_substring_or_glob():
    assert run(MICRO, "--filter", "blk.1.attn_q.").stdout == "blk.1.attn_q.weight  128 x 64  Q8_0  8,704  8.5 KiB\n"
    names = [row["name"] for row in run_json(MICRO, "--tensors", "--filter", "blk.?.attn_norm*")["tensors"]]
    assert names == [f"blk.{i}.attn_norm.weight" for i in range(3)]
    nothing = run(MICRO, "--filter", "lm_head")
    assert (nothing.exit_code, nothing.stdout) == (0, "")
    assert "none of the 35 tensors" in nothing.stderr


def test_statistics_equal_numpy():
    with open_gguf(MICRO) as file:
        for row in run_json(MICRO, "--stats")["tensors"]:
            values = file.weight(row["name"]).dequantize().astype(np.float64)
            assert row["stats"] == {
                "n": values.size,
                "n_not_finite": 0,
                "min": values.min(),
                "max": values.max(),
                "mean": pytest.approx(values.mean(), rel=1e-9, abs=1e-12),
                "std": pytest.approx(values.std(), rel=1e-9),
            }


def test_statistics_of_several_pieces(monkeypatch):
    monkeypatch.setattr("mlx_engine.quant.statistics._PIECE", 96)
    values = np.random.default_rng(3).normal(100, 1, 1000).astype(np.float32)
    found = statistics(Weight.pack("w", values, F32))
    assert (found.min, found.max, found.n) == (values.min(), values.max(), 1000)
    assert found.mean == pytest.approx(values.mean(dtype=np.float64), rel=1e-12)
    assert found.std == pytest.approx(values.std(dtype=np.float64), rel=1e-9)


def test_statistics_of_no_numbers_and_of_nothing():
    odd = statistics(Weight.pack("w", [1, np.nan, np.inf, -np.inf], F32))
    assert (odd.n, odd.n_not_finite) == (4, 3)
    assert np.isnan([odd.min, odd.max, odd.mean, odd.std]).all()
    empty = statistics(Weight.pack("w", np.empty(0), F32))
    assert (empty.n, empty.min, empty.std) == (0, None, None)


def test_first_values(tiny):
    with open_gguf(tiny) as file:
        a = file.weight("a.weight")
        values = a.dequantize().ravel()
        assert first_values(a, 3).tolist() == values[:3].tolist()
        assert run_json(tiny, "--head", 0, "--filter", "a.")["tensors"][0]["head"] == []
        assert run_json(tiny, "--head", 33, "--filter", "a.")["tensors"][0]["head"] == values[:33].tolist()
        assert run_json(tiny, "--head", 10**6, "--filter", "a.")["tensors"][0]["head"] == values.tolist()
    assert run(tiny, "--head", 2, "--filter", "c.").stdout.splitlines()[1] == "    [-1, -0.9682617]"
    assert run(tiny, "--head", -1).exit_code == 2


def test_a_type_that_cannot_be_read_is_listed_all_the_same(tiny):
    raw = np.zeros(18, np.uint8)
    write_gguf(tiny, {}, [Weight("q", (128,), BY_NAME["Q1_0"], raw), Weight.pack("f", [1.5], F32)])
    out = run(tiny, "--stats", "--head", 1).stdout.splitlines()
    assert out[0].split() == ["q", "128", "Q1_0", "18", "18", "B"]
    assert "found Q1_0" in out[1]
    assert out[-1] == "    [1.5]"


def test_a_sound_model_passes_with_a_word_about_its_tied_head():
    result = run(MICRO, "--verify")
    assert result.exit_code == 0
    levels = [line.split()[:2] for line in result.stdout.splitlines()[:-1]]
    assert levels == [
        ["PASS", "file"],
        ["PASS", "types"],
        ["PASS", "settings"],
        ["PASS", "tensors"],
        ["PASS", "head"],
        ["PASS", "values"],
        ["PASS", "tokenizer"],
    ]
    assert result.stdout.endswith("7 passed, 0 to note, 0 failed\n")
    assert run(HF_FOLDER, "--verify").exit_code == 0


def test_a_head_of_its_own_is_not_worth_a_word(tmp_path):
    head = Weight.pack("output.weight", np.ones((512, 64), np.float32), Q8_0)
    findings = run_json(rewritten(tmp_path / "m.gguf", add=[head]), "--verify")["findings"]
    assert "head" not in [finding["check"] for finding in findings]


def test_every_wrong_tensor_fails(tmp_path):
    wrong = Weight.pack("blk.0.attn_k.weight", np.ones((32, 64), np.float32), Q8_0)
    extra = Weight.pack("blk.9.attn_k.weight", np.ones(4, np.float32), F32)
    path = rewritten(
        tmp_path / "m.gguf", drop=["token_embd.weight", "output_norm.weight"], replace=[wrong], add=[extra]
    )
    assert failures(path) == [
        "missing: token_embd.weight",
        "missing: output_norm.weight",
        "unexpected: blk.9.attn_k.weight",
        "misshapen: blk.0.attn_k.weight (expected (64, 64), found (32, 64))",
    ]


def test_values_and_types_that_no_model_can_use_fail(tmp_path):
    norm = Weight.pack("output_norm.weight", np.full(64, np.nan, np.float32), F32)
    blocks = Weight("blk.1.attn_k.weight", (64, 64), BY_NAME["I8"], np.zeros(64 * 64, np.uint8))
    type_, values = failures(rewritten(tmp_path / "m.gguf", replace=[norm, blocks]))
    assert type_.startswith("blk.1.attn_k.weight is I8")
    assert values.startswith("output_norm.weight has values that are not finite")


def test_a_matrix_with_a_value_that_is_not_finite_fails(tmp_path):
    matrix = np.zeros((160, 64), np.float32)
    matrix[3, 17], matrix[5] = np.inf, np.nan
    found = Weight.pack("blk.1.ffn_up.weight", matrix, F16)
    (values,) = failures(rewritten(tmp_path / "m.gguf", replace=[found]))
    assert values.startswith("blk.1.ffn_up.weight has values that are not finite: 65 of 10,240, the first at [3, 17];")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "bert"}, "architecture 'bert'"),
        ({"general.architecture": 7}, "general.architecture"),
        ({"qwen3.attention.head_count_kv": 3}, "n_heads"),
        ({"qwen3.expert_count": 8}, "expert_count"),
        ({"tokenizer.ggml.model": "unigram"}, "tokenizer.ggml.model"),
    ],
)
def test_settings_that_cannot_be_followed_fail(tmp_path, metadata, message):
    (failure,) = failures(rewritten(tmp_path / "m.gguf", metadata=metadata))
    assert message in failure


def test_a_vocabulary_of_another_length(tmp_path):
    with open_gguf(MICRO) as file:
        tokens, types = file.metadata["tokenizer.ggml.tokens"], file.metadata["tokenizer.ggml.token_type"]
    fewer = {"tokenizer.ggml.tokens": tokens[:-2], "tokenizer.ggml.token_type": types[:-2]}
    more = {
        "tokenizer.ggml.tokens": [*tokens, "more than rows"],
        "tokenizer.ggml.token_type": Value(ValueType.ARRAY, np.append(types, np.int32(1))),
    }
    found = run_json(rewritten(tmp_path / "fewer.gguf", metadata=fewer), "--verify")
    assert found["counts"] == {"PASS": 6, "WARN": 1, "FAIL": 0}
    assert "other 2 rows" in found["findings"][-1]["detail"]
    assert failures(rewritten(tmp_path / "more.gguf", metadata=more)) == [
        "byte-level BPE, 513 tokens, but the embedding table has 512 rows"
    ]


def test_bytes_behind_the_last_tensor_are_noted(tmp_path):
    path = rewritten(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes() + bytes(100))
    first = run_json(path, "--verify")["findings"][0]
    assert first["level"] == "WARN"
    assert "the last 100 belong to no tensor" in first["detail"]


def test_a_file_that_is_cut_fails_in_one_line(tmp_path):
    path = tmp_path / "cut.gguf"
    path.write_bytes(MICRO.read_bytes()[:100_000])
    result = run(path)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert "cut short" in result.stderr
    fail, summary = run(path, "--verify").stdout.splitlines()
    assert fail.startswith("FAIL  file")
    assert summary.endswith("0 passed, 0 to note, 1 failed")
    assert len(failures(path)) == 1


def test_a_vocabulary_alone_is_no_model(tmp_path):
    with open_gguf(MICRO) as file:
        write_gguf(tmp_path / "vocab.gguf", file.typed_metadata(), [])
    assert "vocabulary alone" in failures(tmp_path / "vocab.gguf")[0]
    assert run(tmp_path / "vocab.gguf").exit_code == 0


def test_options_that_exclude_each_other_are_wrong_use():
    assert run(MICRO, "--meta", "general.name", "--verify").exit_code == 2


def test_verify_reports_a_quantisation_that_is_not_implemented(tmp_path: Path):
    folder = shutil.copytree(HF_FOLDER, tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "quip"}}))
    found = run_json(folder, "--verify", exit_code=1)
    assert found["findings"][-1]["level"] == "FAIL"
    assert "quant_method" in found["findings"][-1]["detail"]


def test_several_models_have_a_line_each_and_a_sum(monkeypatch, tmp_path):
    found = run("-m", MICRO, "-m", HF_FOLDER, "--backend", "simd").stdout.splitlines()
    assert [line.split()[0] for line in found] == [str(MICRO), str(HF_FOLDER), "together:"]
    assert all(" yes, on simd " in line and " of weights" in line for line in found[:2])
    assert found[2].endswith("available; `serve` keeps all of them")
    parsed = json.loads(run("-m", MICRO, "-m", HF_FOLDER, "--backend", "simd", "--json").stdout)
    sizes = [of["run"]["weights_bytes"] + of["run"]["kv_bytes"] for of in parsed["models"]]
    assert parsed["together"]["needed_bytes"] == sum(sizes)
    monkeypatch.setattr("mlx_engine.bench.outlook.available_memory", lambda: sum(sizes) - 1)
    (tmp_path / "vocab.safetensors").touch()
    *lines, last = run("-m", MICRO, "-m", HF_FOLDER, "-m", tmp_path / "vocab.safetensors").stdout.splitlines()
    assert " no: a file of tensors without" in lines[2]
    assert last.endswith("`serve` unloads a model if another one needs its memory")
    assert run("-m", MICRO, "-m", HF_FOLDER, "--verify").exit_code == 2


@pytest.mark.slow
def test_a_process_without_a_terminal_wraps_nothing_and_ends_as_promised(tmp_path):
    done = process(MICRO)
    assert done.returncode == 0
    assert done.stderr == ""
    assert max(map(len, done.stdout.splitlines())) > 150
    missing = process(tmp_path / "none.gguf")
    assert (missing.returncode, missing.stdout, missing.stderr.count("\n")) == (1, "", 1)
    assert missing.stderr.startswith("error: ")
