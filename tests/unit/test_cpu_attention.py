"""Compiled attention against its NumPy twin and against float64; nothing that is out of sight gets into a result.

A query has the same bits whatever queries are beside it, and wherever its keys lie in a store.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba")

from kernels.cpu import attention_numpy, layout, library, order_numpy, pool
from kernels.cpu.layout import BLOCK, FEW, LANES, QUERIES

U = 2.0**-24
LIBRARY = library.load()
POOL = pool.Pool(3, LIBRARY)
# Two heads share keys wherever it is about spans.
SPAN = QUERIES // 2


def case(
    seed: int, n_tokens: int, past: int, heads: tuple[int, int], width: int, spare: int = 3, start: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Queries, and a store with slots that are not numbers before `start` and behind the last token."""
    rng = np.random.default_rng(seed)
    n_heads, n_kv_heads = heads
    q = rng.standard_normal((n_tokens, n_heads, width)).astype(np.float32)
    kv = np.full((2, n_kv_heads, past + n_tokens + spare, width), np.nan, dtype=np.float32)
    seen = kv[:, :, start : past + n_tokens]
    seen[:] = rng.standard_normal(seen.shape)
    return q, kv


def attend(
    q: np.ndarray, kv: np.ndarray, start: int, stop: int, window: int = 0, scale: float | None = None, first: int = 0
) -> np.ndarray:
    """As `CompiledBackend.attention` calls it; `first` is the position of slot 0."""
    out = np.full_like(q, np.nan)
    scale = q.shape[2] ** -0.5 if scale is None else scale
    POOL.shared.wake()
    n_tokens, n_heads, width = q.shape
    assert layout.attention_scratch(n_heads // kv.shape[1], width) <= layout.SCRATCH_BYTES
    n_blocks = -(-(stop - start) // BLOCK) + 1
    parts = np.full((n_tokens if n_tokens <= FEW else 0, n_heads, n_blocks, width + LANES), np.nan, dtype=np.float32)
    LIBRARY.attend(
        POOL.address, LIBRARY.address("attend_few"), LIBRARY.address("attend_many"), q.ctypes.data, n_tokens, n_heads,
        kv.shape[1], width, kv.ctypes.data, kv.shape[2], start, stop, window, first, scale, parts.ctypes.data,
        out.ctypes.data,
    )  # fmt: skip
    return out


def twin(
    q: np.ndarray, kv: np.ndarray, start: int, stop: int, window: int = 0, scale: float | None = None
) -> np.ndarray:
    out = np.empty_like(q)
    attention_numpy.attend(q, kv, start, stop, window, q.shape[2] ** -0.5 if scale is None else scale, out)
    return out


def check(q: np.ndarray, kv: np.ndarray, start: int, stop: int, window: int = 0, first: int = 0) -> None:
    """Against float64, in bounds that follow from what is rounded.

    A score is a sum of E products: it is off by at most E + 2 roundings of what they add up to without signs, and each
    weight relatively by as much, below the line and above. A sum over n keys adds n roundings; each block of keys
    scales what came before once more.
    """
    wide_q, wide = q.astype(np.float64), kv.astype(np.float64)
    want = twin(wide_q, wide, start, stop, window)
    size = twin(wide_q, np.stack([wide[0], np.abs(wide[1])]), start, stop, window)
    group, width = q.shape[1] // kv.shape[1], q.shape[2]
    keys = np.repeat(np.abs(wide[0, :, start:stop]), group, axis=0)
    score = np.einsum("the,hse->ths", np.abs(wide_q), keys).max(axis=2)[:, :, None] * width**-0.5
    bound = (2 * (width + 4) * score + 2 * (stop - start) + 40) * U * size
    for found in (attend(q, kv, start, stop, window, first=first), twin(q, kv, start, stop, window)):
        assert (np.abs(found - want) <= bound).all()


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1), n_tokens=st.integers(1, 70), past=st.integers(0, 40), n_kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 2, 3, 5]), width=st.sampled_from([16, 32, 64, 80, 96, 128]),
    window=st.sampled_from([0, 0, 1, 2, 15, 16, 17, 33, 500]), hidden=st.integers(0, 40),
    first=st.one_of(st.just(0), st.integers(1, 300)),
)  # fmt: skip
def test_attention_of_any_shape(
    seed: int, n_tokens: int, past: int, n_kv_heads: int, group: int, width: int, window: int, hidden: int, first: int
):
    start = min(hidden, past)
    q, kv = case(seed, n_tokens, past, (group * n_kv_heads, n_kv_heads), width, start=start)
    check(q, kv, start, past + n_tokens, window, first)


