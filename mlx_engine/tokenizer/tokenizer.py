"""The tokenizer: encode text to token ids, decode them at once or one at a time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import AddedToken

from mlx_engine.errors import TokenizerError
from mlx_engine.kernels.cached import cached_property
from mlx_engine.tokenizer.vocabulary import BYTE_OF_CHARACTER, Kind, StreamDecoder, TokenType, Vocabulary

if TYPE_CHECKING:
    from mlx_engine.tokenizer.hf import FileTokenizer
    from mlx_engine.tokenizer.sandbox_process import SandboxProcess


# Texts of more than SHORT characters are encoded by a call that releases the GIL. This call starts the thread pool of
# the tokenizers library, and old versions of the library then warn in forked processes. So shorter texts, which take
# less than 10 ms, are encoded by a call that holds the GIL.
SHORT = 1 << 13

# The normal forms of Unicode can make text shorter: up to 4 bytes become 1, as when U+1D400 becomes "A".
NORMAL_FORMS, SHRINKING = ("NFC", "NFD", "NFKC", "NFKD"), 4


class Tokenizer:
    """A model's tokenizer, created by `from_gguf`, `from_json` or `load_tokenizer`. Thread-safe.

    `decode(encode(text)) == text` with three exceptions: SPM (SentencePiece) decodes U+2581 as a space; an SPM
    vocabulary without tokens for all bytes encodes unknown characters as the unknown token; and a `tokenizer.json` may
    normalise text.
    """

    def __init__(self, vocabulary: Vocabulary, core: tokenizers.Tokenizer | FileTokenizer) -> None:
        self._vocabulary = vocabulary
        self._core = core
        special = vocabulary.ids_of(TokenType.CONTROL, TokenType.UNKNOWN)
        self.special_tokens: dict[str, int] = {vocabulary.tokens[i]: i for i in special}
        self.user_defined_tokens: dict[str, int] = {
            vocabulary.tokens[i]: i for i in vocabulary.ids_of(TokenType.USER_DEFINED)
        }
        # Bytes that have no token. The library drops such bytes without an error.
        self._lacking = [
            bytes([byte])
            for character, byte in BYTE_OF_CHARACTER.items()
            if vocabulary.kind == "byte-level BPE" and core.token_to_id(character) is None
        ]

    def parts(self) -> tuple[Vocabulary, tokenizers.Tokenizer]:
        """Return the vocabulary and a copy of the library's tokenizer, for writing tokenizer files."""
        return self._vocabulary, tokenizers.Tokenizer.from_str(self._core.to_str())

    def padded(self, size: int) -> Tokenizer:
        """Return a tokenizer with at least `size` ids; added ids have no text, and no text encodes to them."""
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
        """The pre-tokenizer's name in a GGUF file; None for Gemma 4, a `tokenizer.json`, or SPM files without one."""
        return self._vocabulary.pre

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
        return len(self._vocabulary.tokens)

    @property
    def bos_id(self) -> int | None:
        """The id of the BOS token."""
        return self._vocabulary.bos_id

    @property
    def eos_id(self) -> int | None:
        """The id of the EOS token; `eog_ids` has all end tokens."""
        return self._vocabulary.eos_id

    @property
    def eog_ids(self) -> frozenset[int]:
        """All ids that end a generation: named by the file, or recognised by their text (`END_NAMES`)."""
        return self._vocabulary.eog_ids

    @property
    def add_bos(self) -> bool:
        """Whether a prompt begins with `bos_id`. `encode` never adds it; `generate` does."""
        return self._vocabulary.add_bos

    @property
    def ends(self) -> tuple[int, ...]:
        """The ids to append to texts for embeddings, by the file's settings. They are not appended to prompts."""
        return self._vocabulary.ends

    @property
    def chat_template(self) -> str | None:
        """The chat template, as Jinja source; None if the model has none."""
        return self._vocabulary.chat_template

    @property
    def response_template(self) -> Mapping[str, Any] | None:
        """The format of answers as a response template of Hugging Face; None if there is none, as in GGUF files."""
        return self._vocabulary.response_template

    @cached_property
    def sandbox(self) -> SandboxProcess:
        """The process that runs the chat template; it is started by the first request."""
        from mlx_engine.tokenizer.sandbox_process import SandboxProcess

        return SandboxProcess()

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Return the token ids of a text. No token is added, not even a BOS.

        With `special`, control tokens spelled in the text, such as `<|im_start|>`, become their ids. Otherwise, they
        are encoded as plain text, so that user input cannot forge a chat turn. User-defined tokens are always
        recognised.

        Raises:
            TokenizerError: the text is not valid Unicode (a lone surrogate), or the vocabulary cannot encode it.
        """
        where = self._vocabulary.where
        try:
            data = text.encode()
        except UnicodeEncodeError as problem:
            raise TokenizerError(
                f"the text to encode: expected text that UTF-8 can write, found {text[problem.start]!r} at index "
                f"{problem.start:,}, half of a surrogate pair; replace it before encoding"
            ) from None
        with refusals(where, f"a text of {len(text):,} characters cannot be encoded"):
            ids = self._encode(text, special)
        found = None if special else self._first_control(ids)
        if found is not None:
            raise TokenizerError(
                f"{where}: expected plain text to need no control token, found {self.token(found)!r} (id {found:,}), "
                "the vocabulary's only encoding of that text; encode with special=True to allow control tokens"
            )
        lacking = [byte for byte in self._lacking if byte in data]
        if lacking and self.decode(ids) != text:
            raise TokenizerError(
                f"{where}: expected a token for every byte of the text, found none for "
                f"{', '.join(f'0x{byte[0]:02X}' for byte in sorted(lacking))}; this vocabulary cannot write the text"
            )
        return ids

    def _encode(self, text: str, special: bool) -> list[int]:
        """Return the ids that the library encodes a text to."""
        if not isinstance(self._core, tokenizers.Tokenizer):  # a third party's tokenizer.json, in a sandbox process
            return self._core.encode(text, special=special)
        core = self._core if special else self._plain_core
        if len(text) <= SHORT:
            ids: list[int] = core.encode(text, add_special_tokens=False).ids
        else:
            ids = core.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    @cached_property
    def _plain_core(self) -> tokenizers.Tokenizer:
        """A second tokenizer of the library, which encodes control tokens as plain text.

        In the library, this is a setting of the tokenizer and not an argument of `encode`. So threads that encode with
        and without control tokens at the same time need two tokenizers. These share the vocabulary and the merges.
        """
        whole = self._core
        assert isinstance(whole, tokenizers.Tokenizer)  # noqa: S101 - `FileTokenizer.encode` has an argument for this
        core = tokenizers.Tokenizer(whole.model)
        for step in ("normalizer", "pre_tokenizer", "post_processor"):
            if (value := getattr(whole, step)) is not None:
                setattr(core, step, value)
        core.add_tokens([token for _, token in sorted(whole.get_added_tokens_decoder().items())])
        core.encode_special_tokens = True
        return core

    def _first_control(self, ids: list[int]) -> int | None:
        """Return the first id that is a control token; None if no id is one."""
        # The ids are searched in parts, because other threads can take the GIL only between calls into C.
        control, rest = self._vocabulary.control_ids, iter(ids)
        while part := list(islice(rest, SHORT)):
            if not control.isdisjoint(part):
                return next(i for i in part if i in control)
        return None

    @cached_property
    def most_bytes(self) -> int | None:
        """An upper bound on the bytes of text that one token stands for.

        None if normalisation, splitting or an added token may remove text, or if one token can stand for any number of
        unknown characters.
        """
        if isinstance(self._core, tokenizers.Tokenizer):
            normalizer, pre_tokenizer = (
                list(steps_of(part)) for part in (self._core.normalizer, self._core.pre_tokenizer)
            )
            trims = any(token.lstrip or token.rstrip for token in self._core.get_added_tokens_decoder().values())
            byte_fallback = bool(getattr(self._core.model, "byte_fallback", False))
        else:
            loaded = self._core.loaded
            normalizer, pre_tokenizer = loaded.steps(0), loaded.steps(1)
            trims, byte_fallback = loaded.trims, loaded.byte_fallback
        if trims or not (_keeps_text(normalizer, pre_tokenizer) and self._knows_all_bytes(byte_fallback)):
            return None
        longest, tokens = 0, self._vocabulary.tokens
        for i in sorted(range(len(tokens)), key=lambda i: -len(tokens[i])):
            if 4 * len(tokens[i]) <= longest:  # a character has at most 4 bytes
                break
            longest = max(longest, len(self._vocabulary.piece(i)))
        shrinks = any(step["type"] in NORMAL_FORMS for step in normalizer)
        return longest * SHRINKING if shrinks else longest

    def _knows_all_bytes(self, byte_fallback: bool) -> bool:
        if self.kind == "byte-level BPE":
            return True  # `encode` refuses a text with a byte that has no token
        return byte_fallback and all(self._core.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256))

    def decode(self, ids: Iterable[int], *, skip_special: bool = False, at_start: bool = True) -> str:
        """Return the text of token ids. Bytes that are not valid UTF-8 become U+FFFD.

        `skip_special` leaves out control tokens. SPM's encoding adds a space to the start of a text. This space is
        removed if `at_start` is true; pass false if the ids continue a text. Raise TokenizerError for an unknown id.
        """
        stream = self.stream(skip_special=skip_special, at_start=at_start)
        return "".join([*map(stream.add, ids), stream.finish()])

    def stream(self, *, skip_special: bool = False, at_start: bool = True) -> StreamDecoder:
        """Return a decoder for ids that arrive one at a time."""
        return StreamDecoder(self._vocabulary, skip_special=skip_special, at_start=at_start)

    def token(self, token_id: int) -> str:
        """Return a token as the file spells it (a space is `Ġ` or `▁`); raise TokenizerError for an unknown id."""
        return self._vocabulary.token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token, which may not be valid UTF-8; raise TokenizerError for an unknown id."""
        return self._vocabulary.piece(token_id)

    def pieces(self) -> list[bytes]:
        """Return the bytes of every token, by id."""
        return self._vocabulary.pieces()

    @cached_property
    def delimiter_ids(self) -> frozenset[int]:
        """Ids of tokens that delimit the parts of an answer (reasoning, text, tool calls), and occur inside no part.

        These are control, unknown and end tokens, and user-defined tokens that the chat template writes, such as
        "<tool_call>".
        """
        vocabulary, template = self._vocabulary, self.chat_template or ""
        written = {i for text, i in self.user_defined_tokens.items() if text.strip() and text in template}
        return frozenset({*self.special_tokens.values(), *vocabulary.eog_ids, *written})

    def __repr__(self) -> str:
        return f"<Tokenizer {self.kind}, {self.vocab_size:,} tokens, from {self._vocabulary.where}>"


