"""A line of the journal: what is needed to run a request again, and what came out of it."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from mlx_engine.errors import FormatError
from mlx_engine.loop.logprobs import digest
from mlx_engine.loop.output import Output
from mlx_engine.loop.request import Request
from mlx_engine.options import Options, Sampling
from mlx_engine.serve.job import Mark

# Options that change no token, and the one that is a struct of its own.
LEFT_OUT = ("sampling", "logprobs", "timeout")

# The options of `load` that a line may have: it is given to `load` as it is.
LOAD_OPTIONS = ("allow_settings", "jit", "context", "quant", "quant_min_dim", "quant_layers")


class ModelId(msgspec.Struct, frozen=True):
    """A loaded model.

    Attributes:
        name: its name in the API.
        source: where it was loaded from: a path, a hub id or "builtin".
        digest: the identity of its files, see `checkpoint/identity.py`.
        options: the keyword arguments of `load` that change its weights.
    """

    name: str
    source: str
    digest: str
    options: dict[str, Any]


class Choice(msgspec.Struct, frozen=True):
    """An answer.

    Attributes:
        token_ids: its tokens; of a request that was cancelled, those until then.
        logprobs: their log-probabilities: little-endian float32, as base64.
        digest: SHA-256 of both, see `decode/logprobs.py`.
        finish_reason: why it ended; null if it was cancelled.
    """

    token_ids: list[int]
    logprobs: str
    digest: str
    finish_reason: str | None

    @classmethod
    def of(cls, output: Output, mark: Mark) -> Choice:
        """Return an answer up to a mark."""
        ids = output.token_ids[: mark.n_tokens]
        values = [token.logprob for token in (output.logprobs or [])[: mark.n_tokens]]
        packed = base64.b64encode(np.array(values, "<f4").tobytes()).decode()
        return cls(ids, packed, digest(ids, values), mark.finish_reason)

    @property
    def logprob_values(self) -> list[float]:
        """The log-probabilities."""
        values: list[float] = np.frombuffer(base64.b64decode(self.logprobs, validate=True), "<f4").tolist()
        return values


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A request that has ended.

    Attributes:
        format: the version of this format.
        id: the id of the reply.
        client_id: the id that the client gave, if it gave one.
        received: when it arrived, in Unix seconds.
        ended: how it ended.
        error: the type of the error, if it failed.
        version: the version of mlx_engine.
        backend: the backend.
        slots: the largest number of answers that ran at the same time.
        model: the model.
        prompt_ids: the tokens of the prompt.
        options: keyword arguments of `Options.of` that are not at their defaults; the seed is the one that was used.
        choices: the answers.
        timings: the receipt, see `timings.py`.
    """

    id: str
    client_id: str | None
    received: float
    ended: Literal["finished", "cancelled", "failed"]
    error: str | None
    version: str
    backend: str
    slots: int
    model: ModelId
    prompt_ids: Annotated[list[int], msgspec.Meta(min_length=1)]
    options: dict[str, Any]
    choices: Annotated[list[Choice], msgspec.Meta(min_length=1)]
    timings: dict[str, Any]
    format: Literal[1] = 1

    @property
    def n_tokens(self) -> int:
        """The number of tokens of the longest answer."""
        return max(len(choice.token_ids) for choice in self.choices)

    def run_options(self) -> Options:
        """Return the options of a run that gives these answers; one that was cancelled ends where it was.

        Raises:
            OptionError, TypeError: an option is invalid.
        """
        given = {**self.options, "logprobs": 0}
        return Options.of(**(given if self.ended == "finished" else {**given, "max_tokens": self.n_tokens}))


def choices_of(request: Request, marks: Sequence[Mark]) -> list[Choice]:
    """Return the answers to a request, each up to its mark."""
    return [Choice.of(output, mark) for output, mark in zip(request.outputs, marks, strict=True)]


def plain_options(options: Options) -> dict[str, Any]:
    """Return the options that are not at their defaults, as JSON types."""
    found = {**asdict(options), **asdict(options.sampling)}
    defaults = {f.name: f.default for f in (*fields(Options), *fields(Sampling))}
    return {name: v for name, v in found.items() if name not in LEFT_OUT and v != defaults[name]}


def parse_entry(line: bytes, where: str) -> Entry:
    """Return a line of a journal.

    Raises:
        FormatError: the line is damaged.
    """
    try:
        entry = msgspec.json.decode(line, type=Entry)
        if entry.n_tokens:
            entry.run_options()
        if not set(entry.model.options) <= set(LOAD_OPTIONS):
            raise ValueError(f"options of the model besides {', '.join(LOAD_OPTIONS)}")
        for choice in entry.choices:
            if len(choice.logprob_values) != len(choice.token_ids):
                raise ValueError(f"{len(choice.token_ids)} tokens and {len(choice.logprob_values)} log-probabilities")
    except (msgspec.DecodeError, RecursionError, TypeError, ValueError) as error:
        hint = "the line was cut off or edited"
        raise FormatError(where=where, expected="a line of a journal", found=str(error), hint=hint) from error
    return entry
