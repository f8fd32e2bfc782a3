"""Measure the perplexity of a text in strided windows, and how far a model's probabilities are from a reference's.

The definition is that of Hugging Face's guide to perplexity. A window has up to `context` tokens; the next window
begins `stride` tokens later. Each token is scored at most once: in the first window that contains it, from the tokens
before it in this window. The first token of a window is scored only if a BOS is put before the window. The
perplexity is exp of the mean negative log-likelihood (NLL) of all scored tokens.

The guide's code computes another perplexity, `Result.guide`: exp of a weighted mean of the windows' mean NLLs. The
weight of a window is the number of its tokens that are in no earlier window, minus 1. The two perplexities differ a
little if windows overlap.

The reference is another model, or a file with a model's log-probabilities: a line of JSON, then a record (`_record`)
per scored token.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mlx_engine.cache import KVSequence, SequenceInput
from mlx_engine.cache.pool import LONGEST_PASS
from mlx_engine.engine import Engine
from mlx_engine.errors import FormatError, OptionError, SourceError
from mlx_engine.kernels.files import draft
from mlx_engine.loop.forward import check_logits, forward
from mlx_engine.loop.logprobs import digest, token_logprobs
from mlx_engine.loop.row_reader import MOST_BYTES
from mlx_engine.weights.model import Model

Progress = Callable[[int, int], None]

MAGIC = "mlx_engine log-probabilities 1"
# The most bytes of the header, the first line of a reference file.
MOST_HEADER = 1 << 16
# In a file, a log-probability is at most this much below the largest one at its position: smaller ones are clipped.
# e**-24 is 4e-11.
DEPTH = 24.0
# The largest code of a rounded log-probability in a file.
CODES = (1 << 16) - 1
PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9)


class Window(NamedTuple):
    """Tokens [first, end) of the text, of which [new, end) are in no earlier window, and [scored, end) are scored."""

    first: int
    new: int
    scored: int
    end: int


@dataclass
class Result:
    """The scores of a text.

    Attributes:
        windows: the windows of the text, in order.
        ids: the scored tokens.
        logprobs: the log-probability of each scored token.
        kl: the Kullback-Leibler divergence KL(reference || model) at each scored token; empty without a reference.
        same_top: for each scored token, whether model and reference give the highest probability to the same token.
        references: the reference's log-probability of each scored token.
        squares: for each scored token, two sums over the vocabulary: of the squared differences of the model's logits
            from the reference's, and of the reference's squared logits. Empty if the reference is a file.
    """

    windows: Sequence[Window]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    same_top: list[bool] = field(default_factory=list)
    references: list[float] = field(default_factory=list)
    squares: list[tuple[float, float]] = field(default_factory=list)

    @property
    def guide(self) -> float | None:
        """The perplexity with the window weights of Hugging Face's guide; None if all these weights are 0."""
        ends = np.cumsum([window.end - window.scored for window in self.windows])
        means = [-np.mean(values) for values in np.split(self.logprobs, ends[:-1])]
        weights = [window.end - window.new - 1 for window in self.windows]
        return math.exp(np.average(means, weights=weights)) if sum(weights) else None

    @property
    def digest(self) -> str:
        """The digest of the scored tokens and their log-probabilities."""
        return digest(self.ids, self.logprobs)

    @property
    def logits_error(self) -> float | None:
        """The relative error of the logits in the Frobenius norm; None if the reference's logits are unknown."""
        wrong, size = np.sum(self.squares, axis=0) if self.squares else (0.0, 0.0)
        return math.sqrt(wrong / size) if size else None

    def summary(self) -> dict[str, Any]:
        """Return the perplexity, its standard error and the agreement with the reference, as JSON types."""
        nll = -np.array(self.logprobs)
        mean, error = float(nll.mean()), _standard_error(nll)
        found: dict[str, Any] = {
            "perplexity": math.exp(mean),
            "standard_error": None if error is None else math.exp(mean) * error,
            "nll": mean,
            "nll_standard_error": error,
            "perplexity_of_guide": self.guide,
            "n_scored": len(nll),
            "n_windows": len(self.windows),
        }
        return found | ({"reference": self._agreement()} if self.references else {})

    def _agreement(self) -> dict[str, Any]:
        ours, theirs = np.array(self.logprobs), np.array(self.references)
        kl, same, shift = np.array(self.kl), np.array(self.same_top, dtype=float), np.exp(ours) - np.exp(theirs)
        ratio = float((theirs - ours).mean())
        return {
            "perplexity": math.exp(-float(theirs.mean())),
            "log_ratio": ratio,
            "log_ratio_standard_error": _standard_error(theirs - ours),
            "logits_error": self.logits_error,
            "kl": _described(kl),
            "top_1_agreement": float(same.mean()),
            "top_1_standard_error": _standard_error(same),
            "probability_difference": {**_described(shift), "rms": float(np.sqrt((shift**2).mean()))},
        }


def _standard_error(values: np.ndarray) -> float | None:
    """Return the standard error of the mean; None for a single value."""
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None


