"""The tokenizer of Gemma 4's GGUF files: merges over characters."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_engine.errors import TokenizerError
from mlx_engine.tokenizer.gguf import from_gguf
from mlx_engine.tokenizer.vocabulary import TokenType

NORMAL, CONTROL, BYTE, USER = TokenType.NORMAL, TokenType.CONTROL, TokenType.BYTE, TokenType.USER_DEFINED
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["▁", "a", "b", "c", "\n", "\n\n", "ab", "▁a", "▁ab", "▁▁", "bc"]
TOKENS = ["<pad>", "<eos>", "<bos>", "<turn|>", "<think>", *BYTES, *PIECES]
# "b c" comes before "a b": merges are chosen by rank, not by length.
MERGES = ["\n \n", "▁ ▁", "b c", "a b", "▁ a", "▁ ab", "<eos >"]


def metadata(**changes: object) -> dict[str, Any]:
    found = {
        "model": "gemma4", "tokens": TOKENS, "merges": MERGES[:-1], "add_space_prefix": True, "add_bos_token": False,
        "bos_token_id": 2, "eos_token_id": 1,
        "token_type": [CONTROL] * 4 + [USER] + [BYTE] * 256 + [NORMAL] * len(PIECES),
    }  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in (found | changes).items() if value is not None}


def pieces(text: str, *, special: bool = False, **changes: object) -> list[str]:
    tokenizer = from_gguf(metadata(**changes), where="here")
    ids = tokenizer.encode(text, special=special)
    assert special or tokenizer.decode(ids) == text
    return [tokenizer.token(i) for i in ids]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ab ab", ["ab", "▁ab"]),
        ("abc", ["a", "bc"]),
        ("a  b", ["a", "▁▁", "b"]),
        ("a\n\nb\n", ["a", "\n\n", "b", "\n"]),
        ("\n\n\n", ["\n\n", "\n"]),
        ("aé", ["a", "<0xC3>", "<0xA9>"]),
        (" a", ["▁a"]),
        ("a<think>b", ["a", "<think>", "b"]),
    ],
)
def test_characters_are_merged_by_rank(text: str, expected: list[str]):
    assert pieces(text) == expected


def test_control_tokens_are_text_unless_asked_for():
    assert pieces("a<turn|>", special=True) == ["a", "<turn|>"]
    assert "<turn|>" not in pieces("a<turn|>")


def test_a_bos_is_added_and_a_space_is_not_whatever_the_file_says():
    """As in llama.cpp: files of the first days say the opposite."""
    tokenizer = from_gguf(metadata(), where="here")
    assert (tokenizer.add_bos, tokenizer.bos_id, tokenizer.eog_ids) == (True, 2, {1, 3})
    assert not from_gguf(metadata(bos_token_id=None), where="here").add_bos


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"merges": None}, "merges"),
        ({"merges": ["a c"]}, "'a c', which makes none"),
        ({"tokens": ["x" if token == "<0x00>" else token for token in TOKENS]}, "a byte token"),
        ({"token_type": None}, "tokens for all 256 bytes"),
    ],
)
def test_what_is_no_such_tokenizer(changes: dict[str, Any], found: str):
    with pytest.raises(TokenizerError, match=found):
        from_gguf(metadata(**changes), where="here")
