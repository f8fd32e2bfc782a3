"""A Git-LFS pointer where a file of a model should be is named as what it is, wherever a model is opened."""

import json
import shutil

import pytest
from typer.testing import CliRunner

from mlx_engine import errors, load, load_tokenizer, open_gguf
from mlx_engine.checkpoint.paths import refuse_pointer
from mlx_engine.checkpoint.safetensors import open_safetensors
from mlx_engine.commands import app
from tests.unit.test_command_generate import DATA

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 639446688\n" % (b"0d" * 32)
FOUND = "a Git-LFS pointer to a file of 639,446,688 bytes"


@pytest.fixture
def folder(tmp_path):
    """A copy of the micro model's Hugging Face folder."""
    return shutil.copytree(DATA / "hf", tmp_path / "hf")


def refusal(call, *args):
    with pytest.raises(errors.FormatError) as caught:
        call(*args)
    assert "\n" not in str(caught.value)
    return caught.value


def cli(*args):
    result = CliRunner().invoke(app, list(map(str, args)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.mark.parametrize("open_", [open_gguf, load, load_tokenizer])
def test_a_gguf_file_that_is_a_pointer_is_named(tmp_path, open_):
    path = tmp_path / "model.gguf"
    path.write_bytes(POINTER)
    error = refusal(open_, path)
    assert (error.where, error.expected, error.found) == (str(path), "a GGUF file", FOUND)
    assert "git lfs pull" in error.hint
    assert "download the file again" in error.hint


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.safetensors", "a safetensors file"),
        ("config.json", "JSON"),
        ("tokenizer.json", "a tokenizer.json"),
        ("tokenizer_config.json", "JSON"),
        ("chat_template.jinja", "a chat_template.jinja"),
    ],
)
def test_a_file_of_a_folder_that_is_a_pointer_is_named(folder, name, expected):
    (folder / name).write_bytes(POINTER)
    error = refusal(lambda: load(folder).tokenizer)
    assert (error.where, error.expected, error.found) == (str(folder / name), expected, FOUND)


def test_an_index_and_a_shard_that_are_pointers_are_named(folder):
    index = folder / "model.safetensors.index.json"
    index.write_bytes(POINTER)
    assert refusal(load, folder).where == str(index)
    index.write_text(json.dumps({"weight_map": {"a": "a.safetensors"}}))
    (folder / "a.safetensors").write_bytes(POINTER)
    assert refusal(load, folder).where == str(folder / "a.safetensors")


@pytest.mark.parametrize(
    ("pointer", "found"),
    [
        (POINTER.replace(b"\n", b"\r\n"), FOUND),
        (POINTER.replace(b"oid", b"ext-0-x sha256:0d\noid"), FOUND),
        (POINTER.replace(b"spec/v1", b"spec/v2"), FOUND),
        (POINTER.partition(b"size")[0], "a Git-LFS pointer"),
        (POINTER.replace(b"639446688", b"-1"), "a Git-LFS pointer"),
    ],
    ids=["CRLF", "extension", "newer", "cut short", "no size"],
)
def test_every_form_of_a_pointer_is_known(tmp_path, pointer, found):
    path = tmp_path / "model.safetensors"
    path.write_bytes(pointer)
    assert refusal(open_safetensors, path).found == found


@pytest.mark.parametrize("head", [b"", b"GGUF", b"{}", POINTER[1:], b"version 1"])
def test_other_files_are_no_pointers(tmp_path, head):
    refuse_pointer(tmp_path, head, "a file")


@pytest.mark.parametrize(
    "command", [("generate", "a", "-m"), ("inspect",), ("tokenize", "info", "-m"), ("bench", "-m")], ids=" ".join
)
def test_the_commands_say_it_in_one_line(tmp_path, command):
    path = tmp_path / "model.gguf"
    path.write_bytes(POINTER)
    result = cli(*command, path)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        f"error: {path}: expected a GGUF file, found {FOUND}; "
        "run `git lfs pull` in the repository that this file belongs to, or download the file again\n"
    )


@pytest.mark.parametrize(
    ("name", "check"), [("model.safetensors", "file"), ("config.json", "file"), ("tokenizer.json", "tokenizer")]
)
def test_a_verification_finds_it(folder, name, check):
    (folder / name).write_bytes(POINTER)
    result = cli("inspect", folder, "--verify", "--json")
    (failure,) = [row for row in json.loads(result.stdout)["findings"] if row["level"] == "FAIL"]
    assert result.exit_code == 1
    assert failure["check"] == check
    assert FOUND in failure["detail"]
