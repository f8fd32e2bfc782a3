"""Every cache on every backend's storage against a plain Python list, by one state machine."""

import inspect
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

import mlx_engine.cache
from mlx_engine.backends import backend_names, create_backend, unavailable
from mlx_engine.backends.parameters import Visible
from mlx_engine.cache import Cache, FullCache, MixedCache, NoCache, SlidingCache
from mlx_engine.cache.sliding import SPARE
from mlx_engine.errors import CacheFullError

LAYERS, KV_HEADS, HEAD_DIM = 3, 2, 4

# Floats of one token in all layers, keys and values.
TOKEN_FLOATS = LAYERS * 2 * KV_HEADS * HEAD_DIM

BACKENDS = [name for name in backend_names() if unavailable(name) is None]

SETTINGS = settings(
    max_examples=10,
    stateful_step_count=15,
    deadline=None,
    derandomize=True,
    database=None,
    report_multiple_bugs=False,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
)


@dataclass(frozen=True)
class Kind:
    """How to make a cache, and what it promises: of each layer how far it looks back, if not to the beginning."""

    label: str
    make: object
    remembers: bool = True
    windows: tuple = (None,) * LAYERS
    step: int = 0


def full(capacity, step, cache_class=FullCache):
    def make(backend):
        return cache_class(
            backend, n_layers=LAYERS, n_kv_heads=KV_HEADS, head_dim=HEAD_DIM, capacity=capacity, step=step
        )

    return Kind(f"{cache_class.__name__}-{capacity}-by-{step}", make)


def sliding(capacity, window, step, cache_class=SlidingCache):
    def make(backend, n_layers=LAYERS):
        return cache_class(
            backend, n_layers=n_layers, n_kv_heads=KV_HEADS, head_dim=HEAD_DIM, capacity=capacity, window=window,
            step=step,
        )  # fmt: skip

    return Kind(f"{cache_class.__name__}-{capacity}-{window}-by-{step}", make, windows=(window,) * LAYERS, step=step)


def mixed(capacity, window, step):
    """The first and last layer see a window, the one between them everything."""

    def make(backend):
        latest = sliding(capacity, window, step).make(backend, n_layers=2)
        everything = FullCache(
            backend, n_layers=1, n_kv_heads=KV_HEADS, head_dim=HEAD_DIM, capacity=capacity, step=step
        )
        return MixedCache((everything, latest), (1, 0, 1))

    return Kind(f"MixedCache-{capacity}-{window}-by-{step}", make, windows=(window, None, window), step=step)


def nothing(backend, window=None):
    return NoCache(backend, n_kv_heads=KV_HEADS, head_dim=HEAD_DIM, window=window)


def nothing_mixed(backend):
    return MixedCache((nothing(backend), nothing(backend, 3)), (1, 1, 0))


KINDS = [
    full(1, 1),
    full(7, 1),
    full(12, 5),
    full(20, 4),
    full(20, 256),
    full(64, 3),
    sliding(64, 5, 3),
    sliding(40, 1, 1),
    sliding(64, 2, 9),
    sliding(9, 20, 4),
    mixed(64, 4, 2),
    Kind("NoCache", nothing, remembers=False),
    Kind("MixedCache-of-NoCaches", nothing_mixed, remembers=False, windows=(3, 3, None)),
]


# ---- what lies in a store, read through attention alone ----


def address(token, layer, head):
    """(E,) of which no two are equal: `nearest` finds one among all others."""
    place = 10 * layer + head
    return token, -(token**2) / 2, place, -(place**2) / 2


def nearest(token, layer, head):
    """(E,) whose product with an address is largest at the one that it names, by at least 1/2."""
    return token, 1, 10 * layer + head, 1


def content(token, layer, head):
    return token, layer, head, 1


def rows(backend, tokens, layer, entry):
    """(T, K, E) on the backend, an `entry` for each token and head."""
    flat = [[x for head in range(KV_HEADS) for x in entry(token, layer, head)] for token in tokens]
    return backend.heads(backend.array(np.array(flat, dtype=np.float32)), HEAD_DIM)


def tokens_in(backend, seen, layer):
    """The tokens that `seen` shows, in order.

    A query of zeros weighs all that it sees alike, and query t sees one slot more than query t - 1: the means of the
    values are running means, whose differences are the values one by one. Then each key is asked for by its address,
    and must answer with the value that belongs to it.
    """
    n = seen.stop - seen.start
    zeros = rows(backend, [0] * n, layer, lambda *_: (0, 0, 0, 0))
    means = backend.host(backend.attention(zeros, seen, 1.0)).astype(np.float64)
    totals = means * np.arange(1, n + 1)[:, None, None]
    values = np.diff(totals, axis=0, prepend=0)
    assert np.abs(values - np.rint(values)).max() < 0.1, "what is visible was never written"
    tokens = [int(token) for token in np.rint(values[:, 0, 0])]
    want = np.array([[content(token, layer, head) for head in range(KV_HEADS)] for token in tokens])
    assert np.array_equal(np.rint(values), want), "a value lies in another token's, layer's or head's place"
    by_key = backend.host(backend.attention(rows(backend, tokens, layer, nearest), seen, 100.0))
    assert np.allclose(by_key, want, atol=1e-3), "a key does not stand beside its value"
    return tokens


