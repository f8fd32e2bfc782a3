"""The user's functions: processors edit the logits of a sequence before each draw, a sampler chooses the token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_engine.backends.sampling import masked
from mlx_engine.errors import ProcessorError, is_whole, shown
from mlx_engine.options import Options, Processor, name_of


class Processors:
    """The processors of a run, in order, and the user's sampler.

    They are called once for each token of an answer, with the ids of all tokens before it and a copy of its logits.
    """

    def __init__(self, processors: Sequence[Processor], sampler: Processor | None) -> None:
        self._processors, self._sampler = processors, sampler

    @classmethod
    def of(cls, options: Options) -> Processors | None:
        """Return the processors of a run; None if it has no processor and no sampler."""
        has_any = options.processors or options.sampler is not None
        return cls(options.processors, options.sampler) if has_any else None

    def __call__(self, ids: Sequence[int], logits: np.ndarray, mask: NDArray[np.bool_] | None = None) -> np.ndarray:
        """Return the logits (V,) from which the token is drawn: the result of the last processor.

        A sampler gets the logits under the mask (V,) of the sequence's constraint; then only the token that it chooses
        has a finite logit. A processor must leave a finite logit for a token that the mask allows.

        Raises:
            ProcessorError: a function has failed, or has not returned logits or a token.
        """
        for i, processor in enumerate(self._processors):
            who = f"processors[{i}] ({name_of(processor)})"
            returned = _called(who, processor, ids, logits.copy())
            logits = _checked(who, returned, logits.shape, mask, len(ids))
        if self._sampler is None:
            return logits
        who, row = f"sampler ({name_of(self._sampler)})", logits.copy() if mask is None else masked(logits, mask)
        chosen = _called(who, self._sampler, ids, row.copy())
        token = chosen.item() if hasattr(chosen, "item") and getattr(chosen, "size", 1) == 1 else chosen
        if not is_whole(token) or not 0 <= token < len(row) or row[token] == -np.inf:
            expected = f"expected a token id from 0 to {len(row) - 1} with a finite logit"
            raise ProcessorError(
                f"{who} after {len(ids):,} tokens: {expected}, found {shown(chosen)}; return such an id"
            )
        alone = np.full_like(row, -np.inf)
        alone[token] = 0
        return alone


def _called(who: str, function: Callable[..., Any], ids: Sequence[int], logits: np.ndarray) -> Any:
    try:
        return function(list(ids), logits)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
        # The traceback through this frame would keep the scheduler and its memory alive as long as the error.
        error.__traceback__ = error.__traceback__.tb_next if error.__traceback__ else None
        raise ProcessorError(f"{who} failed after {len(ids):,} tokens: {reason}") from error


def _checked(who: str, returned: Any, shape: tuple[int, ...], mask: NDArray[np.bool_] | None, n: int) -> np.ndarray:
    """Return what a processor has returned as float32 logits; raise ProcessorError if no token can be drawn from it."""
    expected = f"{who} after {n:,} tokens: expected logits of shape {shape}"
    try:
        logits = np.asarray(returned, dtype=np.float32)
    except (TypeError, ValueError):
        raise ProcessorError(f"{expected}, found {shown(returned)}; return the logits") from None
    if logits.shape != shape:
        found = "None" if returned is None else f"shape {logits.shape}"
        raise ProcessorError(f"{expected}, found {found}; return the logits")
    allowed = logits if mask is None else logits[mask]
    if np.isnan(logits).any() or (logits == np.inf).any() or not (allowed > -np.inf).any():
        which = "" if mask is None else " that the constraint allows"
        raise ProcessorError(
            f"{expected} without NaN and infinity, of which one{which} is finite, found others; "
            "minus infinity bans a token"
        )
    return logits
