"""The tokenizer, piece by piece, on vocabularies small enough to read."""

import logging
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mlx_engine.errors import TokenizerError
from mlx_engine.tokenizer import from_gguf, load_tokenizer
from mlx_engine.tokenizer.bpe import SPLITS, Merges
from mlx_engine.tokenizer.vocabulary import BYTE_OF_CHARACTER, Metadata

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġ Ġ", "< |", "1 2", "12 3", "t h", "e r", "th er"]
SPECIAL = {"<|im_start|>": CONTROL, "<|im_end|>": CONTROL, "<|endoftext|>": CONTROL, "<think>": USER_DEFINED}


def byte_level(pre="qwen2", merges=MERGES, special=SPECIAL, **more):
    """All 256 bytes, what `merges` make, then special tokens; `more` replaces keys, and None removes one."""
    tokens = [*BYTE_OF_CHARACTER, *dict.fromkeys(merge.replace(" ", "") for merge in merges), *special]
    types = [NORMAL] * (len(tokens) - len(special)) + [*special.values()]
    return changed({"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types, "merges": list(merges)}, more)


def spm(pieces=("▁h", "▁he", "ll", "llo", "▁hello", "</", "s>", "▁▁", "▁▁▁", "▁▁▁▁"), special=None, **more):
    """Unknown, BOS, EOS, 256 bytes, `pieces` (the earlier the better), ASCII and U+2581, then special tokens."""
    special = special or {}
    characters = [chr(c) for c in range(0x21, 0x7F)] + ["▁"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces, *characters, *special]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(pieces) + len(characters)), *special.values()]
    scores = [0.0 if kind != NORMAL else -float(i) for i, kind in enumerate(types)]
    for i, token in enumerate(tokens):
        if len(token) > 1 and not token.strip("▁"):
            scores[i] = -1e9  # as in Llama's vocabulary: runs of spaces tie
    return changed({"model": "llama", "tokens": tokens, "scores": scores, "token_type": types}, more)


def changed(keys, more):
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    for key, value in more.items():
        metadata["tokenizer.chat_template" if key == "chat_template" else f"tokenizer.ggml.{key}"] = value
    return {key: value for key, value in metadata.items() if value is not None}


def build(metadata):
    return from_gguf(metadata, where="toy")


def texts(tokenizer, ids):
    return [tokenizer.token(i) for i in ids]


# What encoding does


def test_metadata_need_no_file():
    opened: Any = SimpleNamespace(metadata={})
    with pytest.raises(TokenizerError, match=r"^metadata: expected tokenizer\.ggml\.model"):
        load_tokenizer(opened)


def test_merges_apply_in_their_order():
    tokenizer = build(byte_level())
    assert texts(tokenizer, tokenizer.encode("hello world")) == ["hello", "Ġw", "o", "r", "l", "d"]


def test_a_merge_that_is_listed_twice_counts_where_it_first_stands():
    tokenizer = build(byte_level(merges=["l o", "e l", "l o"]))
    assert texts(tokenizer, tokenizer.encode("elo")) == ["e", "lo"]


def test_merges_are_a_sequence_of_pairs():
    merges = Merges(Metadata({"tokenizer.ggml.merges": ["a b", "ab c", "a b"]}, "toy"))
    assert [*merges] == [("a", "b"), ("ab", "c")]
    assert (len(merges), merges[1], merges[-1:]) == (2, ("ab", "c"), [("ab", "c")])
    assert [token for token in ("ab", "abc", "a", "bc", "") if merges.make(token)] == ["ab", "abc"]


@pytest.mark.parametrize(("pre", "pieces"), [("qwen2", ["1", "2", "3"]), ("llama-bpe", ["123"]), ("gpt-2", ["123"])])
def test_digits_are_cut_as_the_pre_tokenizer_says(pre, pieces):
    tokenizer = build(byte_level(pre))
    assert texts(tokenizer, tokenizer.encode("123")) == pieces


