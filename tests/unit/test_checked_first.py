"""What arguments, settings and tokenizer show to be wrong is found before a weight is read."""

import json
import shutil
from dataclasses import replace

import pytest

from mlx_engine.checkpoint.gguf import open_gguf
from mlx_engine.checkpoint.gguf_writer import write_gguf
from mlx_engine.commands.serve import CapacityOptions, Loading
from mlx_engine.errors import EngineError
from mlx_engine.weights.plan import Tensor
from tests.unit.test_command_generate import DATA, MODEL, cli

FOLDER = DATA / "hf"
BEYOND = "for prompt and answer"


class WeightReadError(Exception):
    """A weight was read."""


@pytest.fixture(autouse=True)
def unread(monkeypatch):
    """No weight can be read."""

    def weight(tensor, checkpoint):
        raise WeightReadError(tensor.name)

    monkeypatch.setattr(Tensor, "weight", weight)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder without a tokenizer."""
    path = tmp_path_factory.mktemp("model") / "no-tokenizer"
    shutil.copytree(FOLDER, path)
    for file in path.glob("*token*"):
        file.unlink()
    return path


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """A model whose chat template refuses every conversation."""
    path = tmp_path_factory.mktemp("model") / "broken.gguf"
    with open_gguf(MODEL) as file:
        metadata = dict(file.typed_metadata())
        name = "tokenizer.chat_template"
        metadata[name] = replace(metadata[name], value="{{ raise_exception('not today') }}")
        write_gguf(path, metadata, [file.weight(name) for name in file.tensors])
    return path


WRONG = {
    "no prompt": (["generate", ""], "the prompt is empty"),
    "a long answer": (["generate", "a", "-n", "40000"], BEYOND),
    "a short context": (["generate", "a", "--context-len", "1"], BEYOND),
    "a token": (["generate", "a", "--temp", "1", "--logit-bias", "99999=1"], "--logit-bias"),
    "thinking": (["generate", "a", "--chat", "--think"], "--think needs a chat template that reads"),
    "a stop string": (["generate", "a", "--stop", ""], "--stop must be strings of at least one character"),
    "chat, a long answer": (["chat", "-n", "40000"], BEYOND),
    "chat, thinking": (["chat", "--think"], "--think needs a chat template that reads"),
    "chat, a file": (["chat", "--load", "/nowhere"], "/nowhere: "),
    "bench": (["bench", "-p", "1000000"], "the model's context has"),
    "clients": (["bench", "--concurrency", "1", "-p", "1000000"], "the model's context has"),
}


@pytest.mark.some(3)
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_reported_before_a_weight_is_read(name):
    arguments, message = WRONG[name]
    found = cli(arguments[0], "--model", MODEL, "--backend", "simd", *arguments[1:])
    assert (found.code, message in found.err) == (1 if "file" in name else 2, True), found.err


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_missing_tokenizer_is_reported_before_a_weight_is_read(command, folder):
    found = cli(command, "--model", folder, "--backend", "simd")
    assert found.code == 1
    assert "tokenizer.json" in found.err


def test_a_server_without_a_tokenizer_ends_before_a_weight_is_read(folder):
    with pytest.raises(EngineError, match=r"tokenizer\.json"):
        Loading("simd", CapacityOptions(), {}).open(str(folder)).load()


@pytest.mark.parametrize("arguments", [("generate", "--chat", "a"), ("chat",)], ids=lambda a: a[0])
def test_a_template_that_fails_is_reported_before_a_weight_is_read(arguments, broken):
    command, *rest = arguments
    found = cli(command, "--model", broken, "--backend", "simd", *rest)
    assert (found.code, "not today" in found.err) == (1, True), found.err


def test_a_conversation_that_the_template_refuses_is_reported_before_a_weight_is_read(tmp_path):
    path = tmp_path / "saved.json"
    path.write_text(json.dumps([{"role": "nobody"}]))
    found = cli("chat", "--model", MODEL, "--backend", "simd", "--load", path)
    assert (found.code, "messages[0].content" in found.err) == (2, True), found.err


def test_the_check_can_fail():
    """A prompt that is right reaches the weights."""
    with pytest.raises(WeightReadError):
        cli("generate", "a", "--model", MODEL, "--backend", "simd")
