"""A vocabulary (tokens, their types and roles), the decoder of token ids, and the tokenizer keys of GGUF files."""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mlx_engine.errors import ChatTemplateError, TokenizerError
from mlx_engine.kernels.cached import cached_property

Kind = Literal["byte-level BPE", "SPM"]

SPACE_MARK = "\u2581"
"""The character that represents a space in SPM tokens."""

MAX_TEMPLATE_BYTES = 1_000_000
"""The largest chat template, in UTF-8. Published templates have up to 30 kB."""

MAX_TOKEN = 1024
"""The largest accepted token, in characters (Qwen 2: 128). `bpe` tries all splits of a token, in quadratic time."""

BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
"""The spelling of SPM's byte tokens."""


class SpacePrefix(Enum):
    """Where `encode` adds a space to the text, and `decode` removes it."""

    NEVER = "never"
    START = "before the text"
    SECTION = "before the text, and again after each special token"


def _byte_characters() -> dict[str, int]:
    """Return a dict that maps each character of byte-level vocabularies to the byte that it stands for.

    A printable Latin-1 character stands for its own byte. The 68 characters from U+0100 stand for the other bytes.

    Source: `bytes_to_unicode` of OpenAI's GPT-2, src/encoder.py.
    """
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(0x100 + i): byte for i, byte in enumerate(moved)}


BYTE_OF_CHARACTER = _byte_characters()

# For `str.translate`: maps each character of a byte-level token to the Latin-1 character of its byte. A Latin-1
# character that stands for no byte becomes U+0100, which Latin-1 cannot encode.
BYTES_AS_CHARACTERS = dict.fromkeys(range(256), 256) | {ord(c): byte for c, byte in BYTE_OF_CHARACTER.items()}


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Tokens by id, their types, and the ids of BOS, EOS and so on. `ends` is appended to the ids of texts to embed."""

    where: str
    kind: Kind
    tokens: list[str]
    types: NDArray[np.int8]
    pre: str | None = None
    bos_id: int | None = None
    eos_id: int | None = None
    eog_ids: frozenset[int] = frozenset()
    add_bos: bool = False
    ends: tuple[int, ...] = ()
    space_prefix: SpacePrefix = SpacePrefix.NEVER
    chat_template: str | None = None
    pad_id: int | None = None
    response_template: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        """Raise TokenizerError if a token is too long, ChatTemplateError if the template is too large."""
        longest = max(self.tokens, key=len, default="")
        if len(longest) > MAX_TOKEN:
            raise TokenizerError(
                f"{self.where}: expected tokens of at most {MAX_TOKEN:,} characters, found {longest[:40]!r}... of "
                f"{len(longest):,}; convert or download the file again"
            )
        n_bytes = len((self.chat_template or "").encode("utf-8", "surrogatepass"))
        if n_bytes > MAX_TEMPLATE_BYTES:
            found = f"one of {n_bytes:,} bytes, where at most {MAX_TEMPLATE_BYTES:,} are read"
            raise ChatTemplateError(where=self.where, found=found, hint="convert or download the file again")

    def padded(self, size: int) -> Vocabulary:
        """Return the vocabulary with at least `size` ids; added ids have no text."""
        n = max(0, size - len(self.tokens))
        types = np.concatenate([self.types, np.full(n, TokenType.UNUSED, np.int8)])
        return replace(self, tokens=[*self.tokens, *[""] * n], types=types)

    def ids_of(self, *types: TokenType) -> list[int]:
        """Return the ids of all tokens of these types, ascending."""
        ids: list[int] = np.flatnonzero(np.isin(self.types, types)).tolist()
        return ids

    def token(self, token_id: int) -> str:
        """Return a token as the file spells it; raise TokenizerError for an unknown id."""
        n_tokens = len(self.tokens)
        if not 0 <= token_id < n_tokens:
            raise TokenizerError(
                f"{self.where}: expected a token id from 0 to {n_tokens - 1:,} (a vocabulary of {n_tokens:,}), "
                f"found {token_id:,}; the ids come from another model or tokenizer"
            )
        return self.tokens[token_id]

    @cached_property
    def control_ids(self) -> frozenset[int]:
        """Ids of tokens that `encode` produces only with `special`."""
        return frozenset(self.ids_of(TokenType.CONTROL))

    @cached_property
    def literal_ids(self) -> frozenset[int]:
        """Ids of tokens whose text is literal: no character in it represents a byte or a space."""
        return frozenset(self.ids_of(TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED))

    @cached_property
    def silent_ids(self) -> frozenset[int]:
        """Ids of tokens without text: gaps and padding of the vocabulary."""
        return frozenset(self.ids_of(TokenType.UNUSED, TokenType.UNDEFINED))

    def piece(self, token_id: int) -> bytes:
        """Return the bytes of a token's text; raise TokenizerError for an unknown id."""
        text = self.token(token_id)
        if token_id in self.silent_ids:
            return b""
        if token_id in self.literal_ids:
            return text.encode()
        if self.types[token_id] == TokenType.BYTE and (match := BYTE_TOKEN.fullmatch(text)):
            return bytes([int(match[1], 16)])
        if self.kind == "SPM":
            return text.replace(SPACE_MARK, " ").encode()
        try:
            return bytes(map(BYTE_OF_CHARACTER.__getitem__, text))
        except KeyError:
            return text.encode()

    def pieces(self) -> list[bytes]:
        """Return `piece` of every id; takes 0.1 s for 152,000 tokens."""
        literal, silent = self.literal_ids, self.silent_ids
        is_bytes = self.types == TokenType.BYTE
        is_spm = self.kind == "SPM"
        plain = [text.replace(SPACE_MARK, " ").encode() if is_spm else _as_bytes(text) for text in self.tokens]
        for token_id in (*literal, *silent, *np.flatnonzero(is_bytes).tolist()):
            plain[token_id] = self.piece(token_id)
        return plain


