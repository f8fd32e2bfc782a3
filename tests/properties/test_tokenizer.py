"""Properties of tokenizers for any text and any ids: encoding and decoding lose nothing."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_engine.tokenizer import Tokenizer, from_gguf
from mlx_engine.tokenizer.vocabulary import BYTE_OF_CHARACTER
from tests.golden.test_vocab import NAMES, real

FRAGMENTS = st.sampled_from(
    [
        *"aZ09 .,!'\n\r\t\0\x7f\u00a0\u200d\u2028\ufeff\ufffd\U0010ffff",
        *[
            "  ",
            "   ",
            "    ",
            "\r\n",
            "\n\n\n",
            " \n ",
            "'s",
            "'LL",
            "don't",
            "12345",
            "é",
            "e\u0301",
            "\u017f",
            "İ",
            "ß",
        ],
        *["我想", "カタカナ", "한국어", "नमस्ते", "العربية", "😀", "👨‍👩‍👧", "🇫🇷", "👍🏽", "<0x41>", "[PAD1]", "Ġ", "Ċ"],
        *["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>", "</s>", "<unk>", "<|", "|>", "</", "s>", "<think>"],
    ]
)
ANY_TEXT = st.text() | st.lists(FRAGMENTS | st.characters(exclude_categories=["Cs"]), max_size=30).map("".join)
SPM_TEXT = ANY_TEXT.map(
    lambda text: text.replace("▁", "_")
)  # SPM writes spaces as this character, so it cannot distinguish them
examples = settings(max_examples=60)


def tiny_byte_level() -> Tokenizer:
    """Return a vocabulary of bytes, merges across and inside characters, a control and a user-defined token."""
    merges = ["Ġ t", "h e", "Ġt he", "Ã ©", "ð Ł", "ðŁ ĺ", "Ġ Ġ", "< |", "| >"]
    special = ["<|im_start|>", "<|im_end|>", "<think>"]
    tokens = [*BYTE_OF_CHARACTER, *(merge.replace(" ", "") for merge in merges), *special]
    keys = {
        "model": "gpt2",
        "pre": "qwen2",
        "tokens": tokens,
        "merges": merges,
        "token_type": [1] * (len(tokens) - 3) + [3, 3, 4],
    }
    return from_gguf({f"tokenizer.ggml.{key}": value for key, value in keys.items()}, where="tiny")


def tiny_spm(add_space_prefix: bool) -> Tokenizer:
    """Return a vocabulary of bytes and pieces, equal scores of runs of spaces, control and user-defined tokens."""
    pieces = ["▁", "t", "h", "e", "he", "▁the", "the", "▁▁", "▁▁▁", "▁▁▁▁", "<", "/", "s", ">", "</", "s>", "é"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "<think>"]
    scores = [0.0] * 259 + [-1e9 if len(piece) > 1 and not piece.strip("▁") else -float(len(piece)) for piece in pieces]
    keys = {
        "model": "llama",
        "tokens": tokens,
        "scores": [*scores, 0.0],
        "token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces) + [4],
        "add_space_prefix": add_space_prefix,
    }
    return from_gguf({f"tokenizer.ggml.{key}": value for key, value in keys.items()}, where="tiny")


TINY = {"bytes": tiny_byte_level(), "spm": tiny_spm(True), "spm without prefix": tiny_spm(False)}


def tokenizer_called(name: str) -> Tokenizer:
    return TINY.get(name) or real(name)


@pytest.mark.some(2)
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", [*TINY, *NAMES])
def test_text_comes_back(name, special):
    tokenizer = tokenizer_called(name)

    @examples
    @given(ANY_TEXT if tokenizer.kind == "byte-level BPE" else SPM_TEXT)
    def holds(text):
        ids = tokenizer.encode(text, special=special)
        assert tokenizer.decode(ids) == text
        assert special or not {*tokenizer.special_tokens.values()} & {*ids}

    holds()


@pytest.mark.some(2)
@pytest.mark.parametrize("at_start", [True, False])
@pytest.mark.parametrize("name", [*TINY, *NAMES])
def test_a_stream_equals_decoding_all_ids_at_once(name, at_start):
    tokenizer = tokenizer_called(name)
    any_id = st.integers(0, tokenizer.vocab_size - 1) | st.integers(0, min(300, tokenizer.vocab_size - 1))

    @examples
    @given(st.lists(any_id, max_size=40), st.booleans())
    def holds(ids, skip_special):
        stream = tokenizer.stream(skip_special=skip_special, at_start=at_start)
        pieces = [stream.add(i) for i in ids]
        whole = tokenizer.decode(ids, skip_special=skip_special, at_start=at_start)
        assert "".join(pieces) + stream.finish() == whole
        raw = b"".join(b"" if skip_special and i in control else tokenizer._vocabulary.piece(i) for i in ids)
        if not at_start and name not in ("spm", "llama-spm"):
            assert whole == raw.decode("utf-8", "replace")

    control = tokenizer._vocabulary.control_ids
    holds()


@pytest.mark.some(2)
@pytest.mark.parametrize("name", [*TINY, *NAMES])
def test_words_that_were_encoded_stream_whole(name):
    tokenizer = tokenizer_called(name)

    @examples
    @given(SPM_TEXT.filter(lambda text: "\ufffd" not in text))
    def holds(text):
        stream = tokenizer.stream()
        pieces = [stream.add(i) for i in tokenizer.encode(text)]
        assert stream.finish() == ""
        assert not any("\ufffd" in piece for piece in pieces)

    holds()
