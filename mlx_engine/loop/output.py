"""The output of one answer: its tokens, their decoded text, and the reason for its end.

The scheduler appends each new token to an `Output`. Text that may be the beginning of a stop string is held back until
later text shows whether it is the stop string.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from logging import INFO
from typing import Literal, Protocol

from mlx_engine.loop.logprobs import TokenLogprobs
from mlx_engine.loop.sampler import Sampler
from mlx_engine.observe.log import LOGGER, event
from mlx_engine.options import Options

FinishReason = Literal["stop", "length", "timeout"]


class TextDecoder(Protocol):
    """Decodes token ids to text one by one, and returns complete characters only."""

    @property
    def marks(self) -> Sequence[int]:
        """The indices in the text so far at which the texts of control tokens begin."""

    def add(self, token_id: int) -> str:
        """Return the new text that has become complete with this token."""

    def finish(self) -> str:
        """End the text, and return its rest: U+FFFD for an incomplete character, otherwise ""."""


class NoText:
    """A decoder that returns no text, for benchmarks and for requests that only read a prompt."""

    marks: Sequence[int] = ()

    def add(self, token_id: int) -> str:
        """Return no text."""
        return ""

    def finish(self) -> str:
        """Return no text."""
        return ""


class Output:
    """The tokens and the text of one answer.

    An answer ends at an end-of-text or stop token, at a stop string, at the token limit, when its constraint allows no
    more text, or when `end` is called, for example after a timeout.

    Attributes:
        token_ids: the tokens so far, including the end-of-text or stop token.
        pieces: the parts of the text so far, each appended when it became complete. They do not include the text of an
            end-of-text or stop token, or the stop string.
        logprobs: the log-probabilities of each token; None if the options do not ask for them.
        finish_reason: why the output has ended; None while more tokens follow.
        stop: the stop string or the stop token id that ended the output; None if neither did.
        has_end_token: whether the last token is an end-of-text or stop token.
    """

    def __init__(self, options: Options, *, max_tokens: int, text: TextDecoder, end_ids: Collection[int]) -> None:
        self.max_tokens, self._text = max_tokens, text
        self._end_ids = () if options.ignore_eos else end_ids
        self._stop_ids = options.stop_token_ids
        self._stops = StopStrings(options.stop)
        self.token_ids: list[int] = []
        self.pieces: list[str] = []
        self.logprobs: list[TokenLogprobs] | None = None if options.logprobs is None else []
        self.finish_reason: FinishReason | None = None
        self.stop: str | int | None = None
        self.has_end_token = False

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.pieces)

    @property
    def marks(self) -> Sequence[int]:
        """The indices at which the texts of control tokens begin, in the text so far and its held-back part."""
        return self._text.marks

    def append(self, token: int, sampler: Sampler, n_logprobs: int | None = None) -> None:
        """Append the token that a sampler has chosen last. If `max_tokens` is 0, end without the token.

        If the options ask for log-probabilities, and `n_logprobs` is not None, also append the log-probabilities of the
        token and of the `n_logprobs` most likely tokens.
        """
        if not self.max_tokens:
            self.end("length")
            return
        if self.logprobs is not None and n_logprobs is not None:
            self.logprobs.append(sampler.logprobs(n_logprobs))
        self.token_ids.append(token)
        self.stop = token if token in self._stop_ids else None
        self.has_end_token = ended = self.stop is not None or token in self._end_ids
        piece = self._stops.add("" if ended else self._text.add(token))
        if ended or self._stops.found or sampler.is_complete:
            self.finish_reason = "stop"
        elif len(self.token_ids) == self.max_tokens:
            self.finish_reason = "length"
        if self.finish_reason is not None:
            piece += self._rest()
        if piece:
            self.pieces.append(piece)
        if LOGGER.isEnabledFor(INFO):
            self._log(token, piece, sampler.probability())

    def end(self, reason: FinishReason) -> None:
        """End the output with this reason, or with "stop" if the rest of the text completes a stop string.

        Do nothing if the output has already ended.
        """
        if self.finish_reason is None:
            self.finish_reason = reason
            if piece := self._rest():
                self.pieces.append(piece)

    def _rest(self) -> str:
        """End the text, and return its held-back rest."""
        piece = self._stops.add(self._text.finish()) + self._stops.finish()
        # An incomplete character at the end becomes U+FFFD, which may complete a stop string.
        if self._stops.found:
            self.finish_reason, self.stop = "stop", self._stops.found
        return piece

    def _log(self, token: int, piece: str, probability: float | None) -> None:
        step = len(self.token_ids)
        phase = "prefill" if step == 1 else "decode"
        event(INFO, "token", step=step, id=token, probability=probability, text=piece, phase=phase)
        if self.has_end_token:
            event(INFO, "end", step=step, id=token)


class StopStrings:
    """Ends a stream of text before the first complete stop string, which may span several pieces.

    If several stop strings end at the same character, the longest one counts. The time per character does not depend on
    the length of the stop strings. `found` is the stop string that ended the stream, or None.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held = [_Matcher(stop) for stop in stops], ""
        self.found: str | None = None

    def add(self, piece: str) -> str:
        """Return the text that can be output now; after a stop string, always ""."""
        if self.found:
            return ""
        if not self._stops:
            return piece
        text = self._held + piece
        ends = [(end, -len(stop.text), stop.text) for stop in self._stops if (end := stop.read(piece)) is not None]
        if ends:
            held, self._held = len(self._held), ""
            end, length, self.found = min(ends)
            return text[: held + end + length]
        keep = max(stop.n_matched for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """End the stream, and return the text that is still held back."""
        held, self._held = self._held, ""
        return held


class _Matcher:
    """The automaton of Knuth, Morris and Pratt for one string.

    Attributes:
        text: the string.
        n_matched: the length of the longest prefix of `text` that is a suffix of the pieces read so far.
    """

    def __init__(self, text: str) -> None:
        self.text, self.n_matched = text, 0
        # For each prefix of the string, the length of its longest proper suffix that is also a prefix.
        self._shorter = array("H", [0] * len(text))
        for i in range(1, len(text)):
            self._shorter[i] = self._after(self._shorter[i - 1], text[i])

    def read(self, piece: str) -> int | None:
        """Read a piece; return the index in the piece after the end of the first match, or None without a match."""
        for i, character in enumerate(piece):
            self.n_matched = self._after(self.n_matched, character)
            if self.n_matched == len(self.text):
                return i + 1
        return None

    def _after(self, n: int, character: str) -> int:
        """Return the length of the matched prefix after one more character, if n characters matched before."""
        while n and self.text[n] != character:
            n = self._shorter[n - 1]
        return n + (self.text[n] == character)
