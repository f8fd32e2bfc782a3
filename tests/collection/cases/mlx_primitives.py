"""Kernels of mlx-primitives: its own tests, and kernels that these leave out, compared with its fallbacks."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from tests.collection.case import Checkout, Results, case, normal, suite

PRIMITIVES = "zakkeown/mlx-primitives"
KERNELS = "mlx_primitives.kernels"

suite(PRIMITIVES, "kernels", "tests/kernels", options=("-k", "not gelu_exact_vs_numpy"))  # it needs SciPy
suite(PRIMITIVES, "dsl", "tests/dsl")
suite(PRIMITIVES, "primitives", "tests/primitives")
suite(PRIMITIVES, "chunked", "tests/attention/test_chunked.py", "tests/attention/test_sliding_window.py")


def rms(x: mx.array, weight: mx.array, eps: float = 1e-6) -> mx.array:
    return x * mx.rsqrt(mx.mean(x * x, axis=-1, keepdims=True) + eps) * weight


@case(PRIMITIVES)
def rms_norm(checkout: Checkout) -> Results:
    norms, array = checkout.module(f"{KERNELS}.rmsnorm"), normal()
    x, weight = array(2, 5, 96), array(96)
    return norms.fast_rmsnorm(x, weight), rms(x, weight)


@case(PRIMITIVES, bug="the kernel's name is rmsnorm_residual_eps1e-06: a function's name has no minus sign")
def rms_norm_of_a_sum(checkout: Checkout) -> Results:
    norms, array = checkout.module(f"{KERNELS}.rmsnorm"), normal()
    x, residual, weight = array(2, 5, 96), array(2, 5, 96), array(96)
    return norms.fast_rmsnorm_residual(x, residual, weight), rms(x + residual, weight)


@case(PRIMITIVES)
def layer_norm(checkout: Checkout) -> Results:
    norms, array = checkout.module(f"{KERNELS}.layernorm"), normal()
    x, weight, bias = array(2, 5, 96) + 0.4, array(96), array(96)
    return norms.fast_layernorm(x, weight, bias), mx.fast.layer_norm(x, weight, bias, 1e-6)


@case(PRIMITIVES)
def gated_silu(checkout: Checkout) -> Results:
    gate, up = normal(0)(3, 70), normal(1)(3, 70)
    return checkout.module(f"{KERNELS}.swiglu").fast_swiglu(gate, up), nn.silu(gate) * up


@case(PRIMITIVES)
def gated_gelu(checkout: Checkout) -> Results:
    gate, up = normal(0)(3, 70), normal(1)(3, 70)
    return checkout.module(f"{KERNELS}.swiglu").fast_geglu(gate, up), nn.gelu_approx(gate) * up


def turned(checkout: Checkout) -> tuple[object, mx.array, mx.array, mx.array]:
    rope, x = checkout.module(f"{KERNELS}.rope"), normal()(2, 7, 3, 16)
    cos, sin = rope.precompute_rope_cache(12, 16)
    return rope, x, cos, sin


@case(PRIMITIVES)
def rope(checkout: Checkout) -> Results:
    module, x, cos, sin = turned(checkout)
    return module.fast_rope(x, cos, sin, 2), module.rope(x, cos, sin, 2, use_metal=False)  # type: ignore[attr-defined]


@case(PRIMITIVES)
def rope_of_queries_and_keys(checkout: Checkout) -> Results:
    module, x, cos, sin = turned(checkout)
    given = x, x[::-1], cos, sin, 2
    return module.fast_rope_qk(*given), module.rope_qk(*given, use_metal=False)  # type: ignore[attr-defined]


def grouped(checkout: Checkout, *, tiled: bool) -> Results:
    module, array = checkout.module(f"{KERNELS}.gqa_optimized"), normal()
    q, k, v = array(2, 40, 4, 32), array(2, 40, 2, 32), array(2, 40, 2, 32)
    given = q, k, v, 2
    expected = module.gqa_attention_reference(*given, causal=True)
    return module.fast_gqa_attention(*given, causal=True, use_tiled=tiled), expected


@case(PRIMITIVES)
def grouped_attention(checkout: Checkout) -> Results:
    return grouped(checkout, tiled=False)


@case(PRIMITIVES)
def grouped_attention_in_tiles(checkout: Checkout) -> Results:
    return grouped(checkout, tiled=True)


def with_rope(checkout: Checkout, function: str) -> Results:
    module, array = checkout.module(f"{KERNELS}.fused_rope_attention"), normal()
    tables = checkout.module(f"{KERNELS}.rope")
    q, k, v = array(1, 50, 2, 32), array(1, 50, 2, 32), array(1, 50, 2, 32)
    cos, sin = tables.precompute_rope_cache(64, 32)
    turned = (tables.rope(x, cos, sin, use_metal=False).transpose(0, 2, 1, 3) for x in (q, k))
    expected = mx.fast.scaled_dot_product_attention(
        *turned, v.transpose(0, 2, 1, 3), scale=32**-0.5, mask="causal"
    ).transpose(0, 2, 1, 3)
    return getattr(module, function)(q, k, v, cos_cache=cos, sin_cache=sin, causal=True), expected


@case(PRIMITIVES)
def attention_with_rope(checkout: Checkout) -> Results:
    return with_rope(checkout, "fast_fused_rope_attention")


@case(PRIMITIVES)
def attention_with_rope_in_tiles(checkout: Checkout) -> Results:
    return with_rope(checkout, "fast_fused_rope_attention_tiled")
