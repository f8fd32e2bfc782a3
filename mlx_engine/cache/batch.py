"""Make a `Batch` from the new tokens of one or more sequences: allocate pages, and compute slots and positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mlx_engine.backends.batch import Batch, KVGroup
from mlx_engine.backends.parameters import Token
from mlx_engine.cache.sequence import KVSequence


class SequenceInput(NamedTuple):
    """New tokens of a sequence.

    Attributes:
        ids: (n,), at least one.
        kv: the KV cache of the sequence.
        wanted: the number of last tokens whose logits are wanted; None for all.
    """

    ids: Sequence[Token]
    kv: KVSequence
    wanted: int | None = 1


def begin(parts: Sequence[SequenceInput]) -> Batch:
    """Allocate pages for the new tokens and return them as one batch. The caller commits or rolls back the batch.

    Raises:
        CacheFullError: there are too few free pages, or a sequence is at its capacity; no sequence has changed.
    """
    if not parts:
        raise ValueError("expected new tokens of at least one sequence, found none")
    pool, lengths = parts[0].kv.pool, tuple(len(part.ids) for part in parts)
    wanted = tuple(n if part.wanted is None else part.wanted for part, n in zip(parts, lengths, strict=True))
    if not all(lengths):
        raise ValueError(f"expected at least one new token of each sequence, found {lengths}")
    if any(part.kv.pool is not pool for part in parts):
        raise ValueError("expected sequences of one pool, found several pools")
    if len({part.kv for part in parts}) != len(parts):
        raise ValueError(f"expected {len(parts)} different sequences, found one of them twice")
    if any(not 0 <= want <= n for want, n in zip(wanted, lengths, strict=True)):
        raise ValueError(f"expected logits of at most {lengths} tokens to be wanted, found {wanted}")
    firsts: list[int] = []
    try:
        for part, n in zip(parts, lengths, strict=True):
            firsts.append(part.kv.begin(n))
        return _batch(parts, lengths, wanted, firsts)
    except BaseException:
        for part, n in list(zip(parts, lengths, strict=True))[: len(firsts)]:
            part.kv.roll_back(n)
        raise


def _batch(
    parts: Sequence[SequenceInput], lengths: tuple[int, ...], wanted: tuple[int, ...], firsts: Sequence[int]
) -> Batch:
    pool, sequences = parts[0].kv.pool, tuple(part.kv for part in parts)
    places = tuple(zip(sequences, firsts, lengths, strict=True))
    groups = tuple(
        KVGroup(
            window,
            tuple([kv.span(group, first + n, n) for kv, first, n in places]),
            np.concatenate([kv.slots(group, first, n) for kv, first, n in places]),
        )
        for group, window in enumerate(pool.windows)
    )
    return Batch(
        ids=[i for part in parts for i in part.ids],
        lengths=lengths,
        positions=tuple(p for first, n in zip(firsts, lengths, strict=True) for p in range(first, first + n)),
        wanted=wanted,
        kv=sequences,
        stores=pool.stores,
        groups=groups,
        runs=_runs(parts, lengths),
    )


def _runs(parts: Sequence[SequenceInput], lengths: Sequence[int]) -> np.ndarray:
    """Return the rows and slots of states (n, 4): see `StateView`."""
    runs, row = [], 0
    for part, n in zip(parts, lengths, strict=True):
        at = row
        for n_rows, source, target in part.kv.state.runs:
            runs.append((at, n_rows, source, target))
            at += n_rows
        row += n
    return np.array(runs, dtype=np.int64).reshape(-1, 4)
