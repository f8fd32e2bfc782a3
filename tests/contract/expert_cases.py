"""Cases of mixtures of experts: the choice of experts, their products, and the whole block."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from mlx_engine.backends.base import Backend
from mlx_engine.backends.experts import ExpertLinear, Experts, Routing, SharedExpert
from mlx_engine.backends.parameters import Gating, Linear
from tests.contract.case import OpCase, Run, linear, norm_of, normal, weight

# Four rows of seven logits: none equal; equal ones at the edge of the choice; all equal; far apart.
LOGITS = [
    [0.5, -1.0, 2.0, 0.25, -3.0, 1.5, 0.0],
    [1.0, 2.0, 1.0, 1.0, 2.0, 0.0, 1.0],
    [3.0] * 7,
    [-1000.0, 0.0, 90.0, -90.0, 89.0, 1000.0, 1.0],
]


def chosen(be: Backend, ids: list[list[int]]) -> Any:
    """Return ids as the backend's `route` returns them."""
    like = be.array(np.zeros((1, 1), np.float32))
    if isinstance(like, list | np.ndarray):
        return ids if isinstance(like, list) else np.array(ids)
    import mlx.core as mx

    return mx.array(ids)


def route(rows: list[list[float]], n_used: int, *, normalize: bool, bias: bool = False, **options: Any) -> Run:
    def run(be: Backend, rng: np.random.Generator) -> Any:
        of_choice = weight(be, normal(rng, len(rows[0]))) if bias else None
        routing = Routing(n_used, normalize, bias=of_choice, **options)
        ids, weights = be.route(be.array(np.array(rows, np.float32)), routing)
        return be.array(np.asarray(be.host(ids))), weights

    return run


def stack(
    be: Backend, rng: np.random.Generator, x: int, n: int, k: int, type_name: str = "F32", *, bias: bool = False
) -> ExpertLinear:
    made = be.stack([linear(be, rng, n, k, type_name, bias=bias) for _ in range(x)])
    return ExpertLinear("w", made, (n, k), x * n * k * 4, x)


def head_linear(n_tokens: int, heads: int, n: int, k: int, width: int, type_name: str = "F32") -> Run:
    """Heads have `width` elements, of which the first k are read."""

    def run(be: Backend, rng: np.random.Generator) -> Any:
        return be.head_linear(be.array(normal(rng, n_tokens, heads, width)), stack(be, rng, heads, n, k, type_name))

    return run


def join_heads(be: Backend, rng: np.random.Generator) -> Any:
    return be.join_heads(be.array(normal(rng, 3, 2, 5)), be.array(normal(rng, 3, 2, 4)))


def expert_linear(ids: list[list[int]], *, each: bool, type_name: str = "F32", bias: bool = False) -> Run:
    """`each`: a row for each expert of a token, or one for all."""

    def run(be: Backend, rng: np.random.Generator) -> Any:
        rows = len(ids) * (len(ids[0]) if each else 1)
        linears = stack(be, rng, 5, 32, 64, type_name, bias=bias)
        return be.expert_linear(be.array(normal(rng, rows, 64)), linears, chosen(be, ids))

    return run


def combine(t: int, c: int) -> Run:
    return lambda be, rng: be.combine(be.array(normal(rng, t * c, 48)), be.array(normal(rng, t, c)))


def block(
    t: int, type_name: str = "F32", *, normalize: bool = True, n_used: int = 2, kind: str = "rms", ties: bool = False,
    gating: Gating = "silu", bias: bool = False, width: int = 32, shared: int = 0, beside: bool = False,
    added: bool = True, weighted: bool = True, choice_bias: bool = False, gate: bool = True, **routing: Any,
) -> Run:  # fmt: skip
    """Return a case of a mixture, or of its sum alone if nothing is `added`.

    `ties`: every second expert has the logits of the one before; `beside`: as beside a dense FFN, with all norms.
    """

    def run(be: Backend, rng: np.random.Generator) -> Any:
        rows = normal(rng, 6, 64, scale=0.125)
        of_router = weight(be, normal(rng, 6)) if bias else None
        router = Linear("w", weight(be, np.repeat(rows[:3], 2, axis=0) if ties else rows), of_router)
        sizes = ((width, 64), (width, 64), (64, width))
        parts = [stack(be, rng, 6, *size, type_name, bias=bias) for size in sizes]
        of_all = shared_expert(be, rng, shared, weighted=weighted) if shared else None
        of_choice = weight(be, normal(rng, 6, scale=0.3)) if choice_bias else None
        experts = Experts("moe", router, Routing(n_used, normalize, bias=of_choice, **routing), *parts, gating, of_all)
        if not gate:
            of_all = None if of_all is None else replace(of_all, gate=None, activation="relu2")
            experts = replace(experts, gate=None, activation="relu2", shared=of_all)
        x, norm = be.array(normal(rng, t, 64)), norm_of(be, rng, 64, kind)
        if not beside:
            return be.norm_experts_add(x, norm, experts) if added else be.norm_experts(x, norm, experts)
        scaled = replace(experts.routing, scales=weight(be, normal(rng, 6)))
        norms = {name: norm_of(be, rng, 64, "rms") for name in ("router_norm", "post_norm")}
        experts = replace(experts, routing=scaled, **norms)
        if not added:
            return be.norm_experts(x, norm, experts)
        return be.norm_experts_add(x, norm, experts, be.array(normal(rng, t, 64)))

    return run


