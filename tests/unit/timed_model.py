"""A model that takes as long as it is told, on a clock that moves only while it works."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from mlx_engine.bench import cells

WRITTEN = 7
CONTEXT = 2048


class Clock:
    """A clock that stands still until a pass moves it."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Token(int):
    """A written id, and when the device will have computed it; None before that has begun."""

    done = None


class Backend:
    """Eager, it works when it is called; lazy, it has a device, which works from when something is begun."""

    profiler = None

    def __init__(self, clock, *, lazy):
        self.clock, self.lazy, self.pending, self.is_open, self.choice = clock, lazy, 0.0, False, 0.0
        self.busy_until = 0.0

    @contextmanager
    def session(self):
        self.is_open = True
        yield
        self.is_open = False

    def spend(self, seconds):
        self.pending += seconds
        if not self.lazy:
            self.wait(None)

    def begin(self, x):
        self.busy_until = x.done = max(self.busy_until, self.clock.now) + self.pending
        self.pending = 0.0

    def wait(self, x):
        self.clock.now = max(self.busy_until, self.clock.now) + self.pending
        self.pending = 0.0

    def argmax(self, logits):
        self.spend(self.choice)
        return Token(WRITTEN)

    def token_id(self, token):
        if token.done is None:
            self.wait(token)
        self.clock.now = max(self.clock.now, token.done or 0.0)
        return int(token)


class Cache:
    """As long as it was promised to become, and no longer."""

    def __init__(self, capacity):
        self.capacity, self.length = capacity, 0

    def take(self, n):
        self.length += n
        assert self.length <= self.capacity

    advance = take

    def trim(self, n):
        self.length -= n


class Spy:
    """A model that writes one id for ever. `passes` has the ids of each pass, `runs` one list of lengths per cache.

    A pass costs `cost(tokens, tokens before them)`, and without a cache `cost(tokens, None)`.
    """

    def __init__(self, backend, cost):
        self.backend, self.cost, self.passes, self.at = backend, cost, [], []
        self.config = SimpleNamespace(vocab_size=50, context_length=CONTEXT)

    def forward(self, ids, cache, *, every=False):
        assert self.backend.is_open
        at = None if cache is None else cache.length
        self.passes.append(list(ids))
        self.at.append(at)
        self.backend.spend(self.cost(len(ids), at))
        if cache is not None:
            cache.take(len(ids))
        return "logits"

    def new_cache(self, capacity):
        return Cache(capacity)

    def no_cache(self):
        return None

    @property
    def lengths(self):
        return [len(ids) for ids in self.passes]


def measured(model, n_prompt=0, n_gen=0, depth=0, **options):
    """A cell on `model`. The engine has no tokenizer: whoever asks for one fails."""
    engine = SimpleNamespace(model=model, backend=model.backend, config=model.config)
    return cells.measure(engine, cells.Test(n_prompt, n_gen, depth), **options)


both_kinds = pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
