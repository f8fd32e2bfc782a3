"""What a prefix cache may hold, in plain Python: tokens as values that name their whole prefix, and a slow search."""

from __future__ import annotations

import numpy as np

from mlx_engine.backends import create_backend
from mlx_engine.cache import KVLayer, KVPool, KVSequence, PrefixCache, SequenceInput, begin
from mlx_engine.cache.prefix import Node

BACKEND = create_backend("simd")


class Prefixes:
    """Pools whose stores hold, for each token, a number that stands for all tokens up to it."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, ...], int] = {}

    def values(self, ids: list[int]) -> list[int]:
        """Return the number of each prefix of ids; equal prefixes have equal numbers."""
        return [self._numbers.setdefault(tuple(ids[: i + 1]), len(self._numbers) + 1) for i in range(len(ids))]

    def append(self, kv: KVSequence, ids: list[int], new: list[int], *, committed: int | None = None) -> None:
        """Run a pass over new tokens of a sequence that has `ids`, and commit some of them, by default all."""
        batch, pool = begin([SequenceInput(new, kv)]), kv.pool
        numbers = np.array(self.values(ids + new)[len(ids) :], dtype=np.float32)
        for layer, group in enumerate(pool.stores.group_of):
            k = np.tile(numbers[:, None, None], (1, 1, 2))
            pool.stores.layers[layer] = BACKEND.kv_write(
                pool.stores.layers[layer], batch.groups[group].slots, k, k + layer
            )
        committed = len(new) if committed is None else committed
        kv.commit(committed)
        kv.roll_back(len(new) - committed)

    def check(self, pool: KVPool, group: int, pages: np.ndarray, ids: list[int], first: int) -> None:
        """Assert that a page table holds exactly these tokens from position `first` on."""
        numbers = self.values(ids)
        for layer in (i for i, of in enumerate(pool.stores.group_of) if of == group):
            store = pool.stores.layers[layer]
            found = [store[:, 0, pages[p // pool.page] + p % pool.page, 0].tolist() for p in range(first, len(ids))]
            assert found == [[n, n + layer] for n in numbers[first:]], f"layer {layer}, tokens from {first}"

    def check_sequence(self, kv: KVSequence, ids: list[int]) -> None:
        """Assert that a sequence reads back its own tokens, in groups with a window those that it still sees."""
        assert kv.length == len(ids)
        for group, window in enumerate(kv.pool.windows):
            first = 0 if window is None else max(0, len(ids) + 1 - window)
            self.check(kv.pool, group, kv.tables[group], ids, first)

    def check_nodes(self, cache: PrefixCache) -> None:
        """Assert that each page of each node holds all its tokens up to the node's end."""
        for node in cache._nodes:
            ids, page = ids_of(node), cache.pool.page
            for group, pages in enumerate(node.pages):
                assert len(pages) == -(-node.end // page) - node.start // page
                assert cache.pool.windows[group] is not None or (pages >= 0).all()
                table = np.concatenate((np.full(node.start // page, -1), pages))
                for i in np.flatnonzero(table >= 0).tolist():
                    self.check(cache.pool, group, table, ids[: (i + 1) * page], i * page)


def new_pool(n_tokens: int, page: int = 4, windows: tuple[int | None, ...] = (None, None), **options: int) -> KVPool:
    """Return a pool of small layers with these windows."""
    pool = KVPool(BACKEND, [KVLayer(1, 2, window) for window in windows], n_tokens, page=page, **options)
    for store in pool.stores.layers:
        store.fill(-1)  # memory that an earlier pool has freed may hold the numbers that are expected
    return pool


def ids_of(node: Node) -> list[int]:
    """Return all tokens up to a node's end."""
    before = ids_of(node.parent) if node.parent is not None else []
    return before + node.ids.tolist()


def longest(cache: PrefixCache, ids: list[int], step: int = 1) -> int:
    """Return the length, a multiple of `step`, of the longest prefix that can be reused, by trying all in each node."""
    # The nodes on the path, and the number of tokens that each has in common with ids.
    path = [(node, _n_equal(ids_of(node), ids)) for node in cache._nodes]
    path = [(node, n) for node, n in path if n > node.start]
    return next(m for m in range(len(ids) - len(ids) % step, -1, -step) if _is_held(cache, path, m))


def _n_equal(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _is_held(cache: PrefixCache, path: list[tuple[Node, int]], m: int) -> bool:
    page = cache.pool.page
    if not any(n >= m for _, n in path):
        return m == 0
    for group, window in enumerate(cache.pool.windows):
        for p in range(0 if window is None else max(0, m + 1 - window), m):
            # Of this page all tokens before m are needed.
            i, end = p // page, min(m, (p // page + 1) * page)
            held = [n for node, n in path if node.start // page <= i <= (node.end - 1) // page
                    and node.pages[group][i - node.start // page] >= 0]  # fmt: skip
            if not any(n >= end for n in held):
                return False
    return True


def check_references(pool: KVPool, sequences: list[KVSequence], cache: PrefixCache | None = None) -> None:
    """Assert that every reference to a page is a sequence's or a node's, and that pages without any are free."""
    for group, n_pages in enumerate(pool.n_pages):
        held = [pages for kv in sequences for pages in kv.tables[group][kv._firsts[group] : kv._end].tolist()]
        held += [
            pages for node in (cache._nodes if cache else ()) for pages in node.pages[group].tolist() if pages >= 0
        ]
        counts = np.bincount(np.array(held, dtype=np.int64) // pool.page, minlength=n_pages)
        assert counts.tolist() == pool.references(group, np.arange(n_pages) * pool.page).tolist()
        free = pool._free[group][: pool.free_pages(group)] // pool.page
        assert sorted(free.tolist()) == np.flatnonzero(counts == 0).tolist()
        assert pool.used_pages(group) == np.count_nonzero(counts)


def evict(cache: PrefixCache, n: int) -> int:
    """Have the cache free pages until n of each group are free, as far as it can; return how many were freed."""
    pool, groups = cache.pool, range(len(cache.pool.windows))
    before = sum(map(pool.free_pages, groups))
    for group in groups:
        assert pool.reclaim is not None
        pool.reclaim(group, n)
    return sum(map(pool.free_pages, groups)) - before
