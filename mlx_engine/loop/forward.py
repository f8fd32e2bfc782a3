"""Run single forward passes without a scheduler, and search for the first non-finite value of a pass.

The search runs after a pass has given a row of logits or hidden states that is not finite.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

import numpy as np

from mlx_engine.backends.parameters import Array
from mlx_engine.cache import SequenceInput, begin
from mlx_engine.cache.pool import LONGEST_PASS
from mlx_engine.errors import DistributedError, NotFiniteError
from mlx_engine.weights.model import Model


def forward(model: Model, *parts: SequenceInput) -> Array | None:
    """Run one forward pass, and return the logits (R, V) of its R wanted tokens; None if no token is wanted.

    The last `SequenceInput.wanted` tokens of each sequence are wanted. The new tokens are committed to the KV cache; a
    lazy backend may compute the pass later. If this call fails or is interrupted, every sequence is unchanged.

    Raises:
        CacheFullError: there are too few pages for the new tokens.
    """
    batch = begin(parts)
    try:
        logits = model.forward(batch)
    except BaseException:
        batch.roll_back()
        raise
    batch.commit()
    return logits


def forward_logits(model: Model, *parts: SequenceInput) -> Array:
    """Run one forward pass as `forward` does, and return logits (R, V); raise ValueError if no token is wanted."""
    if all(part.wanted == 0 for part in parts):  # check this before any token is committed
        raise ValueError("expected a forward pass with wanted tokens, found none")
    return wanted_logits(forward(model, *parts))


def wanted_logits(logits: Array | None) -> Array:
    """Return the logits of a pass; raise ValueError if it had no wanted tokens."""
    if logits is None:
        raise ValueError("expected a forward pass with wanted tokens, found none")
    return logits


# Matches the beginning of the name of an intermediate value that belongs to a layer.
_LAYER = re.compile(r"blk\.(\d+)\.")


def check_logits(model: Model, logits: Array, ids: Sequence[int]) -> None:
    """Check the logits (R, V) of the last R tokens of a sequence.

    `ids` has all tokens of the sequence. The sequence must have the default LoRA adapter.

    Raises:
        NotFiniteError: a row has NaN or infinities; see `not_finite`.
    """
    be = model.backend
    for r, row in be.bad_rows(logits, be.row_sums(logits)).items():
        raise not_finite(model, ids[: len(ids) - len(be.host(logits)) + r + 1], row)


def not_finite(model: Model, ids: Sequence[int], row: np.ndarray, adapter: int | None = None) -> NotFiniteError:
    """Run all tokens again to find the first intermediate value that is not finite; return the error that names it.

    Every operation is run in its composed (unfused) form.

    Args:
        model: the model.
        ids: the tokens of the sequence, up to the token whose row is not finite.
        row: the logits (V,) of this token, or its hidden state (D,) if the request reads hidden states.
        adapter: the number of the sequence's LoRA adapter, see `KVSequence.adapter`; None for the default adapter.
    """
    verify = "`inspect --verify` checks the file's weights"
    try:
        found = model.first_fault(partial(_run_again, ids, adapter))
    except DistributedError:  # the connection between the ranks has failed
        raise
    except Exception as error:  # for example too little memory for the search
        origin = f"and the search for their origin failed ({type(error).__name__}); {verify}"
        return NotFiniteError(n_tokens=len(ids), found=_text(*_counts(row)), origin=origin)
    if found is None:
        origin = "but every value was finite when the tokens were run again; report this as a bug of the backend"
        return NotFiniteError(n_tokens=len(ids), found=_text(*_counts(row)), origin=origin)
    match = _LAYER.match(found.name)
    layer = int(match[1]) if match else None
    place = "outside of the layers" if layer is None else f"in layer {layer} (0 to {model.config.n_layers - 1})"
    rank = "" if found.rank is None else f", on rank {found.rank}"
    return NotFiniteError(
        n_tokens=len(ids), found=_text(found.n_nan, found.n_bad, found.n_values),
        origin=f"first in {found.name}, {place}{rank}; {verify}", first=found.name, layer=layer,
    )  # fmt: skip


def _run_again(ids: Sequence[int], adapter: int | None, model: Model) -> None:
    """Run all tokens in a new KV cache, and report the logits of the last token as the intermediate value "output"."""
    be = model.backend
    with be.session(), np.errstate(all="ignore"):
        kv = model.new_kv(len(ids))
        kv.adapter = kv.adapter if adapter is None else adapter
        for start in range(0, len(ids), LONGEST_PASS):
            is_last = start + LONGEST_PASS >= len(ids)
            logits = forward(model, SequenceInput(ids[start : start + LONGEST_PASS], kv, wanted=int(is_last)))
            if logits is not None:
                be.note("output", logits)


def _counts(values: np.ndarray) -> tuple[int, int, int]:
    """Return the number of values that are NaN, the number that are NaN or infinite, and the number of all values."""
    return int(np.isnan(values).sum()), int((~np.isfinite(values)).sum()), int(values.size)


def _text(n_nan: int, n_bad: int, n_values: int) -> str:
    """Return a description such as "NaN and infinity (3 of 100 values)", from the numbers that `_counts` returns."""
    kind = "infinity" if n_nan == 0 else "NaN" if n_nan == n_bad else "NaN and infinity"
    return f"{kind} ({n_bad:,} of {n_values:,} values)"
