"""Build a tokenizer from Hugging Face's `tokenizer.json` and the configuration files in the same folder.

The tokenizers library encodes with the file's own normaliser and pre-tokenizer. `StreamDecoder` decodes, as for GGUF
files. The decoder in the file is read only to find the algorithm, and whether a leading space is removed.

The library reads and runs a `tokenizer.json` in a sandbox process (`sandbox`) with limits of time and memory. A damaged
file may cause a Rust panic, or allocate gigabytes, so that the process aborts. Its regular expressions may
backtrack for minutes, and cannot be interrupted. A tokenizer of 151,643 tokens loads in 300 ms, of which 65 ms are the
start of the process. Each encoding takes 0.1 ms longer than without the sandbox. Tokenizers of GGUF files are built
from known parts, and run in the engine's process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_engine.checkpoint.hf_folder import read_json
from mlx_engine.checkpoint.paths import POINTER_BYTES, read_file, refuse_pointer
from mlx_engine.errors import SourceError, TokenizerError, shown
from mlx_engine.kernels.cached import cached_property
from mlx_engine.tokenizer.sandbox_process import Limits, Request, SandboxError, SandboxProcess, printable
from mlx_engine.tokenizer.tokenizer import Tokenizer
from mlx_engine.tokenizer.vocabulary import (
    BYTE_TOKEN,
    MAX_TEMPLATE_BYTES,
    SPACE_MARK,
    Kind,
    SpacePrefix,
    TokenType,
    Vocabulary,
    named_end_ids,
)

_MAX_VOCAB = 1 << 22  # a damaged id must not allocate gigabytes; published vocabularies have up to a million tokens

MAX_BYTES = 1 << 27
"""The largest accepted tokenizer.json. The file of Gemma 3, with 262,144 tokens, has 33 MB."""

# Limits far above what valid files need: Qwen 2's file of 4.6 MB takes 0.2 s and 150 MB to load, and encoding 1 MB of
# text takes 0.3 to 1.5 s and 80 to 210 MB.
LOAD_LIMITS = Limits(seconds=1, nbytes=192 << 20, characters=None, seconds_per_byte=1e-5, nbytes_per_byte=64)
ENCODE_LIMITS = Limits(seconds=0.5, nbytes=128 << 20, characters=None, seconds_per_byte=2e-5, nbytes_per_byte=1000)


def from_json(path: str | Path) -> Tokenizer:
    """Read a `tokenizer.json`.

    BOS, EOS and padding come from `tokenizer_config.json`, `generation_config.json` and `config.json`. Without these
    files, the tokenizer has no BOS, and end tokens are only recognised by their text. Ids without a token, which pad
    the vocabulary, decode to no text.

    Raises:
        SourceError: the file cannot be read.
        FormatError: the file is a Git-LFS pointer or too large, or a configuration file is damaged.
        TokenizerError: the file is not a tokenizer, is neither byte-level BPE nor SPM, or lacks a configured token.
        ChatTemplateError: the chat template is too large.
    """
    return Tokenizer(*parse(Path(path)))


def parse(path: Path) -> tuple[Vocabulary, FileTokenizer]:
    """Return the vocabulary of a `tokenizer.json` and the library's tokenizer; errors are those of `from_json`."""
    where = str(path)
    text = _read(path, MAX_BYTES)
    if not text:
        raise TokenizerError(f"{where}: expected a tokenizer.json, found an empty file; download the file again")
    core = FileTokenizer(text, where)
    loaded = core.loaded
    config = _FolderConfig(path.parent)
    kind = loaded.kind(where)
    ids = loaded.ids
    size = max(max(ids.values(), default=-1) + 1, config.vocab_size)
    if not 0 < size <= _MAX_VOCAB:
        raise TokenizerError(
            f"{where}: expected ids from 0 to at most {_MAX_VOCAB - 1:,}, found a vocabulary of {size:,}; "
            "the file is damaged, download it again"
        )
    tokens = [""] * size
    for token, token_id in ids.items():
        tokens[token_id] = token
    bos_id = config.token_id("bos", ids, size)
    eos_id = config.token_id("eos", ids, size)
    eog_ids = {i for i in config.listed("eos") if i < size} | named_end_ids(ids)
    vocabulary = Vocabulary(
        where=where,
        kind=kind,
        tokens=tokens,
        types=loaded.types(kind, tokens),
        bos_id=bos_id,
        eos_id=eos_id,
        eog_ids=frozenset(eog_ids if eos_id is None else eog_ids | {eos_id}),
        add_bos=bos_id is not None and config.add_bos(loaded.first == [bos_id]),
        ends=tuple(loaded.last) or ((eos_id,) if config.add_eos and eos_id is not None else ()),
        space_prefix=loaded.space_prefix,
        chat_template=config.chat_template,
        pad_id=config.token_id("pad", ids, size),
        response_template=config.response_template,
    )
    return vocabulary, core


