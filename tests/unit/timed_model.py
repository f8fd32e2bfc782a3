"""A model that takes as long as it is told, on a clock that moves only while it works."""

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from mlx_engine.bench import cells, samples
from mlx_engine.cache import KVLayer, KVPool
from mlx_engine.weights.model import Model

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

    profiler = group = None

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
        self.busy_until = max(self.busy_until, self.clock.now) + self.pending
        for token in x:
            if isinstance(token, Token):
                token.done = self.busy_until
        self.pending = 0.0

    def wait(self, x):
        self.clock.now = max(self.busy_until, self.clock.now) + self.pending
        self.pending = 0.0

    def choose(self, logits, draws):
        self.spend(self.choice)
        return [Token(WRITTEN) for _ in draws]

    def row_sums(self, logits):
        return np.zeros(1)

    def bad_rows(self, logits, sums):
        return {}

    def host(self, x):
        return x

    def kv_empty(self, n_kv_heads, head_dim, n_slots, n_arrays=2):
        return None

    def kv_copy(self, store, source, target, n):
        return None

    def token_id(self, token):
        if token.done is None:
            self.wait(token)
        self.clock.now = max(self.clock.now, token.done or 0.0)
        return int(token)


class Spy(Model):
    """A model that writes one id for ever. `passes` has the ids of each pass, `at` how many tokens were before them.

    A pass costs `cost(tokens, tokens before them)`, and without a cache `cost(tokens, None)`. Sequences become as long
    as they were promised to become, and no longer. `wanted` has the number of rows whose logits are wanted.
    """

    kv_layers = ()

    def __init__(self, backend, cost):
        self.backend, self.cost, self.passes, self.at, self.wanted = backend, cost, [], [], []
        self.config = SimpleNamespace(vocab_size=50, context_length=CONTEXT)

    def forward(self, batch):
        assert self.backend.is_open
        at = batch.positions[0] if batch.stores.are_kept else None
        self.passes.append(list(batch.ids))
        self.at.append(at)
        self.wanted.append(sum(batch.wanted))
        self.backend.spend(self.cost(len(batch.ids), at))
        return None if batch.want == "none" else "logits"

    def new_pool(self, n_tokens, **options):
        return KVPool(self.backend, [KVLayer(1, 2)], n_tokens, **options)

    def scratch_kv(self, n_tokens):
        return self.new_pool(n_tokens, kept=False).sequence()

    @property
    def lengths(self):
        return [len(ids) for ids in self.passes]


def measured(model, n_prompt=0, n_gen=0, depth=0, **options):
    """A cell on `model`. The engine has no tokenizer: whoever asks for one fails."""
    engine = SimpleNamespace(model=model, backend=model.backend, config=model.config)
    return cells.measure(engine, samples.Test(n_prompt, n_gen, depth), **options)


both_kinds = pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
