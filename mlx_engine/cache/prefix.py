"""The prefix cache: keeps keys and values of earlier prompts and answers for sequences with the same first tokens.

Keys and values are in pages. A page has a slot for each of its tokens (`pool.py`), and is named by its first slot.
Recurrent states have slots of their own (`states.py`).

The cache is a `RadixTree` over token ids. A node has a run of tokens, which follow the tokens of its parent, and holds
the pages of these tokens. If a node begins inside a page, its first page also has the last tokens of its parent. So if
several nodes on a path hold a page for the same positions, the page of the deepest node has all their tokens.

The longest common prefix is found exactly, to the token. Its whole pages are shared, and a partly used page is copied
to a page of the new sequence. With `whole_pages`, only full pages are kept and reused. Without `whole_pages`, a client
could guess another client's prompt token by token, from the counts of cached tokens or from latency. The last token of
a prompt is always computed, because its logits are needed. If this token is the last one of a cached page, the other
tokens of the page are reused, even with `whole_pages`.

When the pool has too few free pages, or the cache exceeds its bound, the cache drops its references to pages, least
recently used first. Pages that sequences also hold stay allocated.

In layers with a window, a sequence frees the pages that have left the window. So a prefix can be reused only if the
tree still holds the pages just before the prefix's end. The caller must therefore call `insert` after each chunk
(the part of a prompt that one pass computes), before the sequence frees the pages of this chunk.

A model with recurrent states can reuse a prefix only if the state at exactly the end of the prefix is cached. `insert`
keeps the states that the sequence has: the state after its last token, and the state at the last page boundary in its
last chunk. When slots for states run out, the cache first frees states whose node also holds a state of a longer
prefix, then the other states. Of both kinds, the least recently used states are freed first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, NamedTuple

import numpy as np

from mlx_engine.backends.batch import first_visible
from mlx_engine.cache.disk import STATE, DiskPrefixes, Saver
from mlx_engine.cache.pool import KVPool
from mlx_engine.cache.sequence import KVSequence
from mlx_engine.cache.states import Snapshot
from mlx_engine.errors import CacheFullError


@dataclass(eq=False)
class Node:
    """A node of the radix tree: a run of tokens, and the pages and states that the cache holds for them.

    Attributes:
        start: position of the node's first token.
        ids: (n,) int64 token ids.
        pages: for each group of layers (the layers with the same window) an array (P,): the first slot of each page,
            from page number `start // page` to `(end - 1) // page`. In groups with a window, -1 stands for a page that
            is not held.
        parent: None for the root, and for a node that was removed.
        children: maps the first token id of each child to the child.
        last_use: the prefix cache's counter of uses when this node was last used.
        evicted: the id of the token that was last evicted directly after this node's last token; None if no token
            there was evicted.
        states: maps the length of a prefix, from start + 1 to end, to the slot of the held state after this prefix.
    """

    start: int
    ids: np.ndarray
    pages: list[np.ndarray]
    parent: Node | None
    children: dict[int, Node] = field(default_factory=dict)
    last_use: int = 0
    evicted: int | None = None
    states: dict[int, int] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """The position after the node's last token."""
        return self.start + len(self.ids)


