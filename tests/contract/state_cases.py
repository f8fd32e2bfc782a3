"""Cases of operations with a state: short convolutions, the gated delta rule, and the gates around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mlx_engine.backends.base import Backend
from mlx_engine.backends.batch import Batch, Stores
from mlx_engine.backends.parameters import Convolution, DeltaNet, DeltaRule, Mamba2, RMSNorm, StateSpace
from tests.contract.case import OpCase, Run, norm_weight, normal

# Two passes: first row, rows, source and target. A sequence in two runs and one of a single token; then both go on.
PASSES = (((0, 3, 0, 1), (3, 2, 1, 2), (5, 1, 0, 3)), ((0, 1, 3, 4), (1, 4, 2, 5)))
N_SLOTS = 6
Once = Callable[[Batch, int, np.random.Generator], Any]


def passes(be: Backend, rng: np.random.Generator, shapes: tuple[tuple[int, ...], ...], once: Once) -> Any:
    """Return what `once` returns for each pass: the second reads what the first has written."""
    stores = Stores([None], [-1], 4, True, [tuple(be.state_empty(shape, N_SLOTS) for shape in shapes)])
    found = []
    for runs in PASSES:
        n, lengths = sum(run[1] for run in runs), tuple(run[1] for run in runs)
        table = np.array(runs, dtype=np.int64)
        batch = Batch([0] * n, lengths, tuple(range(n)), lengths, (), stores, (), table)
        found.append(once(batch, n, rng))
    return tuple(found)


def convolution(be: Backend, rng: np.random.Generator, taps: int, channels: int) -> Convolution:
    return Convolution("c", be.array(normal(rng, taps, channels)))


def convolve(taps: int, channels: int) -> Run:
    def run(be: Backend, rng: np.random.Generator) -> Any:
        conv = convolution(be, rng, taps, channels)
        return passes(be, rng, ((taps - 1, channels),), lambda batch, n, rng: be.convolve(
            be.array(normal(rng, n, channels)), conv, batch.state(0, 0)))  # fmt: skip

    return run


def short_conv(taps: int, channels: int) -> Run:
    def run(be: Backend, rng: np.random.Generator) -> Any:
        conv = convolution(be, rng, taps, channels)

        def once(batch: Batch, n: int, rng: np.random.Generator) -> Any:
            b, c, x = (be.array(normal(rng, n, 3 * channels)[:, i * channels : (i + 1) * channels]) for i in range(3))
            return be.short_conv(batch, 0, b, c, x, conv)

        return passes(be, rng, ((taps - 1, channels),), once)

    return run


def rule_of(
    be: Backend, rng: np.random.Generator, keys: int, dim: int, values: int, width: int, *, are_neighbors: bool = False
) -> DeltaRule:
    rate, bias = be.array(-np.exp(normal(rng, values))), be.array(normal(rng, values))
    return DeltaRule("r", rate, bias, keys, dim, values, width, are_neighbors)


def delta_rule(keys: int, dim: int, values: int, width: int, scale: float = 1.0) -> Run:
    def run(be: Backend, rng: np.random.Generator) -> Any:
        rule = rule_of(be, rng, keys, dim, values, width)

        def once(batch: Batch, n: int, rng: np.random.Generator) -> Any:
            x = be.array(normal(rng, n, 2 * keys * dim + values * width))
            beta, step = (be.array(normal(rng, n, values, scale=scale)) for _ in range(2))
            return be.delta_rule(x, beta, step, rule, batch.state(0, 0))

        return passes(be, rng, ((values, dim, width),), once)

    return run


def delta_net(keys: int, dim: int, values: int, width: int, *, are_neighbors: bool = False) -> Run:
    def run(be: Backend, rng: np.random.Generator) -> Any:
        channels = 2 * keys * dim + values * width
        norm = RMSNorm("n", norm_weight(be, rng, width), 1e-6)
        shapes = ((3, channels), (values, dim, width))
        rule = rule_of(be, rng, keys, dim, values, width, are_neighbors=are_neighbors)
        net = DeltaNet((None,) * 4, convolution(be, rng, 4, channels), rule, norm, shapes)  # type: ignore[arg-type]

        def once(batch: Batch, n: int, rng: np.random.Generator) -> Any:
            x, gate = be.array(normal(rng, n, channels)), be.array(normal(rng, n, values * width))
            both = normal(rng, n, 2 * values)
            return be.delta_net(batch, 0, x, gate, be.array(both[:, :values]), be.array(both[:, values:]), net)

        return passes(be, rng, shapes, once)

    return run


def biased(be: Backend, rng: np.random.Generator) -> Any:
    conv = Convolution("c", be.array(normal(rng, 4, 16)), be.array(normal(rng, 16)))
    return passes(be, rng, ((3, 16),), lambda batch, n, rng: be.convolve(
        be.array(normal(rng, n, 16)), conv, batch.state(0, 0)))  # fmt: skip


def space_of(be: Backend, rng: np.random.Generator, heads: int, width: int, groups: int, dim: int) -> StateSpace:
    rate, bias = be.array(-np.exp(normal(rng, heads))), be.array(normal(rng, heads))
    return StateSpace("s", rate, bias, be.array(normal(rng, heads)), heads, width, groups, dim)


def state_space(heads: int, width: int, groups: int, dim: int, scale: float = 1.0) -> Run:
    def run(be: Backend, rng: np.random.Generator) -> Any:
        space = space_of(be, rng, heads, width, groups, dim)

        def once(batch: Batch, n: int, rng: np.random.Generator) -> Any:
            x = be.array(normal(rng, n, heads * width + 2 * groups * dim))
            return be.state_space(x, be.array(normal(rng, n, heads, scale=scale)), space, batch.state(0, 0))

        return passes(be, rng, ((heads, dim, width),), once)

    return run


def mamba2(heads: int, width: int, groups: int, dim: int, norm_groups: int) -> Run:
    def run(be: Backend, rng: np.random.Generator) -> Any:
        inner, channels = heads * width, heads * width + 2 * groups * dim
        norm = RMSNorm("n", norm_weight(be, rng, inner), 1e-6) if norm_groups else None
        shapes, space = ((3, channels), (heads, dim, width)), space_of(be, rng, heads, width, groups, dim)
        conv = Convolution("c", be.array(normal(rng, 4, channels)), be.array(normal(rng, channels)))
        net = Mamba2(None, conv, space, norm, norm_groups or 1, shapes)  # type: ignore[arg-type]

        def once(batch: Batch, n: int, rng: np.random.Generator) -> Any:
            of = normal(rng, n, inner + channels + heads)
            parts = (be.array(part) for part in np.split(of, (inner, inner + channels), axis=1))
            return be.mamba2(batch, 0, *parts, net)

        return passes(be, rng, shapes, once)

    return run


def group_norm(n: int, width: int, groups: int) -> Run:
    def run(be: Backend, rng: np.random.Generator) -> Any:
        return be.group_norm(be.array(normal(rng, n, width)), norm_weight(be, rng, width), 1e-5, groups)

    return run


def sigmoid(be: Backend, rng: np.random.Generator) -> Any:
    return be.sigmoid(be.array(np.array([[-100.0, -20.0, -1.0, 0.0, 1e-3, 2.0, 90.0]], dtype=np.float32)))


def sigmoid_gate(n: int, width: int) -> Run:
    def run(be: Backend, rng: np.random.Generator) -> Any:
        both = normal(rng, n, 2 * width, scale=9.0)
        return be.sigmoid_gate(be.array(both[:, :width]), be.array(both[:, width:]))

    return run


def state_nbytes(be: Backend, rng: np.random.Generator) -> Any:
    """Check the size of an empty and of a store with slots: the number of bytes differs between backends."""
    none, some = (int(be.state_nbytes(be.state_empty((3, 5), n))) for n in (0, 4))
    return int(none == 0) + 2 * int(some >= 4 * 3 * 5 * 4)


WHY = "errors add up from token to token"
CASES = [
    OpCase("convolve", "typical", convolve(3, 32)),
    OpCase("convolve", "four-taps", convolve(4, 10)),
    OpCase("convolve", "two-taps", convolve(2, 1)),
    OpCase("short_conv", "typical", short_conv(3, 32)),
    OpCase("short_conv", "odd-channels", short_conv(4, 9)),
    OpCase("delta_rule", "typical", delta_rule(2, 8, 4, 16), rtol=1e-5, atol=2e-5, why=WHY),
    OpCase("delta_rule", "extremes", delta_rule(1, 4, 1, 3, scale=60.0), rtol=1e-5, atol=2e-5, why=WHY),
    OpCase("delta_net", "typical", delta_net(2, 32, 4, 80), rtol=1e-5, atol=3e-5, why=WHY),
    OpCase("delta_net", "neighbors", delta_net(2, 32, 6, 32, are_neighbors=True), rtol=1e-5, atol=3e-5, why=WHY),
    OpCase("delta_net", "odd-heads", delta_net(1, 6, 2, 5), rtol=1e-5, atol=3e-5, why=WHY),
    OpCase("convolve", "bias", biased),
    OpCase("state_space", "typical", state_space(4, 16, 2, 8), rtol=1e-5, atol=2e-5, why=WHY),
    OpCase("state_space", "extremes", state_space(2, 3, 1, 4, scale=60.0), rtol=1e-5, atol=2e-5, why=WHY),
    OpCase("mamba2", "typical", mamba2(4, 80, 2, 16, 2), rtol=1e-5, atol=3e-5, why=WHY),
    OpCase("mamba2", "no-norm", mamba2(3, 64, 1, 8, 0), rtol=1e-5, atol=3e-5, why=WHY),
    OpCase("mamba2", "odd-heads", mamba2(2, 5, 1, 6, 1), rtol=1e-5, atol=3e-5, why=WHY),
    OpCase("group_norm", "typical", group_norm(3, 48, 4)),
    OpCase("sigmoid", "extremes", sigmoid, each=1e-6),
    OpCase("sigmoid_gate", "typical", sigmoid_gate(3, 48)),
    OpCase("sigmoid_gate", "odd-width", sigmoid_gate(1, 7)),
    OpCase("state_nbytes", "law", state_nbytes),
]
