"""What is named as a model and is none: one line says what it is and what helps, in every command that reads it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mlx_engine.checkpoint.gguf import open_gguf
from mlx_engine.checkpoint.gguf_writer import write_gguf
from mlx_engine.commands import app

HF = Path(__file__).parents[1] / "data" / "qwen3-micro" / "hf"
GGUF = HF.parent / "model-q8_0.gguf"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 639446688\n" % (b"0d" * 32)
BNB = {"_load_in_4bit": True, "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}

pytestmark = pytest.mark.skipif(os.name != "posix", reason="pipes and devices as POSIX has them")


@pytest.fixture(autouse=True)
def in_time():
    """A read of a pipe that has no writer would never end."""

    def late(*_: object) -> None:
        raise TimeoutError("the command waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 10)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def content(data: bytes, name: str = "model.gguf") -> Callable[[Path], Path]:
    """Return a function that writes a file."""

    def make(folder: Path) -> Path:
        (folder / name).write_bytes(data)
        return folder / name

    return make


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


def torch_archive(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w") as archive:
        archive.writestr("data.pkl", b"")
    return folder / "pytorch_model.bin"


def part_of_three(folder: Path) -> Path:
    with open_gguf(GGUF) as file:
        split = {"split.no": 0, "split.count": 3, "split.tensors.count": 3}
        write_gguf(folder / "m-00001-of-00003.gguf", {**file.typed_metadata(), **split}, [])
    return folder / "m-00001-of-00003.gguf"


def changed(name: str, data: bytes | None, *others: str) -> Callable[[Path], Path]:
    """Return a function that copies a sound folder without a file, or with other content (None: a pipe)."""

    def make(folder: Path) -> Path:
        folder = shutil.copytree(HF, folder / "hf")
        (folder / name).unlink(missing_ok=True)
        if data is None:
            os.mkfifo(folder / name)
        elif data:
            (folder / name).write_bytes(data)
        for other in others:
            (folder / other).write_text("{}")
        return folder

    return make


def empty(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        folder = shutil.copytree(HF, folder / "hf")
        (folder / name).write_bytes(b"")
        return folder

    return make


def quantized(settings: dict[str, object]) -> Callable[[Path], Path]:
    config = json.loads((HF / "config.json").read_bytes())
    return changed("config.json", json.dumps({**config, "quantization_config": settings}).encode())


LFS = "a Git-LFS pointer to a file of 639,446,688 bytes"
FOLDER = "name its folder, "
# How a path is made or what it is, what the message says that it is, and what it says that helps.
FILES: dict[str, tuple[Callable[[Path], Path] | str, str, str]] = {
    "safetensors": (lambda folder: HF / "model.safetensors", "a safetensors file", FOLDER + str(HF)),
    "config.json": (lambda folder: HF / "config.json", "a JSON file", FOLDER + str(HF)),
    "LFS": (content(POINTER), LFS, "git lfs pull"),
    "split": (part_of_three, "m-00002-of-00003.gguf, m-00003-of-00003.gguf are missing", "download them"),
    "empty": (content(b""), "an empty file", "download or convert it again"),
    "other": (content(b"hello, world"), "b'hell'", "this is not a GGUF file"),
    "zip": (torch_archive, "a ZIP archive, as PyTorch writes", "save_pretrained"),
    "pickle": (content(b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."), "a pickle, as PyTorch writes", "save_pretrained"),
    "page": (content(b"<!DOCTYPE html><html>"), "a page in HTML", "download the file again"),
    "GGML": (content(b"lmgg" + bytes(40)), "a file of GGML", "download the GGUF file"),
    "gzip": (content(b"\x1f\x8b\x08\x00" + bytes(40)), "a compressed file", "unpack it first"),
    "pipe": (pipe, "this is a pipe", "write its content to a file"),
    "device": ("/dev/zero", "this is a device", "write its content to a file"),
    "null": ("/dev/null", "this is a device", "write its content to a file"),
    "nothing": ("nothing.gguf", "no such file or folder", "give a file, a folder"),
    "traversal": (
        "me/ggufs:../../etc/passwd",
        "'../../etc/passwd' leads out",
        "name a file as the hub lists it",
    ),
    "absolute": ("me/ggufs:/etc/passwd", "'/etc/passwd' leads out", "name a file as the hub lists it"),
    "backslashes": (
        "me/ggufs:a\\..\\..\\b",
        "'a\\\\..\\\\..\\\\b' leads out",
        "name a file as the hub lists it",
    ),
}
FOLDERS: dict[str, tuple[Callable[[Path], Path] | str, str, str]] = {
    "empty folder": (lambda folder: folder, "an empty folder", "name a GGUF file or another folder"),
    "LFS weights": (changed("model.safetensors", POINTER), LFS, "git lfs pull"),
    "LFS settings": (changed("config.json", POINTER), LFS, "git lfs pull"),
    "pipe as weights": (changed("model.safetensors", None), "this is a pipe", "write its content to a file"),
    "pipe as settings": (changed("config.json", None), "this is a pipe", "write its content to a file"),
    "empty settings": (empty("config.json"), "an empty file", "download the file again"),
    "torch": (changed("model.safetensors", b"", "pytorch_model.bin"), "weights of PyTorch", "save_pretrained"),
}
QUANTIZED = {
    "bitsandbytes": (quantized({"quant_method": "bitsandbytes", **BNB}), "'bitsandbytes'", "--quant q8_0"),
    "old bitsandbytes": (quantized(BNB), "'bitsandbytes'", "download the original model"),
    "hqq": (quantized({"quant_method": "hqq"}), "'hqq'", "--quant q8_0"),
}
TOKENIZERS = {
    "no tokenizer": (changed("tokenizer.json", b""), "no tokenizer.json", "download it too"),
    "SentencePiece": (changed("tokenizer.json", b"", "tokenizer.model"), "only tokenizer.model", "AutoTokenizer"),
    "vocab.json": (changed("tokenizer.json", b"", "vocab.json"), "only vocab.json", "AutoTokenizer"),
    "LFS tokenizer": (changed("tokenizer.json", POINTER), LFS, "git lfs pull"),
    "pipe as tokenizer": (changed("tokenizer.json", None), "this is a pipe", "write its content to a file"),
    "pipe as template": (changed("chat_template.jinja", None), "this is a pipe", "write its content to a file"),
    "pipe as roles": (changed("tokenizer_config.json", None), "this is a pipe", "write its content to a file"),
    "empty tokenizer": (empty("tokenizer.json"), "an empty file", "download the file again"),
}
COMMANDS = {
    "generate": ("generate", "a", "-n", 1, "-b", "simd", "-m"),
    "bench": ("bench", "-p", 1, "-n", 1, "-r", 1, "-b", "simd", "-m"),
    "quantize": ("quantize", "--to", "q8_0"),
    "inspect": ("inspect",),
    "tokenize": ("tokenize", "info", "-m"),
}
READERS = [
    *((FILES, command) for command in ("generate", "bench", "inspect", "tokenize", "quantize")),
    *((FOLDERS, command) for command in ("generate", "bench", "inspect", "quantize")),
    *((QUANTIZED, command) for command in ("generate", "bench", "quantize")),
    *((TOKENIZERS, command) for command in ("generate", "tokenize", "quantize")),
]
CASES = {f"{command}: {name}": (case, command) for kinds, command in READERS for name, case in kinds.items()}
# `inspect` lists a single file of safetensors.
del CASES["inspect: safetensors"]
# `tokenize` looks for a tokenizer in any JSON file.
del CASES["tokenize: config.json"]


@pytest.mark.parametrize("name", CASES)
def test_one_line_says_what_it_is_and_what_helps(tmp_path, monkeypatch, name):
    (source, found, hint), command = CASES[name]
    monkeypatch.chdir(tmp_path)
    path = source if isinstance(source, str) else source(tmp_path)
    out = ("out.gguf",) if command == "quantize" else ()
    result = CliRunner().invoke(app, [*map(str, COMMANDS[command]), str(path), *out])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert (result.exit_code, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()[-1:]
    assert line.startswith("error: ")
    assert found in line
    assert hint in line.partition(found)[2]
    assert not (tmp_path / "out.gguf").exists()


def test_a_folder_of_bitsandbytes_can_be_inspected(tmp_path):
    result = CliRunner().invoke(app, ["inspect", str(QUANTIZED["bitsandbytes"][0](tmp_path))])
    assert result.exit_code == 0
    assert "runs here" in result.stdout
    assert "found 'bitsandbytes'; download the original model" in result.stdout


def test_a_template_with_line_ends_of_windows_is_the_same_template(tmp_path):
    from mlx_engine import load_tokenizer

    unix = load_tokenizer(changed("chat_template.jinja", b"{{ 1 }}\n\n{{ 2 }}")(tmp_path)).chat_template
    (tmp_path / "hf" / "chat_template.jinja").write_bytes(b"{{ 1 }}\r\n\r\n{{ 2 }}")
    assert load_tokenizer(tmp_path / "hf").chat_template == unix