def _keeps_text(normalizer: Iterable[dict[str, Any]], pre_tokenizer: Iterable[dict[str, Any]]) -> bool:
    """Return whether normalisation and splitting remove no text; Unicode's normal forms may still shorten it."""
    normal = all(
        step["type"] in (*NORMAL_FORMS, "Prepend", "ByteLevel")
        or (
            step["type"] == "Replace"  # a fixed text, not a regular expression, is replaced by at least as many bytes
            and len(step["content"].encode()) >= len(step["pattern"].get("String", step["content"] + " ").encode())
        )
        for step in normalizer
    )
    return normal and all(
        step["type"] in ("ByteLevel", "Metaspace", "Digits")
        or (step["type"] == "Split" and step["behavior"] != "Removed")
        for step in pre_tokenizer
    )


def mark_special(core: tokenizers.Tokenizer, vocabulary: Vocabulary) -> None:
    """Add control, unknown and user-defined tokens to `core`.

    `Tokenizer.encode` without `special` recognises only the user-defined tokens.
    """
    control = vocabulary.ids_of(TokenType.CONTROL, TokenType.UNKNOWN)
    always = vocabulary.ids_of(TokenType.USER_DEFINED)
    for special, ids in ((True, control), (False, always)):
        added = [AddedToken(vocabulary.tokens[i], special=special, normalized=False) for i in ids]
        (core.add_special_tokens if special else core.add_tokens)(added)


@contextmanager
def refusals(where: str, what: str) -> Iterator[None]:
    """Return a context that converts the library's failures to TokenizerError; other exceptions propagate."""
    try:
        yield
    except BaseException as problem:  # a Rust panic is not an Exception, and its class has no public name
        if type(problem) is not Exception and type(problem).__name__ != "PanicException":
            raise
        reason = (str(problem).splitlines() or ["no reason given"])[0]
        raise TokenizerError(f"{where}: {what}; the tokenizers library says: {reason:.300}") from None


def steps_of(component: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps of a normaliser, pre-tokenizer or decoder as JSON; a "Sequence" has several steps."""
    if component is not None:
        state = json.loads(component.__getstate__())
        lists = [value for value in state.values() if isinstance(value, list)]
        yield from lists[0] if state["type"] == "Sequence" else [state]