def _read(path: Path, most: int) -> str:
    try:
        text = read_file(path, most).decode("utf-8")
    except UnicodeDecodeError:
        raise TokenizerError(f"{path}: expected JSON in UTF-8, found other bytes; download it again") from None
    refuse_pointer(path, text[:POINTER_BYTES].encode(), f"a {path.name}")
    return text


class FileTokenizer:
    """The tokenizers library with a `tokenizer.json`, in a sandbox process. Thread-safe."""

    def __init__(self, text: str, where: str) -> None:
        """Load the text of a file; raise TokenizerError if it is not a tokenizer, or exceeds the limits."""
        self._where, self._load = where, Request("load", {}, LOAD_LIMITS, text.encode())
        self._process = SandboxProcess()
        refused = "expected a tokenizer.json that the tokenizers library can load"
        self.loaded = Loaded(**self._ask(self._load, refused, "download the file again"))

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token; None if there is no such token."""
        return self.loaded.ids.get(token)

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Return the ids of a text. With `special`, control tokens spelled in the text become their ids.

        Raises:
            TokenizerError: the library refuses the text, or encoding it exceeds the limits.
        """
        refused = f"a text of {len(text):,} characters cannot be encoded; expected its ids from the tokenizers library"
        request = Request("encode", {"special": special}, ENCODE_LIMITS, text.encode())
        ids: list[int] = self._ask(request, refused, "the file is damaged, or made for other texts")["ids"]
        return ids

    def to_str(self) -> str:
        """Return the text of a tokenizer.json that the library writes from the loaded file."""
        request = Request("written", {}, LOAD_LIMITS)
        written: str = self._ask(request, "expected a tokenizer.json that can be written", "download it again")["text"]
        return written

    def _ask(self, request: Request, refused: str, hint: str) -> dict[str, Any]:
        """Return the answer to a request; if it fails, raise TokenizerError with the texts `refused` and `hint`."""
        try:
            answer = self._process.exchange(request, first=None if request is self._load else self._load)
        except SandboxError as problem:
            answer = {"refused": problem.found}
            if problem.__cause__ is not None:  # no process could be started; the file may be valid
                hint = "the tokenizer needs a process of its own"
        if "refused" in answer:
            raise TokenizerError(f"{self._where}: {refused}, found {printable(answer['refused']):.300}; {hint}")
        return answer


@dataclass(frozen=True)
class Loaded:
    """The contents of a `tokenizer.json`, as `sandbox.load` returns them.

    Attributes:
        numbers: the ids of `tokens`.
        special: maps the id of each added token, in decimal, to whether the token is special.
        parts: normaliser, pre-tokenizer and decoder, each as JSON, or None.
        unknown: the token for unknown characters; None if there is none.
        first: a list with the first id that the post-processor adds to an empty text; empty if it adds no ids.
        last: the ids that the post-processor adds after a text.
        trims: whether any added token also matches the white space around it.
        byte_fallback: whether unknown characters are encoded as tokens of their bytes.
    """

    tokens: list[str]
    numbers: list[int]
    special: Mapping[str, bool]
    parts: Sequence[Any]
    unknown: str | None
    first: list[int]
    last: list[int]
    trims: bool
    byte_fallback: bool

    @cached_property
    def ids(self) -> dict[str, int]:
        """The id of each token."""
        return dict(zip(self.tokens, self.numbers, strict=True))

    def steps(self, index: int) -> list[dict[str, Any]]:
        """Return the steps of `parts[index]`: 0 is the normaliser, 1 the pre-tokenizer, 2 the decoder."""
        part = self.parts[index]
        if part is None:
            return []
        lists = [value for value in part.values() if isinstance(value, list)]
        steps: list[dict[str, Any]] = lists[0] if part["type"] == "Sequence" else [part]
        return steps

    def kind(self, where: str) -> Kind:
        """Return the algorithm; raise TokenizerError if it is neither byte-level BPE nor SPM."""
        steps = self.steps(2)
        if any(step["type"] == "ByteLevel" for step in steps):
            return "byte-level BPE"
        for step in steps:
            replaces_mark = step["type"] == "Replace" and step["pattern"].get("String") == SPACE_MARK
            if replaces_mark or step["type"] == "Metaspace":
                return "SPM"
        found = ", ".join(step["type"] for step in steps) or "none"
        raise TokenizerError(
            f"{where}: expected a ByteLevel decoder, or one that replaces {SPACE_MARK!r} or is a Metaspace, found "
            f"{found:.200}; tokenizers of this kind are not implemented here"
        )

    @property
    def space_prefix(self) -> SpacePrefix:
        """Where encoding adds a space to the text, and decoding removes it."""
        normalizer, pre_tokenizer, decoder = (self.steps(i) for i in range(3))
        strips = any(step["type"] == "Strip" and step["start"] > 0 for step in decoder)
        if not strips and not any(step.get("prepend_scheme", "never") != "never" for step in decoder):
            return SpacePrefix.NEVER
        prepends = any(step["type"] == "Prepend" for step in normalizer)
        if prepends or any(step.get("prepend_scheme") == "always" for step in pre_tokenizer):
            return SpacePrefix.SECTION
        return SpacePrefix.START

    def types(self, kind: Kind, tokens: list[str]) -> NDArray[np.int8]:
        """Return the type of each id. `tokens` has a token per id, empty for ids without a token."""
        types = np.full(len(tokens), TokenType.UNUSED, np.int8)
        types[[token_id for token, token_id in self.ids.items() if token]] = TokenType.NORMAL
        for token_id, is_special in self.special.items():
            types[int(token_id)] = TokenType.CONTROL if is_special else TokenType.USER_DEFINED
        if kind == "SPM":
            types[[i for i, token in enumerate(tokens) if BYTE_TOKEN.fullmatch(token)]] = TokenType.BYTE
        if self.unknown is not None and self.unknown in self.ids:
            types[self.ids[self.unknown]] = TokenType.UNKNOWN
        return types


