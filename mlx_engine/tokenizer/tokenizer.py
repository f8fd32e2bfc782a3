"""The tokenizer: encode text to token ids and decode them."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING

import tokenizers
from tokenizers import AddedToken

from mlx_engine.errors import TokenizerError
from mlx_engine.forks import kept_over_forks
from mlx_engine.tokenizer.rust import refusals
from mlx_engine.tokenizer.special import TokenType
from mlx_engine.tokenizer.stream import StreamDecoder
from mlx_engine.tokenizer.vocabulary import BYTE_OF_CHARACTER, Kind, Vocabulary

if TYPE_CHECKING:
    from mlx_engine.tokenizer.hf import FileTokenizer
    from mlx_engine.tokenizer.sandbox_process import SandboxProcess


class Tokenizer:
    """A model's tokenizer, created by `from_gguf`, `from_json` or `load_tokenizer`. Thread-safe.

    `decode(encode(text)) == text` with two exceptions: SPM writes spaces as U+2581, so this character is decoded as a
    space; and a `tokenizer.json` may normalise text.
    """

    def __init__(self, vocabulary: Vocabulary, core: tokenizers.Tokenizer | FileTokenizer) -> None:
        self._vocabulary = vocabulary
        self._core = core
        # Recognising special tokens is a setting of `core`, not an argument.
        self._lock = kept_over_forks(threading.Lock())
        special = vocabulary.ids_of(TokenType.CONTROL, TokenType.UNKNOWN)
        self.special_tokens: dict[str, int] = {vocabulary.tokens[i]: i for i in special}
        self.user_defined_tokens: dict[str, int] = {
            vocabulary.tokens[i]: i for i in vocabulary.ids_of(TokenType.USER_DEFINED)
        }
        self._lacks_bytes = vocabulary.kind == "byte-level BPE" and any(
            core.token_to_id(character) is None for character in BYTE_OF_CHARACTER
        )

    def parts(self) -> tuple[Vocabulary, tokenizers.Tokenizer]:
        """Return the vocabulary, and a copy of the library's tokenizer, from which files can be written."""
        return self._vocabulary, tokenizers.Tokenizer.from_str(self._core.to_str())

    def padded(self, size: int) -> Tokenizer:
        """Return a tokenizer with at least `size` ids; those that are added have no text and are never encoded."""
        return self if size <= self.vocab_size else Tokenizer(self._vocabulary.padded(size), self._core)

    @property
    def where(self) -> str:
        """The source file, for error messages."""
        return self._vocabulary.where

    @property
    def kind(self) -> Kind:
        """The algorithm: "byte-level BPE" or "SPM"."""
        return self._vocabulary.kind

    @property
    def pre(self) -> str | None:
        """The pre-tokenizer's name in llama.cpp (byte-level BPE of GGUF files only); None for a `tokenizer.json`."""
        return self._vocabulary.pre

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
        return len(self._vocabulary.tokens)

    @property
    def bos_id(self) -> int | None:
        """The BOS token."""
        return self._vocabulary.bos_id

    @property
    def eos_id(self) -> int | None:
        """The EOS token that the file names; `eog_ids` has all end tokens."""
        return self._vocabulary.eos_id

    @property
    def eog_ids(self) -> frozenset[int]:
        """All tokens that end a generation: named by the file, or recognised by their text."""
        return self._vocabulary.eog_ids

    @property
    def add_bos(self) -> bool:
        """Whether a prompt begins with `bos_id`. `encode` never adds it; `generate` does."""
        return self._vocabulary.add_bos

    @property
    def chat_template(self) -> str | None:
        """The chat template, Jinja source."""
        return self._vocabulary.chat_template

    @cached_property
    def sandbox(self) -> SandboxProcess:
        """The process that runs the chat template; it is started by the first request."""
        from mlx_engine.tokenizer.sandbox_process import SandboxProcess

        return SandboxProcess()

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Return the token ids of a text. No token is added, not even a BOS.

        With `special`, control tokens spelled in the text, such as `<|im_start|>`, become their ids. Without, they are
        encoded as plain text, so that user input cannot forge a chat turn. User-defined tokens are always recognised.

        Raises:
            TokenizerError: the text is not valid Unicode (a lone surrogate), or the vocabulary cannot encode it.
        """
        where = self._vocabulary.where
        try:
            text.encode()
        except UnicodeEncodeError as problem:
            raise TokenizerError(
                f"the text to encode: expected text that UTF-8 can write, found {text[problem.start]!r} at index "
                f"{problem.start:,}, half of a surrogate pair; replace it before encoding"
            ) from None
        if isinstance(self._core, tokenizers.Tokenizer):
            with self._lock, refusals(where, f"a text of {len(text):,} characters cannot be encoded"):
                self._core.encode_special_tokens = not special
                ids: list[int] = self._core.encode(text, add_special_tokens=False).ids
        else:  # a third party's tokenizer.json, in a sandbox process
            ids = self._core.encode(text, special=special)
        if not special and not self._vocabulary.control_ids.isdisjoint(ids):
            found = next(i for i in ids if i in self._vocabulary.control_ids)
            raise TokenizerError(
                f"{where}: expected plain text to need no control token, found {self.token(found)!r} (id {found:,}), "
                "which this vocabulary has no other way to write; encode with special=True if that is meant"
            )
        if self._lacks_bytes and self.decode(ids) != text:
            lacking = sorted({*text.encode()} - {BYTE_OF_CHARACTER.get(token) for token in self._vocabulary.tokens})
            raise TokenizerError(
                f"{where}: expected a token for every byte of the text, found none for "
                f"{', '.join(f'0x{byte:02X}' for byte in lacking)}; this vocabulary cannot write the text"
            )
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = False, at_start: bool = True) -> str:
        """Return the text of token ids. Bytes that are not valid UTF-8 become U+FFFD.

        `skip_special` leaves out control tokens. With `at_start=False` the ids continue a text, and SPM's leading
        space is kept; at the start of a text it is an artefact of encoding and is removed.

        Raises:
            TokenizerError: the vocabulary has no such id.
        """
        stream = self.stream(skip_special=skip_special, at_start=at_start)
        return "".join([*map(stream.add, ids), stream.finish()])

    def stream(self, *, skip_special: bool = False, at_start: bool = True) -> StreamDecoder:
        """Return a decoder for ids that arrive one at a time."""
        return StreamDecoder(self._vocabulary, skip_special=skip_special, at_start=at_start)

    def token(self, token_id: int) -> str:
        """Return a token as spelled in the vocabulary, where a space is `Ġ` or `▁` and bytes are mapped to letters.

        Raises:
            TokenizerError: the vocabulary has no such id.
        """
        self._vocabulary.check(token_id)
        return self._vocabulary.tokens[token_id]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token, which are often not valid UTF-8 on their own.

        Raises:
            TokenizerError: the vocabulary has no such id.
        """
        self._vocabulary.check(token_id)
        return self._vocabulary.piece(token_id)

    def __repr__(self) -> str:
        return f"<Tokenizer {self.kind}, {self.vocab_size:,} tokens, from {self._vocabulary.where}>"


def mark_special(core: tokenizers.Tokenizer, vocabulary: Vocabulary) -> None:
    """Register special tokens with `core`: control and unknown are found on request, user-defined always."""
    control = vocabulary.ids_of(TokenType.CONTROL, TokenType.UNKNOWN)
    always = vocabulary.ids_of(TokenType.USER_DEFINED)
    for special, ids in ((True, control), (False, always)):
        added = [AddedToken(vocabulary.tokens[i], special=special, normalized=False) for i in ids]
        (core.add_special_tokens if special else core.add_tokens)(added)