def _described(values: np.ndarray) -> dict[str, Any]:
    """Return mean, standard error, extremes and percentiles."""
    found = {"mean": float(values.mean()), "standard_error": _standard_error(values)}
    percentiles = {f"{p:g}": float(v) for p, v in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True)}
    return found | {"minimum": float(values.min()), "maximum": float(values.max()), "percentiles": percentiles}


@dataclass(frozen=True)
class Text:
    """A text and its windows.

    Attributes:
        context: the largest number of tokens of a window.
        stride: the number of tokens from the beginning of a window to the beginning of the next window.
        bos: a token to put before each window that begins after token 0; None to put nothing there.
    """

    ids: Sequence[int]
    context: int
    stride: int
    bos: int | None = None

    def __post_init__(self) -> None:
        """Raise OptionError if the text has fewer than two tokens, or if the stride is invalid."""
        if len(self.ids) < 2:
            message = f"the text has {len(self.ids)} token; a perplexity needs at least 2"
            raise OptionError(message, option="FILE", found=len(self.ids))
        if not 1 <= self.stride <= self.context:
            message = f"stride must be from 1 to the context's {self.context:,} tokens, not {self.stride:,}"
            raise OptionError(message, option="stride", found=self.stride)

    @property
    def windows(self) -> list[Window]:
        """The windows, without those in which no token is scored."""
        found, end = list[Window](), 0
        for first in range(0, len(self.ids), self.stride):
            new, end = end, min(first + self.context, len(self.ids))
            scored = max(new, first if self.bos is not None and first > 0 else first + 1)
            if scored < end:
                found.append(Window(first, new, scored, end))
            if end == len(self.ids):
                break
        return found

    @property
    def n_scored(self) -> int:
        """The number of scored tokens."""
        return sum(window.end - window.scored for window in self.windows)

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that two runs must share to be compared token by token."""
        ids = sha256(np.array(self.ids, "<i4").tobytes()).hexdigest()
        return {"ids": ids, "n_tokens": len(self.ids), "context": self.context, "stride": self.stride, "bos": self.bos}


def rows_of(engine: Engine, text: Text) -> Iterator[tuple[int, np.ndarray]]:
    """Run all windows; yield (position, logits (R, V)), a few rows at a time.

    Row i scores the token of the text at `position + i`. The rows are valid until the next item.
    """
    model = engine.model
    kv = model.new_kv(text.context)
    for window in text.windows:
        before = [] if text.bos is None or window.first == 0 else [text.bos]
        ids = [*before, *text.ids[window.first : window.end - 1]]  # the last token predicts no token of the window
        shift = window.first + 1 - len(before)
        for position, rows in _chunked(model, ids, kv, window.scored - shift):
            yield position + shift, rows
        kv.close()


def _chunked(model: Model, ids: Sequence[int], kv: KVSequence, first: int) -> Iterator[tuple[int, np.ndarray]]:
    """Run `ids` in chunks. From `ids[first]` on, yield (i, logits (R, V)); row 0 has the logits after `ids[i]`."""
    be, at, most = model.backend, 0, max(1, MOST_BYTES // (4 * int(model.config.vocab_size)))
    while at < len(ids):
        n = min(LONGEST_PASS, len(ids) - at, max(0, first - at) + most)
        wanted = max(0, at + n - max(at, first))
        with be.session():
            logits = forward(model, SequenceInput(ids[at : at + n], kv, wanted))
            if logits is None:
                be.wait(kv.pool.stores.arrays)
            else:
                check_logits(model, logits, ids[: at + n])
        at += n
        if logits is not None:
            yield at - wanted, be.host(logits)


def measure(
    engine: Engine,
    text: Text,
    *,
    reference: Engine | Path | None = None,
    save: Path | None = None,
    progress: Progress = lambda done, total: None,
) -> Result:
    """Score a text with a model; if `save` is given, write the log-probabilities to this file.

    `reference` is another model with the same vocabulary, or a file that an earlier run has saved. `progress` is called
    with (tokens scored so far, tokens scored in total).

    Raises:
        OptionError: the reference has another vocabulary, or is a file made from other tokens or windows.
        FormatError: the file of the reference is damaged.
        SourceError: the file `save` cannot be written.
        NotFiniteError: logits are NaN or infinite.
    """
    found, be, total = Result(text.windows), engine.backend, text.n_scored
    n_vocab = int(engine.config.vocab_size)
    theirs = None if reference is None else _reference(reference, text, n_vocab)
    with nullcontext() if save is None else saving(save, text, n_vocab) as add:
        for position, rows in rows_of(engine, text):
            for row, token_id in zip(rows, text.ids[position:], strict=False):
                logprob = token_logprobs(be, row, token_id).logprob
                found.ids.append(token_id)
                found.logprobs.append(logprob)
                if add is not None:
                    add(row, logprob)
                if theirs is not None:
                    _compare(found, row, *next(theirs), has_logits=not isinstance(reference, Path))
            progress(len(found.logprobs), total)
    return found


def _reference(reference: Engine | Path, text: Text, n_vocab: int) -> Iterator[tuple[float, np.ndarray]]:
    """Return an iterator over the reference's (log-probability of the token, logits (V,)), one per scored token.

    If the reference is a file, rounded log-probabilities (V,) take the place of the logits.
    """
    if isinstance(reference, Path):
        return read_saved(reference, text, n_vocab)
    if int(reference.config.vocab_size) != n_vocab:
        found = f"{int(reference.config.vocab_size):,} tokens, and the model {n_vocab:,}"
        raise OptionError(f"reference: expected the model's vocabulary, found {found}", option="reference")
    return _scored_by(reference, text)


def _scored_by(engine: Engine, text: Text) -> Iterator[tuple[float, np.ndarray]]:
    for position, rows in rows_of(engine, text):
        for row, token_id in zip(rows, text.ids[position:], strict=False):
            yield token_logprobs(engine.backend, row, token_id).logprob, row


def log_softmax(row: np.ndarray) -> np.ndarray:
    """Return log-probabilities (V,) float64 of logits (V,), or of rounded log-probabilities, which it normalises."""
    x = row.astype(np.float64)
    x -= x.max()
    return x - math.log(np.exp(x).sum())


def _compare(found: Result, row: np.ndarray, logprob: float, reference: np.ndarray, *, has_logits: bool) -> None:
    ours, theirs = log_softmax(row), log_softmax(reference)
    found.kl.append(float(np.dot(np.exp(theirs), theirs - ours)))
    found.same_top.append(int(reference.argmax()) == int(row.argmax()))
    found.references.append(logprob)
    if has_logits:
        exact = reference.astype(np.float64)
        found.squares.append((float(np.square(row - exact).sum()), float(np.square(exact).sum())))


# ---- files ----


def _record(n_vocab: int) -> np.dtype[Any]:
    """Return the NumPy type of a scored token's record.

    A record has the token's log-probability, and the log-probabilities of the whole vocabulary, rounded to
    `least + step * code`.
    """
    return np.dtype([("logprob", "<f4"), ("least", "<f4"), ("step", "<f4"), ("codes", "<u2", (n_vocab,))])


@contextmanager
def saving(target: Path, text: Text, n_vocab: int) -> Iterator[Callable[[np.ndarray, float], None]]:
    """Write a reference file in a `with` block. The file appears under its name when the block ends without an error.

    The block gets a function that appends a token's record, given the logits (V,) and the token's log-probability.

    Raises:
        SourceError: the file cannot be written.
    """
    record = np.zeros(1, _record(n_vocab))

    def add(row: np.ndarray, logprob: float) -> None:
        x = log_softmax(row)
        least = max(float(x.min()), float(x.max()) - DEPTH)
        step = max((float(x.max()) - least) / CODES, 1e-9)
        codes = np.clip(np.rint((x - least) / step), 0, CODES)
        record[0] = (logprob, least, step, codes.astype(np.uint16))
        file.write(record.tobytes())

    try:
        with draft(target) as path:
            with path.open("wb") as file:
                file.write(json.dumps({"format": MAGIC, "vocab_size": n_vocab, **text.identity}).encode() + b"\n")
                yield add
            path.replace(target)
    except OSError as error:
        raise SourceError(f"{target}: cannot be written ({error.strerror}); check folder and space") from error


def is_saved(path: Path) -> bool:
    """Return whether a path is a reference file, as made by `saving`."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(MOST_HEADER).startswith(json.dumps({"format": MAGIC})[:-1].encode())