class CacheMachine(RuleBasedStateMachine):
    """Passes, interrupted passes and trims on a cache and on a list."""

    def __init__(self, kind, backend):
        super().__init__()
        self.backend, self.kind, self.remembers = backend, kind, kind.remembers
        self.cache = kind.make(backend)
        self.capacity = self.cache.capacity
        self.want, self.next_token, self.most = [], 0, 0
        assert self.cache.nbytes == 0

    def new_tokens(self, n):
        self.next_token += n
        return list(range(self.next_token - n, self.next_token))

    def append(self, layer, new):
        k, v = rows(self.backend, new, layer, address), rows(self.backend, new, layer, content)
        seen = self.cache.append(layer, k, v)
        window, want = self.kind.windows[layer], self.want + new
        assert seen.window == window
        # What attention itself does with a window is the contract's; here it is what the slots hold.
        found = tokens_in(self.backend, replace(seen, window=None), layer)
        assert found == want[len(want) - len(found) :]
        assert len(found) >= min(len(want), len(new) + (window or len(want)) - 1)

    def reserved(self, n):
        """Whether n tokens fit; if they do, they are reserved, and if not, nothing has changed."""
        if len(self.want) + n <= self.capacity:
            assert self.cache.reserve(n) == len(self.want)
            return True
        before = self.cache.length, self.cache.capacity, self.cache.nbytes
        with pytest.raises(CacheFullError) as caught:
            self.cache.reserve(n)
        error = caught.value
        assert (error.length, error.wanted, error.capacity) == (len(self.want), n, self.capacity)
        assert (self.cache.length, self.cache.capacity, self.cache.nbytes) == before
        return False

    @rule(n=st.integers(1, 6))
    def run_a_pass(self, n):
        if not self.reserved(n):
            return
        new = self.new_tokens(n)
        for layer in range(LAYERS):
            self.append(layer, new)
        assert self.cache.length == len(self.want), "tokens count before the pass is complete"
        self.cache.advance(n)
        self.want = self.want + new if self.remembers else []
        self.most = max(self.most, len(self.want))

    @rule()
    def fill_to_the_last_slot(self):
        room = self.capacity - len(self.want)
        if self.remembers and 0 < room <= 20:
            self.run_a_pass(room)

    @rule(n=st.integers(1, 6), layers=st.integers(0, LAYERS))
    def interrupt_a_pass(self, n, layers):
        if self.reserved(n):
            new = self.new_tokens(n)
            for layer in range(layers):
                self.append(layer, new)

    @rule(beyond=st.integers(1, 3))
    def reserve_too_much(self, beyond):
        if self.remembers:
            assert not self.reserved(self.capacity - len(self.want) + beyond)

    @rule(n=st.integers(0, 9))
    def trim(self, n):
        before, usual = self.cache.nbytes, min(n, len(self.want))
        forgotten = self.cache.trim(n)
        if forgotten != usual:
            assert any(self.kind.windows)
            assert forgotten == len(self.want)
            assert len(self.want) - usual < self.most - SPARE, "tokens are lost that were to be spared"
        del self.want[len(self.want) - forgotten :]
        self.most = self.most if self.want else 0
        assert self.cache.nbytes <= before

    @invariant()
    def counts_agree(self):
        assert self.cache.length == len(self.want)
        assert self.cache.capacity == self.capacity
        # A number takes 1 byte at least (a quantised cache), 8 at most (Python's floats).
        windows = [window or self.capacity for window in self.kind.windows]
        least = sum(min(len(self.want), window - 1) for window in windows)
        assert self.cache.nbytes >= least * TOKEN_FLOATS / LAYERS
        # A layer's slots: all, or a window, what is spared, and the longest pass that the rules make.
        most = sum(min(self.capacity, window - 1 + SPARE + max(20, self.kind.step)) for window in windows)
        assert self.cache.nbytes <= (most * TOKEN_FLOATS / LAYERS * 8 if self.remembers else 0)


def drive(kind, backend, settings=SETTINGS):
    run_state_machine_as_test(lambda: CacheMachine(kind, backend), settings=settings)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.label)
def test_a_cache_is_a_list(kind, backend):
    drive(kind, create_backend(backend))


def test_every_cache_class_is_driven():
    driven = {type(kind.make(create_backend("scalar"))) for kind in KINDS}
    classes = [c for _, c in inspect.getmembers(mlx_engine.cache, inspect.isclass) if issubclass(c, Cache)]
    assert {c for c in classes if not inspect.isabstract(c)} == driven