def shared_expert(be: Backend, rng: np.random.Generator, width: int, *, weighted: bool = True) -> SharedExpert:
    sizes = ((1, 64), (width, 64), (width, 64), (64, width))
    made = SharedExpert(*(linear(be, rng, *size) for size in sizes))
    return made if weighted else replace(made, weight=None)


def shared_alone(t: int, *, weighted: bool = True) -> Run:
    return lambda be, rng: be.shared_expert(be.array(normal(rng, t, 64)), shared_expert(be, rng, 48, weighted=weighted))


def norm_add(t: int, kind: str = "rms") -> Run:
    def run(be: Backend, rng: np.random.Generator) -> Any:
        norm = None if kind == "none" else norm_of(be, rng, 40, kind)
        return be.norm_add(be.array(normal(rng, t, 40)), norm, be.array(normal(rng, t, 40)))

    return run


def clamped_swiglu(scale: float) -> Run:
    return lambda be, rng: be.clamped_swiglu(*(be.array(normal(rng, 7, 40, scale=scale)) for _ in range(2)))


def gated(gating: Gating) -> Run:
    return lambda be, rng: be.gated(*(be.array(normal(rng, 3, 20, scale=4.0)) for _ in range(2)), gating)


FEW = [[0, 3], [3, 4], [1, 3]]
MANY = [[i % 4, 4] for i in range(37)]

