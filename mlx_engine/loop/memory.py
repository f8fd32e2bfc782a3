"""Choose the size of a KV pool, and estimate the bytes that a forward pass reads from memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from mlx_engine.backends.costs import nbytes_of
from mlx_engine.backends.experts import Experts, share_read
from mlx_engine.backends.parameters import Linear
from mlx_engine.cache import KVPool, SequenceInput
from mlx_engine.cache.pool import pool_nbytes, state_nbytes, tokens_that_fit
from mlx_engine.errors import OptionError
from mlx_engine.loop.forward import forward_logits
from mlx_engine.loop.request import ScheduledChunk
from mlx_engine.weights.model import Model

# The share of the available memory that a pool takes if the user gives no size.
SPARE_SHARE = 0.5


def spare_bytes(model: Model) -> int:
    """Return the default size of a KV pool: half of the bytes of keys and values that fit into the free memory."""
    return int(model.kv_capacity()[0] * SPARE_SHARE)


def pool_for(model: Model, slots: int, kv_memory: int | None = None, n_proposed: int = 0) -> KVPool:
    """Return a KV pool for `slots` sequences, of at most `kv_memory` bytes (default: `spare_bytes`).

    The pool has room for at most `slots` times as many tokens as the model's context. If the model has recurrent
    states, the pool can also store the states after each of `n_proposed` proposed tokens.

    Raises:
        OptionError: the size is too small for one page per sequence. Or the model runs on several ranks (processes),
            and `kv_memory` is larger than the free memory of a rank.
    """
    nbytes = spare_bytes(model) if kv_memory is None else kv_memory
    free, rank = model.kv_capacity()
    if rank is not None and nbytes > free:
        message = f"kv_memory is {nbytes:,} bytes, but rank {rank} has free memory for only {free:,}"
        raise OptionError(message, option="kv_memory", expected=f"at most {free:,}", found=nbytes)
    most = slots * int(model.config.context_length)
    of_proposed = n_proposed * state_nbytes(model.kv_layers)
    n_tokens = tokens_that_fit(model.kv_layers, nbytes - of_proposed, n_sequences=slots, most=most)
    least = pool_nbytes(model.kv_layers, 1, slots) + of_proposed
    if n_tokens < 1:
        pages = f"a page of tokens in {'one slot' if slots == 1 else f'each of {slots} slots'}"
        message = f"kv_memory is {nbytes:,} bytes; {pages} takes {least:,}"
        raise OptionError(message, option="kv_memory", expected=f"at least {least:,}", found=nbytes)
    return model.new_pool(n_tokens, n_sequences=slots, n_proposed=n_proposed)


def map_pages(model: Model, pool: KVPool) -> None:
    """Run one token before the first request, so that the operating system maps memory of the pool.

    The operating system maps a huge page when it is first written to. The keys and values of a token are in many huge
    pages, because each KV head of each layer has its own part of the pool. With a pool of 10 GiB for a 0.6B model, the
    first token maps 0.9 GiB in 0.2 s.
    """
    kv = pool.sequence()
    with model.backend.session():
        model.backend.wait(forward_logits(model, SequenceInput([0], kv)))
    kv.close()


@dataclass(frozen=True)
class Traffic:
    """The bytes that passes read from memory: weights, keys and values, and recurrent states.

    The bytes are computed from sizes, not measured, and do not include embedding lookups. Recurrent states count twice,
    because they are also written.

    Attributes:
        weights: bytes of the matrices that every token uses: those of the layers and the head, except routed experts.
        kv: maps each attention window to the bytes of one token's keys and values in all layers with this window. The
            window None stands for layers that attend to every earlier token; a window -C, for layers that attend within
            chunks of C tokens.
        experts: maps each share (experts used per token / all experts of the layer) to the bytes of all experts in the
            layers with this share. `nbytes` estimates how many different experts the tokens of a pass use.
        state: bytes of the recurrent states of one sequence; 0 if the model has no such states.
    """

    weights: float
    kv: Mapping[int | None, float]
    experts: Mapping[float, float] = field(default_factory=dict)
    state: int = 0

    @classmethod
    def of(cls, model: Model, pool: KVPool) -> Traffic:
        """Return the traffic of a model's passes, with the keys and values of a pool."""
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

    def nbytes(self, parts: Iterable[ScheduledChunk]) -> float:
        """Return the bytes that the pass over these chunks has read. Call this after the pass has been committed."""
        lengths = [(part.sequence.kv.length, part.n) for part in parts]
        n_tokens = sum(n for _, n in lengths)
        experts = sum(nbytes * share_read(share, n_tokens) for share, nbytes in self.experts.items())
        kv = sum(
            nbytes * sum(length if window is None else min(length, abs(window) - 1 + n) for length, n in lengths)
            for window, nbytes in self.kv.items()
        )
        return self.weights + experts + 2 * self.state * len(lengths) + kv


def linears(value: Any) -> list[Linear]:
    """Return all linear layers in an attribute of a model.

    The linear layers of experts are included only if `Backend.stack` returns them as `Linear` objects.
    """
    return parts_of(value, (Linear,))


def parts_of(value: Any, kinds: tuple[type, ...]) -> list[Any]:
    """Return all objects of these types in `value`, an attribute of a model; search lists, tuples and dataclasses."""
    if isinstance(value, kinds):
        return [value]
    if isinstance(value, list | tuple):
        return [part for item in value for part in parts_of(item, kinds)]
    if is_dataclass(value):
        return [part for f in fields(value) for part in parts_of(getattr(value, f.name), kinds)]
    return []
