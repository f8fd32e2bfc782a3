"""Kernels of smaller projects."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from tests.collection.case import Checkout, Results, case, normal

VLLM = "vllm-project/vllm-metal"
CORRIDOR, VMLX, RAPID = "cmoyates/corridorkey-mlx", "jjang-ai/vmlx", "raullenchai/Rapid-MLX"


def group_norm(checkout: Checkout, *, frozen: bool) -> Results:
    module, array, height, width = checkout.module("corridorkey_mlx.utils.metal_groupnorm"), normal(), 9, 11
    x, weight, bias = array(2, height, width, 64) + 0.3, array(64), array(64)
    groups = np.array(x, np.float64).reshape(2, height * width, 8, 8)
    mean, variance = groups.mean((1, 3), keepdims=True), groups.var((1, 3), keepdims=True)
    normed = ((groups - mean) / np.sqrt(variance + 1e-5)).reshape(x.shape)
    stats = tuple(mx.array(s.reshape(2, 8, 1).astype(np.float32)) for s in (mean, variance)) if frozen else None
    return module.metal_groupnorm(x, weight, bias, stats), normed * np.array(weight) + np.array(bias)


@case(CORRIDOR)
def group_norm_of_an_image(checkout: Checkout) -> Results:
    return group_norm(checkout, frozen=False)


@case(CORRIDOR)
def group_norm_of_a_tile(checkout: Checkout) -> Results:
    return group_norm(checkout, frozen=True)


def codebook(checkout: Checkout) -> tuple[object, mx.array, mx.array, np.ndarray]:
    manager = checkout.module("vmlx_engine.metal.kernel_manager").CodebookKernelManager()
    array = normal()
    indices = np.random.default_rng(1).integers(0, 20, (4, 12, 6)).astype(np.uint16)
    return manager, array(3, 48), array(20, 8), indices


@case(VMLX)
def codebook_of_experts(checkout: Checkout) -> Results:
    manager, x, book, indices = codebook(checkout)
    found = manager.codebook_moe_matvec(x, book, mx.array(indices), [2, 0], 12, 6, 8)  # type: ignore[attr-defined]
    weights = np.array(book)[indices[[2, 0]]].reshape(2, 12, 48)
    return found, np.einsum("bi,koi->bko", np.array(x), weights)


@case(VMLX)
def codebook_of_a_matrix(checkout: Checkout) -> Results:
    manager, x, book, indices = codebook(checkout)
    found = manager.codebook_matvec_2d(x, book, mx.array(indices[0]), 12, 6, 8)  # type: ignore[attr-defined]
    return found, np.array(x) @ np.array(book)[indices[0]].reshape(12, 48).T


@case(VLLM)
def convolution_of_one_token(checkout: Checkout) -> Results:
    kernel = checkout.package("vllm_metal.attention.impls.gdn_lazy").GDNLazyKernels(enabled=True)._conv_kernel
    array, requests, width, taps, slots = normal(), 3, 40, 4, mx.array([4, 0, 2], dtype=mx.int32)
    x, state, weight = array(requests, width), array(5, taps - 1, width), array(width, taps, 1)
    found = kernel(
        inputs=[x, state, weight, slots, requests],
        template=[("T", mx.float32), ("StT", mx.float32), ("CONV_DIM", width), ("KERNEL_SIZE", taps)],
        grid=(requests * width, 1, 1),
        threadgroup=(requests * width, 1, 1),
        output_shapes=[(requests, width), (requests, taps - 1, width)],
        output_dtypes=[mx.float32] * 2,
    )
    window = mx.concatenate([state[slots], x[:, None]], axis=1)
    total = (window * weight[:, :, 0].T).sum(axis=1)
    return found, (total * mx.sigmoid(total), window[:, 1:])


@case(RAPID, tolerance=1 / 256)
def argmax_of_a_quantized_head(checkout: Checkout) -> Results:
    """The logits of the tokens that are chosen, which must be the largest but for a rounding to bfloat16.

    The project's own test compares tokens with those of MLX's product. On a CPU that sums in bfloat16, and its largest
    logit of random weights is often another one.
    """
    module, array = checkout.module("vllm_mlx.spec_decode.mtp.quantized_argmax"), normal()
    dense = nn.Linear(1024, 520, bias=False)
    dense.weight, x = array(520, 1024).astype(mx.bfloat16), array(1, 3, 1024).astype(mx.bfloat16)
    head = nn.QuantizedLinear.from_linear(dense, group_size=64, bits=4)
    weight = mx.dequantize(head.weight, head.scales, head.biases, 64, 4).astype(mx.float32)
    logits = np.array(x.astype(mx.float32), np.float64)[0] @ np.array(weight, np.float64).T
    chosen = np.array(module.quantized_argmax(head, x))[0]
    return logits[np.arange(3), chosen], logits.max(axis=1)
