"""Compiled attention against its NumPy twin and against float64; nothing that is out of sight gets into a result.

A query has the same bits whatever queries and sequences are beside it, and wherever the pages of its keys lie.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba")

from kernels.cpu.build import layout, library, pool
from kernels.cpu.build.layout import BLOCK, LANES, QUERIES, SMALL_BATCH
from kernels.cpu.products import order_numpy
from mlx_engine.backends.batch import KVSpan
from mlx_engine.backends.cpu.backend import parts_of, sequence_descriptors
from mlx_engine.quant import key_values
from tests import cpu_reference as reference

U = 2.0**-24
LIBRARY = library.load()
POOL = pool.Pool(3, LIBRARY)
# Two heads share keys wherever it is about spans.
SPAN = QUERIES // 2


def case(seed: int, n_tokens: int, past: int, heads: tuple[int, int], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return queries of the last tokens, and keys and values (2, G, S, E) of all tokens."""
    rng = np.random.default_rng(seed)
    n_heads, n_kv_heads = heads
    q = rng.standard_normal((n_tokens, n_heads, width)).astype(np.float32)
    return q, rng.standard_normal((2, n_kv_heads, past + n_tokens, width)).astype(np.float32)


def paged(sequences: list[np.ndarray], page: int, seed: int | None) -> tuple[np.ndarray, list[KVSpan]]:
    """Return keys and values in pages, in order or with a seed in random order; all other slots are NaN.

    Stored bytes are put into pages like numbers; their other slots are 255.
    """
    n_pages = [-(-kv.shape[2] // page) for kv in sequences]
    order = np.arange(sum(n_pages) + 3)
    if seed is not None:
        np.random.default_rng(seed).shuffle(order)
    dtype, shape = sequences[0].dtype, (*sequences[0].shape[:2], page * len(order), sequences[0].shape[3])
    store = np.full(shape, 255 if dtype == np.uint8 else np.nan, dtype)
    spans = []
    for kv, n, end in zip(sequences, n_pages, np.cumsum(n_pages), strict=True):
        span = KVSpan(order[end - n : end] * page, kv.shape[2], 1)
        store[:, :, span.slots(0, kv.shape[2], page)] = kv
        spans.append(span)
    return store, spans


def attend_batch(
    parts: list[tuple[np.ndarray, np.ndarray]], window: int = 0, scale: float | None = None, page: int = 64,
    seed: int | None = 0, softcap: float = 0.0, sinks: np.ndarray | None = None,
    type_: str = "f32",
) -> list[np.ndarray]:  # fmt: skip
    """Return attention of several (queries, keys and values) in one call, as `CompiledBackend.attention` does.

    Keys and values are float32, which are rounded to the type, or bytes of Q8_0.
    """
    store, spans = paged([kv for _, kv in parts], page, seed)
    if store.dtype == np.float32:
        with np.errstate(invalid="ignore"):  # slots without a key are NaN
            store = np.ascontiguousarray(key_values.stored(store, type_))
    q, counts = np.concatenate([q for q, _ in parts]), [len(q) for q, _ in parts]
    n, n_heads, width = q.shape
    scratch = layout.attention_scratch(n_heads // store.shape[1], width, layout.KV_TYPES[type_])
    assert scratch <= layout.SCRATCH_BYTES
    out = np.full_like(q, np.nan)
    sequences = sequence_descriptors(spans, counts, counts)
    found = np.full((max(1, parts_of(spans, counts)), n_heads, width + LANES), np.nan, dtype=np.float32)
    POOL.shared.wake()
    LIBRARY.attend(
        POOL.address, LIBRARY.address("attend_decode"), LIBRARY.address("attend_prefill"), q.ctypes.data, n, n_heads,
        store.shape[1], width, store.ctypes.data, layout.KV_TYPES[type_], store.shape[2], len(store), page, window,
        sequences.ctypes.data, len(parts), layout.SEQ_NEW, width**-0.5 if scale is None else scale, softcap,
        0 if sinks is None else sinks.ctypes.data, found.ctypes.data, out.ctypes.data,
    )  # fmt: skip
    return np.split(out, np.cumsum(counts)[:-1])


def attend(
    q: np.ndarray, kv: np.ndarray, window: int = 0, scale: float | None = None, page: int = 64, seed: int | None = 0,
    **scores: Any,
) -> np.ndarray:  # fmt: skip
    """Return attention of one sequence; `scores` are a soft cap and sinks."""
    return attend_batch([(q, kv)], window, scale, page, seed, **scores)[0]


def twin(q: np.ndarray, kv: np.ndarray, window: int = 0, scale: float | None = None, **scores: Any) -> np.ndarray:
    out = np.empty_like(q)
    reference.attend(q, kv, window, q.shape[2] ** -0.5 if scale is None else scale, out, **scores)
    return out


def check(q: np.ndarray, kv: np.ndarray, window: int = 0, page: int = 64) -> None:
    """Against float64, in bounds that follow from what is rounded.

    A score is a sum of E products: it is off by at most E + 2 roundings of what they add up to without signs, and each
    weight relatively by as much, below the line and above. A sum over n keys adds n roundings; each block of keys
    scales what came before once more.
    """
    wide_q, wide = q.astype(np.float64), kv.astype(np.float64)
    want = twin(wide_q, wide, window)
    size = twin(wide_q, np.stack([wide[0], np.abs(wide[1])]), window)
    group, width = q.shape[1] // kv.shape[1], q.shape[2]
    keys = np.repeat(np.abs(wide[0]), group, axis=0)
    score = np.einsum("the,hse->ths", np.abs(wide_q), keys).max(axis=2)[:, :, None] * width**-0.5
    bound = (2 * (width + 4) * score + 2 * kv.shape[2] + 40) * U * size
    for found in (attend(q, kv, window, page=page), twin(q, kv, window)):
        assert (np.abs(found - want) <= bound).all()


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32 - 1), n_tokens=st.integers(1, 70), past=st.integers(0, 40), n_kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 2, 3, 5]), width=st.sampled_from([16, 32, 64, 80, 96, 128]),
    window=st.sampled_from([0, 0, 1, 2, 15, 16, 17, 33, 500, -7, -32]), page=st.sampled_from([1, 5, 16, 64, 100, 256]),
)  # fmt: skip
def test_attention_of_any_shape(
    seed: int, n_tokens: int, past: int, n_kv_heads: int, group: int, width: int, window: int, page: int
):
    q, kv = case(seed, n_tokens, past, (group * n_kv_heads, n_kv_heads), width)
    check(q, kv, window, page)


