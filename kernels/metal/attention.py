"""Softmax attention over pages of keys and values, which are read without copying them.

A row is one query token. A threadgroup computes one row for several query heads that share a KV head, so that each key
is read once for all of them. A sink is one more score of a query head, without a value. Because the order of summation
is fixed, the bits of a row depend only on its queries and sinks, and on the keys and values that it attends to. They do
not depend on pages, or on the other rows and sequences of a launch. The order is:

    Keys are cut into blocks of 32, counted from position 0. Each SIMD-group computes a chain of every eighth block:
    block b belongs to chain b % 8. A chain has four streams (partial sums), or two if heads are wider than 256; key k
    of a block is added to stream k % 4, or k % 2.
    A score is a dot product times the scale, limited by the soft cap if there is one, and then times log2(e). The terms
    of the dot product are divided among 8 parts, or 16 if the head is wider than 256 (`load_head` in heads.h.metal).
    Each part is summed sequentially, and the parts are added pairwise, as a binary tree.
    The weight of a key is 2**(score - m), where m is the chain's largest score so far. A chain processes its blocks
    sequentially; if a block increases m, the sums so far are first multiplied by 2**(old m - new m). In a block, each
    stream adds the weighted values of its keys sequentially to its sum of values. It adds the weights of these keys to
    each other sequentially, and then their total to its sum of weights.
    At the end, the streams of a chain are added pairwise. Then the chains are added in ascending order, each
    multiplied by 2**(m - M), where M is the largest of all scores and the sink. The result is divided by the sum of the
    weights, to which the sink's weight is added last.

A masked key (in a block, but not attended to) has the weight 0, which changes no bit. The running sum is rescaled as in
Milakov and Gimelshein ("Online normalizer calculation for softmax", 2018) and Dao et al. ("FlashAttention", 2022).
"""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np

from ..kernel import Kernel
from ..launch import Size, launch
from . import arguments
from .layout import described
from .reference import EPSILON, PRODUCT, Expected, wide

KERNEL = Kernel.load("attention", ["q", "store", "pages", "owner", "position", "scale", "sinks"], ["y"])
# The number of chains is part of the order of summation: another number would change bits, so it is not tuned.
CHAINS = 8
# If a threadgroup processes several heads, they have at most this number of elements together; a head narrower than 64
# counts as 64. With more heads, keys would be read less often, but queries and sums would need more registers than a
# thread has.
MOST_NUMBERS = 256
# A thread has one part of each head. A head of at most NARROW elements is divided into eight parts, a wider head into
# 16, so that the queries and sums of a part fit into the thread's registers. The sums of the widest head take 18 KiB of
# the 32 KiB of threadgroup memory.
NARROW, WIDEST_HEAD = 256, 576


def fits(head_dim: int) -> bool:
    """Return whether the kernel supports heads of this width."""
    return 8 <= head_dim <= WIDEST_HEAD and head_dim % (8 if head_dim <= NARROW else 64) == 0


def heads(n_heads: int, n_kv_heads: int, head_dim: int) -> int:
    """Return how many query heads a threadgroup processes; all of them share one KV head."""
    group = n_heads // n_kv_heads
    return max(n for n in range(1, group + 1) if group % n == 0 and (n == 1 or n * max(head_dim, 64) <= MOST_NUMBERS))


