"""State machine test: sequences that fork, share pages and fill a prefix cache, against plain lists of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from mlx_engine.cache import KVPool, KVSequence, PrefixCache
from mlx_engine.cache.prefix import HeldPages, RadixTree
from mlx_engine.errors import CacheFullError
from tests.prefix_model import Prefixes, check_references, evict, longest, new_pool

SETTINGS = settings(
    max_examples=15,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    database=None,
    report_multiple_bugs=False,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
)
N_SEQUENCES = 4
# Few different ids, so that prefixes are often equal.
IDS = st.lists(st.integers(0, 2), min_size=1, max_size=9)
WHICH = st.integers(0, N_SEQUENCES - 1)


@dataclass(frozen=True)
class Kind:
    """The size of a pool, the windows of its layers, and the bound of the cache in pages of the first group."""

    n_tokens: int
    page: int
    windows: tuple[int | None, ...] = (None, None)
    bound: int | None = None


KINDS = [
    Kind(48, 4),
    Kind(24, 1, bound=9),
    Kind(64, 4, windows=(None, 6)),
    Kind(64, 8, windows=(5, None, 12), bound=6),
    Kind(40, 3, windows=(4, 4)),
]


class CacheMachine(RuleBasedStateMachine):
    """Sequences grow, shrink, fork, begin with cached prefixes and are inserted; pages run out and are evicted."""

    def __init__(self, kind: Kind):
        super().__init__()
        self.kind = kind
        self.pool = new_pool(kind.n_tokens, kind.page, kind.windows, n_sequences=2, longest_pass=9)
        bound = None if kind.bound is None else kind.bound * self.pool.page_nbytes[0]
        self.cache = PrefixCache(self.pool, bound)
        self.prefixes = Prefixes()
        self.sequences = [self.pool.sequence() for _ in range(N_SEQUENCES)]
        self.want: list[list[int]] = [[] for _ in self.sequences]

    def refused(self, needs: list[int]) -> None:
        """Assert that some group cannot have as many pages as are needed, even if everything unused were evicted."""
        groups = range(len(self.pool.windows))
        have = [self.pool.free_pages(group) + self.cache.evictable_pages(group) for group in groups]
        assert any(n < need for n, need in zip(have, needs, strict=True)), "refused without need"

    def needs(self, i: int, n: int) -> list[int]:
        """Return the pages that n more tokens of a sequence take, in each group."""
        kv, page = self.sequences[i], self.pool.page
        last = kv.length // page
        shared = [
            kv.length % page > 0 and kv.length < kv._lent and self.pool.references(g, table[last : last + 1])[0] > 1
            for g, table in enumerate(kv.tables)
        ]
        return [-(-(kv.length + n) // page) - kv._end + copy for copy in shared]

    def appended(self, i: int, ids: list[int], kept: int) -> bool:
        needs = self.needs(i, len(ids))
        try:
            self.prefixes.append(self.sequences[i], self.want[i], ids, committed=kept)
        except CacheFullError:
            if len(self.want[i]) + len(ids) <= self.kind.n_tokens:
                self.refused(needs)
            return False
        self.want[i] = self.want[i] + ids[:kept]
        return True

    @rule(i=WHICH, ids=IDS, kept=st.integers(0, 9))
    def append(self, i: int, ids: list[int], kept: int):
        """Sometimes only a part is accepted."""
        self.appended(i, ids, min(kept, len(ids)))

    @rule(i=WHICH, of=WHICH, n=st.integers(0, 20), ids=IDS, kept=st.sampled_from(["chunks", "end", "nothing"]))
    def answer(self, i: int, of: int, n: int, ids: list[int], kept: str):
        """A request: begin with what is cached of some tokens of a sequence and others, compute the rest, keep it."""
        ids = (self.want[of][:n] + ids + ids[::-1])[: self.kind.n_tokens]
        self.close(i)
        self.attached(i, ids)
        while (rest := ids[len(self.want[i]) :]) and self.appended(i, rest[:5], len(rest[:5])):
            if kept == "chunks":
                self.insert(i, 60)
        if kept == "end":
            self.insert(i, 60)

    def attached(self, i: int, ids: list[int]) -> None:
        match, before = self.cache.match(ids), self.cache.stats.hits
        n = self.cache.attach(self.sequences[i], ids).length
        assert self.cache.stats.hits - before == (n > 0)
        if n < match.length:
            # No page was free for a copy, so whole pages are shared.
            assert any(self.pool.windows) or n == match.length - match.length % self.pool.page
            assert min(map(self.pool.free_pages, range(len(self.pool.windows)))) == 0
        self.want[i] = ids[:n]

    @rule(i=WHICH, j=WHICH, of_one=IDS, of_other=IDS)
    def answer_twice(self, i: int, j: int, of_one: list[int], of_other: list[int]):
        """Two answers to one prompt."""
        if i == j:
            return
        self.close(j)
        try:
            self.sequences[j] = self.sequences[i].fork()
        except CacheFullError:
            self.refused([1] * len(self.pool.windows))
            return
        self.want[j] = list(self.want[i])
        self.appended(i, of_one, len(of_one))
        self.appended(j, of_other, len(of_other))

    @rule(i=WHICH, n=st.integers(1, 5), ids=IDS, kept=st.booleans())
    def answer_again(self, i: int, n: int, ids: list[int], kept: bool):
        """The last tokens are replaced by others, after they were kept."""
        if kept:
            self.insert(i, 60)
        self.truncate(i, n)
        self.appended(i, ids, len(ids))

    @rule(i=WHICH, n=st.integers(0, 60))
    def insert(self, i: int, n: int):
        ids = self.want[i][:n]
        self.cache.insert(ids, self.sequences[i])
        if self.kind.bound is None:
            match = self.cache.match(ids)
            assert match.agreeing == len(ids)
            assert match.length == len(ids) or any(self.pool.windows)
            if len(ids) == len(self.want[i]):
                assert match.length == len(ids), "a sequence that ends here has all pages that its windows need"

    @rule(i=WHICH, n=st.integers(0, 9))
    def truncate(self, i: int, n: int):
        length = max(0, len(self.want[i]) - n)
        try:
            self.sequences[i].truncate(length)
            self.want[i] = self.want[i][:length]
        except ValueError:
            assert any(self.pool.windows)

    @rule(i=WHICH)
    def close(self, i: int):
        self.sequences[i].close()
        self.want[i] = []

    @rule(n=st.integers(1, 8))
    def evict(self, n: int):
        groups = range(len(self.pool.windows))
        free = [self.pool.free_pages(group) for group in groups]
        most = [free[group] + self.cache.evictable_pages(group) for group in groups]
        assert evict(self.cache, n) == sum(self.pool.free_pages(group) - free[group] for group in groups)
        assert all(self.pool.free_pages(group) >= min(n, most[group]) for group in groups)

    @rule(alone=st.integers(0, 5))
    def fill_a_sequence(self, alone: int):
        """A single sequence has room for all tokens of the pool, whatever the cache holds. Done rarely."""
        if alone:
            return
        for i in range(1, N_SEQUENCES):
            self.close(i)
        while room := self.kind.n_tokens - len(self.want[0]):
            new = [room % 3] * min(room, 9)
            assert self.appended(0, new, len(new))

    @invariant()
    def all_tokens_are_read_back(self):
        for kv, ids in zip(self.sequences, self.want, strict=True):
            self.prefixes.check_sequence(kv, ids)
        self.prefixes.check_nodes(self.cache)

    @invariant()
    def references_add_up(self):
        check_references(self.pool, self.sequences, self.cache)
        held = [{page for node in self.cache._nodes for page in node.pages[g].tolist() if page >= 0}
                for g in range(len(self.pool.windows))]  # fmt: skip
        assert [len(pages) for pages in held] == [self.cache.held_pages(g) for g in range(len(held))]
        assert self.cache.max_nbytes is None or self.cache.nbytes <= self.cache.max_nbytes
        order = {node: i for i, node in enumerate(self.cache._nodes)}
        assert all(order[child] < order[node] for node in order for child in node.children.values())

    @invariant()
    def matches_are_the_longest(self):
        for ids in [*self.want, [0, 1, 2] * 3, [*self.want[0][:5], 2, 2], [1] * 12]:
            match = self.cache.match(ids)
            assert match.length == longest(self.cache, ids)
            for group, window in enumerate(self.pool.windows):
                first = 0 if window is None else max(0, match.length + 1 - window)
                self.prefixes.check(self.pool, group, match.pages[group], ids[: match.length], first)

    def teardown(self):
        for kv in self.sequences:
            kv.close()
        self.cache.clear()
        assert all(self.pool.free_pages(g) == n for g, n in enumerate(self.pool.n_pages)), "pages are missing"
        assert (self.cache.nbytes, self.cache.n_tokens, self.cache.snapshot()) == (0, 0, [])


def drive(kind: Kind, settings: settings = SETTINGS):
    run_state_machine_as_test(lambda: CacheMachine(kind), settings=settings)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_sequences_and_prefixes_are_lists(kind: Kind):
    drive(kind)


# ---- the state machine detects errors ----


def shares_without_a_reference(patch: pytest.MonkeyPatch):
    patch.setattr(KVPool, "retain", lambda self, group, pages: None)


def shares_partial_pages(patch: pytest.MonkeyPatch):
    def replaced(self: KVSequence, group: int) -> None:
        pass

    patch.setattr(KVSequence, "_replace_last", replaced)


def copies_too_little(patch: pytest.MonkeyPatch):
    copy = KVPool.copy
    patch.setattr(KVPool, "copy", lambda self, group, a, b, n: copy(self, group, a, b, n - 1))


def forgets_what_was_lent(patch: pytest.MonkeyPatch):
    lend = KVSequence.lend

    def forgetting(self: KVSequence, length: int):
        found, self._lent = lend(self, length), 0
        return found

    patch.setattr(KVSequence, "lend", forgetting)


def frees_pages_in_use(patch: pytest.MonkeyPatch):
    def drop(self: HeldPages, group: int, pages: np.ndarray) -> None:
        while (held := pages[self.pool.references(group, pages) > 0]).size:
            self.pool.give_back(group, held)

    patch.setattr(HeldPages, "in_use", lambda self, group, pages: np.zeros(len(pages), dtype=bool))
    patch.setattr(HeldPages, "drop", drop)


def matches_one_token_more(patch: pytest.MonkeyPatch):
    walk = RadixTree.walk

    def longer(self: RadixTree, ids: np.ndarray):
        path, n = walk(self, ids)
        return path, min(n + 1, len(ids), path[-1].end) if path else n

    patch.setattr(RadixTree, "walk", longer)


def splits_without_a_reference(patch: pytest.MonkeyPatch):
    split = RadixTree._split

    def unheld(self: RadixTree, node, at):
        self.held.add, add = (lambda group, pages: None), self.held.add
        upper = split(self, node, at)
        self.held.add = add
        return upper

    patch.setattr(RadixTree, "_split", unheld)


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "broken",
    [shares_without_a_reference, shares_partial_pages, copies_too_little, forgets_what_was_lent, frees_pages_in_use,
     matches_one_token_more, splits_without_a_reference],
)  # fmt: skip
def test_the_machine_catches(broken, monkeypatch: pytest.MonkeyPatch):
    broken(monkeypatch)
    # Any counterexample is enough, so it is not shrunk.
    with pytest.raises((AssertionError, IndexError, ValueError)):
        drive(Kind(48, 4, windows=(None, 6)), settings(SETTINGS, max_examples=60, phases=[Phase.generate]))
