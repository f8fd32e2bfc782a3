"""What people do to a program without meaning harm: closed streams, full disks, values that are almost right."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import mlx_engine
from mlx_engine.commands import app
from mlx_engine.errors import ContextLengthError, ModelError, OptionError, SourceError

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "tests" / "data" / "qwen3-micro" / "model-q8_0.gguf"


@pytest.fixture(scope="module")
def engine() -> mlx_engine.Engine:
    return mlx_engine.load(MODEL, jit=False)


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    line = command.replace("CLI", f"{sys.executable} {ROOT / 'cli.py'}").replace("MODEL", f"-m {MODEL} --no-jit -n 3")
    everything = {**os.environ, **environment}
    return subprocess.run(["sh", "-c", line], env=everything, capture_output=True, text=True, check=False)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("command", "code", "told"),
    [
        ("CLI tokenize encode <&-", 2, "no text: give it as an argument"),
        ("CLI generate a MODEL > /dev/full", 1, "the output cannot be written"),
        ("CLI generate a MODEL --json > /dev/full", 1, "the output cannot be written"),
    ],
)
def test_an_accident_is_told_in_one_line(command: str, code: int, told: str):
    if "/dev/full" in command and not Path("/dev/full").exists():
        pytest.skip("this system has no device that is always full")
    result = shell(command)
    assert result.returncode == code
    assert told in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["generate", "-"], 2, "no prompt: give it as an argument"),
        (["generate", "a", "--model", ""], 1, "the name of the model is empty"),
        (["generate", "a", "--model", "/"], 1, "found no config.json"),
    ],
    ids=str,
)
def test_an_accident_without_stdin_is_told_in_one_line(monkeypatch, capsys, arguments: list[str], code: int, told: str):
    monkeypatch.setattr(sys, "stdin", None)  # what Python makes of a stream that is closed
    with pytest.raises(SystemExit) as found:
        app(arguments)
    assert found.value.code == code
    assert told in capsys.readouterr().err


@pytest.mark.slow
def test_without_stderr_the_text_still_comes():
    result = shell("CLI generate a MODEL 2>&-")
    assert result.returncode == 0
    assert result.stdout.strip()


def test_the_package_runs_as_a_module():
    command = [sys.executable, "-m", "mlx_engine", "--version"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["mlx-engine", mlx_engine.__version__]


@pytest.mark.parametrize("ids", [np.array([[1, 2]]), b"abc", [True], [1.5], ["a"], None, mx.array([[1, 2]])], ids=str)
def test_ids_that_are_none_are_refused(engine: mlx_engine.Engine, ids: object):
    with pytest.raises(OptionError, match="the prompt "):
        engine.logits(ids)


@pytest.mark.parametrize("ids", [np.array([1, 2]), mx.array([1, 2]), (1, 2), range(1, 3)], ids=str)
def test_ids_come_in_any_sequence(engine: mlx_engine.Engine, ids: object):
    assert engine.generate(ids, max_tokens=2).prompt_ids == [1, 2]


def test_a_long_wrong_value_is_cut_in_the_message(engine: mlx_engine.Engine):
    with pytest.raises(OptionError) as caught:
        engine.logits([1] * 100_000 + ["x"])
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("options", [{"stop": 3}, {"kv": "no"}, {"ignore_eos": 1}], ids=str)
def test_options_of_another_type_are_refused(engine: mlx_engine.Engine, options: dict[str, object]):
    with pytest.raises(OptionError, match=next(iter(options))):
        engine.generate([1], max_tokens=1, **options)


def test_a_seed_of_numpy_is_the_same_seed(engine: mlx_engine.Engine):
    runs = [engine.generate([1], max_tokens=8, temperature=2.0, seed=seed).token_ids for seed in (3, np.int64(3))]
    assert runs[0] == runs[1]


def test_logits_keep_to_the_context(engine: mlx_engine.Engine):
    with pytest.raises(ContextLengthError):
        engine.logits([1] * (engine.config.context_length + 1))


@pytest.mark.parametrize("source", [None, 3, b"x"], ids=repr)
def test_a_source_that_is_no_name_is_refused(source: object):
    with pytest.raises(OptionError, match="source"):
        mlx_engine.load(source)


def test_nothing_is_compiled_for_a_model_that_is_not_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mlx_engine.backends.cpu.kernels.load_kernels", lambda: pytest.fail("compiled"))
    with pytest.raises(SourceError):
        mlx_engine.load("nowhere.gguf", "simd")


def test_a_vocabulary_alone_is_told_apart_from_a_damaged_model(tmp_path: Path):
    with mlx_engine.open_gguf(MODEL) as file:
        from mlx_engine.checkpoint import write_gguf

        write_gguf(tmp_path / "vocabulary.gguf", file.typed_metadata(), [])
    with pytest.raises(ModelError, match="a vocabulary alone"):
        mlx_engine.load(tmp_path / "vocabulary.gguf")
