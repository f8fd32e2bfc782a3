"""Turn constraints on the text of an answer into masks of the tokens that may come next, with the library llguidance.

A `Grammars` belongs to a tokenizer, and makes a `Matcher` for a constraint. Each sequence has its own matcher, which
returns the mask of the next token and is advanced by each chosen token. A mask depends only on the vocabulary, the
constraint and the tokens so far.

If a constraint allows only one continuation, llguidance could encode this text and append its tokens (*forced* tokens)
without running the model. This is turned off: the model chooses every token, so every token has a log-probability.

llguidance marks the end of a text with an extra token, whose id follows the last id of the vocabulary. If this token
may come next, the mask allows all end tokens of the model.
"""

from __future__ import annotations

import copy
import json
import re
import threading
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mlx_engine.constraint import Constraint, bounded
from mlx_engine.errors import ConstraintError, OptionError, shown
from mlx_engine.kernels.cached import cached_property
from mlx_engine.machine.forks import kept_over_forks

if TYPE_CHECKING:
    from mlx_engine.tokenizer.tokenizer import Tokenizer

Mask = NDArray[np.bool_]

# The number of compiled constraints that are kept for later requests, for example one per set of tools.
COMPILED = 32

# The first line of every grammar turns forced tokens off.
HEAD = '%llguidance {"no_forcing": true}\n'

# Models write one or two line feeds between reasoning and text. So one of these tokens may come before the text.
LINE_FEEDS = (b"\n", b"\n\n")


class Reasoning(NamedTuple):
    """The reasoning at the start of an answer, to which a constraint does not apply.

    Attributes:
        opening: the ids of the marker that opens the reasoning, such as "<think>". Empty if the prompt ends with this
            marker; otherwise an answer begins with the marker, or has no reasoning.
        closing: the bytes of the marker that closes the reasoning.
    """

    opening: tuple[int, ...]
    closing: bytes


class Grammars:
    """Makes matchers for the vocabulary of one tokenizer. Thread-safe.

    Args:
        n_logits: the number of the model's logits, which is the length V of the masks.
    """

    def __init__(self, tokenizer: Tokenizer, n_logits: int) -> None:
        self._tokenizer, self.n_logits = tokenizer, n_logits
        self.end_ids = np.array(sorted(i for i in tokenizer.eog_ids if i < n_logits), dtype=np.int64)
        self._lock = kept_over_forks(threading.Lock())
        # Held while a mask is computed, so that a forked process gets no matcher in a half-changed state.
        self.computing = kept_over_forks(threading.Lock())
        self._compiled = lru_cache(COMPILED)(self._compile)
        self._crossing: dict[bytes, NDArray[np.int64]] = {}

    @cached_property
    def pieces(self) -> list[bytes]:
        """The bytes of every token."""
        return self._tokenizer.pieces()

    @cached_property
    def end(self) -> int:
        """The id of llguidance's extra token, which ends a text."""
        return len(self.pieces)

    @cached_property
    def free(self) -> Mask:
        """The mask (V,) inside reasoning: it allows every token that does not end the answer."""
        mask = np.ones(self.n_logits, dtype=np.bool_)
        mask[self.end_ids] = False
        return mask

    @cached_property
    def line_feeds(self) -> NDArray[np.int64]:
        """The tokens that may stand between reasoning and text."""
        return np.array([i for i in range(self.n_logits) if self.pieces[i] in LINE_FEEDS], dtype=np.int64)

    @cached_property
    def _library(self) -> Any:
        """The vocabulary as an object of llguidance. Making it takes about 0.6 s and 60 MB for 152,000 tokens."""
        from llguidance import LLTokenizer

        vocabulary: Any = _Vocabulary(self.pieces, sorted(self._tokenizer.delimiter_ids))
        return LLTokenizer(vocabulary)

    def crossing(self, rest: bytes) -> NDArray[np.int64]:
        """Return the ids of tokens that begin with `rest`, the end of a marker, and have text after it.

        White space alone is no text.
        """
        if rest not in self._crossing:
            found = [i for i, piece in enumerate(self.pieces) if piece.startswith(rest) and piece[len(rest) :].strip()]
            self._crossing[rest] = np.array([i for i in found if i < self.n_logits], dtype=np.int64)
        return self._crossing[rest]

    def matcher(self, constraint: Constraint, reasoning: Reasoning | None = None) -> Matcher:
        """Return a matcher at the start of an answer.

        Raises:
            OptionError: the constraint is invalid, or allows no text.
        """
        with self._lock:
            return Matcher(self, self._compiled(constraint.kind, constraint.text).deep_copy(), reasoning)

    def _compile(self, kind: str, text: str) -> Any:
        from llguidance import LLMatcher

        compiled = LLMatcher(self._library, HEAD + lark(kind, text), log_level=0)
        if compiled.is_error():
            raise _invalid(compiled.get_error(), text)
        first = compiled.deep_copy()
        first.compute_bitmask()  # detects a constraint that allows no text, such as a schema that is its own $ref
        if first.is_error():
            raise _invalid(first.get_error(), text)
        return compiled


