"""How much memory a pool of keys and values may take."""

from __future__ import annotations

from mlx_engine.cache import KVPool, New
from mlx_engine.cache.size import pool_nbytes, tokens_that_fit
from mlx_engine.decode.step import forward_logits
from mlx_engine.errors import OptionError
from mlx_engine.machine.memory import available_memory
from mlx_engine.weights.model import Model, Staged

# The part of the available memory that a pool takes if the user gives no size.
SPARE_SHARE = 0.5


def spare_bytes(model: Model) -> int:
    """Return the bytes that the machine, or all machines that share the model, can spare for keys and values."""
    free = model.room()[0] if isinstance(model, Staged) else available_memory()
    return int(free * SPARE_SHARE)


def pool_for(model: Model, slots: int, kv_memory: int | None = None) -> KVPool:
    """Return a pool for `slots` sequences within `kv_memory` bytes, at most a full context for each.

    Args:
        model: the model.
        slots: the largest number of sequences.
        kv_memory: bytes; None takes what the machine can spare.

    Raises:
        OptionError: the memory is too small for one page for each sequence, or more than a rank has free.
    """
    nbytes = spare_bytes(model) if kv_memory is None else kv_memory
    if isinstance(model, Staged):
        free, rank = model.room()
        if nbytes > free:
            message = f"kv_memory is {nbytes:,} bytes; the memory of rank {rank} suffices for {free:,}"
            raise OptionError(message, option="kv_memory", expected=f"at most {free:,}", found=nbytes)
    most = slots * int(model.config.context_length)
    n_tokens = tokens_that_fit(model.kv_layers, nbytes, n_sequences=slots, most=most)
    least = pool_nbytes(model.kv_layers, 1, slots)
    if n_tokens < 1:
        pages = f"a page of tokens in {'one slot' if slots == 1 else f'each of {slots} slots'}"
        message = f"kv_memory is {nbytes:,} bytes; {pages} takes {least:,}"
        raise OptionError(message, option="kv_memory", expected=f"at least {least:,}", found=nbytes)
    return model.new_pool(n_tokens, n_sequences=slots)


def map_pages(model: Model, pool: KVPool) -> None:
    """Run one token, so that the memory of the pool's first pages is mapped before the first request.

    The system maps memory when it is first written to, in huge pages: for 10 GiB of keys and values of a 0.6B model
    these are 0.9 GiB, and took the first request 0.2 s.
    """
    kv = pool.sequence()
    with model.backend.session():
        model.backend.wait(forward_logits(model, New([0], kv)))
    kv.close()
