"""Build tokenizers of the library `tokenizers` from the vocabularies of GGUF files. Three kinds of BPE are implemented.

- Byte-level BPE: text is split into words, words into bytes, and bytes are merged by the ranks of a merge list.
- SPM, the SentencePiece BPE of Llama and Gemma: the pair whose merged token has the highest score is merged first.
- The BPE of Gemma 4: tokens are spelled as in SPM, and characters are merged by the ranks of a merge list.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import tokenizers
from numpy.typing import NDArray
from tokenizers import Regex, models, normalizers, pre_tokenizers

from mlx_engine.errors import TokenizerError
from mlx_engine.tokenizer.tokenizer import refusals
from mlx_engine.tokenizer.vocabulary import CONVERT_AGAIN, SPACE_MARK, Metadata, SpacePrefix, TokenType, Vocabulary

_KEY = "tokenizer.ggml.merges"


class Merges(Sequence[tuple[str, str]]):
    """The merges of a GGUF file, in order of rank. If a merge is listed twice, the first rank counts.

    The file stores a merge as `left right`; a space inside a token is written as `Ġ` or U+2581. Merges are split into
    pairs only during iteration: a list of the 151,387 pairs of Qwen2 would take 25 MB.

    Raises:
        TokenizerError: the file has no merges, or an entry is not a pair.
    """

    def __init__(self, read: Metadata) -> None:
        merges = read.strings(_KEY)
        if {*map(str.count, merges, repeat(" "))} - {1}:
            index = next(i for i, merge in enumerate(merges) if merge.count(" ") != 1)
            raise read.error(f"{_KEY}[{index:,}]", "two tokens with a space between", f"{merges[index]!r:.60}")
        self._read, self._listed, self._known = read, merges, {*merges}
        if len(self._known) < len(merges):
            self._listed = [*dict.fromkeys(merges)]

    def __len__(self) -> int:
        return len(self._listed)

    def __getitem__(self, index: Any) -> Any:
        return [*self][index]

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return map(tuple, map(str.split, self._listed, repeat(" ")))  # type: ignore[arg-type]

    def make(self, token: str) -> bool:
        """Return whether a merge produces this token; all splits of the token are tried."""
        return any(f"{token[:i]} {token[i:]}" in self._known for i in range(1, len(token)))

    def check(self, ids: dict[str, int]) -> None:
        """Raise TokenizerError, with the merge, if a merge produces no token. The library's error does not name it."""
        for index, merge in enumerate(self._read.strings(_KEY)):
            if merge.replace(" ", "") not in ids:
                expected = "two tokens of the vocabulary that make a third"
                raise self._read.error(f"{_KEY}[{index:,}]", expected, f"{merge!r:.60}, which makes none") from None


def byte_level_bpe(vocabulary: Vocabulary, ids: dict[str, int], merges: Merges, split: Split) -> tokenizers.Tokenizer:
    """Return a tokenizer that merges bytes into the tokens of `vocabulary`; `mark_special` adds the special tokens.

    The tokenizer does not normalise text, unlike the original tokenizers of some models, because GGUF has no key for
    normalisation.

    Raises:
        TokenizerError: a merge does not join two tokens into a third.
    """
    try:
        with refusals(vocabulary.where, f"expected {_KEY} to join two tokens into a third, found others"):
            pairs = without_control(vocabulary, ids, merges)
            core = tokenizers.Tokenizer(models.BPE(ids, pairs, ignore_merges=split.whole_words))
            core.pre_tokenizer = split.pre_tokenizer()
    except TokenizerError:
        merges.check(ids)
        raise
    return core


def without_control(vocabulary: Vocabulary, ids: dict[str, int], merges: Merges) -> Sequence[tuple[str, str]]:
    """Return the merges, without merges that join or produce a control, unknown, unused or undefined token.

    So plain text such as `</s>` is not encoded as a control token. If no merge produces such a token, return all
    merges, also those that join one.

    Raises:
        TokenizerError: a merge produces no token. If all merges are returned, the library checks them later.
    """
    barred_ids = vocabulary.ids_of(TokenType.CONTROL, TokenType.UNKNOWN, TokenType.UNUSED, TokenType.UNDEFINED)
    barred = {vocabulary.tokens[i] for i in barred_ids}
    if not any(map(merges.make, barred)):
        return merges
    merges.check(ids)  # the library does not check merges that are left out below
    return [pair for pair in merges if barred.isdisjoint({*pair, "".join(pair)})]