class StreamDecoder:
    """Incremental decoder: the concatenated results of `add` and `finish` equal `decode` of all ids.

    If the bytes of a character are spread over several tokens, `add` returns the character with the last of them.
    Invalid bytes become U+FFFD. No id is decoded twice, so a stream of n ids takes O(n) time.
    """

    def __init__(self, vocabulary: Vocabulary, *, skip_special: bool = False, at_start: bool = True) -> None:
        self._vocabulary = vocabulary
        self._skip_special = skip_special
        self._drop_space = at_start and vocabulary.space_prefix is not SpacePrefix.NEVER
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._n, self._marks = 0, list[int]()

    @property
    def marks(self) -> Sequence[int]:
        """The start indices, in the text, of the tokens that may be delimiters (`is_marked`), ascending."""
        return self._marks

    def add(self, token_id: int) -> str:
        """Add a token and return the text that it completes, often empty; raise TokenizerError for an unknown id."""
        vocabulary = self._vocabulary
        piece = vocabulary.piece(token_id)
        if token_id in vocabulary.literal_ids:
            skipped = self._skip_special and token_id in vocabulary.control_ids
            piece = b"" if skipped else piece
            self._drop_space = vocabulary.space_prefix is SpacePrefix.SECTION or (skipped and self._drop_space)
        elif self._drop_space:
            self._drop_space = False
            piece = piece.removeprefix(b" ")
        text = self._utf8.decode(piece)
        self._n += len(text)
        if token_id in vocabulary.literal_ids and is_marked(literal := piece.decode()):
            self._marks.append(self._n - len(literal))
        return text

    def finish(self) -> str:
        """End the stream: return U+FFFD if the last character is incomplete, else an empty text."""
        return self._utf8.decode(b"", final=True)


def _as_bytes(text: str) -> bytes:
    """Return the bytes of a byte-level token; its text in UTF-8 if one of its characters stands for no byte."""
    try:
        return text.translate(BYTES_AS_CHARACTERS).encode("latin-1")
    except UnicodeEncodeError:
        return text.encode()


def is_marked(text: str) -> bool:
    """Return whether a special token may delimit reasoning or tool calls: whether it has 3 or more characters."""
    return len(text.strip()) > 2


def type_array(values: Any) -> NDArray[np.int8]:
    """Return token types as int8; numbers that GGUF does not define become UNDEFINED."""
    types = np.asarray(values)
    return np.where((types >= 0) & (types <= max(TokenType)), types, TokenType.UNDEFINED).astype(np.int8)


