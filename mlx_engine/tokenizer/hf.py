"""Build a tokenizer from Hugging Face's `tokenizer.json` and the configuration files in the same folder.

The tokenizers library encodes with the file's own normaliser and pre-tokenizer. Decoding is implemented here, so that
GGUF files and `tokenizer.json` stream alike; the decoder in the file only tells byte-level BPE from SPM.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from mlx_engine.checkpoint.lfs import POINTER_BYTES, refuse_pointer
from mlx_engine.checkpoint.paths import read_file
from mlx_engine.errors import TokenizerError
from mlx_engine.tokenizer.rust import refusals, steps_of
from mlx_engine.tokenizer.special import TokenType, named_end_ids
from mlx_engine.tokenizer.tokenizer import Tokenizer
from mlx_engine.tokenizer.vocabulary import BYTE_TOKEN, SPACE_MARK, Kind, SpacePrefix, Vocabulary

_MAX_VOCAB = 1 << 24  # a damaged id must not allocate gigabytes


def from_json(path: str | Path) -> Tokenizer:
    """Read a `tokenizer.json`; roles come from `tokenizer_config.json`, `generation_config.json` and `config.json`.

    These three may be missing: the tokenizer then has no BOS, and only end tokens that are recognised by their text.
    Ids without a token (models round their vocabulary up) decode to no text.

    Raises:
        SourceError: the file cannot be read.
        FormatError: it is a Git-LFS pointer.
        TokenizerError: it is not a tokenizer, or one that is neither byte-level BPE nor SPM.
    """
    return Tokenizer(*parse(Path(path)))


def parse(path: Path) -> tuple[Vocabulary, tokenizers.Tokenizer]:
    """Read the vocabulary of a `tokenizer.json` and its configuration files; return it with the library's tokenizer.

    Raises:
        SourceError: the file cannot be read.
        FormatError: it is a Git-LFS pointer.
        TokenizerError: it is not a tokenizer, or one that is neither byte-level BPE nor SPM.
    """
    where = str(path)
    text = _read(path)
    if not text:
        raise TokenizerError(f"{where}: expected a tokenizer.json, found an empty file; download the file again")
    with refusals(where, "expected a tokenizer.json, found something else; download the file again"):
        core = tokenizers.Tokenizer.from_str(text)
        core.no_truncation()
        core.no_padding()
    beside = _Beside(path.parent)
    kind = _kind(core, where)
    ids = core.get_vocab(with_added_tokens=True)
    size = max(max(ids.values(), default=-1) + 1, beside.vocab_size)
    if not 0 < size <= _MAX_VOCAB:
        raise TokenizerError(
            f"{where}: expected ids from 0 to at most {_MAX_VOCAB - 1:,}, found a vocabulary of {size:,}; "
            "the file is damaged, download it again"
        )
    tokens = [""] * size
    for token, token_id in ids.items():
        tokens[token_id] = token
    bos_id = beside.token_id("bos", ids, size)
    eos_id = beside.token_id("eos", ids, size)
    ends = {i for i in beside.listed("eos") if i < size} | named_end_ids(ids)
    vocabulary = Vocabulary(
        where=where,
        kind=kind,
        tokens=tokens,
        types=_types(core, kind, tokens),
        bos_id=bos_id,
        eos_id=eos_id,
        eog_ids=frozenset(ends if eos_id is None else ends | {eos_id}),
        add_bos=bos_id is not None and beside.add_bos(core, bos_id),
        space_prefix=_space_prefix(core),
        chat_template=beside.chat_template,
        pad_id=beside.token_id("pad", ids, size),
    )
    return vocabulary, core


def _read(path: Path) -> str:
    try:
        text = read_file(path).decode("utf-8")
    except UnicodeDecodeError:
        raise TokenizerError(f"{path}: expected JSON in UTF-8, found other bytes; download it again") from None
    refuse_pointer(path, text[:POINTER_BYTES].encode(), f"a {path.name}")
    return text


def _kind(core: tokenizers.Tokenizer, where: str) -> Kind:
    parts = list(steps_of(core.decoder))
    if any(part["type"] == "ByteLevel" for part in parts):
        return "byte-level BPE"
    for part in parts:
        replaces_mark = part["type"] == "Replace" and part["pattern"].get("String") == SPACE_MARK
        if replaces_mark or part["type"] == "Metaspace":
            return "SPM"
    found = ", ".join(part["type"] for part in parts) or "none"
    raise TokenizerError(
        f"{where}: expected a ByteLevel decoder, or one that replaces {SPACE_MARK!r} or is a Metaspace, found {found}; "
        "tokenizers of this kind are not implemented here"
    )


def _space_prefix(core: tokenizers.Tokenizer) -> SpacePrefix:
    decoder = list(steps_of(core.decoder))
    strips = any(part["type"] == "Strip" and part["start"] > 0 for part in decoder)
    if not strips and not any(part.get("prepend_scheme", "never") != "never" for part in decoder):
        return SpacePrefix.NEVER
    prepends = any(part["type"] == "Prepend" for part in steps_of(core.normalizer))
    if prepends or any(part.get("prepend_scheme") == "always" for part in steps_of(core.pre_tokenizer)):
        return SpacePrefix.SECTION
    return SpacePrefix.START


def _types(core: tokenizers.Tokenizer, kind: Kind, tokens: list[str]) -> np.ndarray[Any, np.dtype[np.int8]]:
    types = np.array([TokenType.NORMAL if token else TokenType.UNUSED for token in tokens], np.int8)
    for token_id, added in core.get_added_tokens_decoder().items():
        types[token_id] = TokenType.CONTROL if added.special else TokenType.USER_DEFINED
    if kind == "SPM":
        types[[i for i, token in enumerate(tokens) if BYTE_TOKEN.fullmatch(token)]] = TokenType.BYTE
    unknown = getattr(core.model, "unk_token", None)
    if unknown is not None and unknown in tokens:
        types[tokens.index(unknown)] = TokenType.UNKNOWN
    return types


@dataclass(frozen=True, eq=False)
class _Beside:
    """The configuration files in the folder of a tokenizer.json."""

    folder: Path

    @cached_property
    def _tokenizer_config(self) -> dict[str, Any]:
        return self._load("tokenizer_config.json")

    @cached_property
    def _model_configs(self) -> list[dict[str, Any]]:
        config = self._load("config.json")
        text_config = config.get("text_config")  # a multimodal model keeps its language model's settings there
        return [self._load("generation_config.json"), config, text_config if isinstance(text_config, dict) else {}]

    def _load(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        if not path.exists():
            return {}
        try:
            value = json.loads(_read(path))
        except (json.JSONDecodeError, RecursionError) as problem:
            raise TokenizerError(
                f"{path}: expected JSON, found something else ({problem}); download it again"
            ) from None
        if not isinstance(value, dict):
            raise TokenizerError(f"{path}: expected a JSON object, found {type(value).__name__}; download it again")
        return value

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding table, which may exceed the number of tokens; 0 if unknown."""
        sizes = [config.get("vocab_size") for config in self._model_configs]
        return next((size for size in sizes if type(size) is int), 0)

    def listed(self, role: str) -> list[int]:
        """Return all ids that the model's configuration files list for a role, in the order of the files."""
        given = [config.get(f"{role}_token_id") for config in self._model_configs]
        flat = [i for value in given for i in (value if isinstance(value, list) else [value])]
        return [i for i in flat if type(i) is int and i >= 0]

    def token_id(self, role: str, ids: dict[str, int], vocab_size: int) -> int | None:
        """Return the id for a role: the token named in tokenizer_config.json, else the first listed id.

        Raises:
            TokenizerError: the vocabulary has no such token.
        """
        named = self._tokenizer_config.get(f"{role}_token")
        if isinstance(named, dict):
            named = named.get("content")
        if isinstance(named, str):
            if named in ids:
                return ids[named]
            raise self._error(f"{role}_token in tokenizer_config.json", repr(named))
        token_id = next(iter(self.listed(role)), None)
        if token_id is not None and token_id >= vocab_size:
            raise self._error(f"{role}_token_id", f"{token_id:,} of {vocab_size:,}")
        return token_id

    def _error(self, key: str, found: str) -> TokenizerError:
        return TokenizerError(
            f"{self.folder}: expected {key} to be a token of tokenizer.json, found {found}; "
            "the files beside it belong to another model"
        )

    def add_bos(self, core: tokenizers.Tokenizer, bos_id: int) -> bool:
        """Return whether a BOS is added: from the configuration, else from the post-processor of tokenizer.json."""
        asked = self._tokenizer_config.get("add_bos_token")
        if isinstance(asked, bool):
            return asked
        return bool(core.encode("").ids[:1] == [bos_id])

    @property
    def chat_template(self) -> str | None:
        """Return the chat template from its own file or the configuration (of several, the one named `default`)."""
        path = self.folder / "chat_template.jinja"
        if path.exists():
            return _read(path).replace("\r\n", "\n")
        template = self._tokenizer_config.get("chat_template")
        if isinstance(template, list):
            named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
            template = named.get("default")
        return template if isinstance(template, str) else None
