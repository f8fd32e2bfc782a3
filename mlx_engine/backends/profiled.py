"""A profiled backend: the same operations, each timed, counted and, at the trace level, logged.

`profiled` makes a copy of a backend on demand, so that runs without profiling have no overhead.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from logging import DEBUG
from typing import Any, cast

from mlx_engine.backends.base import Backend, OpByOp
from mlx_engine.backends.batch import KVView
from mlx_engine.backends.costs import arrays_of, cost_of, flattened, shape_of
from mlx_engine.backends.parameters import Linear
from mlx_engine.backends.primitives import OPERATIONS
from mlx_engine.observe.log import LOGGER, TRACE, event
from mlx_engine.observe.profiler import Cost, Profiler, Span, rate

PRIMITIVES = (*OPERATIONS["primitive"], *OPERATIONS["storage"], *OPERATIONS["exchange"])
# The time of a composed block excludes its primitives, which are timed separately; a fused block is timed as a whole.
BLOCKS = tuple(OPERATIONS["block"])

LAYER = re.compile(r"blk\.(\d+)\.(.*)")


def profiled(backend: Backend, profiler: Profiler) -> Backend:
    """Return a copy of `backend` whose operations report to `profiler`; it shares the original's arrays."""
    copied = copy.copy(backend)
    timed = {name: _timed(name, _method(copied, name), profiler) for name in PRIMITIVES + BLOCKS}
    # A compiled program would get a single time, so the layers run op by op.
    timed["compile"] = lambda copied, layers, width: OpByOp(copied, layers)
    copied.__class__ = type(f"Profiled{type(backend).__name__}", (type(backend),), timed)
    copied.profiler = profiler
    return copied


def _method(copied: Backend, name: str) -> Callable[..., Any]:
    """Remove and return the instance attribute `name` if there is one, which hides the method; else the method."""
    own = vars(copied).pop(name, None)
    return getattr(type(copied), name) if own is None else lambda self, *args, **kwargs: own(*args, **kwargs)


def watched(backend: Backend) -> Backend:
    """Return `backend`, or a profiled copy if the log level includes events of passes or operations."""
    return profiled(backend, Profiler()) if LOGGER.isEnabledFor(DEBUG) else backend


def _timed(name: str, method: Callable[..., Any], profiler: Profiler) -> Callable[..., Any]:
    def run(self: Backend, *args: Any, **kwargs: Any) -> Any:
        with profiler.span(name, *_place(args)) as span:
            result = method(self, *args, **kwargs)
            self.wait(result)
        with profiler.unnoticed():
            profiler.record(span, cost_of(name, args, result))
            # The cost of a composed block has already been counted by its primitives.
            composed = name in BLOCKS and span.cost == Cost()
            span.role = name if composed else _role(name, args)
            if LOGGER.isEnabledFor(TRACE) and not composed:
                _log(span, args)
        return result

    return run


def _log(span: Span, args: tuple[Any, ...]) -> None:
    shapes = " ".join("x".join(map(str, shape_of(array))) for array in arrays_of(args))
    speed = {"gflops": rate(span.cost.flops, span.own), "gbs": rate(span.cost.nbytes, span.own)}
    event(TRACE, "operation", op=span.op, layer=span.layer, shapes=shapes, ms=span.own * 1e3, **speed)


def _place(args: tuple[Any, ...]) -> tuple[int | None, str]:
    """Return the layer index in the first parameter's name, and the rest of the name."""
    for arg in flattened(args):
        found = LAYER.match(getattr(arg, "name", ""))
        if found:
            return int(found[1]), found[2]
    return None, ""


def _role(name: str, args: tuple[Any, ...]) -> str:
    """Return an operation's role: its linear layers ("attn_q+k+v", "ffn_down", "head"), or its own name."""
    linears = [arg for arg in flattened(args) if isinstance(arg, Linear)]
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
