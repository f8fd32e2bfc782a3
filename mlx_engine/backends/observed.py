"""Make copies of a backend that report its operations or intermediate values; the original has no overhead.

`profiled` returns a copy that measures the time of each operation and its cost (FLOPs and bytes). At the log level
"trace", the copy also logs each operation. `tapped` and `observed` return copies that pass each intermediate value of a
forward pass to a function, the tap. A block is an operation that `Backend` composes of primitives. If a backend fuses a
block, the values inside the block do not reach the tap. So `tapped` replaces fused blocks by composed ones, and results
may differ in the last bits. `observed` runs both forms: the composed block for the tap, and the backend's own block for
the result of the pass. All copies share the arrays of the original.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from logging import DEBUG
from typing import Any, TypeVar, cast

from mlx_engine.backends.base import Backend, OpByOp
from mlx_engine.backends.batch import KVView
from mlx_engine.backends.costs import arrays_of, cost_of, flattened, shape_of
from mlx_engine.backends.parameters import Array, HeadNorms, Linear, Norm, RMSNorm
from mlx_engine.backends.primitives import OPERATIONS
from mlx_engine.observe.log import LOGGER, TRACE, event
from mlx_engine.observe.profiler import Cost, Profiler, Span, rate

B = TypeVar("B", bound=Backend)

PRIMITIVES = (*OPERATIONS["primitive"], *OPERATIONS["storage"], *OPERATIONS["exchange"])
# The time of a composed block does not include its primitives, which are timed separately. A fused block is timed as a
# whole.
BLOCKS = tuple(OPERATIONS["block"])

LAYER = re.compile(r"blk\.(\d+)\.(.*)")


def with_methods(backend: B, prefix: str, methods: Mapping[str, Any]) -> B:
    """Return a copy of `backend` with some methods replaced. The class of the copy is a subclass of the original's."""
    copied, kind = copy.copy(backend), type(backend)
    copied.__class__ = type(f"{prefix}{kind.__name__}", (kind,), dict(methods))
    return copied


def profiled(backend: Backend, profiler: Profiler) -> Backend:
    """Return a copy of `backend` whose operations report to `profiler`."""
    timed = {name: _timed(name, _method(backend, name), profiler) for name in PRIMITIVES + BLOCKS}
    # A compiled program could only be timed as a whole, so the layers run op by op.
    timed["compile"] = lambda copied, layers, width: OpByOp(copied, layers)
    copied = with_methods(backend, "Profiled", timed)
    for name in PRIMITIVES + BLOCKS:
        vars(copied).pop(name, None)  # an instance attribute would hide the timed method
    copied.profiler = profiler
    return copied


def _method(backend: Backend, name: str) -> Callable[..., Any]:
    """Return the operation `name` of a backend, as a function whose first argument is a backend.

    An instance attribute `name` takes precedence over the method of the class; the first argument is then ignored.
    """
    own = vars(backend).get(name)
    return getattr(type(backend), name) if own is None else lambda self, *args, **kwargs: own(*args, **kwargs)


def watched(backend: Backend) -> Backend:
    """Return a profiled copy of `backend` if the log level is "debug" or "trace", else `backend` itself."""
    return profiled(backend, Profiler()) if LOGGER.isEnabledFor(DEBUG) else backend


def _timed(name: str, method: Callable[..., Any], profiler: Profiler) -> Callable[..., Any]:
    def run(self: Backend, *args: Any, **kwargs: Any) -> Any:
        with profiler.span(name, *_place(args)) as span:
            result = method(self, *args, **kwargs)
            self.wait(result)
        with profiler.unnoticed():
            profiler.record(span, cost_of(name, args, result))
            # The cost of a composed block is counted in its primitives, so the cost of the block's span is zero.
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
    """Return (3, "attn_q") for "blk.3.attn_q", the name of the first argument whose name begins with a layer.

    Return (None, "") if there is no such argument.
    """
    for arg in flattened(args):
        found = LAYER.match(getattr(arg, "name", ""))
        if found:
            return int(found[1]), found[2]
    return None, ""