class Matcher:
    """The state of a constraint in one sequence.

    While one thread runs `mask`, other threads may only read `is_complete`.

    Attributes:
        is_complete: whether the text is complete, so that no token may follow.
    """

    def __init__(self, grammars: Grammars, compiled: Any, reasoning: Reasoning | None = None) -> None:
        self._grammars, self._compiled, self._reasoning = grammars, compiled, reasoning
        # An answer has these parts: opening marker, reasoning, line feeds, text. `_part` is the part of the next token.
        # `_at` is the number of ids of the opening marker so far. `_tail` has the last bytes of the reasoning, which
        # may be the beginning of the closing marker. `_n_text` is the number of tokens of the text so far.
        # `_has_ended` is set after an end token. `_past` has these five values as they were before each token.
        # `_found` is the result of `_words` for the next token; None before it has been computed.
        self._part = "text" if reasoning is None else "opening" if reasoning.opening else "reasoning"
        self._at, self._tail, self._n_text, self._has_ended = 0, b"", 0, False
        self._past: list[tuple[str, int, bytes, int, bool]] = []
        self._found: NDArray[np.uint8] | None = None
        self.is_complete = False

    def copy(self) -> Matcher:
        """Return a matcher in the same state, for another answer."""
        made = copy.copy(self)
        made._compiled, made._past = self._compiled.deep_copy(), list(self._past)
        return made

    def mask(self) -> Mask:
        """Return the mask (V,) of the tokens that may come next. If the text is complete, the mask allows all tokens.

        Raises:
            ConstraintError: no token may come next, or llguidance reports an error.
        """
        grammars, reasoning = self._grammars, self._reasoning
        if self.is_complete:
            return np.ones(grammars.n_logits, dtype=np.bool_)  # callers ignore this mask, because the answer ends
        if reasoning is not None and self._part == "reasoning":
            return self._free_mask(reasoning.closing)
        if reasoning is not None and self._part == "opening" and self._at:
            return self._only(reasoning.opening[self._at : self._at + 1])
        mask = self._text_mask()
        if reasoning is not None and self._part == "opening":
            mask[reasoning.opening[0]] = True
        elif self._part == "line feeds":
            mask[grammars.line_feeds] = True
        if not mask.any():
            why = "" if len(grammars.end_ids) else ", and the model has no end token"
            raise ConstraintError(f"constraint: no token of the vocabulary continues the text{why}; allow other texts")
        return mask

    def allows(self, token: int) -> bool:
        """Return whether a token may come next. This takes microseconds; a whole mask takes up to 1 ms.

        Raises:
            ConstraintError: llguidance reports an error.
        """
        reasoning = self._reasoning
        if self.is_complete:
            return True
        if reasoning is not None and self._part == "reasoning":
            return bool(self._free_mask(reasoning.closing)[token])
        if reasoning is not None and self._part == "opening":
            is_opening = token == reasoning.opening[self._at]
            return is_opening or (not self._at and self._continues(token))
        return (self._part == "line feeds" and token in self._grammars.line_feeds) or self._continues(token)

    def advance(self, token: int) -> None:
        """Advance the state by the chosen token.

        Raises:
            ConstraintError: the token continues neither the opening marker nor the text, or llguidance fails.
        """
        self._past.append((self._part, self._at, self._tail, self._n_text, self._has_ended))
        reasoning = self._reasoning
        if reasoning is not None and self._part == "reasoning":
            self._close(self._grammars.pieces[token], reasoning.closing)
        elif reasoning is not None and self._part == "opening" and (self._at or not self._continues(token)):
            self._open(token, reasoning.opening)
        elif self._part == "line feeds" and token in self._grammars.line_feeds and not self._continues(token):
            self._part = "text"
        else:
            self._write(token)
            self._part = "text"
            self.is_complete = self._has_ended or self._compiled.is_stopped()
        self._found = None

    def roll_back(self, n: int) -> None:
        """Return to the state before the last n tokens."""
        if not n:
            return
        n_text = self._n_text
        self._part, self._at, self._tail, self._n_text, self._has_ended = self._past[-n]
        del self._past[-n:]
        if n_text > self._n_text and not self._compiled.rollback(n_text - self._n_text):
            raise ConstraintError(f"constraint: {_reason(self._compiled.get_error())}")
        self._found, self.is_complete = None, False

    def _words(self) -> NDArray[np.uint8]:
        """Return an array that has 1 for each token that may continue the text, and 0 for other tokens.

        The array has one more item at its end, which is 1 if the text may end here.
        """
        if self._found is None:
            with self._grammars.computing:
                found = np.frombuffer(self._compiled.compute_bitmask(), dtype=np.uint8)
            if self._compiled.is_error():  # after an error, llguidance's mask allows the end of the text
                raise ConstraintError(f"constraint: {_reason(self._compiled.get_error())}")
            self._found = np.unpackbits(found, count=len(self._grammars.pieces) + 1, bitorder="little")
        return self._found

    def _text_mask(self) -> Mask:
        """Return the mask (V,) of the tokens that continue or end the text."""
        grammars, found = self._grammars, self._words()
        mask = found[: grammars.n_logits].astype(np.bool_)
        if found[-1]:
            mask[grammars.end_ids] = True
        return mask

    def _free_mask(self, closing: bytes) -> Mask:
        """Return the mask (V,) inside reasoning.

        The mask forbids tokens that end the answer. It also forbids tokens that contain both the end of the closing
        marker and the beginning of the text, because the constraint could not check this text.
        """
        mask = self._grammars.free
        for n in range(min(len(self._tail), len(closing) - 1), -1, -1):
            if self._tail.endswith(closing[:n]):
                crossing = self._grammars.crossing(closing[n:])
                if len(crossing):
                    mask = mask.copy()
                    mask[crossing] = False
        return mask

    def _only(self, ids: Iterable[int] | NDArray[np.int64]) -> Mask:
        """Return a mask (V,) that allows only these tokens."""
        mask = np.zeros(self._grammars.n_logits, dtype=np.bool_)
        mask[list(ids)] = True
        return mask

    def _continues(self, token: int) -> bool:
        """Return whether the constraint allows a token as the next token of the text, or as the token that ends it."""
        return self._is_next(token) or (token in self._grammars.end_ids and self._is_next(self._grammars.end))

    def _is_next(self, token: int) -> bool:
        """Return whether the text may continue with a token id; for `Grammars.end`, whether the text may end here.

        The result is an item of the array that `_words` returns. If this array has not been computed, compute only the
        item, which is faster.
        """
        if self._found is None:
            with self._grammars.computing:
                n_valid = self._compiled.validate_tokens([token])
            if self._compiled.is_error():
                raise ConstraintError(f"constraint: {_reason(self._compiled.get_error())}")
            return bool(n_valid)
        return bool(self._found[token])

    def _open(self, token: int, opening: Sequence[int]) -> None:
        """Advance by a token of the opening marker."""
        if token != opening[self._at]:
            raise ConstraintError(f"constraint: expected the token {opening[self._at]}, found {token}")
        self._at += 1
        self._part = "reasoning" if self._at == len(opening) else "opening"

    def _close(self, piece: bytes, closing: bytes) -> None:
        """Advance by a token of the reasoning; the token may complete the closing marker."""
        self._tail += piece
        if closing in self._tail:
            self._part, self._tail = "line feeds", b""
        else:
            self._tail = self._tail[-len(closing) :]

    def _write(self, token: int) -> None:
        """Advance by a token of the text, or by an end token."""
        if not self._has_ended and self._is_next(token) and self._compiled.consume_token(token):
            self._n_text += 1
            return
        if token not in self._grammars.end_ids or not (self._has_ended or self._is_next(self._grammars.end)):
            raise ConstraintError(f"constraint: the token {token} does not continue the text")
        self._has_ended = True


