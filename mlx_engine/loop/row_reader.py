"""Readers of a prompt's rows, for log-probabilities of a prompt, embeddings and reranking.

A row is the logits or the hidden state of one token of the prompt. A pass computes the rows of one chunk of the prompt.
A reader reads its rows one at a time, in the order of positions, so that a sum of rows does not depend on the chunks or
on the batch. Rows are dropped after they have been read: the logits of 8,192 tokens with a vocabulary of 150,000 would
take 5 GB.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, cast

import numpy as np

from mlx_engine.backends.base import Backend
from mlx_engine.loop.logprobs import TokenLogprobs, token_logprobs

# The largest number of bytes of logits that one pass computes for readers.
MOST_BYTES = 1 << 26


class RowReader(ABC):
    """Reads the rows of the tokens at positions [start, end) of a prompt.

    Attributes:
        kind: "logits": the rows of R tokens are logits (R, V). "hidden": they are hidden states (R, D) after the last
            norm.
        start: the position of the next row to read; it grows while the prompt is run. If the sequence is preempted and
            computed again, the rows before this position are skipped.
        end: the position after the last row to read.
    """

    kind: Literal["logits", "hidden"] = "logits"

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end

    def n_wanted(self, first: int, n: int) -> int:
        """Return how many of a chunk's rows, counted from its end, the pass must return for the reader.

        Return 0 if the reader needs no row of the chunk. The chunk has n tokens, from position `first` on.
        """
        at = max(first, self.start)
        return first + n - at if at < min(self.end, first + n) else 0

    def read(self, backend: Backend, first: int, rows: np.ndarray) -> None:
        """Read the rows (R, ...) of the tokens from position `first` on; skip rows outside of [start, end)."""
        for position, row in enumerate(rows, start=first):
            if position == self.start < self.end:
                self.read_row(backend, position, row)
                self.start += 1

    @abstractmethod
    def read_row(self, backend: Backend, position: int, row: np.ndarray) -> None:
        """Read the row of the token at `position`."""


class PromptLogprobs(RowReader):
    """Computes the log-probability of each prompt token after the first, and those of the `n_top` most likely tokens.

    Attributes:
        tokens: the log-probabilities so far, from those of the prompt's second token on.
    """

    def __init__(self, prompt_ids: Sequence[int], n_top: int = 0) -> None:
        super().__init__(0, len(prompt_ids) - 1)
        self._prompt_ids, self._n_top = prompt_ids, n_top
        self.tokens: list[TokenLogprobs] = []

    def read_row(self, backend: Backend, position: int, row: np.ndarray) -> None:
        """Append the log-probabilities of the token after `position`."""
        token_id = self._prompt_ids[position + 1]
        self.tokens.append(token_logprobs(backend, row, token_id, self._n_top, ranked=True))


class LastLogits(RowReader):
    """Keeps the logits of given token ids in the row of a prompt's last token.

    Attributes:
        values: the logits, in the order of the token ids; empty before the prompt has been run.
    """

    def __init__(self, n_prompt: int, token_ids: Sequence[int]) -> None:
        super().__init__(n_prompt - 1, n_prompt)
        self._token_ids = token_ids
        self.values: list[float] = []

    def read_row(self, backend: Backend, position: int, row: np.ndarray) -> None:
        """Keep the logits."""
        self.values = [float(row[i]) for i in self._token_ids]


class PooledHidden(RowReader):
    """Computes one vector from a prompt's hidden states.

    With the pooling "last", the vector is the hidden state of the last token; with "cls", that of the first token; with
    "mean", the mean of all hidden states, which are added in float64 in the order of positions.
    """

    kind = "hidden"

    def __init__(self, n_prompt: int, pooling: Literal["last", "mean", "cls"]) -> None:
        super().__init__(n_prompt - 1 if pooling == "last" else 0, 1 if pooling == "cls" else n_prompt)
        self._n, self._sum = self.end - self.start, cast("np.ndarray | None", None)

    def read_row(self, backend: Backend, position: int, row: np.ndarray) -> None:
        """Add a hidden state (D,)."""
        added = row.astype(np.float64)
        self._sum = added if self._sum is None else self._sum + added

    def vector(self, dimensions: int | None = None, *, normalized: bool) -> np.ndarray:
        """Return the float32 vector (D,), or its first `dimensions` values.

        With `normalized`, divide these values by their L2 norm.

        Raises:
            ValueError: the prompt has not been run.
        """
        if self._sum is None or self.start < self.end:
            raise ValueError(f"vector: expected a prompt that has been run, found {self.end - self.start} rows missing")
        x = (self._sum / self._n)[:dimensions]
        if normalized:  # `fsum` rounds only once, so the order of the terms does not matter
            x = x / max(math.sqrt(math.fsum((x * x).tolist())), 1e-12)
        return x.astype(np.float32)