@pytest.mark.parametrize("past", [0, 1, BLOCK - 2, BLOCK - 1, BLOCK, 2 * BLOCK - 1, 2 * BLOCK, 1000])
@pytest.mark.parametrize("window", [0, 1, 100, BLOCK, BLOCK + 1])
def test_one_token_over_keys_in_blocks(past: int, window: int):
    q, kv = case(past, 1, past, (6, 2), 32)
    check(q, kv, window)


@pytest.mark.parametrize("n_tokens", [1, 12])
def test_128_heads_that_share_a_latent_have_the_bits_of_fewer_heads(n_tokens: int):
    """The heads of DeepSeek-V3; chunks of a prompt are single tokens."""
    q, kv = case(3, n_tokens, 130, (128, 1), 576)
    few = [attend(np.ascontiguousarray(q[:, first : first + 2]), kv) for first in (0, 70, 126)]
    found = attend(q, kv)
    assert all((found[:, first : first + 2] == of).all() for first, of in zip((0, 70, 126), few, strict=True))


TOKENS, PASTS, WINDOWS = (
    (SPAN - 1, SPAN, SPAN + 1, 2 * SPAN + 2),
    (0, BLOCK // 3, BLOCK - 1, BLOCK, 2 * BLOCK + 5),
    (0, 40, BLOCK + 1),
)


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("n_tokens", "past", "window"),
    [
        pytest.param(n, past, window, marks=[pytest.mark.slow] * ((i + j + k) % 3 > 0))  # each pair is in one test
        for i, n in enumerate(TOKENS)
        for j, past in enumerate(PASTS)
        for k, window in enumerate(WINDOWS)
    ],
)
def test_many_tokens_over_keys_in_blocks(n_tokens: int, past: int, window: int):
    q, kv = case(n_tokens + past, n_tokens, past, (4, 2), 48)
    check(q, kv, window)


