"""Write the tokenizer of a GGUF file as the files of a Hugging Face folder. The ids of every text stay the same.

What GGUF has no key for is not there: Qwen's own tokenizer also normalises text to form C.
"""

from __future__ import annotations

import json
from typing import Any

from tokenizers import decoders, processors

from mlx_engine.tokenizer.tokenizer import Tokenizer
from mlx_engine.tokenizer.vocabulary import SPACE_MARK, SpacePrefix, TokenType, Vocabulary


def to_json(tokenizer: Tokenizer, *, context_length: int) -> dict[str, str]:
    """Return tokenizer.json, tokenizer_config.json and, if there is a template, chat_template.jinja.

    Args:
        tokenizer: the tokenizer of a GGUF file.
        context_length: the number of tokens that the model was trained on.
    """
    vocabulary, core = tokenizer.parts()
    core.decoder = _decoder(vocabulary)
    if vocabulary.add_bos and vocabulary.bos_id is not None:
        bos = vocabulary.tokens[vocabulary.bos_id]
        core.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", f"{bos}:1", "$B:1"], special_tokens=[(bos, vocabulary.bos_id)]
        )
    files = {
        "tokenizer.json": core.to_str(),
        "tokenizer_config.json": json.dumps(_config(vocabulary, context_length), ensure_ascii=False, indent=4) + "\n",
    }
    if vocabulary.chat_template is not None:
        files["chat_template.jinja"] = vocabulary.chat_template
    return files


def _decoder(vocabulary: Vocabulary) -> Any:
    """Return the decoder of Hugging Face's own tokenizers of this kind."""
    if vocabulary.kind == "byte-level BPE":
        return decoders.ByteLevel()
    steps = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.space_prefix is not SpacePrefix.NEVER:
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)


def _config(vocabulary: Vocabulary, context_length: int) -> dict[str, object]:
    unknown = next(iter(vocabulary.ids_of(TokenType.UNKNOWN)), None)
    ids = {"bos": vocabulary.bos_id, "eos": vocabulary.eos_id, "unk": unknown, "pad": vocabulary.pad_id}
    roles = {f"{role}_token": vocabulary.tokens[i] for role, i in ids.items() if i is not None}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **roles,
        "add_bos_token": vocabulary.add_bos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
    }
