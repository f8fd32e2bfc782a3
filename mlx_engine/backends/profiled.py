"""A profiled backend: the same operations, each timed, counted and, at the trace level, logged.

`profiled` makes a copy of a backend on demand, so that runs without profiling have no overhead.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from logging import DEBUG
from typing import Any, cast

from mlx_engine.backends.base import OPERATIONS, Backend
from mlx_engine.backends.batch import KVView
from mlx_engine.backends.parameters import LayerNorm, Linear, Native, RMSNorm
from mlx_engine.backends.program import OpByOp
from mlx_engine.observe.log import TRACE, enabled, event
from mlx_engine.observe.profiler import Cost, Profiler, Span, rate

PRIMITIVES = (*OPERATIONS["primitive"], *OPERATIONS["storage"])
# The time of a composed block is only the time between its primitives; the time of a fused block is all of it.
BLOCKS = tuple(OPERATIONS["block"])

LAYER = re.compile(r"blk\.(\d+)\.(.*)")


def profiled(backend: Backend, profiler: Profiler) -> Backend:
    """Return a copy of `backend` whose operations report to `profiler`; it shares the original's arrays."""
    twin = copy.copy(backend)
    timed = {name: _timed(name, _method(twin, name), profiler) for name in PRIMITIVES + BLOCKS}
    # A compiled program would be a single timing, so the layers run operation by operation.
    timed["compile"] = lambda twin, layers: OpByOp(twin, layers, backend.compile(layers).fused)
    twin.__class__ = type(f"Profiled{type(backend).__name__}", (type(backend),), timed)
    twin.profiler = profiler
    return twin


def _method(twin: Backend, name: str) -> Callable[..., Any]:
    """Return the class's method. Remove an instance attribute of that name, which would hide it, and return that."""
    own = vars(twin).pop(name, None)
    return getattr(type(twin), name) if own is None else lambda self, *args, **kwargs: own(*args, **kwargs)


def watched(backend: Backend) -> Backend:
    """Return `backend`, or a profiled copy if the log level includes events of passes or operations."""
    return profiled(backend, Profiler()) if enabled(DEBUG) else backend


def _timed(name: str, method: Callable[..., Any], profiler: Profiler) -> Callable[..., Any]:
    def run(self: Backend, *args: Any, **kwargs: Any) -> Any:
        with profiler.span(name, *_place(args)) as span:
            result = method(self, *args, **kwargs)
            self.wait(result)
        with profiler.unnoticed():
            profiler.record(span, _cost(name, args, result))
            # The cost of a composed block has already been counted by its primitives.
            composed = name in BLOCKS and span.cost == Cost()
            span.role = name if composed else _role(name, args)
            if enabled(TRACE) and not composed:
                _log(span, args)
        return result

    return run


def _log(span: Span, args: tuple[Any, ...]) -> None:
    shapes = " ".join("x".join(map(str, shape_of(array))) for array in _arrays(args))
    speed = {"gflops": rate(span.cost.flops, span.own), "gbs": rate(span.cost.nbytes, span.own)}
    event(TRACE, "operation", op=span.op, layer=span.layer, shapes=shapes, ms=span.own * 1e3, **speed)


def _place(args: tuple[Any, ...]) -> tuple[int | None, str]:
    """Return the layer index in the first parameter's name, and the rest of the name."""
    for arg in _flat(args):
        found = LAYER.match(getattr(arg, "name", ""))
        if found:
            return int(found[1]), found[2]
    return None, ""


def _role(name: str, args: tuple[Any, ...]) -> str:
    """Return an operation's role: its linear layers ("attn_q+k+v", "ffn_down", "head"), or its own name."""
    linears = [arg for arg in _flat(args) if isinstance(arg, Linear)]
    if linears:
        return role_of(linears)
    if name == "attention" and cast(KVView, args[1]).window:
        return "attention, window"
    return "embedding" if name == "embed" else name


def role_of(linears: Sequence[Linear]) -> str:
    """Return the joint role of linear layers with the same input, as "attn_q+k+v"."""
    names = [LAYER.match(linear.name) for linear in linears]
    stems = [found[2] if found else "head" for found in names]
    shared = stems[0][: stems[0].rfind("_") + 1]
    return "+".join([stems[0], *(stem.removeprefix(shared) for stem in stems[1:])])


def _cost(name: str, args: tuple[Any, ...], result: Native) -> Cost:
    """Return the operation's least cost: each input read once, the result written once."""
    nbytes = sum(map(nbytes_of, _arrays(args))) + nbytes_of(result)
    if name == "embed":
        return Cost(nbytes=2 * nbytes_of(result))
    linears = [arg for arg in _flat(args) if isinstance(arg, Linear)]
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
        return Cost(nbytes=2 * sum(map(nbytes_of, _arrays(args[2:]))))
    return Cost(nbytes=nbytes)


def _n_pairs(n_tokens: int, n_slots: int, window: int | None) -> int:
    """Return the query-key pairs of one head: token i attends to all tokens up to i, at most a window of them."""
    if not n_tokens:
        return 0
    most = n_slots if window is None else min(n_slots, window)
    whole = min(n_tokens, n_slots - most + 1)  # tokens that attend to a full window
    rest = n_tokens - whole
    return whole * most + rest * most - rest * (rest + 1) // 2


def _slots_nbytes(store: Native, n: int) -> float:
    """Return the bytes of n slots; in a store that is one array, axis -2 is the slots."""
    shape = shape_of(store)
    return nbytes_of(store) * n / shape[-2] if len(shape) == 4 else 0.0


def _flat(args: Iterable[Any]) -> Iterator[Any]:
    """Yield the arguments, with tuples and lists of parameters flattened."""
    for arg in args:
        if isinstance(arg, tuple | list) and arg and isinstance(arg[0], Linear | RMSNorm | LayerNorm):
            yield from arg
        else:
            yield arg


def _arrays(args: tuple[Any, ...]) -> list[Native]:
    """Return the arrays among the arguments, including the arrays of parameters."""
    found: list[Native] = []
    for arg in _flat(args):
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
    """Return the bytes of an array or of several; 8 per float of a nested list, 0 for anything else."""
    if isinstance(x, tuple | list) and x and hasattr(x[0], "nbytes"):
        return sum(map(nbytes_of, x))
    return int(x.nbytes) if hasattr(x, "nbytes") else 8 * math.prod(shape_of(x)) if isinstance(x, list) else 0
