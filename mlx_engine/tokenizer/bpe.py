"""Byte-level BPE: text is split into words, words into bytes, and bytes are merged by the ranks of a merge list."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import tokenizers
from tokenizers import Regex, models, pre_tokenizers

from mlx_engine.errors import TokenizerError
from mlx_engine.tokenizer.tokenizer import refusals
from mlx_engine.tokenizer.vocabulary import Metadata, TokenType, Vocabulary

_KEY = "tokenizer.ggml.merges"


class Merges(Sequence[tuple[str, str]]):
    """The merges of a GGUF file, by rank. If a merge is listed twice, the first rank counts.

    The file stores each merge as `left right`. Tokens contain no space, because byte-level BPE writes spaces as `Ġ`.
    Merges are split on access, because a list of split pairs would take 25 MB more than the library's copy.

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
        """Return whether a merge produces this token, by trying all splits of the token."""
        return any(f"{token[:i]} {token[i:]}" in self._known for i in range(1, len(token)))

    def check(self, ids: dict[str, int]) -> None:
        """Check that every merge produces a token. The library checks this too, but does not report which merge fails.

        Raises:
            TokenizerError: a merge produces no token.
        """
        for index, merge in enumerate(self._read.strings(_KEY)):
            if merge.replace(" ", "") not in ids:
                expected = "two tokens of the vocabulary that make a third"
                raise self._read.error(f"{_KEY}[{index:,}]", expected, f"{merge!r:.60}, which makes none") from None


def byte_level_bpe(vocabulary: Vocabulary, ids: dict[str, int], merges: Merges, split: Split) -> tokenizers.Tokenizer:
    """Return a tokenizer that merges bytes into the tokens of `vocabulary`, without special tokens.

    The tokenizer does not normalise text, unlike the original tokenizers of some models, because GGUF has no key for
    normalisation. So `decode` returns exactly the text given to `encode`. No merge produces a control token, so the
    spelling of a control token in plain text stays text.

    Raises:
        TokenizerError: a merge does not join two tokens into a third.
    """
    try:
        with refusals(vocabulary.where, f"expected {_KEY} to join tokens of the vocabulary, found others"):
            pairs = without_control(vocabulary, ids, merges)
            core = tokenizers.Tokenizer(models.BPE(ids, pairs, ignore_merges=split.whole_words))
            core.pre_tokenizer = split.pre_tokenizer()
    except TokenizerError:
        merges.check(ids)
        raise
    return core


def without_control(vocabulary: Vocabulary, ids: dict[str, int], merges: Merges) -> Sequence[tuple[str, str]]:
    """Return the merges without control tokens, so that the spelling of a control token in plain text stays text.

    Raises:
        TokenizerError: there are merges with control tokens, and some merge produces no token.
    """
    kept = vocabulary.ids_of(TokenType.CONTROL, TokenType.UNKNOWN, TokenType.UNUSED, TokenType.UNDEFINED)
    unmade = {vocabulary.tokens[i] for i in kept}
    if not any(map(merges.make, unmade)):
        return merges
    merges.check(ids)  # the library does not check merges that are left out below
    return [pair for pair in merges if unmade.isdisjoint({*pair, "".join(pair)})]


_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS_AND_SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN_2 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_SIGNS_AND_SPACES}"
_LLAMA_3 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_SIGNS_AND_SPACES}"
_QWEN_3_5 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Split:
    """A pre-tokenizer.

    It splits text into words for byte-level BPE. SPLITS has the pre-tokenizers by their name in `tokenizer.ggml.pre`.

    A pre-tokenizer is one or several regular expressions, applied in sequence: each splits the pieces of the previous
    one into its matches and the text between them.

    Source: llama.cpp src/llama-vocab.cpp at 00ad355e for the names, and for `gpt-2`, `smollm` and `default`; the
    `tokenizer.json` of Qwen2, Qwen3.5 and Llama 3 for the others, which llama.cpp rewrites without `(?i:)`.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    """A word that is a token becomes that token without merging (`ignore_merges`)."""
    add_bos: bool = False
    """Add a BOS if the file does not say."""

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """Return the library's pre-tokenizer: split into words, then map each byte to its character."""
        cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_gpt_2 = Split((_GPT_2,))
_qwen_2 = Split((_QWEN_2,))
_digit_by_digit = Split((r"\p{N}", _GPT_2))
_llama_3 = Split((_LLAMA_3,), whole_words=True, add_bos=True)
_merging_llama_3 = Split((_LLAMA_3,))

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
    "smollm": _digit_by_digit,
    "starcoder": _digit_by_digit,
    "refact": _digit_by_digit,
    "command-r": _digit_by_digit,
    "codeshell": _digit_by_digit,
    "exaone": _digit_by_digit,
    # For files that are older than the key. llama.cpp also uses this pre-tokenizer, with a warning.
    "default": Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT_2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}


def name_of(pre_tokenizer: Any, *, whole_words: bool) -> str | None:
    """Return the name in `SPLITS` of a pre-tokenizer of a `tokenizer.json`; None if it has none."""
    steps = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer])
    if [step and step["type"] == "ByteLevel" for step in steps] != [False] * (len(steps) - 1) + [True]:
        return None
    # A last step that only maps bytes, without a split, has the pattern "".
    cuts = tuple(pattern for pattern in map(_pattern, steps) if pattern != "")
    return next((n for n, split in SPLITS.items() if (split.patterns, split.whole_words) == (cuts, whole_words)), None)


def _pattern(step: Any) -> str | None:
    """Return the pattern of a split step, "" for a step that does not split, None for any other step."""
    match step:
        case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False}:
            return pattern
        case {"type": "Digits", "individual_digits": True}:
            return r"\p{N}"
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": use_regex}:
            return _GPT_2 if use_regex else ""
    return None