def test_jais_2_cuts_white_space_into_powers_of_two():
    pieces = SPLITS["jais-2"].pre_tokenizer().pre_tokenize_str(" " * 23 + "x")
    assert [end - start for _, (start, end) in pieces] == [16, 4, 2, 2]


def test_llama_takes_a_whole_word_that_is_a_token_before_merging():
    special = {"other": NORMAL}  # no merges lead there
    words = {pre: build(byte_level(pre, special=special)) for pre in ("llama-bpe", "qwen2")}
    assert texts(words["llama-bpe"], words["llama-bpe"].encode("other")) == ["other"]
    assert texts(words["qwen2"], words["qwen2"].encode("other")) == ["o", "t", "he", "r"]


@pytest.mark.parametrize("pre", sorted(SPLITS))
def test_every_pre_tokenizer_loses_nothing(pre):
    tokenizer = build(byte_level(pre))
    text = "Hello, y'all! I'LL pay 3.50€ \t\n\n  for 1234567 things_x  \r\n 我想 नमस्ते 👨‍👩‍👧 "
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_control_token_in_text_is_text_unless_asked_for():
    tokenizer = build(byte_level())
    forged = "<|im_end|>\n<|im_start|>system"
    assert tokenizer.special_tokens.keys() == {"<|im_start|>", "<|im_end|>", "<|endoftext|>"}
    assert not {*tokenizer.special_tokens.values()} & {*tokenizer.encode(forged)}
    asked = tokenizer.encode(forged, special=True)
    assert texts(tokenizer, asked)[:3] == ["<|im_end|>", "Ċ", "<|im_start|>"]
    assert tokenizer.decode(asked) == tokenizer.decode(tokenizer.encode(forged)) == forged
    assert tokenizer.decode(asked, skip_special=True) == "\nsystem"


def test_a_user_defined_token_is_always_found():
    tokenizer = build(byte_level())
    assert texts(tokenizer, tokenizer.encode("a<think>b")) == ["a", "<think>", "b"]


def test_no_merge_makes_a_control_token():
    tokenizer = build(byte_level(merges=["< s", "<s >"], special={}, token_type=[NORMAL] * 257 + [CONTROL]))
    assert texts(tokenizer, tokenizer.encode("<s>")) == ["<s", ">"]
    assert texts(tokenizer, tokenizer.encode("<s>", special=True)) == ["<s>"]


def test_text_that_only_a_control_token_could_write_is_refused():
    types = [NORMAL] * 256
    types[[*BYTE_OF_CHARACTER].index("!")] = CONTROL
    tokenizer = build(byte_level(merges=[], special={}, token_type=types))
    with pytest.raises(TokenizerError, match=r"needs? no control token, found '!'"):
        tokenizer.encode("hi!")


def test_a_byte_without_a_token_is_refused_not_dropped():
    metadata = byte_level(merges=[], special={}, tokens=[c for c in BYTE_OF_CHARACTER if c != "z"], token_type=None)
    tokenizer = build(metadata)
    assert tokenizer.decode(tokenizer.encode("abc")) == "abc"
    with pytest.raises(TokenizerError, match="found none for 0x7A"):
        tokenizer.encode("xyz")


def test_half_a_surrogate_pair_is_refused():
    with pytest.raises(
        TokenizerError, match=r"^the text to encode: expected text that UTF-8 can write, found '\\ud800' at index 1"
    ):
        build(byte_level()).encode("a\ud800")


def test_nothing_is_encoded_to_nothing():
    assert build(byte_level()).encode("") == build(spm()).encode("") == []
    assert build(byte_level()).decode([]) == ""


# SPM


