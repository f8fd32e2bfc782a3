"""A `tokenizer.json` as GGUF metadata: scores for merges, names for cuts, and what is refused."""

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models

from mlx_engine.convert.gguf_form import last_step, scores, to_gguf
from mlx_engine.errors import TokenizerError
from mlx_engine.tokenizer import from_gguf, from_json
from mlx_engine.tokenizer.bpe import SPLITS, name_of
from mlx_engine.tokenizer.vocabulary import TokenType

DATA = Path(__file__).parents[1] / "data"
GEMMA, QWEN = DATA / "gemma3-micro" / "hf", DATA / "qwen3-micro" / "hf"


def changed(folder: Path, tmp_path: Path, change) -> Path:
    content = json.loads((folder / "tokenizer.json").read_text())
    change(content)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    return path


# Scores for merges


def test_the_last_step_is_the_one_that_bpe_takes():
    ranks = {("a", "b"): 0, ("b", "c"): 1, ("ab", "c"): 2, ("a", "bc"): 3}
    assert last_step("abc", ranks) == 2  # (a, bc) never happens: ab is made before bc
    assert last_step("bc", ranks) == 1
    assert last_step("ca", ranks) is None


def test_a_token_that_two_others_would_make_by_scores_alone_is_refused():
    """ "abc" by the list is ab + c, which is no merge, though a + bc is one: nothing ever makes it."""
    tokens = ["a", "b", "c", "ab", "bc", "abc"]
    with pytest.raises(TokenizerError, match="'abc'"):
        scores("here", tokens, range(6), [("a", "b"), ("b", "c"), ("a", "bc")])
    assert scores("here", tokens, range(6), [("a", "b"), ("b", "c"), ("ab", "c")])[3:] == [0.0, -1.0, -2.0]


def test_a_token_that_nothing_makes_by_either_rule_is_let_be():
    assert scores("here", ["a", "b", "<xy>", "ab"], range(4), [("a", "b")]) == [-1.0, -1.0, -1.0, 0.0]


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=25), st.lists(st.text("abc▁"), min_size=5))
def test_scores_cut_every_text_as_the_merges_do(picks: list[tuple[int, int]], texts: list[str]):
    """Vocabularies at random: either refused, or the same tokens from SPM as from BPE."""
    tokens, merges = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "a", "b", "c", "▁"], []
    first = 257
    for left, right in picks:
        pair = tuple(tokens[first + i % (len(tokens) - first)] for i in (left, right))
        if pair not in merges:
            merges.append(pair)
            if "".join(pair) not in tokens:
                tokens.append("".join(pair))
    try:
        values = scores("here", tokens, range(first, len(tokens)), merges)
    except TokenizerError:
        return
    types = [TokenType.UNKNOWN, *[TokenType.BYTE] * 256, *[TokenType.NORMAL] * (len(tokens) - first)]
    metadata = {"model": "llama", "tokens": tokens, "scores": values, "token_type": [int(t) for t in types]}
    metadata |= {"add_space_prefix": False, "add_bos_token": False}
    ours = from_gguf({f"tokenizer.ggml.{key}": value for key, value in metadata.items()}, where="toy")
    theirs = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    for text in texts:
        assert ours.encode(text) == theirs.encode(text).ids


@pytest.mark.parametrize("rank", ["first", "last"])
def test_a_token_of_spaces_is_made_by_merges_where_it_is_not_looked_for_in_text(tmp_path: Path, rank: str):
    """As the last merge it gives way to all others."""
    content = json.loads((GEMMA / "tokenizer.json").read_text())
    path = tmp_path / "tokenizer.json"
    vocab, number = content["model"]["vocab"], len(content["model"]["vocab"])
    vocab["▁▁"] = number
    merges = content["model"]["merges"]
    merges.insert(0 if rank == "first" else len(merges), ["▁", "▁"])
    flags = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized", "special"], False)
    content["added_tokens"].append({"id": number, "content": "▁▁", **flags})
    path.write_text(json.dumps(content))
    ours, theirs = from_gguf(to_gguf(path, number + 1), where="toy"), from_json(path)
    for text in ("a  b", "   x", "a    b     c ", "ends  ", "  the  little"):
        assert ours.encode(text) == theirs.encode(text)
    assert number in ours.encode("ends  ")
    content["added_tokens"][-1]["normalized"] = True
    path.write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match="normalized"):
        to_gguf(path, number + 1)


