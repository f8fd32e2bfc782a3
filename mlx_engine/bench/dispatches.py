"""Count the GPU dispatches (kernel launches) of one decode step, for the command `backends -m MODEL`.

Launches of this project's kernels are counted during a pass. For MLX's operations, the functions in the table `STOCK`
return the numbers of dispatches. In a small model, a dispatch spends more time waiting for the previous dispatch than
reading memory, so the number of dispatches determines the speed.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_engine.backends.batch import Batch, KVView
from mlx_engine.backends.metal.weights import SplitMatrix, joined
from mlx_engine.backends.mlx.backend import MlxBackend
from mlx_engine.backends.mlx.weights import GroupMatrix
from mlx_engine.backends.observed import with_methods
from mlx_engine.backends.parameters import Linear, Scores
from mlx_engine.bench.samples import Test
from mlx_engine.bench.work import bytes_per_weight, sizes, work
from mlx_engine.cache import SequenceInput, begin
from mlx_engine.engine import Engine, load
from mlx_engine.kernels.launch import counted
from mlx_engine.kernels.metal.attention import fits
from mlx_engine.kernels.metal.dense import NARROWEST
from mlx_engine.kernels.metal.layout import BLOCK
from mlx_engine.loop.forward import wanted_logits
from mlx_engine.options import OFF
from mlx_engine.weights.model import Model, open_model

# From this number of keys on, MLX splits attention into two dispatches on large GPUs. On smaller GPUs, the number is
# larger.
TWO_PASSES = 1024
# The head dims that MLX's attention kernel for one query supports. Attention with another head dim takes UNFUSED
# dispatches: scale, matmul, softmax, matmul.
FUSED_HEADS, UNFUSED = (64, 96, 128, 256), 4
# If a row has more elements than this, MLX splits its sum into two dispatches.
LONGEST_SUM = 4096
# Dispatches of attention with a soft cap: scale, matmul, tanh, multiply, softmax, matmul.
CAPPED = 6


def _attention(backend: Any, q: Any, kv: KVView, counts: Any, scores: Scores) -> int:
    if _launches(backend, "attention") and fits(q.shape[-1]):
        return 0
    if scores.softcap is not None:
        return CAPPED if scores.sinks is None else CAPPED + 1
    if q.shape[-1] not in FUSED_HEADS:
        return UNFUSED
    return 1 if kv.spans[0].length - kv.first_visible(kv.spans[0], 1) < TWO_PASSES else 2


def _linear(backend: Any, x: Any, linear: Linear) -> int:
    return _product(backend, linear.weight) + (linear.bias is not None)


def _rms_norm(backend: Any, x: Any, weight: Any, eps: float) -> int:
    return 0 if _launches(backend, "norm_rows") and x.ndim == 2 and x.shape[1] % BLOCK == 0 else 1


def _launches(backend: Any, kernel: str) -> bool:
    """Return whether the backend runs our kernel of this name; if so, `counted` counts its launches."""
    kernels = getattr(backend, "kernels", None)
    return kernels is not None and kernel not in kernels.refused


def _product(backend: Any, weight: Any) -> int:
    """Return the number of dispatches that MLX needs for a matrix product; 0 if our kernel computes it."""
    if not isinstance(weight, SplitMatrix):
        return 0 if _launches(backend, "dense") and weight.shape[1] >= NARROWEST else 1
    return 3 if "matvec" in weight.kernels.refused else 0  # MLX computes scales, biases and the product


def _embed(backend: Any, table: Any, ids: Any) -> int:
    """Return the number of dispatches that MLX needs for a lookup of embeddings; 0 if our kernel does the lookup.

    A float table takes one gather. A `GroupMatrix` takes three gathers (quants, scales, biases) and a dequantisation.
    For a `SplitMatrix`, MLX gathers quants and scales, computes scales and biases, and dequantises.
    """
    if isinstance(table, SplitMatrix):
        return 5 if "embed_rows" in table.kernels.refused else 0
    return 4 if isinstance(table, GroupMatrix) else 1


# Maps each operation of `MlxBackend` to a function that returns the number of its dispatches for one token. The
# operations `heads`, `merge` and `take` are absent: they make views, without a dispatch.
STOCK: dict[str, Callable[..., int]] = {
    "embed": _embed,
    "linear": _linear,
    "rms_norm": _rms_norm,
    "layer_norm": lambda *_: 1,
    "rope": lambda *_: 3,
    "attention": _attention,
    "silu": lambda *_: 2,
    "gelu": lambda *_: 9,
    "gelu_erf": lambda *_: 5,
    "relu2": lambda *_: 2,
    "add": lambda *_: 1,
    "multiply": lambda *_: 1,
    "soft_cap": lambda *_: 3,
    "argmax": lambda *_: 1,
    "row_sums": lambda _, logits: 1 if logits.shape[-1] <= LONGEST_SUM else 2,
    # MLX writes to the store in place, because nothing else refers to it. If k and v are halves of one array, MLX
    # writes them in one dispatch.
    "kv_write": lambda backend, store, slots, k, v: 1 if joined(k, v) is not None else 2,
}


@dataclass(frozen=True)
class Dispatches:
    """The dispatches of one decode step. Both fields map the names of kernels and operations to numbers of dispatches.

    `layer` has the mean over all layers, rounded up. `around` has the dispatches of the operations in `AROUND`.
    """

    layer: dict[str, int]
    around: dict[str, int]


# The operations before the first and after the last layer.
AROUND = ("embed", "norm_head", "row_sums", "argmax")


def dispatches(engine: Engine, depth: int = 0) -> Dispatches:
    """Count the dispatches of one token after `depth` tokens. Raise TypeError if the backend does not run on MLX."""
    if not isinstance(engine.backend, MlxBackend):
        raise TypeError(f"dispatches: expected a backend on MLX, found {engine.backend.name}")
    counts: Counter[str] = Counter()  # first of the whole step; in the end, without `around`
    around: Counter[str] = Counter()
    model = copy.copy(engine.model)
    model.run_on(_counting(engine.backend, counts, around))
    with engine.backend.session():
        kv = model.new_kv(depth + 1, longest_pass=depth + 1)
        if depth:
            kv.begin(depth)
            kv.commit(depth)
        batch = begin([SequenceInput([0], kv)])
        _choose(model, batch)  # not counted: the first pass compiles and checks the kernels
        counts.clear()
        around.clear()
        with counted() as launches:
            _choose(model, batch)
    counts.update(launches)
    counts.subtract(around)
    n = engine.config.n_layers
    return Dispatches({name: -(-count // n) for name, count in counts.items() if count}, dict(around))


def _choose(model: Model, batch: Batch) -> None:
    """Build the MLX graph of a pass, of the sum that checks its logits, and of the choice of a token."""
    logits = wanted_logits(model.forward(batch))
    model.backend.row_sums(logits)
    model.backend.argmax(logits)


def decode_cost(model: str, backend: str, allow_settings: Sequence[str] = ()) -> dict[str, Any]:
    """Return, as JSON fields, the dispatches and the bytes read per token of a model on an MLX backend.

    Raises:
        EngineError: the model cannot be loaded, or the backend is unavailable.
        TypeError: the backend does not run on MLX.
    """
    engine = load(model, backend, allow_settings=allow_settings, speculate=OFF)
    checkpoint = open_model(engine.path, allow_settings)
    needed = sizes(checkpoint, lambda type_: bytes_per_weight(engine.backend, type_))
    few, many, n_layers = dispatches(engine), dispatches(engine, TWO_PASSES), engine.config.n_layers
    return {
        "layers": n_layers,
        "layer": few.layer,
        "around": few.around,
        "per_layer": sum(few.layer.values()),
        "per_layer_from_1024_keys": sum(many.layer.values()),
        "per_step": n_layers * sum(few.layer.values()) + sum(few.around.values()),
        "weight_bytes": needed.nbytes,
        "cache_bytes_per_token": needed.cached,
        "bytes_per_token": work(needed, Test(n_gen=1), kv=True).nbytes,
        **({"notes": list(checkpoint.notes)} if checkpoint.notes else {}),
    }


def _counting(backend: MlxBackend, stock: Counter[str], around: Counter[str]) -> MlxBackend:
    """Return a copy of `backend` that adds the dispatches of MLX's operations to `stock`.

    The dispatches of the operations in AROUND, including launches of our kernels, are also added to `around`.
    """
    kind = type(backend)
    methods = {name: _costing(name, getattr(kind, name), cost, stock) for name, cost in STOCK.items()}
    for name in AROUND:
        methods[name] = _apart(methods.get(name, getattr(kind, name)), stock, around)
    return with_methods(backend, "Counting", methods)


def _costing(
    name: str, method: Callable[..., Any], cost: Callable[..., int], stock: Counter[str]
) -> Callable[..., Any]:
    def run(self: MlxBackend, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        stock[name] += cost(self, *args, **kwargs)
        return result

    return run


def _apart(method: Callable[..., Any], stock: Counter[str], around: Counter[str]) -> Callable[..., Any]:
    def run(self: MlxBackend, *args: Any, **kwargs: Any) -> Any:
        before = stock.copy()
        with counted() as launches:
            result = method(self, *args, **kwargs)
        around.update(launches + (stock - before))
        return result

    return run
