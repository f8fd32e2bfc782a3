"""Kernels of mlx-examples and mlx-audio."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from tests.collection.case import Checkout, Results, case, normal

EXAMPLES, AUDIO = "ml-explore/mlx-examples", "Blaizzy/mlx-audio"


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def lstm(module: object, batch: int) -> Results:
    array, rng = normal(), np.random.default_rng(1)
    time, width, d = 4, 12, 40
    layer = module.LSTM(width, d)  # type: ignore[attr-defined]
    layer.Wx, layer.Wh, layer.bias = (mx.array(rng.standard_normal(s) / 5) for s in ((4 * d, width), (4 * d, d), 4 * d))
    x = array(batch, time, width)
    steps = np.array(x, np.float64) @ np.array(layer.Wx, np.float64).T + np.array(layer.bias)
    hidden, cell, every = np.zeros((batch, d)), np.zeros((batch, d)), []
    for t in range(time):
        i, f, g, o = np.split(steps[:, t] + hidden @ np.array(layer.Wh, np.float64).T, 4, axis=-1)
        cell = sigmoid(f) * cell + sigmoid(i) * np.tanh(g)
        hidden = sigmoid(o) * np.tanh(cell)
        every.append(hidden)
    return layer(x), np.stack(every, axis=1)


OUTSIDE = "cell and both outputs have hidden_size elements per sequence, and are indexed with 4 * hidden_size"


@case(EXAMPLES)
def encodec_lstm(checkout: Checkout) -> Results:
    return lstm(checkout.module("encodec.encodec"), batch=1)


@case(EXAMPLES, bug=OUTSIDE)
def encodec_lstm_of_two_sequences(checkout: Checkout) -> Results:
    return lstm(checkout.module("encodec.encodec"), batch=2)


@case(AUDIO)
def audio_encodec_lstm(checkout: Checkout) -> Results:
    return lstm(checkout.module("mlx_audio.codec.models.encodec.encodec"), batch=1)


@case(AUDIO, bug=OUTSIDE)
def audio_encodec_lstm_of_two_sequences(checkout: Checkout) -> Results:
    return lstm(checkout.module("mlx_audio.codec.models.encodec.encodec"), batch=2)


MOSSFORMER = "mlx_audio.sts.models.mossformer2_se"


@case(AUDIO)
def relu_squared(checkout: Checkout) -> Results:
    flash, array = checkout.module(f"{MOSSFORMER}.flash_attention_kernels").FlashAttentionImplementations, normal()
    q, k, v = (array(1, 2, 20, 24) for _ in range(3))
    return flash.simple_kernel(q, k, v), flash.standard(q, k, v)


@case(AUDIO)
def relu_squared_of_products(checkout: Checkout) -> Results:
    flash, array = checkout.module(f"{MOSSFORMER}.flash_attention_kernels").FlashAttentionImplementations, normal()
    q, k, v = (array(2, 2, 20, 24) for _ in range(3))
    return flash.fused_kernel(q, k, v), flash.standard(q, k, v)


@case(AUDIO)
def multiply_add(checkout: Checkout) -> Results:
    kernel, array = checkout.module(f"{MOSSFORMER}.flash_attention_kernels").fused_multiply_add, normal()
    a, b = array(100), array(100)
    found = kernel(
        inputs=[a, b, mx.array([0.3])], grid=(100, 1, 1), threadgroup=(32, 1, 1), output_shapes=[(100,)],
        output_dtypes=[mx.float32],
    )  # fmt: skip
    return found[0], a * b * 0.3


@case(AUDIO)
def depthwise_convolution(checkout: Checkout) -> Results:
    convolution, array = checkout.module(f"{MOSSFORMER}.depthwise_conv1d_kernel").depthwise_conv1d, normal()
    x, weight = array(2, 19, 6), array(6, 5, 1)
    return convolution(x, weight, padding=2, groups=6), mx.conv1d(x, weight, padding=2, groups=6)