@pytest.mark.parametrize("n_tokens", [1, 30])
@pytest.mark.parametrize("larger", ["first", "last", "middle"])
def test_scores_far_apart_leave_the_value_of_the_largest(n_tokens: int, larger: str):
    """At any position: sums before it are scaled down to 0, and later weights are 0."""
    past, width = 2 * BLOCK + 60, 32
    q, kv = case(3, n_tokens, past, (2, 1), width)
    slot = {"first": 0, "last": past - 1, "middle": BLOCK + 60}[larger]
    q[:] = np.abs(q) + np.float32(0.1)
    kv[0, :, :past] = -1e4 * np.abs(kv[0, :, :past])
    kv[0, :, slot] = 1e4
    kv[0, :, past : past + n_tokens] = -1e4
    np.testing.assert_array_equal(attend(q, kv), np.broadcast_to(kv[1, 0, slot], q.shape))


@pytest.mark.parametrize("n_tokens", [1, 30])
def test_scores_beyond_what_exp_can_hold(n_tokens: int):
    q, kv = case(4, n_tokens, 300, (4, 2), 64)
    q *= 1e15
    kv[0] *= 1e15
    found = attend(q, kv)
    # Such scores are so far apart that the largest alone counts.
    np.testing.assert_allclose(found, twin(q.astype(np.float64), kv.astype(np.float64)), rtol=1e-6)


@pytest.mark.parametrize(("n_tokens", "past"), [(1, 0), (1, 700), (40, 0), (40, 300)])
def test_scores_that_are_equal_give_the_mean(n_tokens: int, past: int):
    q, kv = case(5, n_tokens, past, (3, 1), 16)
    q[:] = 0
    found = attend(q, kv)
    values = kv[1, 0, : past + n_tokens].astype(np.float64)
    seen = np.arange(past + 1, past + n_tokens + 1)[:, None]
    size = np.cumsum(np.abs(values), axis=0)[past:] / seen
    want = np.cumsum(values, axis=0)[past:] / seen
    assert (np.abs(found - want[:, None]) <= (past + n_tokens + 40) * U * size[:, None]).all()


@pytest.mark.parametrize("n_tokens", [1, 5, 70])
def test_a_query_sees_itself_alone_in_a_window_of_one(n_tokens: int):
    q, kv = case(6, n_tokens, 290, (4, 2), 32)
    found = attend(q, kv, window=1)
    own = kv[1, :, 290 : 290 + n_tokens].transpose(1, 0, 2)
    np.testing.assert_array_equal(found, np.repeat(own, 2, axis=1))


@pytest.mark.parametrize("n_tokens", [1, 3, 70])
def test_the_scale_is_applied_once(n_tokens: int):
    q, kv = case(8, n_tokens, 20, (2, 2), 32)
    found = attend(q, kv, scale=0.25)
    np.testing.assert_array_equal(found, attend(q * np.float32(0.5), kv, scale=0.5))


# ---- bits ----

PASSES = (2, 3, 5, SMALL_BATCH, SMALL_BATCH + 1, 16, 49, 129)


def each_alone(q: np.ndarray, kv: np.ndarray, window: int, **scores: Any) -> np.ndarray:
    """Return attention with one call per query, over the keys up to its own."""
    past = kv.shape[2] - len(q)
    return np.concatenate([attend(q[t : t + 1], kv[:, :, : past + t + 1], window, **scores) for t in range(len(q))])


@pytest.mark.some(2)
@pytest.mark.parametrize("heads", [(4, 2), (5, 1)])
@pytest.mark.parametrize("window", [0, 1, 40, BLOCK, BLOCK + 33])
def test_a_query_has_the_same_bits_in_any_pass(heads: tuple[int, int], window: int):
    """Alone, beside other queries, and with keys of this pass or of an earlier one."""
    past, n_tokens = 2 * BLOCK - 60, max(PASSES)
    q, kv = case(window, n_tokens, past, heads, 32)
    alone = each_alone(q, kv, window)
    for n in PASSES:
        np.testing.assert_array_equal(attend(q[-n:], kv, window), alone[-n:])
        np.testing.assert_array_equal(attend(q[:n], kv[:, :, : past + n], window), alone[:n])


