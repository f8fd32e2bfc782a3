"""Random-weight checkpoints of real shapes."""

from pathlib import Path

import numpy as np
import pytest

import mlx_engine
from mlx_engine.checkpoint import shapes
from mlx_engine.checkpoint.sources import resolve
from mlx_engine.errors import SourceError
from mlx_engine.models.verify import Level, verify

TINY = shapes.Shape(2, 64, 96, 4, 2, 32, 700, 128, 1e4)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(shapes.SHAPES, "tiny", TINY)
    return tmp_path


def test_a_shape_is_written_once_and_is_a_whole_model(cache: Path):
    path = resolve("shape:tiny")
    assert path.is_relative_to(cache)
    before = path.stat().st_mtime_ns
    assert resolve("shape:tiny") == path
    assert path.stat().st_mtime_ns == before
    assert {finding.level for finding in verify(path)} == {Level.PASS, Level.WARN}


def test_its_activations_neither_vanish_nor_explode():
    logits = np.asarray(mlx_engine.load("shape:tiny").logits([1, 2, 3, 4]))
    assert 0.05 < logits.std() < 20


def test_its_vocabulary_comes_back_from_text():
    tokenizer = mlx_engine.load_tokenizer(resolve("shape:tiny"))
    assert tokenizer.vocab_size == TINY.vocab_size
    assert tokenizer.decode(tokenizer.encode("Wörter, words, 言葉")) == "Wörter, words, 言葉"


def test_the_real_shape_has_the_real_number_of_parameters():
    shape = shapes.SHAPES["qwen3-0.6b"]
    D, F, E = shape.hidden_size, shape.intermediate_size, shape.head_dim
    attention = D * E * (2 * shape.n_heads + 2 * shape.n_kv_heads)
    layer = attention + 3 * D * F + 2 * D + 2 * E
    assert shape.vocab_size * D + shape.n_layers * layer + D == 596_049_920


def test_an_unknown_shape_is_told_those_there_are():
    with pytest.raises(SourceError, match=r"qwen3-0\.6b"):
        resolve("shape:qwen9")


def test_a_cache_that_cannot_be_made_is_told(cache: Path, monkeypatch: pytest.MonkeyPatch):
    (cache / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "file"))
    with pytest.raises(SourceError, match="XDG_CACHE_HOME"):
        resolve("shape:tiny")