@dataclass(frozen=True, eq=False)
class _FolderConfig:
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
        return read_json(path) if path.exists() else {}

    @property
    def vocab_size(self) -> int:
        """The number of rows of the embedding table, which may exceed the number of tokens; 0 if unknown."""
        sizes = [config.get("vocab_size") for config in self._model_configs]
        return next((size for size in sizes if type(size) is int), 0)

    def listed(self, role: str) -> list[int]:
        """Return all ids that the model's configuration files list for a role (bos, eos or pad), in file order."""
        given = [config.get(f"{role}_token_id") for config in self._model_configs]
        flat = [i for value in given for i in (value if isinstance(value, list) else [value])]
        return [i for i in flat if type(i) is int and i >= 0]

    def token_id(self, role: str, ids: dict[str, int], vocab_size: int) -> int | None:
        """Return the id of the token that tokenizer_config.json names for a role (bos, eos or pad).

        If it names none, return the first id in `listed`; None if there is neither.

        Raises:
            TokenizerError: the vocabulary has no such token.
        """
        named = self._tokenizer_config.get(f"{role}_token")
        if isinstance(named, dict):
            named = named.get("content")
        if isinstance(named, str):
            if named in ids:
                return ids[named]
            raise self._error(f"{role}_token in tokenizer_config.json", shown(named))
        token_id = next(iter(self.listed(role)), None)
        if token_id is not None and token_id >= vocab_size:
            raise self._error(f"{role}_token_id", f"{token_id:,} of {vocab_size:,}")
        return token_id

    def _error(self, key: str, found: str) -> TokenizerError:
        return TokenizerError(
            f"{self.folder}: expected {key} to be a token of tokenizer.json, found {found}; "
            "the files of this folder belong to different models"
        )

    def add_bos(self, is_first: bool) -> bool:
        """Return the setting `add_bos_token`; if it is absent, return `is_first` (the post-processor adds a BOS)."""
        asked = self._tokenizer_config.get("add_bos_token")
        return asked if isinstance(asked, bool) else is_first

    @property
    def add_eos(self) -> bool:
        """Whether the configuration asks for an EOS after a text."""
        return self._tokenizer_config.get("add_eos_token") is True

    @property
    def response_template(self) -> Mapping[str, Any] | None:
        """The format of answers; None if the folder does not have it."""
        template = self._tokenizer_config.get("response_template")
        return template if isinstance(template, Mapping) else None

    @property
    def chat_template(self) -> str | None:
        """The text of chat_template.jinja; without this file, the (default) template of tokenizer_config.json."""
        path = self.folder / "chat_template.jinja"
        if path.exists():
            return _read(path, MAX_TEMPLATE_BYTES).replace("\r\n", "\n")
        template = self._tokenizer_config.get("chat_template")
        if isinstance(template, list):
            named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
            template = named.get("default")
        return template if isinstance(template, str) else None


# Maps the file name of each other form of tokenizer to a description of this form.
_OTHER_FORMS = {
    "tokenizer.model": "a SentencePiece model",
    "vocab.json": "an older form of byte-level BPE",
    "tekken.json": "Mistral's own form",
}
_JSON_HINT = (
    "download tokenizer.json too, if the model has one, or write it with transformers, "
    """`python -c "from transformers import AutoTokenizer as T; T.from_pretrained({0!r}).save_pretrained({0!r})"`"""
)


def tokenizer_json(folder: Path) -> Path:
    """Return the path of a folder's tokenizer.json.

    Raises:
        SourceError: there is no tokenizer.json. If the folder has another form of tokenizer, the error names its file.
    """
    path = folder / "tokenizer.json"
    if path.exists():
        return path
    other = next((name for name in _OTHER_FORMS if (folder / name).exists()), None)
    if other is None:
        found, hint = "", "download it too, or name a file that has a tokenizer"
    else:
        found = f", only {other}, {_OTHER_FORMS[other]}, which is not read here"
        hint = _JSON_HINT.format(str(folder))
    raise SourceError(f"{folder}: no tokenizer.json{found}; {hint}")