@pytest.mark.some(2)
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("scores", [{"softcap": 2.0}, {"sinks": True}, {"softcap": 2.0, "sinks": True}])
def test_soft_caps_and_sinks_keep_the_bits_in_any_pass(window: int, scores: dict[str, Any]):
    past, n_tokens = 2 * BLOCK - 10, 49
    q, kv = case(window, n_tokens, past, (4, 2), 32)
    if "sinks" in scores:
        scores = {**scores, "sinks": np.array([0.5, -3, 7, 90], dtype=np.float32)}
    alone = each_alone(q, kv, window, **scores)
    for n in (3, SMALL_BATCH, SMALL_BATCH + 1, n_tokens):
        np.testing.assert_array_equal(attend(q[-n:], kv, window, page=23, **scores), alone[-n:])
    np.testing.assert_allclose(alone, twin(q, kv, window, **scores), rtol=0, atol=2e-6)
    assert np.abs(alone - each_alone(q, kv, window)).max() > 1e-2


@pytest.mark.parametrize("n_tokens", [1, 30])
def test_a_sink_far_above_all_scores_leaves_nothing_and_one_far_below_changes_no_bit(n_tokens: int):
    q, kv = case(4, n_tokens, 200, (2, 1), 16)
    sinks = np.array([-400, 400], dtype=np.float32)
    found = attend(q, kv, sinks=sinks)
    np.testing.assert_array_equal(found[:, 0], attend(q, kv)[:, 0])
    np.testing.assert_array_equal(found[:, 1], 0)


@pytest.mark.some(2)
@pytest.mark.parametrize("n_tokens", [SMALL_BATCH, SMALL_BATCH + 1])
@pytest.mark.parametrize("window", [0, 3])
def test_a_block_that_some_queries_see(n_tokens: int, window: int):
    """Queries before a block do not attend to it yet; with a window, later queries do not attend to it any more."""
    for past in range(BLOCK - n_tokens, BLOCK + 4):
        q, kv = case(past, n_tokens, past, (4, 2), 32)
        np.testing.assert_array_equal(attend(q, kv, window), each_alone(q, kv, window))


@pytest.mark.some(2)
@pytest.mark.parametrize("n_tokens", [1, SMALL_BATCH, SMALL_BATCH + 1, 40])
@pytest.mark.parametrize("window", [0, 90])
def test_pages_change_no_bit(n_tokens: int, window: int):
    """Pages smaller and larger than a block of keys, in order or not."""
    q, kv = case(9, n_tokens, 2 * BLOCK + 70, (4, 2), 48)
    want = attend(q, kv, window, page=1024, seed=None)
    for page in (1, 16, 23, 64, BLOCK, 200, 256):
        for seed in (None, 1, 2):
            np.testing.assert_array_equal(attend(q, kv, window, page=page, seed=seed), want)