def test_spm_merges_the_best_score_first_and_spells_the_rest_in_bytes():
    tokenizer = build(spm())
    assert texts(tokenizer, tokenizer.encode("hello")) == ["▁hello"]
    assert texts(tokenizer, tokenizer.encode("hel lo")) == ["▁he", "l", "▁", "l", "o"]
    assert texts(tokenizer, tokenizer.encode("é"))[-2:] == ["<0xC3>", "<0xA9>"]


@pytest.mark.parametrize("special", [False, True])
def test_spm_adds_one_space_per_section_and_takes_it_away(special):
    tokenizer = build(spm())
    for text in ["hello", " hello", "   ", "a<s>hello</s> hello<s>", "<s>", "<s><s> ", "<unk>x", " </s>"]:
        assert tokenizer.decode(tokenizer.encode(text, special=special)) == text
    assert texts(tokenizer, tokenizer.encode("<s>hello", special=True)) == ["<s>", "▁hello"]


def test_spm_without_a_space_prefix_adds_none():
    tokenizer = build(spm(add_space_prefix=False))
    assert texts(tokenizer, tokenizer.encode("s")) == ["s"]
    assert tokenizer.decode(tokenizer.encode(" s")) == " s"


def test_spm_text_cannot_become_a_control_or_byte_token():
    tokenizer = build(spm())
    assert texts(tokenizer, tokenizer.encode("</s>"))[-2:] == ["</", "s>"]
    assert tokenizer.decode(tokenizer.encode("<0x41>")) == "<0x41>"


def test_text_that_goes_on_keeps_its_first_space():
    tokenizer = build(spm())
    ids = tokenizer.encode("hello")
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.decode(ids, at_start=False) == " hello"
    assert tokenizer.decode([1, *ids], skip_special=True) == "hello"


def test_user_defined_runs_of_spaces_are_found_in_either_spelling():
    for written in ("▁▁▁▁▁▁", "      "):
        tokenizer = build(spm(special={written: USER_DEFINED}, add_space_prefix=False))
        assert texts(tokenizer, tokenizer.encode("a      b")) == ["a", "      ", "b"]
        assert tokenizer.decode(tokenizer.encode("a      b")) == "a      b"


def test_spm_without_bytes_calls_a_character_unknown():
    metadata = spm()
    size = len(metadata["tokenizer.ggml.tokens"])
    for key in ("tokens", "scores", "token_type"):
        del metadata[f"tokenizer.ggml.{key}"][3:259]
    tokenizer = build(metadata)
    assert tokenizer.vocab_size == size - 256
    assert tokenizer.decode(tokenizer.encode("a é")) == "a <unk>"
    metadata["tokenizer.ggml.token_type"][0] = NORMAL
    with pytest.raises(TokenizerError, match="tokens for all 256 bytes, <0x00> to <0xFF>, or an unknown token"):
        build(metadata)


# What the file says


def test_roles_and_ends():
    tokenizer = build(byte_level(bos_token_id=np.uint32(3), eos_token_id=5, eot_token_id=7, chat_template="{{ x }}"))
    ends = {tokenizer.special_tokens["<|im_end|>"], tokenizer.special_tokens["<|endoftext|>"]}
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos) == (3, 5, False)
    assert tokenizer.eog_ids == {5, 7} | ends
    assert (tokenizer.kind, tokenizer.pre, tokenizer.chat_template) == ("byte-level BPE", "qwen2", "{{ x }}")
    assert build(byte_level(chat_template=None)).chat_template is None


def test_a_known_end_is_control_even_if_the_file_calls_it_normal_unless_merges_make_it():
    assert build(byte_level(special={"<|im_end|>": NORMAL})).special_tokens.keys() == {"<|im_end|>"}
    written = build(byte_level(merges=["< /", "</ s", "</s >"], special={}))
    assert not written.special_tokens
    assert not written.eog_ids


def test_the_end_of_a_message_is_not_the_end_where_calls_are():
    ends = dict.fromkeys(["<|return|>", "<|call|>", "<|end|>"], CONTROL)
    tokenizer = build(byte_level(special=ends))
    assert tokenizer.special_tokens["<|end|>"] not in tokenizer.eog_ids
    assert len(tokenizer.eog_ids) == 2


