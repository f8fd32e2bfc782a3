"""Arguments that a kernel's function cannot take: the error names what was expected and what was found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import mlx.core as mx
import pytest

from kernels.metal import (
    attention,
    dense,
    dequantize,
    embed_rows,
    head_norm_rope,
    matvec,
    norm_gate_up,
    norm_project,
    norm_qkv,
    norm_rows,
    project_add,
)
from kernels.metal.formats import Q8_0Matrix

EPS = 1e-6
Call = Callable[..., mx.array | Sequence[mx.array]]

W, X, G = Q8_0Matrix(mx.zeros((3, 16), mx.uint32), mx.zeros((3, 2), mx.float16)), mx.zeros((1, 64)), mx.zeros((64,))
NARROW = Q8_0Matrix(mx.zeros((3, 8), mx.uint32), mx.zeros((3, 1), mx.float16))
FEWER = Q8_0Matrix(mx.zeros((2, 16), mx.uint32), mx.zeros((2, 2), mx.float16))
Q, STORE, PAGES, ROWS = (
    mx.zeros((3, 2, 8)),
    mx.zeros((2, 1, 16, 8)),
    mx.zeros((1, 1), mx.int32),
    mx.zeros((3,), mx.int32),
)
paged_attention = partial(attention.attention, page=16, window=0, scale=1.0)
ROW, TURNS = mx.zeros((1, 16)), mx.zeros((1, 4, 2))


@pytest.mark.parametrize(
    ("call", "arguments", "wanted"),
    [
        (matvec.matvec, (mx.zeros((1, 32)), W), r"x \(V, 64\) of bfloat16, float16 or float32, found \(1, 32\)"),
        (matvec.matvec, (mx.zeros((64,)), W), r"expected x \(V, 64\)"),
        (matvec.matvec, (mx.zeros((0, 64)), W), r"expected x \(V, 64\)"),
        (norm_project.norm_project, (mx.zeros((9, 64)), G, EPS, W), "at most 8 vectors, or factors of `norm_rows`"),
        (norm_project.norm_project, (X, G, EPS, W, G), r"expected factors \(1,\) of float32, found \(64,\)"),
        (norm_project.norm_project, (X.astype(mx.float16), G, EPS, W, G[:1]), r"expected x \(1, 64\) of float32"),
        (norm_rows.norm_rows, (X, G[:32], EPS), r"norm_weight \(64,\) of float16 or float32, found \(32,\)"),
        (norm_rows.norm_rows, (X[:, :40], G[:40], EPS), "norm_rows: expected K to be a multiple of 32, found K = 40"),
        (dense.dense, (X, mx.zeros((3, 64), mx.float16)), r"expected weight \(3, 64\) of float32, found"),
        (dense.dense, (X, mx.zeros((3, 32))), r"expected x \(V, 32\)"),
        (dense.dense, (X.astype(mx.float16), mx.zeros((3, 64))), r"expected x \(1, 64\) of float32"),
        (dense.dense, (X[:, :7], mx.zeros((3, 7))), "expected K from 8 on, found 7"),
        (paged_attention, (Q, STORE[:, :, :, :4], PAGES, ROWS, ROWS), r"store \(2, 1, 16, 8\) of float32 or float16"),
        (paged_attention, (Q, STORE.astype(mx.uint8), PAGES, ROWS, ROWS), "float16 or bfloat16, found .* of uint8"),
        (paged_attention, (Q[:, :, :4], STORE, PAGES, ROWS, ROWS), "E a multiple of 8 from 8 to 256, or of 64 to"),
        (paged_attention, (Q, mx.zeros((2, 3, 16, 8)), PAGES, ROWS, ROWS), "whose G divides 2 query heads, found"),
        (paged_attention, (Q, STORE, PAGES.astype(mx.uint32), ROWS, ROWS), r"pages \(B, P\) of int32, found"),
        (paged_attention, (Q, STORE, PAGES, ROWS[:1], ROWS), r"owner \(3,\) of int32, found \(1,\)"),
        (paged_attention, (Q, STORE, PAGES, ROWS, ROWS.astype(mx.float32)), "expected position .* of float32"),
        (partial(paged_attention, sinks=mx.zeros((3,))), (Q, STORE, PAGES, ROWS, ROWS), r"sinks \(2,\) of float32"),
        (partial(paged_attention, page=0), (Q, STORE, PAGES, ROWS, ROWS), "at least 1 position, found 0"),
        (project_add.project_add, (X, W, mx.zeros((1, 4))), r"residual \(1, 3\) of float32, found \(1, 4\)"),
        (project_add.project_add, (X, W, mx.zeros((1, 3), mx.float16)), "found .* of float16"),
        (norm_project.norm_project, (X, G[:32], 1e-6, W), r"norm_weight \(64,\) of float16 or float32, found \(32,\)"),
        (norm_qkv.norm_qkv, (X, G, 1e-6, W, NARROW, W), "expected 64 columns of k, found 32"),
        (norm_qkv.norm_qkv, (X, G, 1e-6, W, W, NARROW), "expected 64 columns of v, found 32"),
        (norm_gate_up.norm_gate_up, (X, G, 1e-6, W, FEWER), "expected 3 rows of up, found 2"),
        (norm_gate_up.norm_gate_up, (X, G, 1e-6, W, NARROW), "expected 64 columns of up, found 32"),
        (norm_gate_up.norm_gate_up, (X, G, 1e-6, W, W, "relu"), "expected the activation .* found 'relu'"),
        (head_norm_rope.head_norm_rope, (ROW, ROW, ROW, TURNS, 7), "expected an even head_dim from 8 on"),
        (head_norm_rope.head_norm_rope, (ROW, ROW, ROW[:, :8], TURNS, 8), r"expected v \(1, 16\)"),
        (head_norm_rope.head_norm_rope, (mx.zeros((1, 20)), ROW, ROW, TURNS, 8), r"expected q \(1, 16\)"),
        (head_norm_rope.head_norm_rope, (ROW, ROW, ROW, mx.zeros((2, 4, 2)), 8), r"expected cos_sin \(1, 4, 2\)"),
        (head_norm_rope.head_norm_rope, (ROW, ROW, ROW, TURNS, 8, (G[:8], G)), r"expected a norm weight \(8,\)"),
        (dequantize.dequantize, (W, mx.bfloat16), "expected float16 or float32, found"),
        (embed_rows.embed_rows, (W, mx.array([1.0])), r"expected ids \(T,\) of int32, found \(1,\) of float32"),
        (embed_rows.embed_rows, (W, mx.zeros((0,), mx.int32)), r"expected ids \(T,\) of int32"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_are_named(call: Call, arguments: tuple[object, ...], wanted: str):
    with pytest.raises(ValueError, match=wanted):
        call(*arguments)
