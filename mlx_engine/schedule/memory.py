"""How much memory a pool of keys and values may take."""

from __future__ import annotations

from mlx_engine.cache import KVPool, New
from mlx_engine.cache.size import pool_nbytes, tokens_that_fit
from mlx_engine.decode.step import forward_logits
from mlx_engine.errors import require
from mlx_engine.weights.model import Model

# The part of the available memory that a pool takes if the user gives no size.
SPARE_SHARE = 0.5


def spare_bytes(model: Model) -> int:
    """Return the bytes that the machine, or all machines that share the model, can spare for keys and values."""
    return int(model.kv_capacity()[0] * SPARE_SHARE)


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
    free, rank = model.kv_capacity()
    if rank is not None:
        expected = f"at most {free:,} bytes, for which the memory of rank {rank} suffices"
        require(nbytes <= free, option="kv_memory", expected=expected, found=nbytes)
    most = slots * int(model.config.context_length)
    n_tokens = tokens_that_fit(model.kv_layers, nbytes, n_sequences=slots, most=most)
    least = pool_nbytes(model.kv_layers, 1, slots)
    expected = f"at least {least:,} bytes, for a page of tokens in each of {slots} slots"
    require(n_tokens > 0, option="kv_memory", expected=expected, found=nbytes)
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
