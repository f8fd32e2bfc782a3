"""The bytes that a pass reads from memory: weights once, chosen experts once, keys and values of every sequence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from mlx_engine.backends.costs import nbytes_of
from mlx_engine.backends.experts import Experts, share_read
from mlx_engine.backends.parameters import Linear
from mlx_engine.cache import KVPool
from mlx_engine.decode.passes import Part
from mlx_engine.weights.model import Model


@dataclass(frozen=True)
class Traffic:
    """What a pass of a model reads. Counted from sizes, not measured; embedding lookups are neglected.

    Attributes:
        weights: bytes of the matrices of the layers and the head, without experts.
        kv: bytes of keys and values per token, by window; None is the window of layers that see every token.
        experts: bytes of experts, by the share of them that one token uses. For several tokens in a pass, the bytes
            that are read are an expectation.
        state: bytes of a sequence's state, which a pass reads and writes.
    """

    weights: float
    kv: Mapping[int | None, float]
    experts: Mapping[float, float] = field(default_factory=dict)
    state: int = 0

    @classmethod
    def of(cls, model: Model, pool: KVPool) -> Traffic:
        """Return what the passes of a model read; keys and values as float32."""
        parts = [part for value in vars(model).values() for part in parts_of(value, (Linear, Experts))]
        mixtures = [part for part in parts if isinstance(part, Experts)]
        dense = [part for part in parts if isinstance(part, Linear)] + [
            linear for experts in mixtures for linear in experts.dense
        ]
        found = {id(linear.weight): linear.weight for linear in dense}
        experts: dict[float, float] = {}
        for mixture in mixtures:
            experts[mixture.share] = experts.get(mixture.share, 0.0) + mixture.nbytes
        kv = {window: nbytes / pool.page for window, nbytes in zip(pool.windows, pool.page_nbytes, strict=True)}
        return cls(sum(map(nbytes_of, found.values())), kv, experts, pool.states.nbytes_each)

    def nbytes(self, parts: Iterable[Part]) -> float:
        """Return the bytes of one pass, from its parts after it has been committed."""
        lengths = [(part.sequence.kv.length, part.n) for part in parts]
        n_tokens = sum(n for _, n in lengths)
        experts = sum(nbytes * share_read(share, n_tokens) for share, nbytes in self.experts.items())
        return (
            self.weights
            + experts
            + 2 * self.state * len(lengths)
            + sum(
                nbytes * sum(length if window is None else min(length, window - 1 + n) for length, n in lengths)
                for window, nbytes in self.kv.items()
            )
        )


def linears(value: Any) -> list[Linear]:
    """Return all linear layers in an attribute of a model; the experts' only where each has a matrix of its own."""
    return parts_of(value, (Linear,))


def parts_of(value: Any, kinds: tuple[type, ...]) -> list[Any]:
    """Return all parts of these types in an attribute of a model, which may be a dataclass or a list."""
    if isinstance(value, kinds):
        return [value]
    if isinstance(value, list | tuple):
        return [part for item in value for part in parts_of(item, kinds)]
    if is_dataclass(value):
        return [part for f in fields(value) for part in parts_of(getattr(value, f.name), kinds)]
    return []