def lark(kind: str, text: str) -> str:
    """Return a constraint as a Lark grammar."""
    if kind == "json_schema":
        return f"start: %json {json.dumps(bounded(json.loads(text)))}"
    if kind == "choice":
        return f"start: CHOICE\nCHOICE: {' | '.join(json.dumps(one) for one in json.loads(text))}"
    if kind == "regex":
        from llguidance import regex_to_lark

        return f"start: TEXT\nTEXT: /{regex_to_lark(text, 'd')}/"
    return text


class _Vocabulary:
    """The vocabulary in the form that llguidance reads, with an extra token for the end of a text."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, pieces: Sequence[bytes], special_ids: Sequence[int]) -> None:
        self.tokens, self.special_token_ids = [*pieces, b""], special_ids
        self.eos_token_id = len(pieces)

    def __call__(self, text: str) -> list[int]:
        """Raise an error: llguidance encodes text only for forced tokens, which `HEAD` turns off."""
        raise AssertionError(f"expected no text to be encoded, found {shown(text)}")


def _invalid(error: str, text: str) -> OptionError:
    return OptionError(f"constraint: {_reason(error)}", option="constraint", expected="a constraint", found=text)


def _reason(error: str) -> str:
    """Return llguidance's error message on one line, without the parser's state and the position in our Lark text."""
    error = error.partition("<state>")[0].replace("NoExtensionBias", "it allows no text")
    lines = [line for line in error.splitlines() if not re.match(r"\s*(\d+ \||\^+\s*$|$)", line)]
    said = re.sub(r"^at \d+\(\d+\): ", "", " ".join(" ".join(lines).split()))
    if "coerce_one_of" in said:
        said = (
            "oneOf needs schemas that llguidance can prove to exclude each other; write anyOf, or add a const property "
            "to each schema"
        )
    return f"{said or 'llguidance gives no reason':.500}"
