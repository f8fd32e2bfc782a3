"""The sampling that a model's files suggest.

Folders have it in `generation_config.json`, GGUF files under the keys `general.sampling.*`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_engine.checkpoint.gguf import open_gguf
from mlx_engine.checkpoint.hf_folder import read_json
from mlx_engine.errors import FormatError
from mlx_engine.options import declared

GENERATION_CONFIG = "generation_config.json"

# Our name of an option, by the file's: generation_config.json has the same names.
GGUF_KEYS = {f"general.sampling.{about.gguf}": f.name for f, about in declared() if about.gguf is not None}
HF_KEYS = {name: name for name in GGUF_KEYS.values()}
# Settings that would change the choice of tokens and are not implemented; by name, the values that switch them off.
UNUSED: dict[str, tuple[object, ...]] = {
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "num_beams": (1,),
    "no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "penalty_alpha": (0.0,),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "bad_words_ids": ([],),
    "general.sampling.xtc_probability": (0.0,),
    "general.sampling.mirostat": (0,),
}


@dataclass(frozen=True)
class Suggested:
    """The suggested options of sampling.

    Attributes:
        where: the file.
        values: options by name; empty if nothing is suggested. Other options keep their defaults.
        unused: settings of the file that change the choice of tokens and are not implemented.
    """

    where: str
    values: Mapping[str, Any]
    unused: tuple[str, ...] = ()


def suggested_sampling(path: Path, metadata: Mapping[str, object] | None = None) -> Suggested:
    """Return the sampling options that the files of a model suggest.

    `do_sample: false` suggests greedy decoding; without `do_sample` a temperature is a suggestion to sample.

    Args:
        path: the file or folder.
        metadata: the metadata of the GGUF file; None reads it.

    Raises:
        SourceError: a file cannot be read.
        FormatError: a file is damaged, or a value is not a number.
    """
    if path.is_dir():
        config = path / GENERATION_CONFIG
        return _suggested(str(config), read_json(config), HF_KEYS) if config.exists() else Suggested(str(config), {})
    if metadata is None:
        with open_gguf(path) as file:
            metadata = file.metadata
    return _suggested(str(path), metadata, GGUF_KEYS)


def _suggested(where: str, settings: Mapping[str, Any], keys: Mapping[str, str]) -> Suggested:
    values: dict[str, Any] = {
        name: _number(where, key, settings[key]) for key, name in keys.items() if settings.get(key) is not None
    }
    # 0 and -1 switch top_k off.
    if "top_k" in values:
        values["top_k"] = int(values["top_k"]) if values["top_k"] >= 1 else None
    samples = settings.get("do_sample", "temperature" in values)
    if samples:
        values = {"temperature": 1.0, **values}  # transformers' default
    elif keys is HF_KEYS:
        values = {name: value for name, value in values.items() if name == "repetition_penalty"}
    unused = (key for key, off in UNUSED.items() if settings.get(key) is not None and settings[key] not in off)
    return Suggested(where, values, tuple(unused))


def _number(where: str, key: str, value: object) -> float:
    # An int may be too large for a float.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        hint = "correct the file, or use --no-suggested"
        raise FormatError(where=where, expected=f"a number as {key}", found=repr(value)[:80], hint=hint)
    return value
