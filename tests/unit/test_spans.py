"""Spans of a profiled pass: their times, costs and roles."""

from __future__ import annotations

import numpy as np
import pytest

from mlx_engine.backends.batch import KVSpan, KVView
from mlx_engine.backends.costs import _n_pairs
from mlx_engine.backends.numpy.simd import SimdBackend
from mlx_engine.backends.observed import profiled, role_of
from mlx_engine.backends.parameters import Linear, RMSNorm, Scores
from mlx_engine.bench.bottlenecks import analysis as taken_apart
from mlx_engine.bench.bottlenecks.analysis import Pass
from mlx_engine.observe.profiler import Cost, Profiler, Span

# ---- spans ----


def span(role: str, own: float, *, layer: int | None = None, part: str = "", phase: str = "layers") -> Span:
    return Span("op", layer, part, 0.0, phase, own=own, cost=Cost(1.0, 2.0), role=role)


def test_operations_are_medians_over_passes():
    passes = [Pass([span("a", s), span("a", s), span("b", 0.001)], 1.0) for s in (0.001, 0.004, 0.002)]
    passes.append(Pass([], 1.0))
    a, b = taken_apart.operations(passes)
    assert a.samples == pytest.approx([2.0, 8.0, 4.0, 0.0])
    assert (a.ms, a.calls, a.cost) == (pytest.approx(3.0), 1.5, Cost(1.5, 3.0))
    assert (b.ms, b.calls) == (pytest.approx(1.0), 0.75)


def test_a_pass_is_told_by_phases():
    spans = [
        span("embedding", 0.001, phase="embedding"),
        span("add", 0.003),
        span("last", 0.0001, phase="norm"),
        span("head", 0.004, phase="projection"),
        span("argmax", 0.0005, phase="sampling"),
    ]
    assert taken_apart.phases(Pass(spans, 0.02)) == pytest.approx(
        {"embedding": 1.0, "layers": 3.0, "norm": 0.1, "projection": 4.0, "sampling": 0.5, "sum": 8.6, "watched": 20.0}
    )
    assert taken_apart.operations([Pass(spans, 0.02)])[2].role == "output_norm"


def test_layers_are_told_by_halves():
    def one(layer: int, attention: float, feed_forward: float) -> list[Span]:
        return [
            span("q", attention, layer=layer, part="attn_norm.weight"),
            span("gate", feed_forward, layer=layer, part="ffn_norm"),
        ]

    passes = [Pass(one(0, a, 0.002) + one(1, 0.001, 0.001), 1.0) for a in (0.001, 0.002, 0.006)]
    first, second = taken_apart.layers(passes)
    assert (first["layer"], first["attention"], first["feed_forward"]) == pytest.approx((0, 2.0, 2.0))
    assert (first["ms"], first["min"], first["max"], first["jitter"]) == pytest.approx((4.0, 3.0, 8.0, 8 / 3))
    assert (second["ms"], second["jitter"]) == pytest.approx((2.0, 1.0))


def test_spread():
    assert taken_apart.spread([4.0, 1.0, 2.0, 3.0, 5.0]) == {
        "median": 3.0, "q1": 2.0, "q3": 4.0, "min": 1.0, "max": 5.0, "n": 5,
    }  # fmt: skip
    assert taken_apart.spread([7.0])["q1"] == 7.0


# ---- what an operation needs, and what it is for ----


@pytest.mark.parametrize("window", [None, 1, 2, 3, 5, 9])
@pytest.mark.parametrize(("n_tokens", "n_slots"), [(1, 1), (1, 7), (3, 3), (4, 9), (5, 5), (7, 8)])
def test_scores_are_counted_where_something_is_visible(n_tokens, n_slots, window):
    sees = [n_slots - n_tokens + t + 1 for t in range(n_tokens)]
    assert _n_pairs(n_tokens, n_slots, window) == sum(min(n, window or n) for n in sees)
    if window is not None:
        assert _n_pairs(n_tokens, n_slots, -window) == _n_pairs(n_tokens, n_slots, window)