def _role(name: str, args: tuple[Any, ...]) -> str:
    """Return the operation's role in bottleneck reports.

    If arguments are linear layers, the role is their names ("attn_q+k+v", "head"). The role of attention with a window
    is "attention, window", and that of `embed` "embedding". The role of any other operation is `name`.
    """
    linears = [arg for arg in flattened(args) if isinstance(arg, Linear)]
    if linears:
        return role_of(linears)
    if name == "attention" and cast(KVView, args[1]).window:
        return "attention, window"
    return "embedding" if name == "embed" else name


def role_of(linears: Sequence[Linear]) -> str:
    """Return the joint role of linear layers with the same input, such as "attn_q+k+v"."""
    names = [LAYER.match(linear.name) for linear in linears]
    stems = [found[2] if found else "head" for found in names]
    shared = stems[0][: stems[0].rfind("_") + 1]
    return "+".join([stems[0], *(stem.removeprefix(shared) for stem in stems[1:])])


# The methods that `tapped` replaces by those of `Backend`, because fused blocks and compiled programs do not pass
# intermediate values to the tap.
COMPOSED = (*OPERATIONS["block"], *OPERATIONS["dispatch"], "note", "compile")


def tapped(backend: Backend, tap: Callable[[str, Array], None]) -> Backend:
    """Return a copy of `backend` that calls `tap(name, array)` for every named intermediate value.

    The name of a value is the GGUF tensor name, without ".weight", of the norm or linear layer that computed it
    ("blk.0.attn_norm", "blk.0.ffn_gate"), or the name that model code passes to `note` ("blk.0.q_rope",
    "blk.0.attn_out", "blk.0.layer_out").
    """
    copied = with_methods(backend, "Tapped", {name: getattr(Backend, name) for name in COMPOSED})
    copied.tap = tap
    return copied


def observed(backend: Backend, tap: Callable[[str, Array], None]) -> Backend:
    """Return a copy of `backend` that calls `tap` as in `tapped`, and whose results are bit-identical to `backend`'s.

    A composed block uses the backend's own norms and products, and has the same inputs as the fused block. So the
    tapped values are bit-identical to the values inside the fused blocks. Exceptions are experts and linear attention
    on the compiled CPU backend: their composed blocks compute activation functions in NumPy, which may change the last
    bits.
    """
    blocks = {name: _twice(getattr(Backend, name), getattr(backend, name)) for name in OPERATIONS["block"]}

    def norm(self: Backend, x: Array, norm: Norm | None) -> Array:
        return x if norm is None else self.note(norm.name, backend.norm(x, norm))

    def norm_rope(self: Backend, x: Array, head_dim: int, norm: RMSNorm, *rotation: Any) -> Array:
        _note_heads(self, backend, x, head_dim, norm)
        return backend.norm_rope(x, head_dim, norm, *rotation)

    def head_norm_rope(
        self: Backend, q: Array, k: Array, v: Array, head_dim: int, norms: HeadNorms, *rotation: Any
    ) -> tuple[Array, Array, Array]:
        for x, of_heads in zip((q, k), norms or (), strict=False):
            _note_heads(self, backend, x, head_dim, of_heads)
        return backend.head_norm_rope(q, k, v, head_dim, norms, *rotation)

    own = {"norm": norm, "norm_rope": norm_rope, "head_norm_rope": head_norm_rope}
    own |= {"note": Backend.note, "compile": Backend.compile}
    copied = with_methods(backend, "Observed", blocks | own)
    copied.tap = tap
    return copied


def _note_heads(copied: Backend, original: Backend, x: Array, head_dim: int, norm: RMSNorm) -> None:
    """Apply the norm to each head of x (T, N), by `norm_rope` without a rotation, and pass the result to the tap."""
    rows: Any = x
    copied.note(norm.name, original.norm_rope(x, head_dim, norm, None, [0] * len(rows)))


def _twice(composed: Callable[..., Any], fused: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operation that runs `composed` for the tap, then returns the result of `fused`."""

    def block(self: Backend, *args: Any, **kwargs: Any) -> Any:
        composed(self, *args, **kwargs)
        return fused(*args, **kwargs)

    return block
