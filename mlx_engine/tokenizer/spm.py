"""SPM, the SentencePiece BPE of Llama and Gemma: merge the adjacent pair whose token has the highest score first.

`tokenizers` has no such model (its Unigram maximises the score of the whole text instead). BPE gives the same result
if every split of a token into two tokens is a merge, and merges are ordered by the score of the merged token.

For equal scores SPM merges the leftmost pair, and BPE the merge of lower rank. To get the same result, merges of equal
score are ranked by the length of the result (longest first), then by the length of the left part (longest first). Then
both merge a run of equal characters from the left. In Llama's vocabulary the tokens of two to sixteen spaces have one
score.
"""

from __future__ import annotations

from typing import Any

import tokenizers
from numpy.typing import NDArray
from tokenizers import models, normalizers

from mlx_engine.errors import TokenizerError
from mlx_engine.tokenizer.bpe import Merges, without_control
from mlx_engine.tokenizer.tokenizer import refusals
from mlx_engine.tokenizer.vocabulary import CONVERT_AGAIN, SPACE_MARK, SpacePrefix, TokenType, Vocabulary


def spm(
    vocabulary: Vocabulary, ids: dict[str, int], scores: NDArray[Any], unknown_id: int | None
) -> tokenizers.Tokenizer:
    """Return a tokenizer that merges characters into the tokens of `vocabulary`, without special tokens.

    Merges produce normal tokens only, as in sentencepiece. In llama.cpp they also produce control tokens, so that the
    plain text `</s>` may become EOS there.

    Raises:
        TokenizerError: the vocabulary has neither all byte tokens nor an unknown token, for characters without a token.
    """
    has_bytes, tokens = has_all_bytes(vocabulary, unknown_id), vocabulary.tokens
    with refusals(vocabulary.where, "tokens and scores do not make a vocabulary"):
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
    """Return whether the vocabulary has a token for each byte, to encode characters without a token.

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
    """Return a tokenizer that merges characters into the tokens of `vocabulary`, without special tokens.

    A character without a token becomes the tokens of its bytes. No merge produces a control token.

    This is the tokenizer of Gemma 4's GGUF files: SPM's tokens, merged by the ranks of a merge list.

    Spaces are written as U+2581, and nothing is split before merging. llama.cpp splits at newlines, which changes
    nothing: tokens have either no newline or newlines alone.

    Source: llama.cpp src/llama-vocab.cpp, `LLAMA_VOCAB_PRE_TYPE_GEMMA4`, and the tokenizer.json of Gemma 4.

    Raises:
        TokenizerError: there are no byte tokens and no unknown token, or a merge does not join two tokens into a third.
    """
    has_bytes, tokens = has_all_bytes(vocabulary, unknown_id), vocabulary.tokens
    unknown = None if unknown_id is None else tokens[unknown_id]
    try:
        with refusals(vocabulary.where, "expected merges that join tokens of the vocabulary, found others"):
            pairs = without_control(vocabulary, ids, merges)
            model = models.BPE(ids, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes)
            core = tokenizers.Tokenizer(model)
            core.normalizer = normalizers.Replace(" ", SPACE_MARK)
    except TokenizerError:
        merges.check(ids)
        raise
    return core