def test_linear_layers_are_named_by_what_they_are_for():
    assert role_of([Linear(f"blk.7.attn_{x}", None) for x in "qkv"]) == "attn_q+k+v"
    assert role_of([Linear("blk.7.ffn_gate", None), Linear("blk.7.ffn_up", None)]) == "ffn_gate+up"
    assert role_of([Linear("blk.7.ffn_down", None)]) == "ffn_down"
    assert role_of([Linear("token_embd", None)]) == role_of([Linear("output", None)]) == "head"


def test_a_head_that_is_one_job_has_its_matrix_and_is_the_projection():
    class Fused(SimdBackend):
        def norm_head(self, x, norm, head):
            return x @ head.weight.T

    profiler = Profiler(keep=True)
    be, x = profiled(Fused(), profiler), np.ones((4, 64), np.float32)
    be.norm_head(x, RMSNorm("output_norm", x[0], 1e-6), Linear("token_embd", np.ones((10, 64), np.float32)))
    (head,) = profiler.spans
    assert (head.phase, head.role, head.cost.flops) == ("projection", "head", 2 * 4 * 10 * 64)
    assert head.cost.nbytes == 4 * (4 * 64 + 64 + 10 * 64 + 4 * 10)


def test_composed_blocks_count_nothing_twice():
    profiler = Profiler(keep=True)
    be, x = profiled(SimdBackend(), profiler), np.ones((1, 64), np.float32)
    linears = [Linear(f"blk.2.attn_{name}", np.ones((32, 64), np.float32)) for name in "qk"]
    be.norm_project(x, RMSNorm("blk.2.attn_norm", x[0], 1e-6), linears)
    be.norm_head(x, RMSNorm("output_norm", x[0], 1e-6), Linear("output", np.ones((10, 64), np.float32)))
    assert [span.role for span in profiler.spans] == [
        *("rms_norm", "attn_q", "attn_k", "norm_project"),
        *("rms_norm", "head", "norm_head"),
    ]
    assert sum(span.cost.flops for span in profiler.spans) == 2 * 64 * (32 + 32 + 10)
    assert [span.phase for span in profiler.spans[4:]] == ["norm", "projection", "norm"]


def test_attention_over_a_window_is_told_apart():
    profiler = Profiler(keep=True)
    be = profiled(SimdBackend(), profiler)
    store = be.kv_empty(1, 8, 6)
    store[:] = 1
    q, kv = np.ones((1, 2, 8), np.float32), KVView(store, 6, [KVSpan(np.array([0]), 6, 1)])
    be.attention(q, kv, [1], Scores(1.0))
    be.attention(q, kv._replace(window=4), [1], Scores(1.0))
    assert [span.role for span in profiler.spans] == ["attention", "attention, window"]
    assert [span.cost.flops for span in profiler.spans] == [4 * 16 * 6, 4 * 16 * 4]
    # Queries are read and as much is written; of each slot that is seen a key and a value are read.
    assert [span.cost.nbytes for span in profiler.spans] == [4 * (2 * 16 + 2 * 8 * n) for n in (6, 4)]


def test_attention_costs_what_each_sequence_of_a_batch_does():
    """Of the second one all three tokens are queries, of the third one nobody is."""
    profiler = Profiler(keep=True)
    be = profiled(SimdBackend(), profiler)
    store = np.ones((2, 1, 16, 8), np.float32)
    spans = [KVSpan(np.array([first]), length, n_new) for first, length, n_new in ((0, 5, 1), (8, 3, 3), (12, 4, 2))]
    be.attention(np.ones((4, 2, 8), np.float32), KVView(store, 8, spans), [1, 3, 0], Scores(1.0))
    (span,) = profiler.spans
    assert span.cost == Cost(4 * 16 * (5 + 1 + 2 + 3), 4 * (2 * 4 * 16 + 2 * 8 * (5 + 3)))