@pytest.mark.parametrize("past", [0, 1, BLOCK - 2, BLOCK - 1, BLOCK, 2 * BLOCK - 1, 2 * BLOCK, 1000])
@pytest.mark.parametrize("window", [0, 1, 100, BLOCK, BLOCK + 1])
def test_one_token_over_keys_in_blocks(past: int, window: int):
    q, kv = case(past, 1, past, (6, 2), 32)
    check(q, kv, 0, past + 1, window)


@pytest.mark.parametrize("n_tokens", [SPAN - 1, SPAN, SPAN + 1, 2 * SPAN + 2])
@pytest.mark.parametrize("past", [0, BLOCK // 3, BLOCK - 1, BLOCK, 2 * BLOCK + 5])
@pytest.mark.parametrize("window", [0, 40, BLOCK + 1])
def test_many_tokens_over_keys_in_blocks(n_tokens: int, past: int, window: int):
    q, kv = case(n_tokens + past, n_tokens, past, (4, 2), 48)
    check(q, kv, 0, past + n_tokens, window)


@pytest.mark.parametrize("n_tokens", [1, 2, 20, SPAN + 1])
def test_the_first_slots_may_be_hidden(n_tokens: int):
    q, kv = case(7, n_tokens, 2 * BLOCK + 40, (2, 1), 16, start=BLOCK + 30)
    check(q, kv, BLOCK + 30, 2 * BLOCK + 40 + n_tokens)


@pytest.mark.parametrize("n_tokens", [1, 30])
@pytest.mark.parametrize("larger", ["first", "last", "middle"])
def test_scores_far_apart_leave_the_value_of_the_largest(n_tokens: int, larger: str):
    """Wherever it comes: what was added up before it is scaled down to nothing, what comes after is nothing."""
    past, width = 2 * BLOCK + 60, 32
    q, kv = case(3, n_tokens, past, (2, 1), width)
    slot = {"first": 0, "last": past - 1, "middle": BLOCK + 60}[larger]
    q[:] = np.abs(q) + np.float32(0.1)
    kv[0, :, :past] = -1e4 * np.abs(kv[0, :, :past])
    kv[0, :, slot] = 1e4
    kv[0, :, past : past + n_tokens] = -1e4
    np.testing.assert_array_equal(attend(q, kv, 0, past + n_tokens), np.broadcast_to(kv[1, 0, slot], q.shape))


@pytest.mark.parametrize("n_tokens", [1, 30])
def test_scores_beyond_what_exp_can_hold(n_tokens: int):
    q, kv = case(4, n_tokens, 300, (4, 2), 64)
    q *= 1e15
    kv[0] *= 1e15
    found = attend(q, kv, 0, 300 + n_tokens)
    # Such scores are so far apart that the largest alone counts.
    np.testing.assert_allclose(found, twin(q.astype(np.float64), kv.astype(np.float64), 0, 300 + n_tokens), rtol=1e-6)


@pytest.mark.parametrize(("n_tokens", "past"), [(1, 0), (1, 700), (40, 0), (40, 300)])
def test_scores_that_are_equal_give_the_mean(n_tokens: int, past: int):
    q, kv = case(5, n_tokens, past, (3, 1), 16)
    q[:] = 0
    found = attend(q, kv, 0, past + n_tokens)
    values = kv[1, 0, : past + n_tokens].astype(np.float64)
    seen = np.arange(past + 1, past + n_tokens + 1)[:, None]
    size = np.cumsum(np.abs(values), axis=0)[past:] / seen
    want = np.cumsum(values, axis=0)[past:] / seen
    assert (np.abs(found - want[:, None]) <= (past + n_tokens + 40) * U * size[:, None]).all()


@pytest.mark.parametrize("n_tokens", [1, 5, 70])
def test_a_query_sees_itself_alone_in_a_window_of_one(n_tokens: int):
    q, kv = case(6, n_tokens, 290, (4, 2), 32)
    found = attend(q, kv, 0, 290 + n_tokens, window=1)
    own = kv[1, :, 290 : 290 + n_tokens].transpose(1, 0, 2)
    np.testing.assert_array_equal(found, np.repeat(own, 2, axis=1))


@pytest.mark.parametrize("n_tokens", [1, 3, 70])
def test_the_scale_is_applied_once(n_tokens: int):
    q, kv = case(8, n_tokens, 20, (2, 2), 32)
    found = attend(q, kv, 0, 20 + n_tokens, scale=0.25)
    np.testing.assert_array_equal(found, attend(q * np.float32(0.5), kv, 0, 20 + n_tokens, scale=0.5))


# ---- bits ----

PASSES = (2, 3, 5, FEW, FEW + 1, 16, 49, 129)


@pytest.mark.parametrize("heads", [(4, 2), (5, 1)])
@pytest.mark.parametrize("window", [0, 1, 40, BLOCK, BLOCK + 33])
@pytest.mark.parametrize("first", [0, 1, BLOCK - 1, 3 * BLOCK + 50])
def test_a_query_has_the_same_bits_in_any_pass(heads: tuple[int, int], window: int, first: int):
    """Alone, beside any others, and with keys that are of this pass or of an earlier one."""
    past, n_tokens, start = 2 * BLOCK - 60, max(PASSES), 7
    q, kv = case(window, n_tokens, past, heads, 32, start=start)
    stop = past + n_tokens
    alone = np.concatenate(
        [attend(q[t : t + 1], kv, start, past + t + 1, window, first=first) for t in range(n_tokens)]
    )
    for n in PASSES:
        np.testing.assert_array_equal(attend(q[-n:], kv, start, stop, window, first=first), alone[-n:])
        np.testing.assert_array_equal(attend(q[:n], kv, start, past + n, window, first=first), alone[:n])


@pytest.mark.parametrize("n_tokens", [FEW, FEW + 1])
@pytest.mark.parametrize("window", [0, 3])
def test_a_block_that_some_queries_see(n_tokens: int, window: int):
    """Those before a block begins do not see it yet, and with a window those behind it do not see it any more."""
    for past in range(BLOCK - n_tokens, BLOCK + 4):
        q, kv = case(past, n_tokens, past, (4, 2), 32)
        alone = np.concatenate([attend(q[t : t + 1], kv, 0, past + t + 1, window) for t in range(n_tokens)])
        np.testing.assert_array_equal(attend(q, kv, 0, past + n_tokens, window), alone)


@pytest.mark.parametrize("n_tokens", [1, FEW, FEW + 1, 40])
@pytest.mark.parametrize("window", [0, 90])
def test_blocks_are_counted_from_position_0(n_tokens: int, window: int):
    """Keys that have moved to other slots have the same positions, and give the same bits."""
    past = 2 * BLOCK + 70
    q, kv = case(9, n_tokens, past, (4, 2), 48)
    for start in (1, 16, BLOCK - 1, BLOCK + 37):
        want = attend(q, kv, start, past + n_tokens, window)
        moved = np.ascontiguousarray(kv[:, :, start:])
        found = attend(q, moved, 0, past + n_tokens - start, window, first=start)
        np.testing.assert_array_equal(found, want)
        if window == 0:
            # With blocks that begin elsewhere sums are rounded otherwise.
            assert not np.array_equal(attend(q, moved, 0, past + n_tokens - start, window, first=start + 1), want)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1), n_tokens=st.one_of(st.integers(1, 4), st.integers(FEW, FEW + 2)),
    past=st.sampled_from([0, 5, 100, BLOCK - 1, BLOCK, BLOCK + 30]), n_kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 2, 3]), width=st.sampled_from([16, 32, 80]), window=st.sampled_from([0, 0, 1, 20, BLOCK]),
    hidden=st.integers(0, 40), first=st.one_of(st.just(0), st.integers(1, 300)),
    spread=st.sampled_from([1.0, 1.0, 8.0]),
)  # fmt: skip
def test_attention_has_the_bits_of_the_order_in_numpy(
    seed: int, n_tokens: int, past: int, n_kv_heads: int, group: int, width: int, window: int, hidden: int, first: int,
    spread: float,
):  # fmt: skip
    start = min(hidden, past)
    q, kv = case(seed, n_tokens, past, (group * n_kv_heads, n_kv_heads), width, start=start)
    q *= np.float32(spread)
    want = order_numpy.attend(q, kv, first, start, past + n_tokens, window, width**-0.5)
    np.testing.assert_array_equal(attend(q, kv, start, past + n_tokens, window, first=first), want)
