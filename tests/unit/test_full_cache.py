"""The full cache refuses what would corrupt it."""

import numpy as np
import pytest

from mlx_engine.backends import create_backend
from mlx_engine.cache import FullCache


@pytest.fixture(params=["scalar", "simd", "mlx"])
def cache(request: pytest.FixtureRequest) -> FullCache:
    return FullCache(create_backend(request.param), n_layers=1, n_kv_heads=1, head_dim=2, capacity=4, step=2)


def tokens(cache: FullCache, n: int) -> object:
    return cache._backend.heads(cache._backend.array(np.ones((n, 2), dtype=np.float32)), 2)


def test_amounts_that_make_no_sense_are_refused(cache: FullCache):
    for refused in (lambda: cache.reserve(0), lambda: cache.reserve(-1), lambda: cache.trim(-1)):
        with pytest.raises(ValueError, match="expected"):
            refused()
    assert cache.length == 0


def test_only_reserved_slots_can_be_written_and_counted(cache: FullCache):
    cache.reserve(2)
    for refused in (lambda: cache.append(0, tokens(cache, 3), tokens(cache, 3)), lambda: cache.advance(3)):
        with pytest.raises(ValueError, match="2 slots left"):
            refused()
    cache.append(0, tokens(cache, 2), tokens(cache, 2))
    cache.advance(2)
    assert cache.length == 2


def test_an_interrupted_growth_leaves_the_cache_as_it_was(cache: FullCache, monkeypatch: pytest.MonkeyPatch):
    """Code that writes by address believes the number of slots."""
    cache.reserve(2)
    slots, stores = cache._slots, cache._stores

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cache._backend, "kv_grow", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.reserve(4)
    assert cache._slots == slots
    assert cache._stores is stores


def test_kv_views_are_the_reserved_slots_of_every_layer(cache: FullCache):
    cache.reserve(2)
    with pytest.raises(ValueError, match="2 slots left"):
        cache.kv_views(3)
    first = cache.append(0, tokens(cache, 1), tokens(cache, 1))
    assert cache.kv_views(1) == [first]
    cache.advance(1)
    assert [(seen.start, seen.stop, seen.window) for seen in cache.kv_views(1)] == [(0, 2, None)]


@pytest.mark.parametrize("wrong", [{"capacity": 0}, {"step": 0}])
def test_a_cache_of_nothing_cannot_be_made(wrong: dict[str, int]):
    with pytest.raises(ValueError, match="at least 1"):
        FullCache(create_backend("simd"), **{"n_layers": 1, "n_kv_heads": 1, "head_dim": 2, "capacity": 4, **wrong})
