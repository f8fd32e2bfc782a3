"""The loop of a lazy backend: a pass is begun before anybody has seen the token that it reads.

The device then never waits for the host, which builds the next pass while this one runs. A pass that is under way does
not count in the cache until its token is asked for: where the text ends one token earlier, or nobody goes on, it has
written into a slot that is free, and the cache is what it is on any other backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from mlx_engine.backends.parameters import Array
from mlx_engine.cache import Cache
from mlx_engine.decode.metrics import Metrics
from mlx_engine.decode.sampler import Choice, Sampler
from mlx_engine.models import Model


def decode_ahead(
    model: Model, forward: Callable[[], Array], cache: Cache, pick: Sampler, metrics: Metrics
) -> Iterator[int]:
    """Token ids without end, of which `forward`, the prefill, gives the first.

    Raises:
        CacheFullError: the cache has no room for the next token. None is begun that it has no room for.
    """
    ahead: Choice | None = None
    while True:
        with model.backend.session(), _as_it_was_if_this_fails(cache):
            resumed = metrics.clock()
            if ahead is None:
                chosen = _begin(model, forward, pick)
            else:
                chosen = ahead
                cache.advance(1)
            ahead = _begin_next(model, chosen, cache, pick)
            asked = metrics.clock()
            token = pick.settle(chosen)
            metrics.record_interval(resumed, asked)
        yield token
        forward = partial(model.forward, [token], cache)


def _begin(model: Model, forward: Callable[[], Array], pick: Sampler) -> Choice:
    choice = pick.choose(forward())
    model.backend.begin(choice.token)
    return choice


def _begin_next(model: Model, chosen: Choice, cache: Cache, pick: Sampler) -> Choice | None:
    """The pass that reads what was chosen, begun and not yet counted; None where the cache has no room for it."""
    if cache.length == cache.capacity:
        return None
    choice = _begin(model, partial(model.forward, [chosen.token], cache), pick)
    cache.trim(1)
    return choice


@contextmanager
def _as_it_was_if_this_fails(cache: Cache) -> Iterator[None]:
    """An interrupted pass does not count, nor does the one that was begun behind it."""
    length = cache.length
    try:
        yield
    except BaseException:
        cache.trim(cache.length - length)
        raise
