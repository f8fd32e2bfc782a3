"""The output of one run: its tokens, the text that they decode to, and how it ended."""

from __future__ import annotations

from collections.abc import Collection
from logging import INFO
from typing import Literal, Protocol

from mlx_engine.decode.logprobs import TokenLogprobs
from mlx_engine.decode.sampler import Sampler
from mlx_engine.decode.stops import StopStrings
from mlx_engine.observe.log import enabled, event
from mlx_engine.options import Options

FinishReason = Literal["stop", "length", "timeout"]


class TextDecoder(Protocol):
    """Decodes ids to text; returns complete characters only."""

    def add(self, token_id: int) -> str:
        """Return the text that is complete after this token."""

    def finish(self) -> str:
        """Return the rest of the text."""


class Output:
    """Grows by a token at a time, and ends at an end-of-text token, a stop string or the token limit.

    Attributes:
        token_ids: the tokens so far, including the end-of-text token.
        pieces: the text so far, without the end-of-text token and the stop string, as it became complete.
        logprobs: the log-probabilities of each token, if they were asked for.
        finish_reason: None while more tokens follow.
        max_tokens: the largest number of tokens.
    """

    def __init__(self, options: Options, *, max_tokens: int, text: TextDecoder, end_ids: Collection[int]) -> None:
        self.max_tokens, self._text = max_tokens, text
        self._end_ids = () if options.ignore_eos else end_ids
        self._stops = StopStrings(options.stop)
        self.token_ids: list[int] = []
        self.pieces: list[str] = []
        self.logprobs: list[TokenLogprobs] | None = None if options.logprobs is None else []
        self.finish_reason: FinishReason | None = None

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.pieces)

    def append(self, token: int, pick: Sampler, n_logprobs: int | None = None) -> None:
        """Append a token that a sampler has chosen, with the log-probabilities of it and `n_logprobs` others.

        If no token is wanted, the output ends without it.
        """
        if not self.max_tokens:
            self.end("length")
            return
        if self.logprobs is not None and n_logprobs is not None:
            self.logprobs.append(pick.logprobs(n_logprobs))
        self.token_ids.append(token)
        ended = token in self._end_ids
        piece = self._stops.add("" if ended else self._text.add(token))
        if ended or self._stops.found:
            self.finish_reason = "stop"
        elif len(self.token_ids) == self.max_tokens:
            self.finish_reason = "length"
        if self.finish_reason is not None:
            piece += self._rest()
        self._append(piece)
        if enabled(INFO):
            self._log(token, piece, pick.probability())

    def end(self, reason: FinishReason) -> None:
        """End the output before its last token, unless it has already ended."""
        if self.finish_reason is None:
            self.finish_reason = reason
            self._append(self._rest())

    def _rest(self) -> str:
        """Return the text that was held back until the end."""
        piece = self._stops.add(self._text.finish()) + self._stops.finish()
        # An incomplete character at the end becomes U+FFFD, which may complete a stop string.
        self.finish_reason = "stop" if self._stops.found else self.finish_reason
        return piece

    def _append(self, piece: str) -> None:
        if piece:
            self.pieces.append(piece)

    def _log(self, token: int, piece: str, probability: float | None) -> None:
        step = len(self.token_ids)
        phase = "prefill" if step == 1 else "decode"
        event(INFO, "token", step=step, id=token, probability=probability, text=piece, phase=phase)
        if token in self._end_ids:
            event(INFO, "end", step=step, id=token)
