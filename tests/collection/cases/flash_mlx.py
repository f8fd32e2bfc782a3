"""Kernels of FlashMLX, compared with its own operations."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np

from tests.collection.case import Checkout, Results, case, normal, suite

FLASH = "lisihao/FlashMLX"

suite(FLASH, "mac", "tests/test_mac_attention.py", options=("--left-empty=flashmlx",))


def merged(checkout: Checkout, module: str, function: str, d: int = 64) -> Results:
    array, n, h = normal(), 3, 4
    given = array(n, h, d), array(n, h), array(n, h, d), array(n, h)
    attention = checkout.module("flashmlx.mac.attention")
    return getattr(checkout.module(f"flashmlx.mac.{module}"), function)(*given), attention.merge_attention_states(
        *given
    )


@case(FLASH)
def merge_with_a_barrier(checkout: Checkout) -> Results:
    return merged(checkout, "merge_fused_fixed", "merge_attention_states_fused")


@case(FLASH)
def merge(checkout: Checkout) -> Results:
    return merged(checkout, "merge_fused", "merge_attention_states_fused")


@case(FLASH, bug="the grid has a thread, not a threadgroup, per query and head: most of the output is never written")
def merge_in_threadgroups(checkout: Checkout) -> Results:
    return merged(checkout, "merge_fused_v2", "merge_attention_states_fused_v2")


@case(FLASH, bug="a template argument is a float, which MLX refuses")
def downdate(checkout: Checkout) -> Results:
    array, n, h, d = normal(), 3, 4, 64
    given = array(n, h, d), array(n, h) + 6, array(n, h, d), array(n, h)
    attention = checkout.module("flashmlx.mac.attention")
    return checkout.module("flashmlx.mac.merge_fused").downdate_attention_fused(*given), attention.downdate_attention(
        *given
    )


def partial(checkout: Checkout, function: Callable[..., Results]) -> Results:
    array, n, s, h, groups, d = normal(), 2, 75, 4, 2, 64
    queries, keys, values = (
        x.astype(mx.bfloat16) for x in (array(n, h, d), array(n, s, groups, d), array(n, s, groups, d))
    )
    start = mx.array(np.random.default_rng(1).integers(0, s - 1, (n, h)).astype(np.int32))
    expected = checkout.module("flashmlx.mac.attention")._mac_partial_attention_reference(
        *(x.astype(mx.float32) for x in (queries, keys, values)), start
    )
    return function(queries, keys, values, start), expected


@case(FLASH)
def attention_block_stride(checkout: Checkout) -> Results:
    return partial(checkout, checkout.module("flashmlx.mac.attention_opt_block").mac_partial_attention_block_stride)


@case(FLASH, bug="four SIMD groups have a part of the sum each and all write it to the same place")
def attention_of_groups(checkout: Checkout) -> Results:
    return partial(checkout, checkout.module("flashmlx.mac.attention_gqa_opt").mac_partial_attention_gqa_opt)


@case(FLASH)
def attention_fused(checkout: Checkout) -> Results:
    return partial(checkout, checkout.module("flashmlx.mac.attention").mac_fused_partial_attention)
