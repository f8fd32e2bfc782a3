"""BPE over characters, the tokenizer of Gemma 4's GGUF files: SPM's tokens, merged by the ranks of a merge list.

Spaces are written as U+2581, and nothing is split before merging. llama.cpp splits at newlines, which changes nothing:
tokens have either no newline or newlines alone.

Source: llama.cpp src/llama-vocab.cpp, `LLAMA_VOCAB_PRE_TYPE_GEMMA4`, and the tokenizer.json of Gemma 4.
"""

from __future__ import annotations

import tokenizers
from tokenizers import models, normalizers

from mlx_engine.errors import TokenizerError
from mlx_engine.tokenizer.bpe import Merges, without_control
from mlx_engine.tokenizer.rust import refusals
from mlx_engine.tokenizer.spm import has_all_bytes
from mlx_engine.tokenizer.vocabulary import SPACE_MARK, Vocabulary


def character_bpe(
    vocabulary: Vocabulary, ids: dict[str, int], merges: Merges, unknown_id: int | None
) -> tokenizers.Tokenizer:
    """Return a tokenizer that merges characters into the tokens of `vocabulary`, without special tokens.

    A character without a token becomes the tokens of its bytes. No merge produces a control token.

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
