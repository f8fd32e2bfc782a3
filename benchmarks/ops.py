"""Time single operations of every backend: `python -m benchmarks.ops` appends to benchmarks/results/ops.jsonl.

Run it on an idle machine. It makes two tables. `--cases`: the cases of the contract tests on every backend; their
inputs are tiny, so the times are the overhead of a call. `--sizes`: operations with the sizes of Qwen3 0.6B, for 1
token and for 512. Without an option, both are measured.

A case builds its inputs and calls the operation. The call is recorded once and then repeated alone, so that only the
operation is timed. With `--sizes`, each call takes the next layer's weights, or the next of several KV caches, because
the same arrays would still be in the processor's cache, unlike in a model.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import mlx_engine
from benchmarks.log import FOLDER, Log, Row
from mlx_engine.backends.base import Backend
from mlx_engine.backends.batch import KVSpan, KVView
from mlx_engine.backends.costs import nbytes_of
from mlx_engine.backends.parameters import Linear, Scores
from mlx_engine.cache.pool import PAGE
from mlx_engine.engine import Engine
from tests.contract.cases import CASES, OpCase
from tests.contract.check import BACKENDS, PLAIN, backend

RESULTS = FOLDER / "ops.jsonl"

# A sample repeats a call for at least this many seconds; a call that takes longer is made once per sample.
SAMPLE_SECONDS, SAMPLES = 2e-3, 5


@dataclass(frozen=True)
class Call:
    """One call of an operation, with its inputs."""

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def on(self, be: Backend) -> None:
        """Make the call, and wait for the result of a lazy backend."""
        result = getattr(be, self.op)(*self.args, **self.kwargs)
        if be.lazy:
            for part in result if isinstance(result, list | tuple) else [result]:
                be.wait(part)


def recorded(case: OpCase, be: Backend) -> list[Call]:
    """Return the calls that a case makes of its operation; most cases make one."""
    calls: list[Call] = []
    copied = copy.copy(be)
    operation = getattr(be, case.op)

    def record(*args: Any, **kwargs: Any) -> Any:
        calls.append(Call(case.op, args, kwargs))
        return operation(*args, **kwargs)

    setattr(copied, case.op, record)
    case.on(copied)
    return calls


def seconds_per_call(
    be: Backend, calls: list[Call], clock: Callable[[], float] = time.perf_counter, samples: int = SAMPLES
) -> list[float]:
    """Return samples of the mean seconds per call, after a warm-up."""

    def timed(n: int) -> float:
        start = clock()
        for _ in range(n):
            for call in calls:
                call.on(be)
        return clock() - start

    with be.session():
        timed(1)
        n = 1
        while timed(n) < SAMPLE_SECONDS:
            n *= 2
        return [timed(n) / n / len(calls) for _ in range(samples)]


def cases() -> Iterator[Row]:
    """Yield a row per backend, with all cases."""
    # Slowest first: a backend in NumPy before its compiled form.
    for name in sorted(BACKENDS, key=lambda name: (name != "scalar", name != PLAIN)):
        be = backend(name)
        found = [{"id": case.id, "seconds": seconds_per_call(be, recorded(case, be))} for case in CASES]
        yield {"kind": "cases", "backend": name, "found": found}


MODEL = "shape:qwen3-0.6b"
RUNGS = [name for name in (PLAIN, "simd", "parallel") if name in BACKENDS]

FEW, MANY = 1, 512
DEPTH = 4096
# For many tokens, calls alternate between this many layers. Two are enough, because arithmetic is the limit.
LAYERS_FOR_MANY = 2
CACHES = 4


@dataclass(frozen=True)
class Sized:
    """Calls of one operation on different arrays, and the least arithmetic and bytes of each call."""

    label: str
    calls: list[Call]
    flops: float
    nbytes: float


def sizes() -> Iterator[Row]:
    """Yield a row per backend."""
    for name in RUNGS:
        engine = mlx_engine.load(MODEL, name.split()[0], jit=name != PLAIN)
        found = [
            {
                "label": item.label,
                "flops": item.flops,
                "nbytes": item.nbytes,
                "seconds": seconds_per_call(engine.backend, item.calls),
            }
            for item in operations(engine)
        ]
        yield {"kind": "sizes", "backend": name, "found": found}


def operations(engine: Engine) -> Iterator[Sized]:
    """Yield the operations of a layer, of attention and of the head, one at a time because of the memory."""
    be, model = engine.backend, engine.model
    rng = np.random.default_rng(0)
    for T in (FEW, MANY):
        layers = model.layers[: None if T == FEW else LAYERS_FOR_MANY]  # type: ignore[attr-defined]
        yield from projections(be, layers, rng, T)
        yield from attentions(be, engine.config, rng, T)
    yield from head(be, model, rng)


def projections(be: Backend, layers: Sequence[Any], rng: np.random.Generator, T: int) -> Iterator[Sized]:
    """Yield the four products of a layer, as a model calls them, one plain product and a norm."""
    D = layers[0].branches[0].out.weight.shape[0]
    F = layers[0].ffn.down.weight.shape[1]
    HE = layers[0].branches[0].out.weight.shape[1]
    x, wide, heads = (be.array(rng.standard_normal((T, n)).astype(np.float32)) for n in (D, F, HE))

    def sized(op: str, what: str, arguments: list[tuple[Any, ...]], linears: list[Linear]) -> Sized:
        weights = [linear.weight for linear in linears]
        flops = 2.0 * T * sum(w.shape[0] * w.shape[1] for w in weights)
        moved = 4.0 * T * (weights[0].shape[1] + sum(w.shape[0] for w in weights))
        calls = [Call(op, args, {}) for args in arguments]
        return Sized(f"{op}, {what}, T={T}", calls, flops, sum(map(nbytes_of, weights)) + moved)

    one = layers[0]
    qkv = [(x, w.norm, (w.mix.q, w.mix.k, w.mix.v)) for w in layers]
    yield sized("norm_project", "q, k, v", qkv, [one.mix.q, one.mix.k, one.mix.v])
    yield sized("project_add", "attn_output", [(heads, w.branches[0].out, x) for w in layers], [one.branches[0].out])
    gated = [(x, w.ffn.norm, w.ffn.gate, w.ffn.up, "silu") for w in layers]
    yield sized("norm_gate_up", "silu", gated, [one.ffn.gate, one.ffn.up])
    yield sized("project_add", "ffn_down", [(wide, w.ffn.down, x) for w in layers], [one.ffn.down])
    yield sized("linear", "ffn_gate", [(x, w.ffn.gate) for w in layers], [one.ffn.gate])
    norms = [Call("rms_norm", (x, w.ffn.norm.weight, w.ffn.norm.eps), {}) for w in layers]
    yield Sized(f"rms_norm, T={T}", norms, 4.0 * T * D, 8.0 * T * D)


def attentions(be: Backend, cfg: Any, rng: np.random.Generator, T: int) -> Iterator[Sized]:
    """Yield attention of T queries over DEPTH cached tokens."""
    H, K, E = cfg.n_heads, cfg.n_kv_heads, cfg.head_dim

    def random(heads: int, n: int) -> Any:
        return be.heads(be.array(rng.standard_normal((n, heads * E)).astype(np.float32)), E)

    q, stores = random(H, T), []
    k, v = random(K, DEPTH), random(K, DEPTH)
    for _ in range(CACHES if T == FEW else 1):
        stores.append(be.kv_write(be.kv_empty(K, E, DEPTH), np.arange(DEPTH), k, v))
    span = KVSpan(np.arange(0, DEPTH, PAGE), DEPTH, T)
    calls = [Call("attention", (q, KVView(store, PAGE, [span]), [T], Scores(E**-0.5)), {}) for store in stores]
    # The first of T queries does not attend to the last T - 1 tokens.
    seen = T * DEPTH - T * (T - 1) // 2
    yield Sized(f"attention, {DEPTH} tokens, T={T}", calls, 4.0 * H * E * seen, 8.0 * K * E * DEPTH + 8.0 * T * H * E)


def head(be: Backend, model: Any, rng: np.random.Generator) -> Iterator[Sized]:
    """Yield the output head, the largest matrix, and argmax."""
    V, D = model.output.weight.shape
    x = be.array(rng.standard_normal((FEW, D)).astype(np.float32))
    calls = [Call("norm_head", (x, model.output_norm, model.output), {})]
    yield Sized("norm_head, T=1", calls, 2.0 * V * D, nbytes_of(model.output.weight) + 4.0 * (V + D))
    rows = itertools.repeat(be.array(rng.standard_normal((FEW, V)).astype(np.float32)), 1)
    yield Sized("argmax, T=1", [Call("argmax", (row,), {}) for row in rows], V, 4.0 * V)


def main() -> None:
    """Measure one table or both."""
    parser = argparse.ArgumentParser(prog="benchmarks.ops", description="Time operations one by one.")
    parser.add_argument("--cases", action="store_true", help="only the contract suite's cases")
    parser.add_argument("--sizes", action="store_true", help="only operations of a real model's sizes")
    parser.add_argument("--out", type=Path, default=RESULTS, help="append to this file")
    options = parser.parse_args()
    both = options.cases == options.sizes
    log = Log("ops", options.out)
    for wanted, measure in ((both or options.cases, cases), (both or options.sizes, sizes)):
        for row in measure() if wanted else ():
            log.append(row)
            middle = statistics.median(statistics.median(entry["seconds"]) for entry in row["found"])
            print(f"{row['kind']}: {row['backend']}: {len(row['found'])} entries, median {middle * 1e6:,.1f} us")


if __name__ == "__main__":
    main()
