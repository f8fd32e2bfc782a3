"""The bytes that a pass reads from memory: the weights once, and the keys and values of every sequence in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from mlx_engine.backends.costs import nbytes_of
from mlx_engine.backends.parameters import Linear
from mlx_engine.cache import KVPool
from mlx_engine.decode.passes import Part
from mlx_engine.models import Model


@dataclass(frozen=True)
class Traffic:
    """What a pass of a model reads. Counted from sizes, not measured; embedding lookups are neglected.

    Attributes:
        weights: bytes of the matrices of the layers and the head.
        kv: bytes of keys and values per token, by window; None is the window of layers that see every token.
        state: bytes of a sequence's state, which a pass reads and writes.
    """

    weights: float
    kv: Mapping[int | None, float]
    state: int = 0

    @classmethod
    def of(cls, model: Model, pool: KVPool) -> Traffic:
        """Return what the passes of a model read; keys and values as float32."""
        found = {id(linear.weight): linear.weight for value in vars(model).values() for linear in linears(value)}
        kv = {window: nbytes / pool.page for window, nbytes in zip(pool.windows, pool.page_nbytes, strict=True)}
        return cls(sum(map(nbytes_of, found.values())), kv, pool.states.nbytes_each)

    def nbytes(self, parts: Iterable[Part]) -> float:
        """Return the bytes of one pass, from its parts after it has been committed."""
        lengths = [(part.sequence.kv.length, part.n) for part in parts]
        return (
            self.weights
            + 2 * self.state * len(lengths)
            + sum(
                nbytes * sum(length if window is None else min(length, window - 1 + n) for length, n in lengths)
                for window, nbytes in self.kv.items()
            )
        )


def linears(value: Any) -> list[Linear]:
    """Return all linear layers in an attribute of a model, which may be a dataclass or a list."""
    if isinstance(value, Linear):
        return [value]
    if isinstance(value, list | tuple):
        return [linear for item in value for linear in linears(item)]
    if is_dataclass(value):
        return [linear for field in fields(value) for linear in linears(getattr(value, field.name))]
    return []