@pytest.mark.some(5)
@pytest.mark.parametrize("window", [0, 1, 90])
@pytest.mark.parametrize(
    "counts", [(1, 1), (1,) * SMALL_BATCH, (1,) * (SMALL_BATCH + 1), (1,) * 32, (3, 1, 4), (1, 70, 2), (SPAN + 1, 1)]
)
def test_a_sequence_has_the_same_bits_in_any_batch(counts: tuple[int, ...], window: int):
    """Each sequence has a different number of tokens before its queries."""
    parts = [case(i, n, 37 * i * i % (3 * BLOCK), (4, 2), 32) for i, n in enumerate(counts)]
    together = attend_batch(parts, window, page=16)
    for (q, kv), found in zip(parts, together, strict=True):
        np.testing.assert_array_equal(found, attend(q, kv, window))


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1), n_tokens=st.one_of(st.integers(1, 4), st.integers(SMALL_BATCH, SMALL_BATCH + 2)),
    past=st.sampled_from([0, 5, 100, BLOCK - 1, BLOCK, BLOCK + 30]), n_kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 2, 3]), width=st.sampled_from([16, 32, 80]), window=st.sampled_from([0, 0, 1, 20, BLOCK]),
    page=st.sampled_from([16, 50, BLOCK]), spread=st.sampled_from([1.0, 1.0, 8.0]),
    softcap=st.sampled_from([0.0, 0.5, 50.0]), sinks=st.sampled_from([None, 0.0, 5.0]),
)  # fmt: skip
def test_attention_has_the_bits_of_the_order_in_numpy(
    seed: int, n_tokens: int, past: int, n_kv_heads: int, group: int, width: int, window: int, page: int, spread: float,
    softcap: float, sinks: float | None,
):  # fmt: skip
    q, kv = case(seed, n_tokens, past, (group * n_kv_heads, n_kv_heads), width)
    q *= np.float32(spread)
    noise = np.random.default_rng(seed).standard_normal(q.shape[1]).astype(np.float32)
    own = None if sinks is None else np.float32(sinks) + noise
    want = order_numpy.attend(q, kv, window, width**-0.5, softcap, own)
    np.testing.assert_array_equal(attend(q, kv, window, page=page, softcap=softcap, sinks=own), want)


@pytest.mark.each_value
@pytest.mark.parametrize("type_", ["f16", "bf16", "q8_0"])
@pytest.mark.parametrize(("n_tokens", "past"), [(1, 300), (3, 128), (SMALL_BATCH, 5), (70, 200)])
@pytest.mark.parametrize(("width", "window"), [(64, 0), (96, 150)])
def test_rounded_keys_and_values_give_the_bits_of_their_numbers_in_float32(type_, n_tokens, past, width, window):
    """Decode and prefill; blocks of which a part is visible; pages in random order."""
    q, kv = case(9, n_tokens, past, (6, 2), width)
    wide = key_values.expanded(key_values.stored(kv, type_), type_)
    assert (wide != kv).any()
    for page in (16, 64):
        (found,), (expected,) = (
            attend_batch([(q, numbers)], window, page=page, type_=of) for numbers, of in ((kv, type_), (wide, "f32"))
        )
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(expected[-1:], order_numpy.attend(q[-1:], wide, window, width**-0.5))


# Bits of float16: both zeros, subnormal and normal numbers at the ends of their ranges, infinities, NaN.
SCALES = (0, 0x8000, 1, 0x8001, 0x03FF, 0x83FF, 0x0400, 0x3C00, 0xBC00, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0xFE01)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1), n_tokens=st.sampled_from([1, 3, SMALL_BATCH, 12]), array=st.sampled_from([0, 1]),
    scales=st.lists(st.sampled_from(SCALES), min_size=1, max_size=4), n_keys=st.integers(12, 140),
)  # fmt: skip
def test_blocks_of_any_scale_give_the_bits_of_their_numbers_in_float32(seed, n_tokens, array, scales, n_keys):
    """Also negative scales, which no rounding writes. Bits are compared, except those of NaN."""
    rng = np.random.default_rng(seed)
    q, kv = case(seed, n_tokens, n_keys - n_tokens, (4, 2), 64)
    rows = key_values.stored(kv, "q8_0").reshape(2, 2, n_keys, 2, 34)
    chosen = rng.random((2, n_keys, 2)) < rng.choice([0.05, 1])
    rows[array, chosen, :2] = rng.choice(np.array(scales, np.uint16), chosen.sum())[:, None].view(np.uint8)
    rows[array, chosen, 2:] = rng.integers(0, 256, (chosen.sum(), 32))
    rows = rows.reshape(2, 2, n_keys, 68)
    (found,), (expected,) = (
        attend_batch([(q, numbers)], page=16, type_=of)
        for numbers, of in ((rows, "q8_0"), (key_values.expanded(rows, "q8_0"), "f32"))
    )
    np.testing.assert_array_equal(
        np.where(np.isnan(found), np.float32(np.nan), found).view(np.uint32),
        np.where(np.isnan(expected), np.float32(np.nan), expected).view(np.uint32),
    )
