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

from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.convert.tokenizer_to_json import to_json
from mlx_engine.errors import UnsupportedConfigError
from mlx_engine.tokenizer.gguf import from_gguf as read_tokenizer
from mlx_engine.weights.divisors import rule_of
from mlx_engine.weights.model import model_file
from mlx_engine.weights.plan import Plan

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
    """The files of a folder beside the weights: the contents of config.json, and other files as text by name."""

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