CASES = [
    OpCase("head_linear", "first-elements", head_linear(5, 3, 32, 64, 80)),
    OpCase("head_linear", "one-token", head_linear(1, 4, 48, 32, 32)),
    OpCase("head_linear", "q8_0", head_linear(3, 2, 32, 64, 64, "Q8_0")),
    OpCase("join_heads", "typical", join_heads),
    OpCase("route", "softmax-over-chosen", route(LOGITS, 3, normalize=True)),
    OpCase("route", "softmax-over-all", route(LOGITS, 2, normalize=False)),
    OpCase("route", "all-experts", route(LOGITS, 7, normalize=True)),
    OpCase("route", "sigmoids", route(LOGITS, 3, normalize=True, scoring="sigmoid", sum_eps=0.25)),
    OpCase("route", "sigmoids-and-a-bias", route(LOGITS, 3, normalize=False, scoring="sigmoid", bias=True)),
    OpCase("route", "softmax-and-a-bias", route(LOGITS, 3, normalize=True, bias=True)),
    OpCase(
        "route",
        "groups",
        route([row[:6] for row in LOGITS], 2, normalize=True, scoring="sigmoid", groups=(3, 1)),
    ),
    OpCase(
        "route",
        "equal-groups",
        route([[0.0] * 8, [3.0] * 8], 3, normalize=True, scoring="sigmoid", groups=(4, 2)),
    ),
    OpCase("route", "one-expert", route(LOGITS[:1], 1, normalize=True)),
    OpCase("expert_linear", "one-row-for-all", expert_linear(FEW, each=False)),
    OpCase("expert_linear", "a-row-for-each", expert_linear(FEW, each=True)),
    OpCase("expert_linear", "one-token", expert_linear([[1, 2]], each=False)),
    OpCase("expert_linear", "many-rows", expert_linear(MANY, each=False)),
    OpCase("expert_linear", "many-rows-for-each", expert_linear(MANY, each=True)),
    OpCase("expert_linear", "q8_0", expert_linear(FEW, each=True, type_name="Q8_0")),
    OpCase("expert_linear", "q8_0-many-rows", expert_linear(MANY, each=True, type_name="Q8_0")),
    OpCase("combine", "rows", combine(3, 4)),
    OpCase("combine", "one", combine(1, 1)),
    OpCase("norm_experts_add", "one-row", block(1)),
    OpCase("norm_experts_add", "rows", block(5)),
    OpCase("norm_experts_add", "many-rows", block(50)),
    OpCase("norm_experts_add", "q8_0-one-row", block(1, "Q8_0")),
    OpCase("norm_experts_add", "q8_0", block(20, "Q8_0")),
    OpCase("norm_experts_add", "softmax-over-all", block(3, normalize=False)),
    OpCase("norm_experts_add", "all-experts", block(3, n_used=6)),
    OpCase("norm_experts_add", "equal-logits", block(9, ties=True, n_used=3)),
    OpCase("expert_linear", "biases", expert_linear(FEW, each=True, bias=True)),
    OpCase("expert_linear", "biases-many-rows", expert_linear(MANY, each=False, bias=True)),
    OpCase("expert_linear", "q8_0-biases", expert_linear(MANY, each=True, type_name="Q8_0", bias=True)),
    OpCase("clamped_swiglu", "rows", clamped_swiglu(1.0)),
    OpCase("clamped_swiglu", "mostly-clamped", clamped_swiglu(50.0)),
    OpCase("clamped_swiglu", "far", clamped_swiglu(1e30)),
    OpCase("gated", "clamped_swiglu", gated("clamped_swiglu")),
    OpCase("gated", "silu", gated("silu")),
    OpCase("gated", "gelu", gated("gelu")),
    OpCase("shared_expert", "one-row", shared_alone(1)),
    OpCase("shared_expert", "rows", shared_alone(19)),
    OpCase("norm_experts_add", "shared-one-row", block(1, shared=96)),
    OpCase("norm_experts_add", "shared", block(37, shared=96)),
    OpCase("norm_experts_add", "smaller-shared", block(20, "Q8_0", shared=16)),
    OpCase("norm_experts_add", "biases", block(1, bias=True)),
    OpCase("norm_experts_add", "biases-rows", block(20, bias=True, width=44)),
    OpCase("norm_experts_add", "clamped_swiglu-one-row", block(1, "Q8_0", gating="clamped_swiglu", bias=True)),
    OpCase("norm_experts_add", "clamped_swiglu", block(30, "Q8_0", gating="clamped_swiglu", bias=True)),
    OpCase("norm_experts_add", "layer-norm", block(3, kind="layer")),
    OpCase("norm_experts_add", "beside-a-dense-ffn-one-row", block(1, gating="gelu", beside=True)),
    OpCase("norm_experts_add", "beside-a-dense-ffn", block(21, "Q8_0", gating="gelu", beside=True)),
    OpCase("norm_experts_add", "beside-and-shared", block(5, shared=16, beside=True)),
    OpCase("norm_experts", "one-row", block(1, "Q8_0", added=False)),
    OpCase("norm_experts", "rows", block(30, added=False)),
    OpCase("norm_experts", "shared", block(5, shared=96, added=False)),
    OpCase("norm_experts", "norms", block(7, gating="gelu", beside=True, added=False)),
    OpCase("shared_expert", "no-weight", shared_alone(19, weighted=False)),
    OpCase("norm_experts_add", "sigmoids-one-row", block(1, scoring="sigmoid", choice_bias=True, n_used=3)),
    OpCase("norm_experts_add", "sigmoids", block(20, "Q8_0", scoring="sigmoid", normalize=False)),
    OpCase("norm_experts_add", "sigmoids-and-equal-logits", block(9, ties=True, scoring="sigmoid", sum_eps=0.5)),
    OpCase("norm_experts_add", "softmax-and-a-bias", block(7, choice_bias=True)),
    OpCase("norm_experts_add", "shared-without-weight", block(37, shared=96, weighted=False)),
    OpCase("norm_experts_add", "no-gate-one-row", block(1, "Q8_0", gate=False, shared=96, weighted=False)),
    OpCase("norm_experts_add", "no-gate", block(33, "Q8_0", gate=False, shared=96)),
    OpCase("norm_experts_add", "groups", block(33, scoring="sigmoid", choice_bias=True, groups=(2, 1))),
    OpCase("norm_experts_add", "weighs-inputs", block(33, scoring="sigmoid", n_used=1, shared=96, weighs_inputs=True)),
    OpCase("norm_experts_add", "softmax-and-groups", block(33, groups=(2, 1))),
    OpCase("norm_add", "no-norm", norm_add(7, "none")),
    OpCase("norm_add", "one-row", norm_add(1)),
    OpCase("norm_add", "rows", norm_add(19)),
    OpCase("norm_add", "layer-norm", norm_add(3, "layer")),
]
