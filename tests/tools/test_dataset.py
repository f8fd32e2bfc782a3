"""The vocabulary and the rows that the model learns from."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers

from tools.corpus import SPECIAL_TOKENS, documents
from tools.dataset import encoded, pack, rows
from tools.train_tokenizer import plain, train

SIZE = 500


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train(seed=2, count=200, size=SIZE)


def test_vocabulary_holds_all_bytes_and_ends_with_the_special_tokens(tokenizer: Tokenizer) -> None:
    vocabulary = tokenizer.get_vocab()
    assert sorted(vocabulary.values()) == list(range(SIZE))
    assert set(pre_tokenizers.ByteLevel.alphabet()) <= set(vocabulary)
    assert len(pre_tokenizers.ByteLevel.alphabet()) == 256
    assert [vocabulary[token] for token in SPECIAL_TOKENS] == [SIZE - 3, SIZE - 2, SIZE - 1]


def test_no_token_was_learned_from_the_special_ones(tokenizer: Tokenizer) -> None:
    learned = {token for token, number in tokenizer.get_vocab().items() if number < SIZE - 3}
    assert not [token for token in learned if "im_" in token or "<|" in token]
    assert plain("a<|im_start|>b<|im_end|>c<|endoftext|>") == "abc"


def test_frequent_words_are_single_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode(" there was a").tokens == ["Ġthere", "Ġwas", "Ġa"]
    assert tokenizer.encode("12").tokens == ["1", "2"]


@settings(max_examples=30)
@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    tokenizer = _shared()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def _shared() -> Tokenizer:
    if not _CACHE:
        _CACHE.append(train(seed=2, count=50, size=400))
    return _CACHE[0]


_CACHE: list[Tokenizer] = []


def test_packing_keeps_documents_whole() -> None:
    rng = random.Random(1)
    lengths = [rng.randint(1, 40) for _ in range(900)]
    made = [[number] * length for number, length in enumerate(lengths, start=1)]
    packed = list(pack(iter(made), 64, filler=0))
    assert all(len(row) == 64 for row in packed)
    runs: list[tuple[int, int]] = []
    for row in packed:
        for number in dict.fromkeys(row):
            if number:
                runs.append((number, row.count(number)))
    assert sorted(runs) == list(enumerate(lengths, start=1))
    filled = sum(number != 0 for row in packed for number in row)
    assert filled / (64 * len(packed)) > 0.95


def test_rows_decode_to_the_documents(tokenizer: Tokenizer) -> None:
    made = rows(tokenizer, seed=9, count=40, length=3000)
    assert made.shape[1] == 3001
    text = "".join(tokenizer.decode(row.tolist(), skip_special_tokens=False) for row in made)
    pieces = sorted(piece for piece in text.split(SPECIAL_TOKENS[0]) if piece)
    assert pieces == sorted(document.removesuffix(SPECIAL_TOKENS[0]) for document in documents(9, 40))


def test_encoding_uses_the_special_tokens(tokenizer: Tokenizer) -> None:
    ends = [ids[-1] for ids in encoded(tokenizer, seed=9, count=30, short_share=0.8)]
    assert set(ends) == {SIZE - 3}
