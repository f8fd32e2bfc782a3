"""`tokenize`: text to ids and back, and what it says of a vocabulary."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from mlx_engine import load_tokenizer
from mlx_engine.checkpoint import open_gguf, write_gguf
from mlx_engine.commands import app

REPOSITORY = Path(__file__).parent.parent.parent
MICRO = REPOSITORY / "tests/data/qwen3-micro/model-q8_0.gguf"
HF_FOLDER = REPOSITORY / "tests/data/qwen3-micro/hf"
TEXT = "the day before the world: 12 €\n"
CHAT = "<|im_start|>user\nhi<|im_end|>"


def run(command, *args, model=MICRO, stdin=None):
    return CliRunner().invoke(app, ["tokenize", command, "-m", str(model), *map(str, args)], input=stdin)


def run_json(*args, **keywords):
    result = run(*args, "--json", **keywords)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(MICRO)


@pytest.fixture
def bytes_only(tmp_path):
    """A vocabulary of the 256 bytes alone, with the characters that stand for them in byte-level vocabularies."""
    from mlx_engine.tokenizer.vocabulary import BYTE_OF_CHARACTER

    tokens = sorted(BYTE_OF_CHARACTER, key=lambda character: BYTE_OF_CHARACTER[character])
    metadata = {
        "general.architecture": "qwen3",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.ones(256, np.int32),
        "tokenizer.ggml.merges": [],
    }
    write_gguf(tmp_path / "bytes.gguf", metadata, [])
    return tmp_path / "bytes.gguf"


def test_ids_are_the_tokenizers(tokenizer):
    ids = tokenizer.encode(TEXT)
    assert run("encode", TEXT).stdout == " ".join(map(str, ids)) + "\n"
    assert run_json("encode", TEXT) == {"ids": ids, "tokens": [tokenizer.token(i) for i in ids], "count": len(ids)}


@pytest.mark.parametrize(("text", "ids"), [("Hello", "72 101 108 108 111"), ("€", "226 130 172"), ("", "")])
def test_a_vocabulary_of_bytes(bytes_only, text, ids):
    assert run("encode", text, model=bytes_only).stdout == ids + "\n"
    assert run("decode", *ids.split(), model=bytes_only, stdin="").stdout == text + "\n"


def test_control_tokens_are_recognized_on_request_only(tokenizer):
    start = tokenizer.special_tokens["<|im_start|>"]
    assert start in run_json("encode", CHAT, "--special")["ids"]
    assert start not in run_json("encode", CHAT)["ids"]


def test_text_comes_from_arguments_stdin_or_a_file(tmp_path):
    file = tmp_path / "text.txt"
    file.write_bytes(TEXT.encode())
    expected = run("encode", TEXT).stdout
    assert run("encode", "-", stdin=TEXT).stdout == expected
    assert run("encode", stdin=TEXT).stdout == expected
    assert run("encode", "--file", file).stdout == expected
    assert run("encode", "more", "--file", file).exit_code == 2
    assert run("encode", "--file", tmp_path / "none").exit_code == 1
    file.write_bytes(b"\xff\xfe")
    assert run("encode", "--file", file).exit_code == 2


def test_pieces_show_each_token(tokenizer):
    lines = [line.split() for line in run("encode", "a the", "--pieces").stdout.splitlines()]
    assert [int(line[0]) for line in lines] == tokenizer.encode("a the")
    assert lines[-1][1].startswith("Ġ")
    assert "' the'" in run("encode", " the", "--pieces").stdout


def test_ids_may_be_written_in_several_ways(tmp_path):
    ids = run_json("encode", TEXT)["ids"]
    file = tmp_path / "ids.txt"
    file.write_text(", ".join(map(str, ids)))
    ways = [
        run("decode", *ids),
        run("decode", ",".join(map(str, ids))),
        run("decode", json.dumps(ids)),
        run("decode", "-", stdin=" ".join(map(str, ids)) + "\n"),
        run("decode", stdin="\n".join(map(str, ids))),
        run("decode", "--file", file),
    ]
    assert {way.stdout for way in ways} == {TEXT + "\n"}
    assert run_json("decode", *ids) == {"text": TEXT, "ids": ids, "count": len(ids)}


def test_control_tokens_may_be_left_out_of_the_text():
    ids = run_json("encode", CHAT, "--special")["ids"]
    assert run("decode", *ids).stdout == CHAT + "\n"
    assert run("decode", *ids, "--skip-special").stdout == "user\nhi\n"


@pytest.mark.parametrize("ids", ["x", "1 2.5", "512", "9" * 5000, '{"a": 1}'])
def test_what_are_no_ids_is_wrong_use(ids):
    result = run("decode", ids)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith("error: ids must be ")


def test_round_trip(monkeypatch):
    assert run_json("encode", TEXT, "--round-trip")["round_trip"] is True
    monkeypatch.setattr("mlx_engine.tokenizer.Tokenizer.decode", lambda self, ids: "other")
    result = run("encode", TEXT, "--round-trip")
    assert result.exit_code == 1
    assert "a different text: other" in result.stderr


def test_info(tokenizer):
    with open_gguf(MICRO) as file:
        metadata = file.metadata
    assert run_json("info") == {
        "kind": "byte-level BPE",
        "pre": "qwen2",
        "vocab_size": 512,
        "bos_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_id": metadata["tokenizer.ggml.eos_token_id"],
        "eog_ids": sorted(tokenizer.eog_ids),
        "add_bos": False,
        "special_tokens": tokenizer.special_tokens,
        "chat_template": metadata["tokenizer.chat_template"],
    }
    lines = run("info").stdout.splitlines()
    assert "vocabulary      512 tokens" in lines
    assert f"EOS             {tokenizer.eos_id} <|im_end|>" in lines
    assert f"  {tokenizer.eos_id}  <|im_end|>" in lines


@pytest.mark.parametrize("model", [HF_FOLDER, HF_FOLDER / "tokenizer.json"])
def test_a_tokenizer_json_gives_the_same_ids(model):
    assert run("encode", TEXT, model=model).stdout == run("encode", TEXT).stdout
    assert "512 tokens" in run("info", model=HF_FOLDER).stdout


def test_lookup(tokenizer):
    (the,) = tokenizer.encode(" the")
    row = {"id": the, "token": "Ġthe", "text": " the"}
    assert run_json("info", "--lookup", " the")["found"] == [row]
    assert run_json("info", "--lookup", "Ġthe")["found"] == [row]
    assert run_json("info", "--lookup", the)["found"] == [row]
    assert run("info", "--lookup", "<|im_end|>").stdout.split()[0] == str(tokenizer.eos_id)
    five = run_json("info", "--lookup", "5")["found"]
    assert [row["id"] for row in five] == [5, *tokenizer.encode("5")]
    for unknown in ("no such token", "512", ""):
        assert run("info", "--lookup", unknown).exit_code == 2


def test_a_file_without_a_tokenizer_is_an_error(tmp_path):
    write_gguf(tmp_path / "empty.gguf", {}, [])
    result = run("info", model=tmp_path / "empty.gguf")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)


@pytest.mark.slow
def test_a_pipe_from_text_to_ids_and_back():
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONUTF8": "1"}
    command = [sys.executable, REPOSITORY / "cli.py", "tokenize"]
    data = TEXT.encode()
    for way in ("encode", "decode"):
        done = subprocess.run(
            [*command, way, "-m", MICRO], input=data, capture_output=True, env=environment, check=True
        )
        assert done.stderr == b""
        data = done.stdout
    assert data.decode() == TEXT + "\n"