_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS_AND_SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN_2 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_SIGNS_AND_SPACES}"
_LLAMA_3 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_SIGNS_AND_SPACES}"
# A run of white space is split into pieces whose lengths are powers of two, up to 512 characters.
_SPACES_BY_SIZE = "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
_JAIS_2 = (
    rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_SPACES_BY_SIZE}|\s{{1}}"
)
_QWEN_3_5 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Split:
    """A pre-tokenizer, which splits text into words for byte-level BPE.

    Its regular expressions are applied in sequence. Each expression splits the pieces of the previous one: its matches
    and the text between the matches are the new pieces.

    Source: llama.cpp src/llama-vocab.cpp at 00ad355e for the names, and for the patterns of `gpt-2`, `smollm`
    and `default`; the same file in llama-cpp-python 0.3.36 for `jais-2`; the `tokenizer.json` of Qwen2, Qwen3.5 and
    Llama 3 for the other patterns, which llama.cpp rewrites without `(?i:)`.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    """Whether a word that is itself a token is encoded as this token, without merging (`ignore_merges`)."""
    add_bos: bool = False
    """Whether to add a BOS if the file has no key `tokenizer.ggml.add_bos_token`."""

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """Return the library's pre-tokenizer: split into words, then map each byte to its character."""
        cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_gpt_2 = Split((_GPT_2,))
_qwen_2 = Split((_QWEN_2,))
_digit_by_digit = Split((r"\p{N}", _GPT_2))
_llama_3 = Split((_LLAMA_3,), whole_words=True, add_bos=True)
_merging_llama_3 = Split((_LLAMA_3,))

# Maps each value of the GGUF key `tokenizer.ggml.pre` to its pre-tokenizer.
SPLITS: dict[str, Split] = {
    "gpt-2": _gpt_2,
    "phi-2": _gpt_2,
    "mpt": _gpt_2,
    "olmo": _gpt_2,
    "exaone4": _gpt_2,
    "qwen2": _qwen_2,
    "deepseek-r1-qwen": _qwen_2,
    "stablelm2": _qwen_2,
    "megrez": _qwen_2,
    "qwen35": Split((_QWEN_3_5,)),
    "llama-bpe": _llama_3,
    "llama3": _llama_3,
    "llama-v3": _llama_3,
    "falcon3": _llama_3,
    "falcon-h1": _llama_3,
    "lfm2": _llama_3,
    "dbrx": _merging_llama_3,
    "smaug-bpe": _merging_llama_3,
    "jais-2": Split((_JAIS_2,)),
    "smollm": _digit_by_digit,
    "starcoder": _digit_by_digit,
    "refact": _digit_by_digit,
    "command-r": _digit_by_digit,
    "codeshell": _digit_by_digit,
    "exaone": _digit_by_digit,
    # As in llama.cpp, for old files without the key `tokenizer.ggml.pre`.
    "default": Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT_2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}


def name_of(pre_tokenizer: Any, *, whole_words: bool) -> str | None:
    """Return the name in `SPLITS` for the pre-tokenizer of a `tokenizer.json`; None if `SPLITS` does not have it."""
    steps = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer])
    if [step and step["type"] == "ByteLevel" for step in steps] != [False] * (len(steps) - 1) + [True]:
        return None
    cuts = tuple(pattern for pattern in map(_pattern, steps) if pattern != "")
    return next((n for n, split in SPLITS.items() if (split.patterns, split.whole_words) == (cuts, whole_words)), None)


def _pattern(step: Any) -> str | None:
    """Return the pattern of a step that splits, "" for a step that does not split, None for an unknown step."""
    match step:
        case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False}:
            return pattern
        case {"type": "Digits", "individual_digits": True}:
            return r"\p{N}"
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": use_regex}:
            return _GPT_2 if use_regex else ""
    return None


