"""Real vocabularies against llama.cpp's ids, from its vocabulary-only GGUF files in their own folder.

They are looked for in `shared/vocab` beside the repository, or in `MLX_ENGINE_VOCAB_DIR`. Source of the files:
https://github.com/ggml-org/llama.cpp/tree/00ad355e009e83abf98f96a6ded7193b95763681/models
"""

import os
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers

from mlx_engine.checkpoint.gguf import open_gguf
from mlx_engine.convert.mlx_folder import to_json
from mlx_engine.tokenizer import Tokenizer, from_gguf, load_tokenizer

NAMES = ["gpt-2", "qwen2", "llama-spm"]
_BESIDE = Path(__file__).parents[2].parent / "shared" / "vocab"


def vocab_file(name: str, suffix: str = "") -> Path:
    """Return a file of the set; skip the test if it is missing."""
    path = Path(os.environ.get("MLX_ENGINE_VOCAB_DIR", _BESIDE)) / f"ggml-vocab-{name}.gguf{suffix}"
    if not path.is_file():
        pytest.skip(f"no {path.name} in {path.parent}; MLX_ENGINE_VOCAB_DIR may name another folder")
    return path


@cache
def _loaded(path: Path) -> Tokenizer:
    return load_tokenizer(path)


def real(name: str) -> Tokenizer:
    """Load the tokenizer of a real vocabulary."""
    return _loaded(vocab_file(name))


def cases(name: str) -> list[tuple[str, list[int]]]:
    """Return texts and their ids; the last text and the last line are empty."""
    texts = vocab_file(name, ".inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    lines = vocab_file(name, ".out").read_text(encoding="utf-8").split("\n")
    return [(text, [int(i) for i in line.split()]) for text, line in zip(texts, lines, strict=True)]


@pytest.mark.some(1)
@pytest.mark.parametrize("name", NAMES)
def test_ids_are_those_of_llama_cpp_and_come_back_as_the_text(name):
    tokenizer = real(name)
    listed = cases(name)
    assert len(listed) > 40
    for text, ids in listed:
        assert tokenizer.encode(text) == ids, repr(text)
        assert tokenizer.decode(ids) == text


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_written_tokenizer_json_has_the_same_ids(name, tmp_path):
    """Read by this engine and by the tokenizers library."""
    with open_gguf(vocab_file(name)) as file:
        files = to_json(from_gguf(file.metadata, where=name), context_length=2048)
    for file_name, text in files.items():
        (tmp_path / file_name).write_text(text, encoding="utf-8")
    ours, theirs = load_tokenizer(tmp_path), tokenizers.Tokenizer.from_str(files["tokenizer.json"])
    for text, ids in cases(name):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids == ids, repr(text)
        assert ours.decode(ids) == theirs.decode(ids) == text
    of = real(name)
    assert theirs.encode("a").ids == [of.bos_id] * of.add_bos + of.encode("a")
    for role in ("kind", "vocab_size", "bos_id", "eos_id", "add_bos", "special_tokens", "chat_template"):
        assert getattr(ours, role) == getattr(of, role), role


@pytest.mark.parametrize(
    ("text", "ids"), [("Once upon a time", [12522, 5193, 264, 882]), ("Hello, world!", [9707, 11, 1879, 0])]
)
def test_ids_that_qwen_is_known_by(text, ids):
    assert real("qwen2").encode(text) == ids


@pytest.mark.parametrize(
    ("name", "bos", "eos", "ends", "add_bos"),
    [
        ("gpt-2", "<|endoftext|>", "<|endoftext|>", {"<|endoftext|>"}, False),
        ("qwen2", "<|endoftext|>", "<|endoftext|>", {"<|endoftext|>", "<|im_end|>"}, False),
        ("llama-spm", "<s>", "</s>", {"</s>"}, True),
    ],
)
def test_roles(name, bos, eos, ends, add_bos):
    tokenizer = real(name)
    assert (tokenizer.token(tokenizer.bos_id), tokenizer.token(tokenizer.eos_id)) == (bos, eos)
    assert {tokenizer.token(i) for i in tokenizer.eog_ids} == ends
    assert tokenizer.add_bos is add_bos


@pytest.mark.parametrize("name", NAMES)
def test_no_control_token_comes_from_plain_text(name):
    tokenizer = real(name)
    written = "".join(tokenizer.special_tokens) + " " + "\n".join(tokenizer.special_tokens)
    assert not {*tokenizer.special_tokens.values()} & {*tokenizer.encode(written)}
    assert {*tokenizer.special_tokens.values()} <= {*tokenizer.encode(written, special=True)}
    for special in (False, True):
        assert tokenizer.decode(tokenizer.encode(written, special=special)) == written


def merged_by_score(tokenizer: Tokenizer, scores: dict[str, float], text: str) -> list[str]:
    """Reference SPM: merge the best score first, the leftmost of equal scores. Slow."""
    symbols = ["▁", *text.replace(" ", "▁")] if text else []
    while True:
        pairs = [(a + b, i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in scores]
        if not pairs:
            break
        best, i = min(pairs, key=lambda pair: (-scores[pair[0]], pair[1]))
        symbols[i : i + 2] = [best]
    return [
        piece
        for symbol in symbols
        for piece in ([symbol] if symbol in scores else [f"<0x{byte:02X}>" for byte in symbol.encode()])
    ]


def test_spm_as_bpe_equals_spm_by_its_definition():
    with open_gguf(vocab_file("llama-spm")) as file:
        keys = [file.metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type")]
    scores = {token: float(score) for token, score, kind in zip(*keys, strict=True) if kind == 1}
    tokenizer = real("llama-spm")
    texts = [text for text, _ in cases("llama-spm")]
    texts += [" " * n for n in range(70)] + ["a" * n + " " * (40 - n) + "b" for n in range(0, 40, 3)]
    texts += ["</s><s><unk>", "=" * 77, "aaaa aaaa", "0" * 50, "\t" * 9, "ーーーーーー", "....,,,,....", "ababababab"]
    for text in texts:
        pieces = [tokenizer.token(i) for i in tokenizer.encode(text)]
        assert pieces == merged_by_score(tokenizer, scores, text), repr(text)
