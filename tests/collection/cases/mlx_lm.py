"""Kernels of mlx-lm, compared with the operations that it uses without a GPU."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np

from tests.collection.case import Checkout, Results, case

MLX_LM = "ml-explore/mlx-lm"


def normal(seed: int = 0) -> Callable[..., mx.array]:
    """Return a maker of arrays of normal random numbers, given their lengths."""
    rng = np.random.default_rng(seed)
    return lambda *shape: mx.array(rng.standard_normal(shape, np.float32))


@case(MLX_LM)
def ssm_update(checkout: Checkout) -> Results:
    ssm = checkout.module("mlx_lm.models.ssm")
    n, h, groups, d, ds = 2, 4, 2, 16, 64
    array = normal()
    given = (
        array(n, 1, h, d), array(h), array(n, 1, groups, ds), array(n, 1, groups, ds), array(h), array(n, 1, h),
        array(h), array(n, h, d, ds), (0.001, 100.0),
    )  # fmt: skip
    return ssm.ssm_update_kernel(*given), ssm.ssm_attn(*given)


def delta_rule(checkout: Checkout, *, vectorized: bool, masked: bool) -> Results:
    gated_delta = checkout.module("mlx_lm.models.gated_delta")
    n, t, hk, hv, dk, dv = 2, 5, 2, 4, 64, 8
    array = normal()
    q, k, v = array(n, t, hk, dk), array(n, t, hk, dk) / 8, array(n, t, hv, dv)
    g = mx.sigmoid(array(n, t, hv, dk) if vectorized else array(n, t, hv))
    beta, state = mx.sigmoid(array(n, t, hv)), array(n, hv, dv, dk)
    mask = mx.array(np.arange(t) < np.array([[3], [5]])) if masked else None
    found = gated_delta.gated_delta_kernel(q, k, v, g, beta, state, mask)
    y, state = gated_delta.gated_delta_ops(q, k, v, g, beta, state, mask)
    if mask is None:
        return found, (y, state)
    # The kernel gives 0 where the operations give what they would without a mask.
    return found, (mx.where(mask[..., None, None], y, 0), state)


@case(MLX_LM)
def gated_delta(checkout: Checkout) -> Results:
    return delta_rule(checkout, vectorized=False, masked=False)


@case(MLX_LM)
def gated_delta_masked(checkout: Checkout) -> Results:
    return delta_rule(checkout, vectorized=False, masked=True)


@case(MLX_LM)
def gated_delta_vectorized(checkout: Checkout) -> Results:
    return delta_rule(checkout, vectorized=True, masked=False)


@case(MLX_LM)
def gated_delta_vectorized_masked(checkout: Checkout) -> Results:
    return delta_rule(checkout, vectorized=True, masked=True)


@case(MLX_LM)
def wkv7(checkout: Checkout) -> Results:
    rwkv7 = checkout.module("mlx_lm.models.rwkv7")
    n, t, h, d = 2, 4, 2, 64
    array = normal()
    r, w, k, v, a, b = (array(n, t, h, d) / 8 for _ in range(6))
    state, ys = array(n, h, d, d), []
    found = rwkv7.wkv7_kernel(r, w, k, v, a, b, state)
    for i in range(t):
        y, state = rwkv7._wkv7_step_ops(r[:, i], w[:, i], k[:, i], v[:, i], a[:, i], b[:, i], state)
        ys.append(y)
    return found, (mx.stack(ys, axis=1).reshape(n, t, h, d), state)


def bit_linear(checkout: Checkout, *, inverted: bool) -> Results:
    layers = checkout.module("mlx_lm.models.bitlinear_layers")
    rows, columns = 24, 96
    rng = np.random.default_rng(0)
    values = rng.integers(-1, 2, (4, rows // 4, columns))
    layer = layers.BitLinear(columns, rows, bias=False, invert_weight_scales=inverted)
    layer.weight = mx.array(((values + 1) << np.arange(0, 8, 2)[:, None, None]).sum(0).astype(np.uint8))
    layer.weight_scale = mx.array([0.3])
    x = rng.standard_normal((2, 3, columns), np.float32)
    scale = 1 / 0.3 if inverted else 0.3
    return layer(mx.array(x)), x @ values.reshape(rows, columns).T * scale


@case(MLX_LM)
def bit_linear_divided(checkout: Checkout) -> Results:
    return bit_linear(checkout, inverted=True)


@case(MLX_LM)
def bit_linear_multiplied(checkout: Checkout) -> Results:
    return bit_linear(checkout, inverted=False)


OVERWRITTEN = "a SIMD group writes its sum over maxima that other SIMD groups have yet to read: a barrier is missing"


def loss(checkout: Checkout, name: str) -> Results:
    losses = checkout.module("mlx_lm.tuner.losses")
    array, tokens = normal(), 5000
    p, q = array(3, tokens), array(3, tokens)
    found = getattr(losses, name)(q, p)
    log_p, log_q = (x - mx.logsumexp(x, axis=-1, keepdims=True) for x in (p, q))
    if name == "kl_div_loss":
        return found, mx.sum(mx.exp(log_p) * (log_p - log_q), axis=-1)
    log_m = mx.logaddexp(log_p, log_q) - np.log(2)
    terms = mx.exp(log_p) * (log_p - log_m) + mx.exp(log_q) * (log_q - log_m)
    return found, mx.sum(terms, axis=-1) / 2


@case(MLX_LM, bug=OVERWRITTEN)
def kl_divergence(checkout: Checkout) -> Results:
    return loss(checkout, "kl_div_loss")


@case(MLX_LM, bug=OVERWRITTEN)
def js_divergence(checkout: Checkout) -> Results:
    return loss(checkout, "js_div_loss")
