"""Text to token ids and back."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import tokenizers
from tokenizers import AddedToken

from mlx_engine.errors import TokenizerError
from mlx_engine.tokenizer.rust import refusals
from mlx_engine.tokenizer.special import TokenType
from mlx_engine.tokenizer.stream import StreamDecoder
from mlx_engine.tokenizer.vocabulary import BYTE_OF_CHARACTER, Kind, Vocabulary


class Tokenizer:
    """A model's tokenizer. Made by `from_gguf`, `from_json` or `load_tokenizer`; safe to share between threads.

    `decode(encode(text)) == text` for every text, except where the vocabulary itself cannot tell: SPM writes spaces as
    U+2581, so that this character comes back as a space, and a `tokenizer.json` may normalise.
    """

    def __init__(self, vocabulary: Vocabulary, core: tokenizers.Tokenizer) -> None:
        self._vocabulary = vocabulary
        self._core = core
        self._lock = threading.Lock()  # whether special tokens are recognised is a setting of `core`, not an argument
        special = vocabulary.ids_of(TokenType.CONTROL, TokenType.UNKNOWN)
        self.special_tokens: dict[str, int] = {vocabulary.tokens[i]: i for i in special}
        self.user_defined_tokens: dict[str, int] = {
            vocabulary.tokens[i]: i for i in vocabulary.ids_of(TokenType.USER_DEFINED)
        }
        self._lacks_bytes = vocabulary.kind == "byte-level BPE" and any(
            core.token_to_id(character) is None for character in BYTE_OF_CHARACTER
        )

    @property
    def where(self) -> str:
        """The file that it came from, for messages."""
        return self._vocabulary.where

    @property
    def kind(self) -> Kind:
        """The algorithm."""
        return self._vocabulary.kind

    @property
    def pre(self) -> str | None:
        """How text is cut into words before byte-level BPE: a name of llama.cpp's; None in a `tokenizer.json`."""
        return self._vocabulary.pre

    @property
    def vocab_size(self) -> int:
        """Ids run from 0 to one less."""
        return len(self._vocabulary.tokens)

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text."""
        return self._vocabulary.bos_id

    @property
    def eos_id(self) -> int | None:
        """The token that the file names as the end; `eog_ids` has all of them."""
        return self._vocabulary.eos_id

    @property
    def eog_ids(self) -> frozenset[int]:
        """Every token that ends a generation: what the file names, and what is known by its text."""
        return self._vocabulary.eog_ids

    @property
    def add_bos(self) -> bool:
        """The model wants `bos_id` in front of a prompt. `encode` never adds it: whoever generates does."""
        return self._vocabulary.add_bos

    @property
    def chat_template(self) -> str | None:
        """The Jinja text that turns messages into a prompt."""
        return self._vocabulary.chat_template

    def encode(self, text: str, special: bool = False) -> list[int]:
        """The ids of a text; nothing is added, no BOS either.

        With `special`, control tokens that are written in the text, such as `<|im_start|>`, are recognised. Without,
        they are text like any other, so that a user's words cannot forge a turn. Tokens that the vocabulary calls
        user-defined are recognised always.

        Raises:
            TokenizerError: the text is not valid Unicode (half of a surrogate pair), or the vocabulary cannot spell it.
        """
        where = self._vocabulary.where
        try:
            text.encode()
        except UnicodeEncodeError as problem:
            raise TokenizerError(
                f"{where}: expected text that UTF-8 can write, found {text[problem.start]!r} at index "
                f"{problem.start:,}, half of a surrogate pair; replace it before encoding"
            ) from None
        with self._lock, refusals(where, f"a text of {len(text):,} characters cannot be encoded"):
            self._core.encode_special_tokens = not special
            ids: list[int] = self._core.encode(text, add_special_tokens=False).ids
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
        """The text of these ids; bytes that are not UTF-8 become U+FFFD.

        `skip_special` leaves out control tokens. `at_start=False` says that other text comes before: SPM's first
        space is then a space between words, not an artefact of encoding.

        Raises:
            TokenizerError: the vocabulary has no such id.
        """
        stream = self.stream(skip_special=skip_special, at_start=at_start)
        return "".join([*map(stream.add, ids), stream.finish()])

    def stream(self, *, skip_special: bool = False, at_start: bool = True) -> StreamDecoder:
        """`decode` for ids that come one at a time."""
        return StreamDecoder(self._vocabulary, skip_special=skip_special, at_start=at_start)

    def token(self, token_id: int) -> str:
        """A token as the vocabulary writes it: a space is `Ġ` or `▁` there, and a byte may look like another letter.

        Raises:
            TokenizerError: the vocabulary has no such id.
        """
        self._vocabulary.check(token_id)
        return self._vocabulary.tokens[token_id]

    def __repr__(self) -> str:
        return f"<Tokenizer {self.kind}, {self.vocab_size:,} tokens, from {self._vocabulary.where}>"


def mark_special(core: tokenizers.Tokenizer, vocabulary: Vocabulary) -> None:
    """Tell `core` which tokens to find in text before anything else: control and unknown on request, others always."""
    control = vocabulary.ids_of(TokenType.CONTROL, TokenType.UNKNOWN)
    always = vocabulary.ids_of(TokenType.USER_DEFINED)
    for special, ids in ((True, control), (False, always)):
        added = [AddedToken(vocabulary.tokens[i], special=special, normalized=False) for i in ids]
        (core.add_special_tokens if special else core.add_tokens)(added)
