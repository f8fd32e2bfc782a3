"""Tokenizers from Hugging Face's `tokenizer.json`."""

import base64
import json
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from mlx_engine.checkpoint import open_gguf
from mlx_engine.commands.options.suggested import suggested_sampling
from mlx_engine.errors import ChatTemplateError, EngineError, FormatError, SourceError, TokenizerError
from mlx_engine.tokenizer import from_json, hf, load_tokenizer
from tests.unit.test_tokenizer import build, byte_level, spm

MICRO = Path(__file__).parents[1] / "data" / "qwen3-micro"


@pytest.fixture
def folder(tmp_path):
    shutil.copy(MICRO / "hf" / "tokenizer.json", tmp_path)
    return tmp_path


def test_json_and_gguf_of_one_model_agree():
    with open_gguf(MICRO / "model-f16.gguf") as file:
        ours, theirs = load_tokenizer(file), load_tokenizer(MICRO / "hf")
    assert ours.vocab_size == theirs.vocab_size == 512
    assert ours.special_tokens == theirs.special_tokens
    for text in ["Once upon a time", "I'LL 123\n\n\t x", "<|im_start|>user\n hé 😀<|im_end|>", "[PAD411]", "  ", ""]:
        for special in (False, True):
            ids = ours.encode(text, special=special)
            assert ids == theirs.encode(text, special=special)
            assert ours.decode(ids) == theirs.decode(ids) == text
    every = range(512)
    assert ours.decode(every) == theirs.decode(every)


def test_roles_come_from_the_files_beside(folder):
    bare = from_json(folder / "tokenizer.json")
    assert (bare.bos_id, bare.eos_id, bare.add_bos, bare.chat_template) == (None, None, False, None)
    assert {bare.token(i) for i in bare.eog_ids} == {"<|endoftext|>", "<|im_end|>"}
    (folder / "config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2, "vocab_size": 500}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    between = load_tokenizer(folder)
    assert (between.bos_id, between.eos_id, between.vocab_size) == (1, 3, 500)
    assert between.eog_ids == bare.eog_ids | {2, 3, 4}
    assert between.decode([499]) == ""
    named = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, "add_bos_token": True}
    named["chat_template"] = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    whole = load_tokenizer(folder / "tokenizer.json")
    assert (whole.bos_id, whole.eos_id, whole.add_bos, whole.chat_template) == (408, 409, True, "d")


def test_a_template_of_its_own_file_is_read(folder):
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert load_tokenizer(folder).chat_template == "{{ messages }}"


def test_truncation_and_padding_in_the_file_are_not_ours(folder):
    content = json.loads((folder / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert load_tokenizer(folder).decode(load_tokenizer(folder).encode("Once upon a time")) == "Once upon a time"


def llama_json(**changes):
    """What Llama 2 ships: a mark before each section, bytes as a fallback, and one space stripped on the way back."""
    tokens = [*(m := spm())["tokenizer.ggml.tokens"]]
    mark = {"String": "▁"}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": tokens[i], "special": True, "normalized": False}
            | dict.fromkeys(["single_word", "lstrip", "rstrip"], False)
            for i in range(3)
        ],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": mark, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {token: i for i, token in enumerate(m["tokenizer.ggml.tokens"])},
            "merges": ["▁ h", "▁h e", "l l", "ll o", "▁he llo"],
        },
    } | changes


