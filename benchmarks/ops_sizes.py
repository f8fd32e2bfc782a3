"""Operations of a real model's size: those of the Qwen3-0.6B shape, for 1 token and for 512.

Each call takes the next layer's weights, or the next of several KV caches: arrays that were just used would still be in
the processor's cache, which they are not in a model.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import mlx_engine
from benchmarks.ops import Call, seconds_per_call
from benchmarks.text import Row
from mlx_engine.backends.base import Backend
from mlx_engine.backends.batch import KVSpan, KVView
from mlx_engine.backends.costs import nbytes_of
from mlx_engine.backends.parameters import Linear, Scores
from mlx_engine.cache.pool import PAGE
from mlx_engine.engine import Engine
from tests.contract.check import BACKENDS, PLAIN

MODEL = "shape:qwen3-0.6b"
RUNGS = [name for name in (PLAIN, "simd", "parallel") if name in BACKENDS]

FEW, MANY = 1, 512
DEPTH = 4096
# Layers that calls alternate between; for many tokens arithmetic is the limit, so two are enough.
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
    """Yield the operations of a layer, of attention and of the output head, one by one: all would not fit in memory."""
    be, model = engine.backend, engine.model
    rng = np.random.default_rng(0)
    for T in (FEW, MANY):
        layers = model.layers[: None if T == FEW else LAYERS_FOR_MANY]  # type: ignore[attr-defined]
        yield from projections(be, layers, rng, T)
        yield from attentions(be, engine.config, rng, T)
    yield from head(be, model, rng)


def projections(be: Backend, layers: Sequence[Any], rng: np.random.Generator, T: int) -> Iterator[Sized]:
    """Yield the four products of a layer, as a model calls them, one plain product and a norm."""
    D = layers[0].out.weight.shape[0]
    F = layers[0].ffn.down.weight.shape[1]
    HE = layers[0].out.weight.shape[1]
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
    yield sized("project_add", "attn_output", [(heads, w.out, x) for w in layers], [one.out])
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
    # Of T queries the first does not see the last T - 1 tokens.
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