def grid(rows: int, n_heads: int, n_kv_heads: int, head_dim: int) -> tuple[Size, Size]:
    """Return the grid and the threadgroup: threadgroup i processes row i // n, with n threadgroups per row."""
    groups = rows * (n_heads // heads(n_heads, n_kv_heads, head_dim))
    return (groups * CHAINS * 32, 1, 1), (CHAINS * 32, 1, 1)


def attention(
    q: mx.array,
    store: mx.array,
    pages: mx.array,
    owner: mx.array,
    position: mx.array,
    *,
    page: int,
    window: int,
    scale: float,
    softcap: float | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Compute softmax attention of R query rows of B sequences.

    Args:
        q: (R, H, E) float32, E a multiple of 8 up to 256, or a multiple of 64 up to 576; query head h reads KV head
            `h // (H // G)`.
        store: keys, then values: (2, G, slots, E) float32, float16 or bfloat16; in Q8_0, (2, G, slots, E / 32 * 34)
            uint8, E a multiple of 32. If the first axis is 1, the keys are also the values. The result has the same
            bits as with the store converted to float32.
        pages: (B, P) int32, the first slot of each page of a sequence: page i has positions
            [i * page, (i + 1) * page). Entries of pages that no row attends to are never read.
        owner: (R,) int32, the sequence of each row.
        position: (R,) int32, the position of each row, from 0 on; a row attends to positions up to this one.
        page: positions per page.
        window: number of latest positions that a row attends to, including its own; 0 for no limit. A window of -C
            limits a row to its chunk, where chunk i has positions [i * C, (i + 1) * C).
        scale: factor of the scores.
        softcap: the scores become `softcap * tanh(score / softcap)`; None for no soft cap.
        sinks: (H,) float32, the sink of each query head; None for no sinks.

    Returns:
        (R, H, E) float32. `reference` has the error bound. Entries of `pages`, `owner` and `position` are in GPU
        memory, so they are not checked; invalid entries make the kernel read out of bounds.

    Raises:
        ValueError: an array has a wrong shape or type, or `page` is less than 1.
    """
    R, H, G, E = _sizes(q, store, page)
    arguments.array("attention", "q", q, (R, H, E), mx.float32)
    types = [mx.float32, mx.float16, mx.bfloat16] + [mx.uint8] * (E % 32 == 0)
    row = E // 32 * 34 if E % 32 == 0 and store.dtype == mx.uint8 else E
    arguments.array("attention", "store", store, (min(2, len(store)), G, store.shape[2], row), *types)
    if pages.ndim != 2 or not pages.size or pages.dtype != mx.int32:
        raise ValueError(f"attention: expected pages (B, P) of int32, found {described(pages)}")
    arguments.array("attention", "owner", owner, (R,), mx.int32)
    arguments.array("attention", "position", position, (R,), mx.int32)
    if sinks is not None:
        arguments.array("attention", "sinks", sinks, (H,), mx.float32)
    # The outer factor contains log2(e), because the kernel computes weights as powers of 2.
    outer, *inner = (scale,) if softcap is None else (softcap, scale / softcap)
    constants = arguments.constants(outer / math.log(2), *inner)
    threads, group = grid(R, H, G, E)
    store = store.view(mx.uint16) if store.dtype == mx.bfloat16 else store
    (y,) = launch(
        KERNEL,
        # Without sinks the kernel does not read this argument; any float32 array is accepted.
        [q, store, pages, owner, position, constants, constants if sinks is None else sinks],
        template=(
            ("H", H),
            ("G", G),
            ("E", E),
            ("ROW", row),
            ("HEADS", heads(H, G, E)),
            ("PARTS", 8 if E <= NARROW else 16),
            ("CHAINS", CHAINS),
            ("PAGE", page),
            # A window of -C is passed as C and CHUNKED, because `launch` refuses negative template values.
            ("WINDOW", abs(window)),
            ("CHUNKED", window < 0),
            ("SOFTCAP", softcap is not None),
            ("SINKS", sinks is not None),
        ),
        grid=threads,
        threadgroup=group,
        output_shapes=[(R, H, E)],
        output_dtypes=[mx.float32],
    )
    return y


def reference(
    q: mx.array,
    store: mx.array,
    pages: mx.array,
    owner: mx.array,
    position: mx.array,
    page: int,
    window: int,
    scale: float,
    softcap: float | None = None,
    sinks: mx.array | None = None,
) -> Expected:
    """Return the expected result in float64, with the error bound.

    A score has `PRODUCT` roundings of a dot product and 2 of the scale, relative to the sum of its terms' absolute
    values. The absolute error of a score is the relative error of its key's weight, and counts twice, because weights
    are in the numerator and the denominator. Powers, sums and the division add 16 roundings. A soft cap does not
    amplify errors, but adds 8 roundings relative to the capped score. If a sink is larger than all scores, the
    difference between score and sink is rounded as well.
    """
    queries, table = wide(q), np.array(pages)
    wide_store = _q8_0(np.array(store)) if store.dtype == mx.uint8 else wide(store.astype(mx.float32))
    value, bound = np.empty(queries.shape), np.empty(queries.shape)
    group = queries.shape[1] // wide_store.shape[1]
    for r, (sequence, last) in enumerate(zip(np.array(owner).tolist(), np.array(position).tolist(), strict=True)):
        first = last - last % -window if window < 0 else max(0, last + 1 - window) if window else 0
        positions = np.arange(first, last + 1)
        slots = table[sequence, positions // page] + positions % page
        both = np.repeat(wide_store[:, :, slots], group, axis=1)
        keys, values = both[0], both[-1]
        scores = scale * np.einsum("he,hke->hk", queries[r], keys)
        sizes = abs(scale) * np.einsum("he,hke->hk", np.abs(queries[r]), np.abs(keys))
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
            sizes = sizes + 8 / (PRODUCT + 2) * abs(scores)
        sink = np.full((len(scores), 1), -np.inf) if sinks is None else wide(sinks)[:, None]
        most = np.maximum(scores.max(axis=1, keepdims=True), sink)
        weights = np.exp(scores - most)
        weights /= weights.sum(axis=1, keepdims=True) + np.exp(sink - most)
        value[r] = np.einsum("hk,hke->he", weights, values)
        roundings = 16 + 2 * (PRODUCT + 2) * sizes.max(axis=1) + 2 * (most[:, 0] - scores.max(axis=1))
        bound[r] = EPSILON * roundings[:, None] * np.einsum("hk,hke->he", weights, np.abs(values))
    return Expected(value, bound)


def _q8_0(store: np.ndarray) -> np.ndarray:
    """Return the values of a Q8_0 store (..., E / 32 * 34) as float64 (..., E)."""
    blocks = store.reshape(*store.shape[:-1], -1, 34)
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float64)
    return (scales * np.ascontiguousarray(blocks[..., 2:]).view(np.int8)).reshape(*store.shape[:-1], -1)


def _sizes(q: mx.array, store: mx.array, page: int) -> tuple[int, int, int, int]:
    """Check `page` and the axes of q and the store; return R, H, G and E."""
    if q.ndim != 3 or not q.shape[0] or not fits(q.shape[2]):
        raise ValueError(
            f"attention: expected q (R, H, E) with E a multiple of 8 from 8 to {NARROW}, or of 64 to {WIDEST_HEAD}, "
            f"found {described(q)}"
        )
    if store.ndim != 4 or not store.size or q.shape[1] % store.shape[1]:
        raise ValueError(
            f"attention: expected a store (2, G, slots, {q.shape[2]}) whose G divides {q.shape[1]} query heads, "
            f"found {described(store)}"
        )
    if page < 1:
        raise ValueError(f"attention: expected a page of at least 1 position, found {page}")
    return q.shape[0], q.shape[1], store.shape[1], q.shape[2]
