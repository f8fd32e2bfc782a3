"""One run as a stream of text, which ends at an end-of-text token, a stop string, the token limit or a timeout.

The timeout counts from when the first piece is asked for. It is checked after every token and, with a KV cache, after
every chunk of the prompt; a pass is not interrupted.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Collection, Generator, Iterator, Sequence
from dataclasses import dataclass
from logging import INFO
from typing import Literal, Protocol

from mlx_engine.decode.logprobs import TokenLogprobs
from mlx_engine.decode.loop import Progress, decode, decode_without_cache
from mlx_engine.decode.metrics import Metrics
from mlx_engine.decode.options import Options
from mlx_engine.decode.sampler import Sampler
from mlx_engine.decode.stops import StopStrings
from mlx_engine.models import Model
from mlx_engine.observe.log import enabled, event

FinishReason = Literal["stop", "length", "timeout"]


class _TimeIsUp(Exception):  # noqa: N818 - not an error; callers never get it
    """The timeout has expired during prefill."""


class TextDecoder(Protocol):
    """Decodes ids to text; returns complete characters only."""

    def add(self, token_id: int) -> str:
        """Return the text that is complete after this token."""

    def finish(self) -> str:
        """Return the rest of the text."""


@dataclass(frozen=True)
class Generation:
    """The result of a run.

    Attributes:
        text: the new text, without the end-of-text token and without the stop string.
        token_ids: the new tokens, including the end-of-text token if there is one.
        metrics: times of the passes.
        finish_reason: "stop" at an end-of-text token or stop string, "length" at the token limit, "timeout" if the
            timeout came first; None while the run continues.
        prompt_ids: the tokens of the prompt.
        logprobs: log-probabilities of the new tokens; None if they were not asked for.
    """

    text: str
    token_ids: list[int]
    metrics: Metrics
    finish_reason: FinishReason | None
    prompt_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None


class Stream:
    """An iterator over pieces of text; `generation` is the result so far.

    `progress`, if it is not None, is called with (tokens done, tokens in total) during prefill.
    """

    def __init__(
        self,
        model: Model,
        prompt_ids: Sequence[int],
        options: Options,
        *,
        max_tokens: int,
        text: TextDecoder,
        end_ids: Collection[int],
        progress: Progress | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self._prompt_ids, self._max_tokens, self._text = list(prompt_ids), max_tokens, text
        self._end_ids = () if options.ignore_eos else end_ids
        self._stops = StopStrings(options.stop)
        self._metrics = metrics or Metrics()
        self._token_ids: list[int] = []
        self._n_top = options.logprobs
        self._logprobs: list[TokenLogprobs] | None = None if options.logprobs is None else []
        self._written: list[str] = []
        self._finish_reason: FinishReason | None = None
        self.progress = progress
        self._timeout, self._deadline = options.timeout, math.inf
        self._pick = Sampler(model.backend, options.sampling, self._prompt_ids)
        self._is_running, self._ids = False, self._loop(model, options)

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> str:
        if not self._is_running and self._timeout is not None:
            self._deadline = self._metrics.clock() + self._timeout
        self._is_running = True
        try:
            piece = ""
            while not piece and self._finish_reason is None:
                token = next(self._ids, None)
                if token is None:  # closed
                    break
                piece = self._add(token)
        except _TimeIsUp:
            self._finish_reason = "timeout"
        except BaseException:
            self.close()
            raise
        if self._finish_reason is not None:
            self.close()
        if not piece:
            raise StopIteration
        return piece

    def close(self) -> None:
        """Cancel the run and free its KV cache; `generation` keeps the result so far."""
        ids, self._ids = self._ids, iter(())
        if isinstance(ids, Generator):
            ids.close()

    @property
    def n_prompt(self) -> int:
        """Number of tokens of the prompt."""
        return len(self._prompt_ids)

    @property
    def n_read(self) -> int:
        """The largest number of tokens that the model runs: all but the last new token."""
        return len(self._prompt_ids) + self._max_tokens - 1

    @property
    def generation(self) -> Generation:
        """The result so far."""
        return Generation(
            "".join(self._written),
            list(self._token_ids),
            copy.deepcopy(self._metrics),
            self._finish_reason,
            list(self._prompt_ids),
            None if self._logprobs is None else list(self._logprobs),
        )

    def _loop(self, model: Model, options: Options) -> Iterator[int]:
        if not options.kv:
            return decode_without_cache(model, self._prompt_ids, self._pick, self._metrics)
        kv = model.new_kv(self.n_read)
        # Weak: a stream that is dropped frees its KV cache at once, and not when cycles are collected.
        read = weakref.WeakMethod(self._read)

        def progress(done: int, total: int) -> None:
            if (report := read()) is not None:
                report(done, total)

        return decode(model, self._prompt_ids, kv, self._pick, self._metrics, progress=progress)

    def _read(self, done: int, total: int) -> None:
        """Report progress and check the timeout, after each chunk of the prompt."""
        if self.progress is not None:
            self.progress(done, total)
        if done < total and self._is_late():
            raise _TimeIsUp

    def _is_late(self) -> bool:
        return self._timeout is not None and self._metrics.clock() >= self._deadline

    def _log(self, token: int, piece: str) -> None:
        step, probability = len(self._token_ids), self._pick.probability()
        phase = "prefill" if step == 1 else "decode"
        event(INFO, "token", step=step, id=token, probability=probability, text=piece, phase=phase)
        if token in self._end_ids:
            event(INFO, "end", step=step, id=token)

    def _add(self, token: int) -> str:
        """Add a token, and return the text that is complete now; set the finish reason if it is the last one."""
        self._token_ids.append(token)
        if self._logprobs is not None and self._n_top is not None:
            self._logprobs.append(self._pick.logprobs(self._n_top))
        ended = token in self._end_ids
        piece = self._stops.add("" if ended else self._text.add(token))
        if ended or self._stops.found:
            self._finish_reason = "stop"
        elif len(self._token_ids) == self._max_tokens:
            self._finish_reason = "length"
        elif self._is_late():
            self._finish_reason = "timeout"
        if self._finish_reason is not None:
            piece += self._stops.add(self._text.finish()) + self._stops.finish()
            # An incomplete character at the token limit becomes U+FFFD, which may complete a stop string.
            self._finish_reason = "stop" if self._stops.found else self._finish_reason
        if enabled(INFO):
            self._log(token, piece)
        if piece:
            self._written.append(piece)
        return piece