# Names for cuts


@pytest.mark.parametrize("name", ["gpt-2", "qwen2", "qwen35", "llama-bpe", "dbrx", "jais-2", "smollm"])
def test_a_cut_is_known_by_what_it_does(name: str):
    split = SPLITS[name]
    pre_tokenizer = json.loads(split.pre_tokenizer().__getstate__())
    assert name_of(pre_tokenizer, whole_words=split.whole_words) == name


def test_gpt2_and_smollm_leave_the_cut_to_the_step_that_writes_bytes():
    write = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    assert name_of(write, whole_words=False) == "gpt-2"
    digits = {"type": "Digits", "individual_digits": True}
    assert name_of({"type": "Sequence", "pretokenizers": [digits, write]}, whole_words=False) == "smollm"
    assert name_of({**write, "add_prefix_space": True}, whole_words=False) is None
    assert name_of({"type": "Sequence", "pretokenizers": [write, digits]}, whole_words=False) is None
    assert name_of({"type": "Sequence", "pretokenizers": [write, write]}, whole_words=False) is None
    assert name_of({"type": "Whitespace"}, whole_words=False) is None
    assert name_of(None, whole_words=False) is None


# What is refused, and what is not


REFUSED = {
    "pre_tokenizer": (QWEN, lambda c: c["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex="x")),
    "normalizer": (QWEN, lambda c: c.update(normalizer={"type": "Lowercase"})),
    "lstrip": (QWEN, lambda c: c["added_tokens"][0].update(lstrip=True)),
    "the model": (QWEN, lambda c: c.update(model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"})),
    "end_of_word_suffix": (QWEN, lambda c: c["model"].update(end_of_word_suffix="x")),
    "byte_fallback": (GEMMA, lambda c: c["model"].update(byte_fallback=False)),
    "none": (GEMMA, lambda c: c.update(pre_tokenizer={"type": "Whitespace"})),
    "without one before": (GEMMA, lambda c: c.update(normalizer=None)),
    "ignore_merges": (GEMMA, lambda c: c["model"].update(ignore_merges=True)),
}


@pytest.mark.some(2)
@pytest.mark.parametrize("what", REFUSED)
def test_what_would_make_other_ids_is_refused(tmp_path: Path, what: str):
    folder, change = REFUSED[what]
    with pytest.raises(TokenizerError, match=what):
        to_gguf(changed(folder, tmp_path, change), 512)


def test_a_normal_form_is_left_out(tmp_path: Path):
    path = changed(QWEN, tmp_path, lambda c: c.update(normalizer={"type": "NFC"}))
    assert from_gguf(to_gguf(path, 512), where="x").encode("é") == from_json(path).encode("é")


def test_there_are_as_many_tokens_as_embeddings():
    more, fewer = to_gguf(QWEN / "tokenizer.json", 600), to_gguf(QWEN / "tokenizer.json", 410)
    assert more["tokenizer.ggml.tokens"][411:] == [f"[PAD{i}]" for i in range(411, 600)]
    assert set(more["tokenizer.ggml.token_type"][411:].tolist()) == {TokenType.UNUSED}
    assert len(fewer["tokenizer.ggml.tokens"]) == 410  # the last is a control token, which the model cannot read
    with pytest.raises(TokenizerError, match="every normal and byte token"):
        to_gguf(QWEN / "tokenizer.json", 400)


def test_an_end_that_only_the_model_knows_gets_a_key(tmp_path: Path):
    path = changed(QWEN, tmp_path, lambda c: None)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [409, 410]}))
    metadata = to_gguf(path, 512)
    assert (metadata["tokenizer.ggml.eos_token_id"], metadata["tokenizer.ggml.eot_token_id"]) == (409, 410)
    assert from_gguf(metadata, where="toy").eog_ids == from_json(path).eog_ids
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [409, 1, 2, 3]}))
    with pytest.raises(TokenizerError, match="end tokens"):
        to_gguf(path, 512)