class RadixTree:
    """The nodes of the prefix cache, and their references to pages and states. The root has no tokens."""

    def __init__(self, pool: KVPool) -> None:
        self.held, self._page = HeldPages(pool), pool.page
        self._windows, self._states = pool.windows, pool.states
        self.root = Node(0, np.empty(0, dtype=np.int64), [np.empty(0, dtype=np.int64) for _ in pool.windows], None)

    def walk(self, ids: np.ndarray) -> tuple[list[Node], int]:
        """Return the path of nodes that agree with ids (n,), and how many tokens agree.

        The last node may agree only in part.
        """
        node, path, n = self.root, list[Node](), 0
        while n < len(ids) and (child := node.children.get(int(ids[n]))) is not None:
            path.append(child)
            n += _agreeing(child.ids, ids[n:])
            if n < child.end:
                break
            node = child
        return path, n

    def usable(
        self, path: Sequence[Node], n: int, step: int, most: int
    ) -> tuple[int, list[np.ndarray], Snapshot | None]:
        """Return the longest reusable prefix of a path: its length, pages and state.

        All pages that later tokens read must be held. In a group with a window, these are only the pages of the last
        tokens. If the model has recurrent states, the state after the prefix must be held, too. For other models, and
        for length 0, the returned state is None. The returned pages are, for each group of layers, the first slots (P,)
        of the pages, with -1 for a page that is not held.

        Args:
            path: the nodes, from a child of the root on.
            n: the number of first tokens of the path that agree, from `walk`.
            step: 1; or the number of tokens per page, to reuse only whole pages. The returned length is a multiple of
                `step`, or `most`. With whole pages, a `most` inside a page is returned only if all tokens of this page
                agree and are held.
            most: the largest length.
        """
        n = min(n - n % step, most)
        tables = [self.table(group, path, n) for group in range(len(self._windows))]
        held = [Snapshot(length, slot) for node in path for length, slot in node.states.items()]
        found = [snapshot for snapshot in held if snapshot.length <= n and snapshot.length % step == 0]
        state, length = None, 0 if self._states.n_slots else self._reaches(n, tables)
        while length % step and length < most:  # the last page is held without its later tokens, so it cannot be reused
            length = self._reaches(length - length % step, tables)
        for snapshot in sorted(found, reverse=True):
            if self._reaches(snapshot.length, tables) == snapshot.length:
                state, length = snapshot, snapshot.length
                break
        return length, [pages[: -(-length // self._page)] for pages, _ in tables], state

    def _reaches(self, n: int, tables: Sequence[tuple[np.ndarray, np.ndarray]]) -> int:
        """Return the largest length, at most n, of a prefix whose needed pages are held; `tables` is from `table`."""
        length, before = n, -1
        while length != before:
            before = length
            for window, (_, reach) in zip(self._windows, tables, strict=True):
                length = _longest(length, window, reach, self._page)
        return length

    def table(self, group: int, path: Sequence[Node], n: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the pages of a group for the first n tokens of a path, as two arrays (P,).

        The first array has the first slot of each page, -1 for a page that is not held. The second array, `reach`, has
        for each held page the position, at most n, at which its tokens end; for any other page, its first position.
        """
        size = -(-n // self._page)
        pages, starts = np.full(size, -1, dtype=np.int64), np.arange(size) * self._page
        reach = starts.copy()
        for node in path:
            first = node.start // self._page
            of_node = node.pages[group][: size - first]
            (at,) = (of_node >= 0).nonzero()
            pages[first + at] = of_node[at]
            reach[first + at] = np.minimum(starts[first + at] + self._page, min(node.end, n))
        return pages, reach

    def insert(self, ids: np.ndarray, pages: Sequence[np.ndarray]) -> list[Node]:
        """Add token ids (n,) to the tree, with those of their pages that the tree lacks. Return the path of the ids.

        `pages` has, for each group of layers, the first slots (P,) of the ids' pages; -1 for a page that was freed.
        """
        path, n = self.walk(ids)
        if path and n < path[-1].end and (n < len(ids) or self._lacks(path[-1], n)):
            path[-1] = self._split(path[-1], n)
        if n < len(ids):
            if not path or path[-1].children or self._ends_in_a_window(path[-1], pages):
                path.append(self._add_leaf(path[-1] if path else self.root, int(ids[n])))
            self._extend(path[-1], ids[n:], pages)
        self._fill(path, pages, len(ids))
        return path

    def _add_leaf(self, parent: Node, first: int) -> Node:
        """Add a child without tokens, whose first id will be `first`, and return the child."""
        parent.children[first] = Node(parent.end, parent.ids[:0], [pages[:0] for pages in parent.pages], parent)
        return parent.children[first]

    def _extend(self, leaf: Node, more: np.ndarray, pages: Sequence[np.ndarray]) -> None:
        """Append tokens to a leaf. `pages` is as in `insert`.

        If the leaf's last page is partly filled, the page in `pages` with the same and further tokens replaces it.
        """
        n_whole = leaf.end // self._page - leaf.start // self._page
        for group, new in enumerate(pages):
            new = new[leaf.end // self._page :]
            self.held.add(group, new)
            self.held.drop(group, leaf.pages[group][n_whole:])
            leaf.pages[group] = np.concatenate((leaf.pages[group][:n_whole], new))
        leaf.ids, leaf.evicted = np.concatenate((leaf.ids, more)), None

    def _split(self, node: Node, at: int) -> Node:
        """Split a node at a position inside it, and return the new upper node.

        If the position is inside a page, both nodes hold this page.
        """
        first, parent = node.start // self._page, node.parent
        upper = Node(node.start, node.ids[: at - node.start], [], parent, {int(node.ids[at - node.start]): node})
        for group, pages in enumerate(node.pages):
            upper.pages.append(pages[: -(-at // self._page) - first].copy())
            node.pages[group] = pages[at // self._page - first :].copy()
            if at % self._page:
                self.held.add(group, node.pages[group][:1])
        upper.states = {length: slot for length, slot in node.states.items() if length <= at}
        node.states = {length: slot for length, slot in node.states.items() if length > at}
        node.start, node.ids, node.parent, upper.last_use = at, node.ids[at - node.start :], upper, node.last_use
        if parent is not None:
            parent.children[int(upper.ids[0])] = upper
        return upper

    def _ends_in_a_window(self, leaf: Node, pages: Sequence[np.ndarray]) -> bool:
        """Return whether, in some group, a leaf holds its partly filled last page, but the new pages lack this page."""
        at = leaf.end // self._page
        is_partial = leaf.end % self._page > 0
        return is_partial and any(old[-1] >= 0 > new[at] for old, new in zip(leaf.pages, pages, strict=True))

    def _lacks(self, node: Node, n: int) -> bool:
        """Return whether position n is inside a page, not at its start, and in some group the node lacks this page."""
        at = n // self._page - node.start // self._page
        return n % self._page > 0 and any(pages[at] < 0 for pages in node.pages)

    def _fill(self, path: Sequence[Node], pages: Sequence[np.ndarray], n: int) -> None:
        """In groups with a window, add those pages of the path's first n tokens that the nodes do not hold yet."""
        for group, window in enumerate(self._windows):
            for node in path if window is not None else ():
                first = node.start // self._page
                # If the node continues after the n tokens, leave out a page that the n tokens fill in part: this page
                # may lack later tokens of the node.
                of_node = node.pages[group] if node.end <= n else node.pages[group][: n // self._page - first]
                new = pages[group][first : first + len(of_node)]
                (gaps,) = ((of_node < 0) & (new >= 0)).nonzero()
                self.held.add(group, new[gaps])
                of_node[gaps] = new[gaps]

    def keep(self, path: Sequence[Node], state: Snapshot) -> None:
        """Hold a state after some tokens of a path, unless a state after the same tokens is already held."""
        for node in path:
            if node.start < state.length <= node.end and state.length not in node.states:
                self._states.retain(state.slot)
                node.states[state.length] = state.slot

    def cut(self, leaf: Node) -> None:
        """Drop a leaf's last page and the tokens in this page. If no token is left, remove the leaf."""
        for group, pages in enumerate(leaf.pages):
            self.held.drop(group, pages[-1:])
            leaf.pages[group] = pages[:-1]
        first, end = int(leaf.ids[0]), (leaf.end - 1) // self._page * self._page
        n_left = max(0, end - leaf.start)
        leaf.ids, leaf.evicted = leaf.ids[:n_left], int(leaf.ids[n_left])
        for length in [length for length in leaf.states if length > leaf.end]:
            self._states.give_back(leaf.states.pop(length))
        if not n_left and leaf.parent is not None:
            del leaf.parent.children[first]
            leaf.parent.evicted, leaf.parent = first, None


def _agreeing(a: np.ndarray, b: np.ndarray) -> int:
    """Return the length of the longest common prefix of a and b."""
    n = min(len(a), len(b))
    (differing,) = (a[:n] != b[:n]).nonzero()
    return int(differing[0]) if len(differing) else n


def _longest(length: int, window: int | None, reach: np.ndarray, page: int) -> int:
    """Return the result of `RadixTree._reaches` for one group, at most `length`; `reach` is from `RadixTree.table`."""
    while True:
        first = first_visible(window, length)
        numbers = np.arange(first // page, -(-length // page) if first < length else first // page)
        (lacking,) = (reach[numbers] < np.minimum((numbers + 1) * page, length)).nonzero()
        if not len(lacking):
            return length
        length = int(reach[numbers[lacking[0]]])


class HeldPages:
    """Counts the references of a tree's nodes to pages of a pool. Several nodes may refer to the same page.

    The methods take the first slots (n,) of different pages. `add` and `drop` skip items that are -1.

    Attributes:
        n_pages: for each group, the number of different pages that are held.
        generations: for each group and page, how often the number of nodes that refer to the page has fallen to 0.
            While this count is the same, the contents of a held page are unchanged.
    """

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self.n_pages = [0] * len(pool.windows)
        self._counts = [np.zeros(n, dtype=np.int64) for n in pool.n_pages]
        self.generations = [np.zeros(n, dtype=np.int64) for n in pool.n_pages]

    @property
    def nbytes(self) -> int:
        """Bytes of the held pages."""
        return sum(n * of_page for n, of_page in zip(self.n_pages, self.pool.page_nbytes, strict=True))

    def add(self, group: int, pages: np.ndarray) -> None:
        """Add a reference to each page. The pages must be in use."""
        pages = pages[pages >= 0]
        counts, numbers = self._counts[group], pages // self.pool.page
        self.n_pages[group] += int((counts[numbers] == 0).sum())
        counts[numbers] += 1
        self.pool.retain(group, pages)

    def drop(self, group: int, pages: np.ndarray) -> None:
        """Remove a reference from each page."""
        pages = pages[pages >= 0]
        counts, numbers = self._counts[group], pages // self.pool.page
        counts[numbers] -= 1
        self.n_pages[group] -= int((counts[numbers] == 0).sum())
        self.generations[group][numbers] += counts[numbers] == 0
        self.pool.give_back(group, pages)

    def in_use(self, group: int, pages: np.ndarray) -> np.ndarray:
        """Return for each page whether a sequence holds it, too. The tree must hold the pages."""
        held: np.ndarray = self._counts[group][pages // self.pool.page]
        return np.asarray(self.pool.references(group, pages) > held)

    def unused(self, group: int) -> int:
        """Return the number of pages of a group that the tree holds, but no sequence holds."""
        counts, page = self._counts[group], self.pool.page
        (numbers,) = counts.nonzero()
        return int((self.pool.references(group, numbers * page) == counts[numbers]).sum())


# The reason why no further tokens can be reused, see `Match.end`.
End = Literal["whole", "new", "differs", "evicted", "window", "state", "memory"]

# The largest number of token ids that `Match.expected` and a node of `PrefixCache.snapshot` show.
SHOWN = 8
# The bits of an id of the tree that are the token id, see `_of_adapter`.
ID = (1 << 32) - 1


class Match(NamedTuple):
    """The longest cached prefix of given token ids.

    Attributes:
        length: number of tokens that can be reused.
        agreeing: number of first tokens that the tree has in common with the ids. This is more than `length` if needed
            pages or the state are not held, if `whole_pages` rounds `length` down, or if no page was free for a copy.
        pages: for each group of layers an array (P,): the first slot of each page of the `length` tokens.
        expected: the ids, at most 8, with which the most recently used branch of the tree continues after `agreeing`
            tokens.
        end: the reason why no further tokens can be reused. "whole": all wanted ids are cached. "new": the tree has no
            token after the agreeing ones. "differs": the tree continues with other tokens. "evicted": the next token
            was cached, and has been evicted. "window": pages that a window needs are not cached. "state": no state
            after more tokens is cached. "memory": no page was free for a copy.
        state: the state after `length` tokens; None for models without recurrent states.
        from_disk: how many of the `length` tokens this look-up has read from files.
        has_more: whether files have more tokens, which the next look-up reads.
    """

    length: int
    agreeing: int
    pages: list[np.ndarray]
    expected: tuple[int, ...]
    end: End
    state: Snapshot | None = None
    from_disk: int = 0
    has_more: bool = False


@dataclass
class PrefixStats:
    """Counters of a prefix cache since its creation.

    Attributes:
        queries: calls of `attach`.
        hits: calls of `attach` that found at least one token.
        queried_tokens: number of tokens that were looked up.
        cached_tokens: number of tokens that were found.
        evicted_pages: number of pages, of all groups, that the cache has dropped because the pool had too few free
            pages or `max_nbytes` was exceeded.
    """

    queries: int = 0
    hits: int = 0
    queried_tokens: int = 0
    cached_tokens: int = 0
    evicted_pages: int = 0


class PrefixCache:
    """The prefix cache of a pool. When the pool's free pages run out, the cache gives pages back to the pool.

    Attributes:
        max_nbytes: the bound of `nbytes`; None for no bound.
        disk: the prefixes on disk, which later processes can reuse; or None.
    """

    def __init__(
        self,
        pool: KVPool,
        max_nbytes: int | None = None,
        *,
        whole_pages: bool = False,
        disk: DiskPrefixes | None = None,
    ) -> None:
        if pool.reclaim is not None or not pool.stores.are_kept:
            raise ValueError("expected a pool without a prefix cache, whose stores are kept")
        self.pool, self.max_nbytes, self.stats = pool, max_nbytes, PrefixStats()
        self.disk = disk
        self.whole_pages, self._step = whole_pages, pool.page if whole_pages else 1
        self._tree = RadixTree(pool)
        # All nodes but the root, least recently used first. When a path is used, its deepest node is marked first, so
        # children stand before their parents.
        self._nodes: dict[Node, None] = {}
        self._clock = 0
        pool.reclaim, pool.states.reclaim = self._reclaim, self._reclaim_states

    @property
    def n_tokens(self) -> int:
        """Number of tokens in the tree."""
        return sum(len(node.ids) for node in self._nodes)

    @property
    def n_nodes(self) -> int:
        """Number of nodes without the root."""
        return len(self._nodes)

    @property
    def nbytes(self) -> int:
        """Bytes of the pages and states that the cache holds, including those that sequences hold, too."""
        return self._tree.held.nbytes + self.n_states * self.pool.states.nbytes_each

    @property
    def n_states(self) -> int:
        """The number of states that the cache holds."""
        return sum(len(node.states) for node in self._nodes) if self.pool.states.n_slots else 0

    def held_pages(self, group: int) -> int:
        """Return the number of pages of a group that the cache holds, including those that sequences hold, too."""
        return self._tree.held.n_pages[group]

    def evictable_pages(self, group: int) -> int:
        """Return the number of pages of a group that the cache holds, but no sequence holds."""
        return self._tree.held.unused(group)

    def match(self, ids: Sequence[int] | np.ndarray) -> Match:
        """Return the longest prefix of ids that can be reused, without marking the prefix as used.

        The ids are those that the tree stores (`_of_adapter`). Without a LoRA adapter, these are the token ids.
        """
        return self._match(ids)[0]

    def _match(self, ids: Sequence[int] | np.ndarray, most: int | None = None) -> tuple[Match, list[Node]]:
        """Return the `match` of ids, with a length of at most `most`, and the nodes of the matched tokens."""
        most = len(ids) if most is None else most
        path, n = self._tree.walk(np.asarray(ids, dtype=np.int64))
        length, pages, state = self._tree.usable(path, n, self._step, most)
        full, n = min(n - n % self._step, most), min(n, most)
        path = [node for node in path if node.start < n]
        last = path[-1] if path else self._tree.root
        expected = self._after(last, n)
        lacking: End = "state" if self.pool.states.n_slots else "window"
        end: End = lacking if length < full else "whole" if n == most else "differs" if expected else "new"
        if end in ("differs", "new") and n == last.end and last.evicted == ids[n]:
            end = "evicted"
        return Match(length, n, pages, expected, end, state), [node for node in path if node.start < length]

    @staticmethod
    def _after(node: Node, n: int) -> tuple[int, ...]:
        """Return at most `SHOWN` ids that follow n tokens on the branch that was used last.

        `node` has the last of the n tokens.
        """
        found = node.ids[n - node.start :]
        while len(found) < SHOWN and node.children:
            node = max(node.children.values(), key=lambda child: child.last_use)
            found = np.concatenate((found, node.ids))
        return tuple((found[:SHOWN] & ID).tolist())

    def attach(self, kv: KVSequence, ids: Sequence[int], most: int | None = None, *, is_busy: bool = False) -> Match:
        """Begin an empty sequence with the longest prefix of token ids that can be reused, and return the match.

        At most `most` tokens are reused. With `whole_pages`, the page in which these tokens end can be reused only if
        all ids of the page agree, so `ids` must also have the later ids of this page. If no page is free for the copy
        of a partly used page, the prefix ends at the start of that page. With `is_busy` (other requests wait for this
        thread), only a part of the prefix is read from files. If `Match.has_more`, a later call reads the next part.
        """
        self._check(kv)
        first, end, has_more = 0, 0, False
        most = min(len(ids) if most is None else most, kv.capacity)
        self.stats.queried_tokens += most
        own = _of_adapter(ids[: -(-most // self.pool.page) * self.pool.page], kv.adapter)
        if self.disk is not None:
            first, end, has_more = self._load(self.disk, own, most, is_busy=is_busy)
        found, path = self._match(own, most)
        self._use(path)
        while found.length and not _adopted(kv, found):
            shorter = self.match(own[: found.length - found.length % self.pool.page])
            found = found._replace(length=shorter.length, pages=shorter.pages, state=shorter.state, end="memory")
        self.stats.queries += 1
        self.stats.hits += found.length > 0
        self.stats.cached_tokens += found.length
        if self.disk is not None:
            found = found._replace(from_disk=max(0, min(end, found.length) - first), has_more=has_more)
            self.disk.folder.stats.tokens += found.from_disk
        return found

    def _load(self, disk: DiskPrefixes, ids: np.ndarray, most: int, *, is_busy: bool) -> tuple[int, int, bool]:
        """Find the longest prefix whose pages are in the tree or in files, and read the missing pages into the tree.

        Return the range [first, end) of the tokens that were read, and whether the files have more tokens. `ids` is
        from `_of_adapter`; `most` and `is_busy` are as in `attach`. If `is_busy`, at most `DiskPrefixes.piece` pages
        are read.
        """
        page, chain = self.pool.page, disk.chain(ids)
        path, n = self._tree.walk(ids)
        first, pages, state = self._tree.usable(path, n, page, most)
        end, has_more = first, False
        while first < most and (n_pages := disk.reach(chain, first // page, most)) * page > first:
            if is_busy and n_pages > first // page + disk.piece:
                n_pages, has_more = first // page + disk.piece, True
            kv = self.pool.sequence(n_pages * page)
            try:
                kv.adopt([of_group[: first // page] for of_group in pages], first, state)
                if disk.fill(kv, chain[:n_pages]):
                    self._share(ids[: n_pages * page], kv)
                    end = min(n_pages * page, most)
                    break
            except CacheFullError:
                has_more = False
                break
            finally:
                kv.close()
        disk.use(chain[: -(-end // page)])
        return first, end, has_more

    def insert(self, ids: Sequence[int] | np.ndarray, kv: KVSequence, *, on_disk: bool = True) -> None:
        """Add the first tokens of a sequence to the cache, by sharing its pages and the slots of its states.

        `ids` (N,) are the sequence's first N tokens, all committed. With `on_disk`, the whole pages, and the states at
        the ends of whole pages, are also queued to be written to `disk`. Several calls with growing prefixes of a
        sequence cost little more than one call.
        """
        self._check(kv)
        ids = _of_adapter(ids[: len(ids) - len(ids) % self._step], kv.adapter)
        path = self._share(ids, kv)
        if self.disk is not None and on_disk:
            self._offer(self.disk, ids, path)
        while self.max_nbytes is not None and self.nbytes > self.max_nbytes:
            self._cut(next(iter(self._nodes)))

    def _share(self, ids: np.ndarray, kv: KVSequence) -> list[Node]:
        """Add the first tokens of a sequence to the tree, and return their path. `ids` (n,) are from `_of_adapter`."""
        path = self._tree.insert(ids, kv.lend(len(ids)))
        self._use(path)
        for state in kv.state.snapshots(len(ids)):
            self._tree.keep(path, state)
        return path

    def save(self, saver: Saver, ids: np.ndarray) -> None:
        """Write the cached pages and states of a prefix to a file, with a `Saver`.

        `ids` (n,) are the token ids of the prefix. Only pages of the model without an adapter are found.
        """
        path, n = self._tree.walk(ids)
        self._offer(saver, ids[:n], path)

    def _offer(self, disk: DiskPrefixes | Saver, ids: np.ndarray, path: Sequence[Node]) -> None:
        """Pass the whole pages of a path, and the cached states at the ends of whole pages, to `disk.offer`."""
        page, held, states = self.pool.page, self._tree.held, self.pool.states
        chain = disk.chain(ids)
        for group in range(len(self.pool.windows)):
            pages, reach = self._tree.table(group, path, len(ids))
            is_whole = (pages >= 0) & (reach == (np.arange(len(pages)) + 1) * page)
            for p in is_whole.nonzero()[0].tolist():
                number = int(pages[p]) // page
                disk.offer(chain[: p + 1], str(group), int(pages[p]), held.generations[group], number)
        for length, slot in (item for node in path for item in node.states.items()):
            if length % page == 0 and length <= len(ids):
                disk.offer(chain[: length // page], STATE, slot, states.generations, slot)

    def _check(self, kv: KVSequence) -> None:
        if kv.pool is not self.pool:
            raise ValueError("expected a sequence of the pool of this prefix cache, found one of another pool")

    def _use(self, path: Sequence[Node]) -> None:
        """Mark the nodes of a path as used now, the deepest first."""
        self._clock += 1
        for node in reversed(path):
            node.last_use = self._clock
            self._nodes.pop(node, None)
            self._nodes[node] = None

    def _reclaim(self, group: int, n: int) -> None:
        """Drop pages, least recently used first, until n pages of a group are free or no other page can be freed."""
        if self.pool.windows[group] is not None:
            self._thin(group, n)
            return
        held = self._tree.held
        # The first round keeps pages that sequences use. The second round also drops such pages from leaves, to reach
        # the leaves' ancestors, whose pages may be unused.
        for spared in (True, False):
            for node in list(self._nodes):
                while self.pool.free_pages(group) < n and len(node.ids) and not node.children:
                    if held.in_use(group, node.pages[group][-1:])[0] and (spared or not held.unused(group)):
                        break
                    self._cut(node)

    def _reclaim_states(self, n: int) -> None:
        """Drop cached states until n slots are free or no other slot can be freed."""
        states = self.pool.states
        held = [
            (length < max(node.states), -node.last_use, -length, node)
            for node in self._nodes
            for length in node.states
            if states.references(node.states[length]) == 1
        ]
        for _, _, length, node in sorted(held, key=lambda entry: entry[:3], reverse=True):
            if states.n_free >= n:
                return
            states.give_back(node.states.pop(-length))

    def _thin(self, group: int, n: int) -> None:
        """Drop pages of a group with a window until n pages are free, but keep the nodes.

        A node's last pages are dropped last, because reuse needs the last pages of a prefix.
        """
        for node in self._nodes:
            pages = node.pages[group]
            (at,) = (pages >= 0).nonzero()
            for i in at[~self._tree.held.in_use(group, pages[at])]:
                if self.pool.free_pages(group) >= n:
                    return
                self._tree.held.drop(group, pages[i : i + 1])
                pages[i] = -1
                self.stats.evicted_pages += 1

    def _cut(self, leaf: Node) -> None:
        """Drop the last page of a leaf, see `RadixTree.cut`."""
        before = sum(self._tree.held.n_pages)
        self._tree.cut(leaf)
        self.stats.evicted_pages += before - sum(self._tree.held.n_pages)
        if not len(leaf.ids):
            del self._nodes[leaf]

    def clear(self) -> None:
        """Drop all prefixes, and free the pages that no sequence holds."""
        for node in list(self._nodes):
            while len(node.ids):
                self._tree.cut(node)
        self._nodes.clear()
        self._tree.root.evicted = None

    def snapshot(self, most: int | None = None) -> list[dict[str, Any]]:
        """Return nodes as dictionaries, the most recently used first, at most `most` (None: all).

        A parent stands before its children. Keys: `parent`, the parent's index in this list, or -1; `start`;
        `n_tokens`; `ids`, the first token ids, at most 8; `pages`, for each group the number of held pages; `in_use`,
        for each group the number of held pages that sequences hold, too; `references`, the largest reference count of
        the node's pages; `last_use`.
        """
        found: list[dict[str, Any]] = []
        index: dict[Node, int] = {}
        for node in islice(reversed(self._nodes), most):
            index[node] = len(found)
            found.append({"parent": index.get(node.parent, -1) if node.parent else -1, **self._described(node)})
        return found

    def _described(self, node: Node) -> dict[str, Any]:
        pages = [of_group[of_group >= 0] for of_group in node.pages]
        return {
            "start": node.start,
            "n_tokens": len(node.ids),
            "ids": (node.ids[:SHOWN] & ID).tolist(),
            "pages": [len(of_group) for of_group in pages],
            "in_use": [int(self._tree.held.in_use(group, of_group).sum()) for group, of_group in enumerate(pages)],
            "references": max(
                int(self.pool.references(group, of_group).max(initial=0)) for group, of_group in enumerate(pages)
            ),
            "last_use": node.last_use,
        }


def _of_adapter(ids: Sequence[int] | np.ndarray, adapter: int) -> np.ndarray:
    """Return the ids (n,) that the tree stores for the token ids of a sequence that uses a LoRA adapter.

    The low 32 bits of an id are the token id, the higher bits the number of the adapter, 0 for none.

    Keys and values depend on the adapter that computed them, so two adapters must not share pages.
    """
    return np.asarray(ids, dtype=np.int64) + (adapter << ID.bit_length())


def _adopted(kv: KVSequence, match: Match) -> bool:
    try:
        kv.adopt(match.pages, match.length, match.state)
    except CacheFullError:
        return False
    return True