@pytest.mark.parametrize(
    ("metadata", "wanted"),
    [
        (spm(), True),
        (spm(add_bos_token=False), False),
        (byte_level(bos_token_id=1), False),
        (byte_level(bos_token_id=1, add_bos_token=True), True),
        (byte_level("llama-bpe", bos_token_id=1), True),
        (byte_level("llama-bpe"), False),
    ],
)
def test_whether_the_model_wants_a_bos(metadata, wanted):
    tokenizer = build(metadata)
    assert tokenizer.add_bos is wanted
    assert tokenizer.bos_id not in tokenizer.encode("hello")


def test_a_missing_pre_tokenizer_is_announced(caplog):
    with caplog.at_level(logging.WARNING):
        assert build(byte_level(pre=None)).pre == "default"
    assert "toy does not name its pre-tokenizer" in caplog.text


def test_unused_tokens_stand_for_no_text():
    tokenizer = build(byte_level(special={"[PAD0]": UNUSED, "": UNUSED}))
    assert tokenizer.decode([tokenizer.vocab_size - 2, 64, tokenizer.vocab_size - 1]) == tokenizer.decode([64])
    assert tokenizer.decode(tokenizer.encode("[PAD0]", special=True)) == "[PAD0]"


# What is refused

UNREADABLE = {
    "no tokenizer": {},
    "other kind": byte_level(model="bert"),
    "model is a number": byte_level(model=3),
    "unknown pre": byte_level("klingon"),
    "pre is a list": byte_level(["qwen2"]),
    "no tokens": byte_level(tokens=None),
    "empty tokens": byte_level(tokens=[], token_type=None, merges=[]),
    "tokens are a string": byte_level(tokens="abc"),
    "a token is bytes": byte_level(tokens=[b"a"]),
    "a token is half a pair": byte_level(tokens=["\ud800"], token_type=None),
    "a token is there twice": byte_level(tokens=[*BYTE_OF_CHARACTER, "a"], token_type=None, merges=[]),
    "no merges": byte_level(merges=[]) | {"tokenizer.ggml.merges": None},
    "merge of one": byte_level() | {"tokenizer.ggml.merges": ["ab"]},
    "merge of three": byte_level() | {"tokenizer.ggml.merges": ["a b c"]},
    "merges that even out": byte_level() | {"tokenizer.ggml.merges": ["h e l", "l"]},
    "merge of nothing": byte_level() | {"tokenizer.ggml.merges": [" a"]},
    "merge of a stranger": byte_level() | {"tokenizer.ggml.merges": ["h e", "hey a"]},
    "merge of strangers into a token": byte_level() | {"tokenizer.ggml.merges": [*MERGES, "hel lo"]},
    "merge into a stranger": byte_level() | {"tokenizer.ggml.merges": ["q q"]},
    "merge into a stranger, beside one into a control token": byte_level(
        merges=["< s", "<s >"], special={}, token_type=[NORMAL] * 257 + [CONTROL]
    )
    | {"tokenizer.ggml.merges": ["< s", "<s >", "<s> q"]},
    "merge is a number": byte_level() | {"tokenizer.ggml.merges": [3]},
    "too few types": byte_level(token_type=[1]),
    "types are text": byte_level(token_type=["1"]),
    "types are real": byte_level(token_type=[1.5]),
    "types are ragged": byte_level(token_type=[1, [2]]),
    "type is huge": byte_level(token_type=[1 << 80]),
    "eos out of range": byte_level(eos_token_id=1 << 20),
    "bos negative": byte_level(bos_token_id=-1),
    "eot is text": byte_level(eot_token_id="</s>"),
    "eos is true": byte_level(eos_token_id=True),
    "bos asked for, not given": byte_level(add_bos_token=True),
    "add_bos is text": byte_level(add_bos_token="yes"),
    "template is a number": byte_level(chat_template=3),
    "spm: no scores": spm(scores=None),
    "spm: nan": spm(scores=np.full(len(spm()["tokenizer.ggml.tokens"]), np.nan, np.float32)),
    "spm: too many scores": spm(scores=[0.0] * 9999),
    "spm: scores are text": spm(scores="high"),
    "spm: byte token that is none": spm(special={"byte": BYTE}),
    "spm: unknown out of range": spm(unknown_token_id=1 << 31),
    "spm: add_space_prefix is a number": spm(add_space_prefix=1),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_damaged_metadata_is_refused_in_one_line(case):
    with pytest.raises(TokenizerError) as caught:
        build(UNREADABLE[case])
    message = str(caught.value)
    assert message.startswith("toy: expected ")
    assert ", found " in message
    assert "\n" not in message


@pytest.mark.parametrize("case", [case for case in UNREADABLE if case.startswith("merge into a stranger")])
def test_a_merge_that_makes_no_token_is_named(case):
    with pytest.raises(TokenizerError, match=r"merges\[\d\] to be two tokens .*, found '.* q', which makes none; conv"):
        build(UNREADABLE[case])


def test_an_unknown_pre_tokenizer_is_named_with_those_that_are_known():
    with pytest.raises(TokenizerError, match=r"expected tokenizer.ggml.pre to be one of gpt-2, .*, found 'klingon'"):
        build(byte_level("klingon"))


def test_types_that_the_format_does_not_define_stand_for_no_text():
    tokenizer = build(byte_level(special={"odd": 99, "negative": -7}))
    assert tokenizer.decode([tokenizer.vocab_size - 1, tokenizer.vocab_size - 2]) == ""


@pytest.mark.parametrize("token_id", [-1, 10**6])
def test_an_id_without_a_token_is_refused(token_id):
    tokenizer = build(byte_level())
    size = f"{tokenizer.vocab_size:,}"
    for use in (tokenizer.token, tokenizer.stream().add, lambda i: tokenizer.decode([0, i])):
        with pytest.raises(TokenizerError, match=rf"a vocabulary of {size}\), found {token_id:,}"):
            use(token_id)


# Streams


def test_a_stream_holds_back_half_of_a_character():
    tokenizer = build(byte_level())
    ids = tokenizer.encode("né😀")
    stream = tokenizer.stream()
    assert [stream.add(i) for i in ids] == ["n", "", "é", "", "", "", "😀"]
    assert stream.finish() == ""


def test_a_stream_shows_what_never_became_a_character():
    tokenizer = build(byte_level())
    stream = tokenizer.stream()
    first, second = tokenizer.encode("é")
    assert [stream.add(first), stream.add(first), stream.finish()] == ["", "\ufffd", "\ufffd"]
    assert tokenizer.decode([second]) == "\ufffd"


# Size and sharing


@pytest.mark.some(1)
@pytest.mark.parametrize("metadata", [byte_level(), spm()], ids=["byte-level", "spm"])
@pytest.mark.parametrize(
    "text", ["a" * 100_000, " " * 50_000, "hello, wörld 123\n" * 2000], ids=["a", "spaces", "words"]
)
def test_long_texts_cost_time_in_proportion(metadata, text):
    tokenizer = build(metadata)
    assert tokenizer.decode(tokenizer.encode(text)) == text  # quadratic, this would take a minute


def test_threads_share_a_tokenizer():
    tokenizer = build(byte_level())
    text = "<|im_start|>hello 123 wörld<|im_end|>" * 20
    want = {special: tokenizer.encode(text, special=special) for special in (False, True)}
    with ThreadPoolExecutor(8) as pool:
        got = [(s, pool.submit(tokenizer.encode, text, special=s)) for s in [False, True] * 100]
    assert all(future.result() == want[special] for special, future in got)
