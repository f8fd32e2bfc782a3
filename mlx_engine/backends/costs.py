"""The minimum cost of an operation, in FLOPs and bytes. The profiler divides these costs by measured times."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, cast

import numpy as np

from mlx_engine.backends.batch import KVView
from mlx_engine.backends.experts import ExpertLinear, Experts, share_read
from mlx_engine.backends.parameters import LayerNorm, Linear, Native, RMSNorm
from mlx_engine.observe.profiler import Cost


def cost_of(name: str, args: tuple[Any, ...], result: Native) -> Cost:
    """Return the minimum cost of operation `name`, which reads each input once and writes its result once."""
    nbytes = sum(map(nbytes_of, arrays_of(args))) + nbytes_of(result)
    if name == "embed":
        return Cost(nbytes=2 * nbytes_of(result))
    for of in (arg for arg in args if isinstance(arg, Experts | ExpertLinear)):
        return _experts_cost(of, args, result)
    linears = [arg for arg in flattened(args) if isinstance(arg, Linear)]
    if linears:
        n_rows = len(result) if name == "norm_head" else len(args[0])
        return Cost(2.0 * n_rows * sum(math.prod(shape_of(linear.weight)) for linear in linears), nbytes)
    if name == "attention":
        q, kv = args[0], cast(KVView, args[1])
        _, *head = shape_of(q)
        spans = list(zip(kv.spans, args[2], strict=True))
        n_pairs = sum(_n_pairs(n, span.length, kv.window) for span, n in spans)
        n_slots = sum(span.length - kv.first_visible(span, n) for span, n in spans if n)
        return Cost(4.0 * math.prod(head) * n_pairs, 2 * nbytes_of(q) + _slots_nbytes(kv.store, n_slots))
    if name == "kv_write":
        return Cost(nbytes=2 * sum(map(nbytes_of, arrays_of(args[2:]))))
    return Cost(nbytes=nbytes)


def _experts_cost(of: Experts | ExpertLinear, args: tuple[Any, ...], result: Native) -> Cost:
    """Return the cost of a mixture of experts, or of a product with the matrices of experts or heads.

    The arguments of a mixture do not include the chosen experts, so its number of bytes is the expected value for
    random choices (`share_read`).
    """
    n = len(result)
    nbytes = nbytes_of(args[0]) + nbytes_of(result)
    if isinstance(of, ExpertLinear) and len(args) == 2:  # `head_linear`: each head has its own matrix
        return Cost(2.0 * n * of.n_experts * math.prod(of.shape), nbytes + of.nbytes)
    if isinstance(of, ExpertLinear):
        n_read = len(set(np.asarray(args[2]).reshape(-1).tolist()))
        return Cost(2.0 * n * math.prod(of.shape), nbytes + of.nbytes / of.n_experts * n_read)
    dense = [linear.weight for linear in of.dense]
    n_weights = sum(math.prod(linear.shape) for linear in of.matrices)
    used = n_weights * of.routing.n_used + sum(math.prod(shape_of(weight)) for weight in dense)
    return Cost(2.0 * n * used, nbytes + sum(map(nbytes_of, dense)) + of.nbytes * share_read(of.share, n))


def _n_pairs(n_tokens: int, n_slots: int, window: int | None) -> int:
    """Return the number of query-key pairs of one head, with the last `n_tokens` of `n_slots` tokens as queries.

    For a negative window (chunked attention, see `first_visible`), the result is an upper bound.
    """
    if not n_tokens:
        return 0
    most = n_slots if window is None else min(n_slots, abs(window))
    whole = min(n_tokens, n_slots - most + 1)  # tokens that attend to a full window
    rest = n_tokens - whole
    return whole * most + rest * most - rest * (rest + 1) // 2


def _slots_nbytes(store: Native, n: int) -> float:
    """Return the bytes of n slots of a KV store. A slot has the keys and values of one token.

    The slots are axis -2 of the store. If the store is not a 4-D array, return 0.
    """
    shape = shape_of(store)
    return nbytes_of(store) * n / shape[-2] if len(shape) == 4 else 0.0


def flattened(args: Iterable[Any]) -> Iterator[Any]:
    """Yield the arguments. If one is a sequence of linear layers or norms, yield its elements instead."""
    for arg in args:
        if isinstance(arg, tuple | list) and arg and isinstance(arg[0], Linear | RMSNorm | LayerNorm):
            yield from arg
        else:
            yield arg


def arrays_of(args: tuple[Any, ...]) -> list[Native]:
    """Return all arrays of the arguments: plain arrays, weights and biases of linear layers, and weights of norms."""
    found: list[Native] = []
    for arg in flattened(args):
        if isinstance(arg, Linear):
            found += [a for a in (arg.weight, arg.bias) if a is not None]
        elif isinstance(arg, RMSNorm | LayerNorm):
            found.append(arg.weight)
        elif shape_of(arg):
            found.append(arg)
    return found


def shape_of(x: Any) -> tuple[int, ...]:
    """Return the shape of an array or nested list; () for anything else."""
    if hasattr(x, "shape"):
        return tuple(x.shape)
    return (len(x), *shape_of(x[0])) if isinstance(x, list) and x else ()


def nbytes_of(x: Any) -> int:
    """Return the bytes of an array, a sequence of arrays, or a nested list (8 per float); 0 for anything else."""
    if isinstance(x, tuple | list) and x and hasattr(x[0], "nbytes"):
        return sum(map(nbytes_of, x))
    return int(x.nbytes) if hasattr(x, "nbytes") else 8 * math.prod(shape_of(x)) if isinstance(x, list) else 0
