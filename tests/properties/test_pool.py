"""State machine test: sequences that share a pool, on every backend's storage, against plain Python lists."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from mlx_engine.backends import backend_names, create_backend, unavailable
from mlx_engine.backends.batch import KVSpan, KVView
from mlx_engine.backends.parameters import Scores
from mlx_engine.cache import KVLayer, KVPool, KVSequence, SequenceInput, begin
from mlx_engine.errors import CacheFullError

KV_HEADS, HEAD_DIM = 2, 4
BACKENDS = [name for name in backend_names() if unavailable(name) is None]

SETTINGS = settings(
    max_examples=25,
    stateful_step_count=15,
    deadline=None,
    derandomize=True,
    database=None,
    report_multiple_bugs=False,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
)
# The pool is the same on all backends: one that is quick runs many examples, the others enough to see their storage.
QUICK, FEW, MANY = "simd", settings(SETTINGS, max_examples=7), settings(SETTINGS, max_examples=100)


@dataclass(frozen=True)
class Kind:
    """The size of a pool, and the sliding window of each layer or None."""

    n_tokens: int
    page: int
    windows: tuple = (None, None)
    n_sequences: int = 3
    longest_pass: int = 6

    def pool(self, backend, pool_class=KVPool):
        return pool_class(
            backend, [KVLayer(KV_HEADS, HEAD_DIM, window) for window in self.windows], self.n_tokens,
            n_sequences=self.n_sequences, page=self.page, longest_pass=self.longest_pass,
        )  # fmt: skip


KINDS = [
    Kind(1, 1, n_sequences=1, longest_pass=1),
    Kind(20, 1),
    Kind(30, 4),
    Kind(64, 16),
    Kind(60, 4, windows=(5, 5)),
    Kind(60, 3, windows=(4, None, 4)),
    Kind(60, 2, windows=(1, 9)),
    Kind(24, 16, windows=(None, 20)),
]


# ---- the contents of a store, read with attention only ----


def address(token, layer, head):
    """Return a unique key, (E,), that the query `nearest` selects among all others."""
    place = 10 * layer + head
    return token, -(token**2) / 2, place, -(place**2) / 2


def nearest(token, layer, head):
    """Return a query, (E,), whose product is largest with its own key, by at least 1/2."""
    return token, 1, 10 * layer + head, 1


def content(token, layer, head):
    return token, layer, head, 1


def rows(backend, tokens, layer, entry):
    """Return a backend array (T, G, E) with an `entry` for each token and head."""
    flat = [[x for head in range(KV_HEADS) for x in entry(token, layer, head)] for token in tokens]
    return backend.heads(backend.array(np.array(flat, dtype=np.float32)), HEAD_DIM)


def tokens_in(backend, view, span, layer, n):
    """Return the last n visible tokens of a span, in order.

    A window of one shows a token's own value alone. Then the first and the last keys are asked for by their addresses,
    and must answer with the values that belong to them.
    """
    zeros = rows(backend, [0] * n, layer, lambda *_: (0, 0, 0, 0))
    own = KVView(view.store, view.page, [span], 1)
    values = backend.host(backend.attention(zeros, own, [n], Scores(1.0))).astype(np.float64)
    assert np.abs(values - np.rint(values)).max() < 0.1, "what is visible was never written"
    tokens = [int(token) for token in np.rint(values[:, 0, 0])]
    want = np.array([[content(token, layer, head) for head in range(KV_HEADS)] for token in tokens])
    assert np.array_equal(np.rint(values), want), "a value lies in another token's, layer's or head's place"
    # The last token queries all others, so its window must include them.
    one = KVSpan(span.pages, span.length, 1)
    for i, token in [*enumerate(tokens)][:3] + [*enumerate(tokens)][3:][-3:]:
        asked = backend.attention(
            rows(backend, [token], layer, nearest), KVView(view.store, view.page, [one], n), [1], Scores(100.0)
        )
        assert np.abs(backend.host(asked)[0] - want[i]).max() < 1e-2, "a key does not stand beside its value"
    return tokens


class PoolMachine(RuleBasedStateMachine):
    """Forward passes over one or more sequences, committed, rolled back or refused; ends of sequences."""

    def __init__(self, kind, backend, pool_class=KVPool, sequence_class=KVSequence):
        super().__init__()
        self.backend, self.kind = backend, kind
        self.pool = kind.pool(backend, pool_class)
        capacity = kind.n_tokens
        self.sequences = [sequence_class(self.pool, capacity) for _ in range(kind.n_sequences)]
        self.want = [[] for _ in self.sequences]
        self.next_token, self.nbytes = 0, self.pool.nbytes
        self.n_pages = [self.pool.free_pages(group) for group in range(len(self.pool.windows))]

    def begun(self, which, n):
        """Begin a batch of n new tokens per sequence. Return None if the pool is full; nothing is changed then."""
        parts, new = [], {}
        for i in which:
            new[i] = list(range(self.next_token, self.next_token + n))
            self.next_token += n
            parts.append(SequenceInput(new[i], self.sequences[i], wanted=None))
        before = [(kv.length, kv.pending) for kv in self.sequences]
        try:
            return begin(parts), new
        except CacheFullError:
            fits = all(len(self.want[i]) + n <= self.kind.n_tokens for i in which)
            pages = [-(-(len(self.want[i]) + n) // self.kind.page) - self.sequences[i]._end for i in new]
            free = [self.pool.free_pages(group) for group in range(len(self.pool.windows))]
            assert not fits or sum(max(0, p) for p in pages) > min(free), "refused without need"
            assert [(kv.length, kv.pending) for kv in self.sequences] == before
            return None, new

    def write(self, batch, new, *, read=True):
        for layer in range(len(self.kind.windows)):
            tokens = [token for i in new for token in new[i]]
            k, v = rows(self.backend, tokens, layer, address), rows(self.backend, tokens, layer, content)
            view = self.backend.kv_append(batch, layer, k, v)
            assert view.window == self.kind.windows[layer]
            for i, span in zip(new, view.spans, strict=True) if read else ():
                want = self.want[i] + new[i]
                assert (span.length, span.n_new) == (len(want), len(new[i]))
                # Everything visible to the first new token.
                n = len(want) - view.first_visible(span, len(new[i]))
                assert tokens_in(self.backend, view, span, layer, n) == want[len(want) - n :]

    def chosen(self, which):
        return sorted({i % len(self.sequences) for i in which})

    @rule(which=st.lists(st.integers(0, 2), min_size=1, max_size=3), n=st.integers(1, 6))
    def run_a_pass(self, which, n):
        n = min(n, self.kind.longest_pass)
        batch, new = self.begun(self.chosen(which), n)
        if batch is None:
            return
        self.write(batch, new)
        assert [kv.length for kv in self.sequences] == list(map(len, self.want)), (
            "tokens count before they are committed"
        )
        batch.commit()
        for i in new:
            self.want[i] += new[i]

    @rule(which=st.lists(st.integers(0, 2), min_size=1, max_size=3), n=st.integers(1, 6), written=st.booleans())
    def interrupt_a_pass(self, which, n, written):
        n = min(n, self.kind.longest_pass)
        batch, new = self.begun(self.chosen(which), n)
        if batch is not None:
            if written:
                self.write(batch, new)
            batch.roll_back()

    @rule(i=st.integers(0, 2), n=st.integers(2, 6), kept=st.integers(0, 5))
    def accept_a_part(self, i, n, kept):
        """As in speculative decoding: commit the first tokens and roll back the others."""
        i, n = i % len(self.sequences), min(n, self.kind.longest_pass)
        batch, new = self.begun([i], n)
        if batch is None:
            return
        self.write(batch, new)
        kept = min(kept, n)
        self.sequences[i].commit(kept)
        self.sequences[i].roll_back(n - kept)
        self.want[i] += new[i][:kept]

    @rule(i=st.integers(0, 2))
    def fill_a_sequence(self, i):
        """A single sequence has room for exactly the promised number of tokens."""
        i %= len(self.sequences)
        for other in range(len(self.sequences)):
            if other != i:
                self.end_a_sequence(other)
        while room := self.kind.n_tokens - len(self.want[i]):
            batch, new = self.begun([i], min(room, self.kind.longest_pass))
            assert batch is not None, "refused although there is room"
            self.write(batch, new, read=room <= self.kind.longest_pass)
            batch.commit()
            self.want[i] += new[i]
        for _ in range(2):
            with pytest.raises(CacheFullError) as caught:
                begin([SequenceInput([0], self.sequences[i])])
            error = caught.value
            assert (error.length, error.wanted, error.capacity) == (self.kind.n_tokens, 1, self.kind.n_tokens)

    @rule(i=st.integers(0, 2), n=st.integers(0, 9))
    def forget_the_last_tokens(self, i, n):
        i %= len(self.sequences)
        kv, length = self.sequences[i], max(0, len(self.want[i]) - n)
        seen = [max(0, length + 1 - (window or length + 1)) for window in self.pool.windows]
        held = [first * self.kind.page for first in kv._firsts]
        if any(first > needed for first, needed in zip(held, seen, strict=True)):
            with pytest.raises(ValueError, match="truncate"):
                kv.truncate(length)
        else:
            kv.truncate(length)
            del self.want[i][length:]

    @rule(i=st.integers(0, 2))
    def end_a_sequence(self, i):
        i %= len(self.sequences)
        self.sequences[i].close()
        self.want[i] = []

    @invariant()
    def counts_agree(self):
        assert [kv.length for kv in self.sequences] == list(map(len, self.want))
        assert [kv.pending for kv in self.sequences] == [0] * len(self.sequences)
        assert self.pool.nbytes == self.nbytes or self.backend.name == "scalar"  # which counts filled slots only

    @invariant()
    def every_page_is_somebody_s(self):
        for group, window in enumerate(self.pool.windows):
            held = [page for kv in self.sequences for page in kv.tables[group][kv._firsts[group] : kv._end].tolist()]
            free = self.pool._free[group][: self.pool.free_pages(group)].tolist()
            assert sorted(held + free) == [page * self.kind.page for page in range(self.n_pages[group])]
            if window is not None:
                bound = -(-(window - 1 + self.kind.longest_pass) // self.kind.page) + 1
                assert all(kv._end - kv._firsts[group] <= bound for kv in self.sequences)


def drive(kind, backend, settings=SETTINGS, **classes):
    run_state_machine_as_test(lambda: PoolMachine(kind, backend, **classes), settings=settings)


@pytest.mark.some(1)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_sequences_are_lists(kind, backend):
    drive(kind, create_backend(backend), SETTINGS if backend == QUICK else FEW)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_sequences_are_lists_in_many_examples(kind, backend):
    drive(kind, create_backend(backend), MANY)


# ---- the state machine detects errors ----


class GivesOnePageTwice(KVPool):
    def take(self, group, n):
        pages = super().take(group, n)
        self._n_free[group] += self._n_free[group] == 2
        return pages


class LosesPages(KVPool):
    def give_back(self, group, pages):
        super().give_back(group, pages[:-1] if len(pages) > 1 else pages)


class SharesOneStore(KVPool):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.stores.are_kept = False
        self.stores.layers[:] = self.stores.layers[:1] * len(self.stores.layers)


class CountsWhatWasRolledBack(KVSequence):
    def roll_back(self, n):
        super().roll_back(n)
        self.length += 1


class CommitsAll(KVSequence):
    def commit(self, n):
        super().commit(self.pending if n else 0)
        self.pending = 0

    def roll_back(self, n):
        self.pending = 0


class GivesTooMuchBack(KVSequence):
    def _give_back(self, group, end):
        super()._give_back(group, min(end + (0 < end < self._end), self._end))


class GivesNothingBack(KVSequence):
    def _give_back(self, group, end):
        if end == self._end:
            super()._give_back(group, end)


class WritesOneSlotEarly(KVSequence):
    def slots(self, group, first, n):
        return super().slots(group, max(0, first - 1), n)


class RefusesTheLastToken(KVSequence):
    def begin(self, n, **how):
        if self.length + n == self.capacity:
            raise CacheFullError(length=self.length, wanted=n, capacity=self.capacity)
        return super().begin(n, **how)


class CountsBeforeItRefuses(KVSequence):
    def begin(self, n, **how):
        self.pending += self.length + n > self.capacity
        return super().begin(n, **how)


@pytest.mark.some(1)
@pytest.mark.parametrize("pool_class", [GivesOnePageTwice, LosesPages, SharesOneStore])
def test_the_machine_catches_a_wrong_pool(pool_class):
    check_caught(pool_class=pool_class)


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "sequence_class",
    [CountsWhatWasRolledBack, CommitsAll, GivesTooMuchBack, GivesNothingBack, WritesOneSlotEarly, RefusesTheLastToken,
     CountsBeforeItRefuses],
)  # fmt: skip
def test_the_machine_catches_a_wrong_sequence(sequence_class):
    check_caught(sequence_class=sequence_class)


def check_caught(**classes):
    # Any counterexample is enough, so it is not shrunk.
    unshrunk = settings(SETTINGS, max_examples=200, phases=[Phase.generate])
    with pytest.raises((AssertionError, IndexError, ValueError, pytest.fail.Exception)):
        drive(Kind(20, 3, windows=(5, None)), create_backend("simd"), unshrunk, **classes)
