"""Long texts, which are encoded by another call of the library, and the most bytes that a token stands for."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers

from mlx_engine.tokenizer import Tokenizer, load_tokenizer
from mlx_engine.tokenizer.tokenizer import SHORT
from tests.golden.goldens import DATA
from tests.golden.test_vocab import NAMES, cases, real

MICRO = ["qwen3-micro/hf", "gpt2-micro/hf", "gemma3-micro/hf", "qwen3-micro/model-q8_0.gguf"]
TOKENIZERS = [*NAMES, *MICRO]
PIECES = [
    "hello ",
    "fox",
    " a",
    "\n\n",
    "    ",
    "12",
    "é",
    "e\u0301",
    "你好",
    "🙂",
    "<|im_end|>",
    "<eos>",
    "</s>",
    "\u1100\u1161",
]


@cache
def of(name: str) -> Tokenizer:
    return real(name) if name in NAMES else load_tokenizer(DATA / name)


@pytest.mark.some(1)
@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("special", [False, True])
def test_a_long_text_has_the_ids_of_the_other_call(name: str, special: bool):
    tokenizer, choose = of(name), random.Random(1)
    texts = ["".join(choose.choices(PIECES, k=6 * SHORT)), " " * (3 * SHORT), "ab" * SHORT]
    if name in NAMES:
        texts.append("".join(text for text, _ in cases(name)) * 20)
    _, core = tokenizer.parts()
    core.encode_special_tokens = not special
    for text in texts:
        assert len(text) > SHORT
        assert tokenizer.encode(text, special) == core.encode(text, add_special_tokens=False).ids


@pytest.mark.some(2)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_threads_with_and_without_control_tokens_do_not_disturb_each_other(name: str):
    tokenizer = of(name)
    texts = ["hello " + token + " fox" for token in list(tokenizer.special_tokens)[:5] if token]
    asked = [(text, special) for text in texts for special in (False, True)] * 20
    fresh = of(name) if name in NAMES else load_tokenizer(DATA / name)
    alone = [fresh.encode(*one) for one in asked]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda one: tokenizer.encode(*one), asked)) == alone
    if texts:
        assert alone[0] != alone[1]


@pytest.mark.some(1)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_no_text_has_fewer_tokens_than_its_bytes_need(name: str):
    tokenizer = of(name)
    most = tokenizer.most_bytes
    assert most is not None
    longest = max(range(tokenizer.vocab_size), key=lambda i: len(tokenizer.token_bytes(i)))
    assert len(tokenizer.token_bytes(longest)) <= most

    @settings(max_examples=50)
    @given(st.text() | st.lists(st.sampled_from(PIECES)).map("".join))
    def law(text: str) -> None:
        assert len(text.encode()) <= most * len(tokenizer.encode(text, special=True))

    law()


def changed(change: object) -> Tokenizer:
    """Return a tokenizer with another normaliser, pre-tokenizer or added token."""
    vocabulary, core = load_tokenizer(DATA / "gpt2-micro" / "hf").parts()
    if isinstance(change, normalizers.Normalizer):
        core.normalizer = change
    elif isinstance(change, pre_tokenizers.PreTokenizer):
        core.pre_tokenizer = change
    else:
        core.add_tokens([change])
    return Tokenizer(vocabulary, core)


@pytest.mark.some(3)
@pytest.mark.parametrize(
    "change",
    [
        normalizers.Strip(),
        normalizers.StripAccents(),
        normalizers.Replace("  ", " "),
        normalizers.Replace(tokenizers.Regex(" +"), " "),
        normalizers.Replace(tokenizers.Regex("x+"), ""),
        normalizers.Replace("\u2026", "."),
        normalizers.Sequence([normalizers.NFC(), normalizers.Strip()]),
        pre_tokenizers.Whitespace(),
        pre_tokenizers.Split(" ", "removed"),
        AddedToken("<x>", lstrip=True),
        AddedToken("<x>", rstrip=True),
    ],
    ids=lambda change: str(change)[:30],
)
def test_there_is_no_bound_where_text_may_disappear(change: object):
    assert changed(change).most_bytes is None


def test_normal_forms_write_four_bytes_as_one():
    plain, normal = load_tokenizer(DATA / "gpt2-micro" / "hf"), changed(normalizers.NFKC())
    assert plain.most_bytes is not None
    assert normal.most_bytes == 4 * plain.most_bytes
    text = "\U0001d400" * 50
    assert normal.encode(text) == normal.encode("A" * 50)