END_NAMES = frozenset(
    {
        "</s>", "<eos>", "[EOS]", "<|endoftext|>", "<|end_of_text|>", "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<turn|>", "<end_of_utterance>",
        "<EOT>", "_<EOT>", "[EOT]", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<|tool_response>", "[e~[",
        # Fill-in-the-middle tokens: padding, next repository, next file. Code models end a file with one of them.
        "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]",
        "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>",
    }
)  # fmt: skip
"""Texts of tokens that end a generation, even if the file marks them neither as control tokens nor as EOS.

The docstring of `gguf.from_gguf`, and a comment in `named_end_ids`, describe exceptions.

Source: llama.cpp src/llama-vocab.cpp, the end-of-generation list in `llama_vocab::impl::load`, at 00ad355e.
"""

END_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep"))
"""GGUF keys of the ids of end tokens."""


class TokenType(IntEnum):
    """The numbers in `tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def named_end_ids(ids: Mapping[str, int]) -> frozenset[int]:
    """Return the ids of tokens in `ids` (text to id) whose text marks the end of a generation."""
    names = END_NAMES & ids.keys()
    if {"<|return|>", "<|call|>"} <= names or {"<|calls|>", "<|flush|>"} <= names:
        names -= {"<|end|>"}  # in these vocabularies <|end|> ends a message, but not the turn
    return frozenset(ids[name] for name in names)


CONVERT_AGAIN = "convert the model again, or download another copy"


@dataclass(frozen=True)
class Metadata:
    """The `tokenizer.ggml.*` keys of one file; `where` names the file in errors."""

    values: Mapping[str, object]
    where: str

    def error(self, key: str, expected: str, found: str, hint: str = CONVERT_AGAIN) -> TokenizerError:
        """Return the error to raise about the value of `key`."""
        return TokenizerError(f"{self.where}: expected {key} to be {expected}, found {found}; {hint}")

    def text(self, key: str) -> str | None:
        """Return a string, or None if the key is missing."""
        value = self.values.get(key)
        if value is None or isinstance(value, str):
            return value
        raise self.error(key, "a string", f"{type(value).__name__} {value!r:.40}")

    def flag(self, key: str) -> bool | None:
        """Return a bool, or None if the key is missing."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, (bool, np.bool_)):
            return bool(value)
        raise self.error(key, "true or false", f"{type(value).__name__} {value!r:.40}")

    def token_id(self, key: str, vocab_size: int) -> int | None:
        """Return a valid token id, or None if the key is missing."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 0 <= value < vocab_size:
            raise self.error(key, f"a token id below {vocab_size:,}", f"{value!r:.40}")
        return int(value)

    def strings(self, key: str) -> list[str]:
        """Return a list of valid Unicode strings; raise TokenizerError if the key is missing or has other values."""
        value = self.values.get(key)
        if not isinstance(value, (list, tuple)):
            raise self.error(key, "a list of strings", "nothing" if value is None else type(value).__name__)
        try:
            "".join(value).encode()
        except TypeError:
            index = next(i for i, item in enumerate(value) if not isinstance(item, str))
            raise self.error(key, "a list of strings", f"{type(value[index]).__name__} at index {index:,}") from None
        except UnicodeEncodeError:
            raise self.error(key, "a list of valid Unicode strings", "half of a surrogate pair") from None
        return list(value)

    def numbers(self, key: str, *, count: int, kinds: str) -> NDArray[Any] | None:
        """Return one finite number per token; None if the key is missing. `kinds`: the accepted NumPy dtype kinds."""
        value = self.values.get(key)
        if value is None:
            return None
        try:
            numbers = np.asarray(value)
        except (ValueError, OverflowError):
            raise self.error(key, f"{count:,} numbers", "a list of mixed types") from None
        if numbers.ndim != 1 or numbers.dtype.kind not in kinds:
            raise self.error(key, f"{count:,} numbers", f"{type(value).__name__} of {numbers.dtype}")
        if len(numbers) != count:
            raise self.error(key, f"{count:,} numbers, one per token", f"{len(numbers):,}")
        if not np.isfinite(numbers).all():
            raise self.error(key, "finite numbers", f"{numbers[~np.isfinite(numbers)][0]}")
        return numbers