def read_saved(path: Path, text: Text, n_vocab: int) -> Iterator[tuple[float, np.ndarray]]:
    """Return an iterator over (log-probability of the scored token, rounded log-probabilities (V,) of the vocabulary).

    Raises:
        FormatError: the file is damaged.
        OptionError: the file was made with another text, vocabulary, context, stride or BOS.
    """
    with path.open("rb") as file:
        line = file.readline(MOST_HEADER)
    try:
        header = json.loads(line)
        if not isinstance(header, dict):
            raise ValueError(f"no object, but {type(header).__name__}")
    except (ValueError, RecursionError) as error:
        raise FormatError(
            where=str(path), expected="a header in JSON", found=str(error), hint="make it again"
        ) from error
    for name, wanted in {"vocab_size": n_vocab, **text.identity}.items():
        if header.get(name) != wanted:
            message = f"{path}: was made with another {name}, {header.get(name)}, not {wanted}; make it again"
            raise OptionError(message, option="reference", expected=wanted, found=header.get(name))
    record, n = _record(n_vocab), text.n_scored
    size = path.stat().st_size - len(line)
    if size != n * record.itemsize:
        raise FormatError(
            where=str(path),
            expected=f"{n * record.itemsize:,} bytes of records",
            found=f"{size:,}",
            hint="make it again",
        )
    return _records(np.memmap(path, record, "r", offset=len(line), shape=(n,)))


def _records(records: np.ndarray) -> Iterator[tuple[float, np.ndarray]]:
    for one in records:
        codes = one["codes"].astype(np.float64)
        yield float(one["logprob"]), codes * float(one["step"]) + float(one["least"])