@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_grows_by_whole_steps(backend):
    cache = full(20, 8).make(create_backend(backend))
    sizes = []
    for token in range(20):
        cache.reserve(1)
        for layer in range(LAYERS):
            k = rows(cache._backend, [token], layer, address)
            cache.append(layer, k, k)
        cache.advance(1)
        sizes.append(cache.nbytes)
    assert sizes == sorted(sizes)
    assert backend != "simd" or [n // (TOKEN_FLOATS * 4) for n in sizes] == [8] * 8 + [16] * 8 + [20] * 4


# ---- the machine can fail ----


class UndoesTrim(FullCache):
    """mlx-lm's ConcatenateKVCache at d78bf58e: trim moves the length alone, and the next tokens come behind the old."""

    surplus = 0

    def trim(self, n):
        forgotten = super().trim(n)
        self.surplus += forgotten
        return forgotten

    def reserve(self, n):
        return super().reserve(n + self.surplus)

    def append(self, layer, k, v):
        at = self._length + self.surplus
        self._stores[layer] = self._backend.kv_write(self._stores[layer], at, k, v)
        return Visible(self._stores[layer], 0, at + len(k))


class DropsTokensOnGrowth(FullCache):
    def reserve(self, n):
        slots = self._slots
        offset = super().reserve(n)
        if slots and self._slots > slots:
            blank = rows(self._backend, [0] * self._slots, 0, address)
            self._stores = [self._backend.kv_write(store, 0, blank, blank) for store in self._stores]
        return offset


class CountsBeforeAdvance(FullCache):
    def append(self, layer, k, v):
        seen = super().append(layer, k, v)
        if layer == LAYERS - 1:
            self._length += len(k)
        return seen

    def advance(self, n):
        pass


class GrowsBeforeItRefuses(FullCache):
    def reserve(self, n):
        self._slots = max(self._slots, min(self._length + n, self._capacity))
        self._stores = [self._backend.kv_grow(store, self._slots) for store in self._stores]
        return super().reserve(n)


class SharesOneStore(FullCache):
    def append(self, layer, k, v):
        return super().append(0, k, v)


class ForgetsHowManyItForgot(FullCache):
    def trim(self, n):
        super().trim(n)
        return n


class SwapsKeysAndValues(FullCache):
    def append(self, layer, k, v):
        return super().append(layer, v, k)


class OverwritesTheLastToken(FullCache):
    def append(self, layer, k, v):
        self._length, before = max(0, self._length - 1), self._length
        try:
            return super().append(layer, k, v)
        finally:
            self._length = before


class RefusesTheLastSlot(FullCache):
    def reserve(self, n):
        if self._length + n == self._capacity:
            raise CacheFullError(length=self._length, wanted=n, capacity=self._capacity)
        return super().reserve(n)


class TrimsWhatItNoLongerHas(SlidingCache):
    def trim(self, n):
        forgotten = min(n, self._length)
        self._length, self._held = self._length - forgotten, max(0, self._held - forgotten)
        return forgotten


class SlidesTooFar(SlidingCache):
    def reserve(self, n):
        held = self._held
        offset = super().reserve(n)
        if self._held < held:
            self._stores = [self._backend.kv_slide(store, 1, self._held - 1) for store in self._stores]
        return offset


class ShowsTooLittle(SlidingCache):
    def append(self, layer, k, v):
        seen = super().append(layer, k, v)
        return replace(seen, start=min(seen.start + 1, seen.stop - 1))


class SparesNothing(SlidingCache):
    def reserve(self, n):
        held = self._held
        offset = super().reserve(n)
        if self._held < held:
            self._stores = [self._backend.kv_slide(store, SPARE, self._held - SPARE) for store in self._stores]
            self._held -= SPARE
        return offset


WRONG_WINDOWS = [TrimsWhatItNoLongerHas, SlidesTooFar, ShowsTooLittle, SparesNothing]

WRONG = [
    UndoesTrim,
    DropsTokensOnGrowth,
    CountsBeforeAdvance,
    GrowsBeforeItRefuses,
    SharesOneStore,
    ForgetsHowManyItForgot,
    SwapsKeysAndValues,
    OverwritesTheLastToken,
    RefusesTheLastSlot,
]


@pytest.mark.parametrize("cache_class", WRONG)
def test_the_machine_catches_a_wrong_cache(cache_class):
    check_caught(full(12, 5, cache_class))


@pytest.mark.parametrize("cache_class", WRONG_WINDOWS)
def test_the_machine_catches_a_wrong_window(cache_class):
    check_caught(sliding(64, 5, 3, cache_class))


def check_caught(kind):
    # A counterexample is enough; nobody reads it, so it need not be shrunk.
    unshrunk = settings(SETTINGS, max_examples=200, phases=[Phase.generate])
    with pytest.raises((AssertionError, CacheFullError, pytest.fail.Exception)):
        drive(kind, create_backend("simd"), unshrunk)