def test_a_llama_json_goes_back_and_forth(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(llama_json()))
    tokenizer = from_json(path)
    assert tokenizer.kind == "SPM"
    assert tokenizer.encode("hello") == build(spm()).encode("hello")
    for text in ["hello", "  é 😀", "<s>hello</s>x", ""]:
        for special in (False, True):
            assert tokenizer.decode(tokenizer.encode(text, special=special)) == text
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    path.write_text(json.dumps(llama_json(normalizer=None, pre_tokenizer=metaspace, decoder=metaspace)))
    tokenizer = from_json(path)
    for text in ["hello", "<s>hello</s> x"]:
        for special in (False, True):
            assert tokenizer.decode(tokenizer.encode(text, special=special)) == text


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b""),
        ("tokenizer.json", b"\xff\xfe"),
        ("tokenizer.json", b"[1, 2]"),
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", json.dumps(llama_json(decoder=None)).encode()),
        (
            "tokenizer.json",
            json.dumps(llama_json(decoder={"type": "WordPiece", "prefix": "##", "cleanup": True})).encode(),
        ),
        (
            "tokenizer.json",
            json.dumps(llama_json(model={"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]})).encode(),
        ),
        (
            "tokenizer.json",
            json.dumps(llama_json(model={"type": "BPE", "vocab": {"a": 4 << 28}, "merges": []})).encode(),
        ),
        ("tokenizer_config.json", b"{"),
        ("config.json", b"[]"),
        ("config.json", b'{"bos_token_id": 99999}'),
        ("tokenizer_config.json", b'{"eos_token": "<nowhere>"}'),
    ],
)
def test_damaged_json_is_refused_in_one_line(folder, name, content):
    (folder / name).write_bytes(content)
    with pytest.raises((FormatError, TokenizerError)) as caught:
        load_tokenizer(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.some(3)
@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json", "config.json"])
@pytest.mark.parametrize(
    "content",
    [
        '{"eos_token_id": ' + "9" * 5000 + "}",
        "[" * 100_000,
        '{"a": "' + "x" * (33 << 20) + '"}',
        "[" + "[]," * (1 << 20),
    ],
    ids=["digits", "depth", "size", "lists"],
)
def test_json_beside_it_is_read_within_bounds(folder, name, content):
    (folder / name).write_text(content)
    with pytest.raises(FormatError, match=name) as caught:
        load_tokenizer(folder)
    assert len(str(caught.value)) < 400
    if name == "generation_config.json":
        with pytest.raises(FormatError, match=name):
            suggested_sampling(folder)


def test_a_file_of_any_size_is_not_read(folder, monkeypatch):
    monkeypatch.setattr(hf, "MAX_BYTES", 1000)
    with pytest.raises(FormatError, match="at most 1,000 bytes, found "):
        load_tokenizer(folder)


@pytest.mark.parametrize("n_bytes", [1_000_000, 1_000_001])
def test_a_template_has_at_most_a_megabyte(folder, n_bytes):
    template = "é" + "x" * (n_bytes - 2)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    for load in (lambda: load_tokenizer(folder), lambda: build(byte_level(chat_template=template))):
        if n_bytes == 1_000_000:
            assert load().chat_template == template
        else:
            with pytest.raises(ChatTemplateError, match="1,000,001 bytes, where at most 1,000,000"):
                load()
    (folder / "chat_template.jinja").write_text(template)
    if n_bytes > 1_000_000:
        with pytest.raises(FormatError, match="at most 1,000,000 bytes, found 1,000,001"):
            load_tokenizer(folder)


def test_a_token_of_any_length_is_refused():
    long = spm()
    long["tokenizer.ggml.tokens"][-1] = "ab" * 513
    with pytest.raises(TokenizerError, match=r"at most 1,024 characters, found 'abab.* of 1,026"):
        build(long)


# ---- what would end this process, or hold it up, ends a sandbox process ----


def written(tmp_path, **changes):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(llama_json(**changes)))
    return path


def split(regex):
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def replaced(pattern, content):
    return {"type": "Replace", "pattern": pattern, "content": content}


SEQUENCE = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}]
AT_LOAD = {
    "a post-processor without its token, which is a panic": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<none>", "type_id": 0}}],
            "pair": SEQUENCE,
            "special_tokens": {},
        }
    },
    "a normaliser that announces 4 GB": {
        "normalizer": {
            "type": "Precompiled",
            "precompiled_charsmap": base64.b64encode((2**32 - 4).to_bytes(4, "little") + bytes(60)).decode(),
        }
    },
}
AT_USE = {
    "a regular expression that backtracks": {"pre_tokenizer": split("a*a*$")},
    "one that backtracks further than the library allows": {"pre_tokenizer": split("(a+)+$")},
    "a hundred characters for one": {"normalizer": replaced({"String": "a"}, "b" * 100)},
    "forty doublings": {"normalizer": {"type": "Sequence", "normalizers": [replaced({"String": "a"}, "aa")] * 40}},
}


@pytest.mark.parametrize("name", AT_LOAD)
def test_a_file_that_would_end_the_process_is_refused(tmp_path, name):
    with pytest.raises(TokenizerError, match="that the tokenizers library can load, found a failure") as caught:
        from_json(written(tmp_path, **AT_LOAD[name]))
    assert str(caught.value).isprintable()


@pytest.mark.some(1)
@pytest.mark.skipif(sys.platform != "linux", reason="no bounds on memory")
@pytest.mark.parametrize("name", AT_USE)
def test_an_encoding_has_limits_and_the_next_text_is_encoded(tmp_path, name):
    tokenizer = from_json(written(tmp_path, **AT_USE[name]))
    want = tokenizer.encode("hell")
    with pytest.raises(TokenizerError, match="a text of 11,001 characters cannot be encoded"):
        tokenizer.encode("a" * 11_000 + "b")
    assert tokenizer.encode("hell") == want


@pytest.mark.slow
@pytest.mark.parametrize("n", [20_000, pytest.param(200_000, marks=pytest.mark.slow)])
def test_long_texts_of_sound_files_are_within_the_limits(tmp_path, n):
    tokenizer = from_json(written(tmp_path))
    for text in (" " * n, "a" * n, "é😀" * (n // 4), "hello, " * (n // 7)):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="no bounds on memory")
def test_memory_that_earlier_texts_have_left_is_not_counted(tmp_path, monkeypatch):
    tokenizer = from_json(written(tmp_path))
    tokenizer.encode("é" * 200_000)
    number = tokenizer._core._process._process.pid
    (size,) = re.findall(r"VmSize:\s*(\d+) kB", Path(f"/proc/{number}/status").read_text())
    # It has 54 MB now, and had 115 MB at the peak.
    monkeypatch.setattr(hf, "ENCODE_LIMITS", replace(hf.ENCODE_LIMITS, nbytes=int(size) * 1600, nbytes_per_byte=0))
    assert tokenizer.decode(tokenizer.encode("é" * 200_000)) == "é" * 200_000
    assert tokenizer._core._process._process.pid == number


def test_threads_and_padded_tokenizers_share_a_process(tmp_path):
    tokenizer = from_json(written(tmp_path))
    padded, texts = tokenizer.padded(1000), [f"hello {i}" * (1 + 500 * (i % 2)) for i in range(20)]
    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(padded.encode, texts)] == [tokenizer.encode(text) for text in texts]
    assert padded._core is tokenizer._core


def test_a_missing_file_is_a_source_error(tmp_path):
    for path in (tmp_path / "tokenizer.json", tmp_path, tmp_path / "model.gguf"):
        with pytest.raises(SourceError, match=str(tmp_path)):
            load_tokenizer(path)
    (tmp_path / "model.gguf").write_bytes(b"GGML")
    with pytest.raises(EngineError):
        load_tokenizer(str(tmp_path / "model.gguf"))