# ---- BPE on characters: SPM and Gemma 4 ----
#
# `tokenizers` has no SPM (its Unigram maximises the score of the whole text instead). The library's BPE merges like SPM
# if every split of a token into two tokens is a merge, and merges are ranked by the score of the merged token. For
# equal scores, SPM merges the leftmost pair, but BPE the pair whose merge has the lower rank. So merges of equal score
# are ranked by the length of the merged token, then by the length of its left part, both longest first. A run of equal
# characters is then merged from the left, as in SPM. This matters for spaces: in Llama's vocabulary, all tokens of two
# to sixteen spaces have the same score.


def spm(
    vocabulary: Vocabulary, ids: dict[str, int], scores: NDArray[Any], unknown_id: int | None
) -> tokenizers.Tokenizer:
    """Return an SPM tokenizer for `vocabulary`; `mark_special` adds the special tokens.

    Merges produce normal tokens only, as in sentencepiece. In llama.cpp, merges also produce control tokens, so the
    plain text `</s>` may become EOS.

    Raises:
        TokenizerError: there are neither tokens for all bytes nor an unknown token, or the library refuses the tokens.
    """
    has_bytes, tokens = has_all_bytes(vocabulary, unknown_id), vocabulary.tokens
    with refusals(vocabulary.where, "no SPM tokenizer can be built from the tokens and scores"):
        core = tokenizers.Tokenizer(
            models.BPE(
                ids,
                _merges(vocabulary, scores),
                unk_token=None if unknown_id is None else tokens[unknown_id],
                fuse_unk=True,
                byte_fallback=has_bytes,
            )
        )
        steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE_MARK)]
        if vocabulary.space_prefix is not SpacePrefix.NEVER:
            steps.insert(0, normalizers.Prepend(SPACE_MARK))
        core.normalizer = normalizers.Sequence(steps)
    return core


def has_all_bytes(vocabulary: Vocabulary, unknown_id: int | None) -> bool:
    """Return whether the vocabulary has a token for each byte; these tokens encode characters without a token.

    Raises:
        TokenizerError: some bytes have no token, and there is no unknown token either.
    """
    tokens = vocabulary.tokens
    has_bytes = {tokens[i] for i in vocabulary.ids_of(TokenType.BYTE)} >= {f"<0x{byte:02X}>" for byte in range(256)}
    if not has_bytes and unknown_id is None:
        raise TokenizerError(
            f"{vocabulary.where}: expected tokens for all 256 bytes, <0x00> to <0xFF>, or an unknown token, "
            f"found neither; {CONVERT_AGAIN}"
        )
    return has_bytes


def _merges(vocabulary: Vocabulary, scores: NDArray[Any]) -> list[tuple[str, str]]:
    normal = vocabulary.ids_of(TokenType.NORMAL)
    known = {vocabulary.tokens[i] for i in normal}
    order = sorted(normal, key=lambda i: (-scores[i], -len(vocabulary.tokens[i])))
    merges = []
    for token in (vocabulary.tokens[i] for i in order):
        for cut in range(len(token) - 1, 0, -1):
            left, right = token[:cut], token[cut:]
            if left in known and right in known:
                merges.append((left, right))
    return merges


def character_bpe(
    vocabulary: Vocabulary, ids: dict[str, int], merges: Merges, unknown_id: int | None
) -> tokenizers.Tokenizer:
    """Return the tokenizer of a GGUF file of Gemma 4; `mark_special` adds the special tokens.

    A character without a token becomes the tokens of its bytes, or the unknown token if a byte token is missing. Text
    is not split before merging. llama.cpp splits at newlines, with the same result: a token has either no newline or
    only newlines.

    Source: llama.cpp src/llama-vocab.cpp, `LLAMA_VOCAB_PRE_TYPE_GEMMA4`, and the tokenizer.json of Gemma 4.

    Raises:
        TokenizerError: there are neither tokens for all bytes nor an unknown token, or a merge does not join two tokens
            into a third.
    """
    has_bytes, tokens = has_all_bytes(vocabulary, unknown_id), vocabulary.tokens
    unknown = None if unknown_id is None else tokens[unknown_id]
    try:
        with refusals(vocabulary.where, f"expected {_KEY} to join two tokens into a third, found others"):
            pairs = without_control(vocabulary, ids, merges)
            model = models.BPE(ids, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes)
            core = tokenizers.Tokenizer(model)
            core.normalizer = normalizers.Replace(" ", SPACE_MARK)
    except TokenizerError:
        merges.check(ids)
        raise
    return core
