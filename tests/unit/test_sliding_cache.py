"""The sliding cache refuses what would corrupt it, and its memory has a bound."""

import numpy as np
import pytest

from mlx_engine.backends import create_backend
from mlx_engine.cache import FullCache, MixedCache, SlidingCache
from mlx_engine.cache.sliding import SPARE
from mlx_engine.errors import CacheFullError

SIZES = {"n_layers": 1, "n_kv_heads": 1, "head_dim": 2}


@pytest.fixture(params=["scalar", "simd", "mlx"])
def cache(request: pytest.FixtureRequest) -> SlidingCache:
    return SlidingCache(create_backend(request.param), **SIZES, capacity=1_000, window=4, step=2)


def run(cache: SlidingCache, n: int) -> None:
    k = cache._backend.heads(cache._backend.array(np.ones((n, 2), dtype=np.float32)), 2)
    cache.reserve(n)
    cache.append(0, k, k)
    cache.advance(n)


def test_amounts_that_make_no_sense_are_refused(cache: SlidingCache):
    for refused in (lambda: cache.reserve(0), lambda: cache.trim(-1), lambda: cache.advance(-1)):
        with pytest.raises(ValueError, match="expected"):
            refused()
    assert cache.length == cache.nbytes == 0


def test_only_reserved_slots_can_be_written_and_counted(cache: SlidingCache):
    cache.reserve(1)
    for refused in (lambda: cache.kv_views(14), lambda: cache.advance(14)):
        with pytest.raises(ValueError, match="13 slots left"):
            refused()
    assert cache.length == 0


@pytest.mark.parametrize("wrong", [{"capacity": 0}, {"step": 0}, {"window": 0}])
def test_a_cache_of_nothing_cannot_be_made(wrong: dict[str, int]):
    with pytest.raises(ValueError, match="at least 1"):
        SlidingCache(create_backend("simd"), **{**SIZES, "capacity": 4, "window": 2, **wrong})


def test_memory_does_not_grow_with_the_tokens():
    cache = SlidingCache(create_backend("simd"), **SIZES, capacity=1_000, window=4, step=2)
    sizes = set()
    for _ in range(300):
        run(cache, 1)
        sizes.add(cache.nbytes)
    assert sizes == {(4 - 1 + SPARE + 2) * 2 * 2 * 4}
    assert cache.length == 300


def test_a_long_pass_makes_room_for_itself_once(cache: SlidingCache):
    run(cache, 40)
    size = cache.nbytes
    for _ in range(5):
        run(cache, 40)
    assert cache.nbytes == size or cache._backend.name == "scalar"  # which counts only the slots that are filled
    assert cache.length == 240


def test_kv_views_say_what_append_says(cache: SlidingCache):
    for _ in range(9):
        run(cache, 3)
    cache.reserve(2)
    (room,) = cache.kv_views(2)
    assert room.window == 4
    assert room.stop - room.start == 3 + 2


def test_all_is_forgotten_where_the_window_would_have_a_hole(cache: SlidingCache):
    for _ in range(50):
        run(cache, 1)
    assert cache.trim(SPARE) == SPARE
    assert cache.length == 50 - SPARE
    assert cache.trim(20) == 50 - SPARE
    assert cache.length == 0
    run(cache, 3)
    assert cache.length == 3


def test_the_parts_of_a_mixed_cache_forget_together():
    backend = create_backend("simd")
    full = FullCache(backend, **SIZES, capacity=100)
    latest = SlidingCache(backend, **SIZES, capacity=100, window=4, step=2)
    mixed = MixedCache((full, latest), (0, 1))
    for _ in range(50):
        mixed.reserve(1)
        mixed.advance(1)
    assert mixed.trim(30) == 50
    assert full.length == latest.length == mixed.length == 0


def test_the_smallest_part_of_a_mixed_cache_refuses_for_all():
    backend = create_backend("simd")
    parts = [FullCache(backend, **SIZES, capacity=capacity) for capacity in (9, 4)]
    mixed = MixedCache(parts, (0, 1))
    assert mixed.capacity == 4
    with pytest.raises(CacheFullError):
        mixed.reserve(5)
    assert [part.nbytes for part in parts] == [0, 0]
