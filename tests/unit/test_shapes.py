"""Random-weight checkpoints of real shapes."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import mlx_engine
from mlx_engine.checkpoint import shapes
from mlx_engine.checkpoint.safetensors import Entry, open_safetensors, write_safetensors
from mlx_engine.checkpoint.shapes import Gemma3Shape, GPT2Shape, Qwen3Shape, Qwen35Shape
from mlx_engine.checkpoint.sources import resolve
from mlx_engine.commands import app
from mlx_engine.commands.cache import kept
from mlx_engine.convert.verify import Level, verify
from mlx_engine.errors import SourceError, size
from mlx_engine.quant.types import F32

TINY = Qwen3Shape(2, 64, 96, 4, 2, 32, 700, 128, 1e4)
TINY_DELTA = Qwen35Shape(4, 64, 96, 2, 1, 64, 700, 128, 1e4, 2, 32, 4)
FOLDERS = {
    "tiny-gpt2": GPT2Shape(2, 64, 4, 700, 32),
    "tiny-gemma3": Gemma3Shape(7, 64, 96, 4, 1, 32, 700, 128, 8),
}
ALL = ["tiny", "tiny-qwen3.5", *FOLDERS]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # where there are no compiled kernels either
    for name, shape in {"tiny": TINY, "tiny-qwen3.5": TINY_DELTA, **FOLDERS}.items():
        monkeypatch.setitem(shapes.SHAPES, name, shape)
    return tmp_path


@pytest.mark.some(2)
@pytest.mark.parametrize("name", ALL)
def test_a_shape_is_written_once_and_is_a_whole_model(cache: Path, name: str):
    path = resolve(f"shape:{name}")
    assert list((cache / "mlx_engine").iterdir()) == [path]  # and no draft is left
    before = path.stat().st_mtime_ns
    assert resolve(f"shape:{name}") == path
    assert path.stat().st_mtime_ns == before
    assert {finding.level for finding in verify(path)} == {Level.PASS}


@pytest.mark.parametrize("name", ["tiny", "tiny-gpt2"])
def test_a_line_says_once_what_is_kept_and_how_to_remove_it(cache: Path, name: str, monkeypatch: pytest.MonkeyPatch):
    lines: list[str] = []
    monkeypatch.setattr(shapes.log, "note", lines.append)
    paths = {resolve(f"shape:{name}") for _ in range(2)}
    (line,) = lines
    (item,) = [item for item in kept() if item.name == f"shape:{name}"]
    assert paths == {item.path}
    begins = f"shape:{name}: {size(item.nbytes)} of random weights are kept in {item.path} for later runs; "
    assert line == f"{begins}`mlx-engine cache remove shape:{name}` removes them; with --no-cache, none are kept"


def test_a_shape_that_is_not_kept_is_there_until_the_command_ends(cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shapes.log, "note", pytest.fail)
    with shapes.not_kept():
        path = resolve("shape:tiny-gpt2")
        assert resolve("shape:tiny-gpt2") == path
        assert path.is_dir()
        assert [item for item in kept() if item.kind == "made"] == []
    assert [path for path in (cache / "mlx_engine").iterdir() if path.name not in ("kernels", "emulator")] == []


def test_a_shape_that_is_in_the_cache_is_read_there(cache: Path):
    path = resolve("shape:tiny")
    with shapes.not_kept():
        assert resolve("shape:tiny") == path


@pytest.mark.some(1)
@pytest.mark.parametrize("options", [[], ["--no-cache"]])
def test_no_cache_keeps_no_shape(cache: Path, options: list[str]):
    arguments = ["bench", "-m", "shape:tiny", "-b", "simd", "-p", "4", "-n", "2", "-r", "1", *options]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    left = [path.name for path in (cache / "mlx_engine").glob("*") if path.name.startswith((".shapes", "tiny"))]
    assert left == ([] if options else ["tiny-q8_0.gguf"])


@pytest.mark.parametrize("name", ALL)
def test_its_activations_neither_vanish_nor_explode(name: str):
    logits = np.asarray(mlx_engine.load(f"shape:{name}", "simd", jit=False).logits([1, 2, 3, 4]))
    assert 0.05 < logits.std() < 20


@pytest.mark.some(2)
@pytest.mark.parametrize("name", ALL)
def test_its_vocabulary_comes_back_from_text(name: str):
    tokenizer = mlx_engine.load_tokenizer(resolve(f"shape:{name}"))
    assert tokenizer.vocab_size == shapes.SHAPES[name].vocab_size
    assert tokenizer.decode(tokenizer.encode("Wörter, words, 言葉")) == "Wörter, words, 言葉"


def test_the_real_qwen3_has_the_real_number_of_parameters():
    shape = shapes.SHAPES["qwen3-0.6b"]
    assert isinstance(shape, Qwen3Shape)
    D, F, E = shape.hidden_size, shape.intermediate_size, shape.head_dim
    attention = D * E * (2 * shape.n_heads + 2 * shape.n_kv_heads)
    layer = attention + 3 * D * F + 2 * D + 2 * E
    assert shape.vocab_size * D + shape.n_layers * layer + D == 596_049_920


@pytest.mark.parametrize(("name", "n"), [("gpt2", 124_439_808), ("gemma3-1b", 999_885_952)])
def test_the_real_folders_have_the_real_number_of_parameters(name: str, n: int):
    shape = shapes.SHAPES[name]
    assert not isinstance(shape, Qwen3Shape)
    assert sum(math.prod(tensor.shape) for tensor in shape.tensors()) == n


@pytest.mark.parametrize("name", FOLDERS)
def test_transformers_computes_the_same_with_it(name: str):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder, ids = resolve(f"shape:{name}"), list(range(1, 21))  # more than Gemma's window
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values())
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0].numpy()
    ours = np.asarray(mlx_engine.load(folder, "simd", jit=False).logits(ids))
    assert np.linalg.norm(ours - want) <= 1e-5 * np.linalg.norm(want)


@pytest.mark.parametrize("name", FOLDERS)
def test_its_weights_have_the_spread_that_was_asked_for(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shapes, "PIECE", 1000)  # so that most tensors are several pieces
    seen: list[tuple[int, int]] = []
    shape, folder = FOLDERS[name], resolve(f"shape:{name}", lambda done, total: seen.append((done, total)))
    file = open_safetensors(folder / "model.safetensors")
    tensors = list(shape.tensors())
    assert list(file.tensors) == [tensor.name for tensor in tensors]
    for tensor in tensors:
        weight = file.weight(tensor.name)
        assert (weight.shape, weight.type) == (tensor.shape, shape.type)
        values = weight.dequantize()
        slack = 5 * tensor.std / math.sqrt(values.size)
        assert abs(values.mean() - tensor.mean) < slack
        assert abs(values.std() - tensor.std) < slack + 0.004
        assert len(np.unique(values)) > values.size / 50  # no piece is written twice
    assert [done for done, _ in seen] == list(range(1, seen[0][1] + 1))


def test_a_folder_that_fails_leaves_nothing_behind(cache: Path, monkeypatch: pytest.MonkeyPatch):
    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shapes, "write_safetensors", fails)
    with pytest.raises(SourceError, match="No space left"):
        resolve("shape:tiny-gpt2")
    assert list((cache / "mlx_engine").iterdir()) == []


def test_of_two_that_write_the_same_the_first_stays(cache: Path, monkeypatch: pytest.MonkeyPatch):
    folder = cache / "mlx_engine" / "tiny-gpt2-f32"

    def meanwhile(*_: object) -> None:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"by": "another"}))

    monkeypatch.setattr(shapes, "write_safetensors", meanwhile)
    assert resolve("shape:tiny-gpt2") == folder
    assert list(folder.iterdir()) == [folder / "config.json"]


def test_pieces_must_fill_the_table(tmp_path: Path):
    entry = Entry("a", (2, 3), F32)
    with pytest.raises(ValueError, match="24 bytes"):
        write_safetensors(tmp_path / "file", [entry], [np.zeros(20, dtype=np.uint8)])


def test_an_unknown_shape_is_told_those_there_are():
    with pytest.raises(SourceError, match=r"qwen3-0\.6b"):
        resolve("shape:qwen9")


def test_a_cache_that_cannot_be_made_is_told(cache: Path, monkeypatch: pytest.MonkeyPatch):
    (cache / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "file"))
    with pytest.raises(SourceError, match="XDG_CACHE_HOME"):
        resolve("shape:tiny")
