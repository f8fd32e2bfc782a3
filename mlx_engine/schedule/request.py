"""A request: a prompt, and the outputs of one or more answers to it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlx_engine.cache.prefix import Match
from mlx_engine.decode.metrics import Metrics
from mlx_engine.decode.output import Output
from mlx_engine.options import Options

_numbers = itertools.count()


@dataclass
class Times:
    """When a request reached each stage, in seconds of the scheduler's clock; None before."""

    submitted: float | None = None
    admitted: float | None = None
    first_token: float | None = None
    ended: float | None = None


class Request:
    """A prompt, and one or more answers to it.

    Attributes:
        prompt_ids: the tokens of the prompt.
        prompt_array: the same (T,) int64.
        options: the options of the run.
        outputs: the output of each answer. The answers share one prefill.
        metrics: the times of the passes that computed tokens of the first answer.
        times: when the request reached each stage.
        match: what the prefix cache had of the prompt, without pages; None before, and without a prefix cache.
        n_cached: tokens of the prompt that were taken from the prefix cache.
        n_prefilled: tokens of the prompt that are in the KV cache, including those from the prefix cache.
        n_steps: number of passes that computed tokens of this request.
        n_rows: number of tokens in these passes, of all requests.
        n_bytes: bytes of weights, keys and values that these passes read, if the scheduler counts them.
        decode_bytes: those of the passes after the first token.
        decode_seconds: the time of these.
        n_preemptions: how often an answer lost its pages to an older request.
        error: what ended the request, if it failed.
        number: the order of arrival.
    """

    def __init__(
        self, prompt_ids: Sequence[int], options: Options, outputs: Sequence[Output], *, metrics: Metrics | None = None
    ) -> None:
        if not prompt_ids or not outputs:
            raise ValueError(f"expected a prompt and an output, found {len(prompt_ids)} tokens, {len(outputs)} outputs")
        self.prompt_ids, self.options, self.outputs = list(prompt_ids), options, tuple(outputs)
        self.metrics, self.times = metrics or Metrics(), Times()
        self.n_cached = self.n_prefilled = self.n_steps = self.n_rows = self.n_preemptions = 0
        self.n_bytes = self.decode_bytes = self.decode_seconds = 0.0
        self.match: Match | None = None
        self.prompt_array = np.array(self.prompt_ids, dtype=np.int64)
        self.error: Exception | None = None
        self.number = next(_numbers)

    @property
    def output(self) -> Output:
        """The output of the first answer."""
        return self.outputs[0]

    @property
    def has_ended(self) -> bool:
        """Whether all answers have ended, or the request has failed."""
        return self.error is not None or all(output.finish_reason is not None for output in self.outputs)

    @property
    def longest(self) -> int:
        """The largest number of tokens of one answer that the KV cache holds: all but the last new token."""
        return len(self.prompt_ids) + max(1, *(output.max_tokens for output in self.outputs)) - 1
