"""Count the GPU dispatches of one decode step: this project's kernels at launch, MLX's operations from a table.

On a small model, the latency of a dispatch that depends on the previous one exceeds the time to read its bytes.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_engine.backends.batch import Batch
from mlx_engine.backends.mlx.backend import MlxBackend
from mlx_engine.bench.samples import Test
from mlx_engine.bench.sizes import bytes_per_weight, sizes
from mlx_engine.bench.stock_dispatches import STOCK, TWO_PASSES
from mlx_engine.bench.work import work
from mlx_engine.cache import New, begin
from mlx_engine.decode.step import wanted_logits
from mlx_engine.engine import Engine, load
from mlx_engine.kernels.launch import counted
from mlx_engine.weights.allowed import open_model
from mlx_engine.weights.model import Model


@dataclass(frozen=True)
class Dispatches:
    """The dispatches of one decode step.

    Attributes:
        layer: dispatches of each layer, by kernel or operation.
        around: dispatches before the first and after the last layer.
    """

    layer: dict[str, int]
    around: dict[str, int]


AROUND = ("embed", "norm_head", "row_sums", "argmax")


def dispatches(engine: Engine, depth: int = 0) -> Dispatches:
    """Count the dispatches of one token at depth `depth`.

    Raises:
        TypeError: the engine's backend does not run on MLX.
    """
    if not isinstance(engine.backend, MlxBackend):
        raise TypeError(f"dispatches: expected a backend on MLX, found {engine.backend.name}")
    layers: Counter[str] = Counter()
    around: Counter[str] = Counter()
    model = copy.copy(engine.model)
    model.backend = _counting(engine.backend, layers, around)
    with engine.backend.session():
        kv = model.new_kv(depth + 1, longest_pass=depth + 1)
        if depth:
            kv.begin(depth)
            kv.commit(depth)
        batch = begin([New([0], kv)])
        _choose(model, batch)  # the first pass compiles and checks the kernels
        layers.clear()
        around.clear()
        with counted() as launches:
            _choose(model, batch)
    layers.update(launches)
    layers.subtract(around)
    n = engine.config.n_layers
    return Dispatches({name: -(-count // n) for name, count in layers.items() if count}, dict(around))


def _choose(model: Model, batch: Batch) -> None:
    """Build the graph of a pass with the check of its logits and the choice of a token."""
    logits = wanted_logits(model.forward(batch))
    model.backend.row_sums(logits)
    model.backend.argmax(logits)


def decode_cost(model: str, backend: str, allow_settings: Sequence[str] = ()) -> dict[str, Any]:
    """Return the dispatches and bytes of one token of a model on an MLX backend, as JSON fields.

    Raises:
        EngineError: the model cannot be loaded, or the backend is unavailable.
    """
    engine = load(model, backend, allow_settings=allow_settings)
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
    """Return a copy of `backend` that counts the dispatches of its operations, those outside of layers in `around`."""
    twin = copy.copy(backend)
    kind = type(backend)
    methods = {name: _costing(name, getattr(kind, name), cost, stock) for name, cost in STOCK.items()}
    for name in AROUND:
        methods[name] = _apart(methods.get(name, getattr(kind, name)), stock, around)
    twin.__class__ = type(f"Counting{kind.__name__}", (kind,), methods)
    return twin


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
