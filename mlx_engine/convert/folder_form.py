"""Express a GGUF file's settings and tokenizer as the files of a Hugging Face folder.

The result is verified by reading it back: the model definition must find the same configuration in config.json as in
the GGUF file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tokenizers import decoders, processors

from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.errors import UnsupportedConfigError
from mlx_engine.tokenizer.gguf import from_gguf as read_tokenizer
from mlx_engine.tokenizer.tokenizer import Tokenizer
from mlx_engine.tokenizer.vocabulary import SPACE_MARK, SpacePrefix, TokenType, Vocabulary
from mlx_engine.weights.model import model_file
from mlx_engine.weights.plan import Plan
from mlx_engine.weights.rope_divisors import rule_of

# `model_type` of the text models whose GGUF architecture has another name, and that are not the first of their file.
TEXT_MODELS = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
    "mistral3": "ministral3",
}
# `model_type` of models with a window that share the GGUF architecture of models without.
WITH_WINDOW = {"olmo2": "olmo3"}


@dataclass(frozen=True)
class FolderForm:
    """The files of a folder other than the weights: the contents of config.json, and other files as text by name."""

    config: Mapping[str, Any]
    files: Mapping[str, str]


def from_gguf(checkpoint: Checkpoint, plan: Plan, *, has_head: bool) -> FolderForm:
    """Convert the settings and the tokenizer of a GGUF file.

    Raises:
        ModelError: config.json cannot represent the configuration.
        TokenizerError: the file has no tokenizer, or one that is not implemented.
    """
    config = replace(plan.config, **rule_of(checkpoint, plan.config))
    tokenizer = read_tokenizer(checkpoint.metadata, where=checkpoint.where)
    ends = sorted(tokenizer.eog_ids, key=lambda token_id: (token_id != tokenizer.eos_id, token_id))
    roles = {"bos_token_id": tokenizer.bos_id, "eos_token_id": ends[0] if len(ends) == 1 else ends or None}
    settings = {
        "model_type": _model_type(checkpoint, config),
        **_shortened(config.to_hf()),
        **roles,
        "tie_word_embeddings": not has_head,
    }
    _read_back(checkpoint, settings, config)
    files = to_json(tokenizer, context_length=config.context_length)
    return FolderForm(settings, files | {"generation_config.json": json.dumps(roles, indent=4) + "\n"})


def _model_type(checkpoint: Checkpoint, config: Any) -> str:
    name = checkpoint.architecture
    if name in WITH_WINDOW and any(config.windows):
        return WITH_WINDOW[name]
    return TEXT_MODELS.get(name) or model_file(checkpoint).ARCHITECTURES[0]


def _shortened(value: Any) -> Any:
    """Return settings with the shortest decimals of float32 numbers, which GGUF has."""
    if isinstance(value, Mapping):
        return {key: _shortened(of) for key, of in value.items()}
    if isinstance(value, list):
        return [_shortened(of) for of in value]
    return float(str(np.float32(value))) if isinstance(value, float) and np.float32(value) == value else value


def _read_back(checkpoint: Checkpoint, settings: Mapping[str, Any], config: Any) -> None:
    """Check that config.json gives the same configuration as the GGUF file.

    Raises:
        UnsupportedConfigError: the configuration differs, because config.json has no key for a setting.
    """
    written = replace(
        checkpoint, naming="hf", architecture=settings["model_type"], settings=settings, metadata={}, shapes={}
    )
    again = model_file(written).plan(written).config
    for name in config.differences(again):
        raise UnsupportedConfigError(
            where=checkpoint.where,
            key=name,
            expected=f"a value that config.json can store, {getattr(again, name, None)!r:.60}",
            found=getattr(config, name),
        )


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
