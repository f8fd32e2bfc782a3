"""A radix tree over token ids. An edge is a run of tokens; its node holds the pages that cover them.

Nodes need not begin at the first slot of a page. If a node begins inside a page, its first page also has the tokens
before the node. So for each page of a path, the deepest node that holds the page has all tokens of the page up to the
node's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mlx_engine.backends.batch import first_visible
from mlx_engine.cache.pool import KVPool
from mlx_engine.cache.states import Snapshot


@dataclass(eq=False)
class Node:
    """A run of tokens.

    Attributes:
        start: position of the node's first token.
        ids: (n,) int64 token ids.
        pages: for each group of layers (P,), the first slots of pages `start // page` to `(end - 1) // page`; -1 for a
            page that is not held, in groups with a window only.
        parent: the node of the tokens before; None for the root, and for a node that was removed.
        children: by their first token id.
        last_use: the clock of the prefix cache at the last use.
        evicted: the first token id of the child that was evicted last; None if no child was evicted.
        states: the slots of states that are held, by the number of tokens of the prefix, from start + 1 to end.
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
        """Position after its last token."""
        return self.start + len(self.ids)


class RadixTree:
    """The nodes, and the references to their pages and states.

    Attributes:
        root: the node without tokens.
        held: the pages of all nodes.
    """

    def __init__(self, pool: KVPool) -> None:
        self.held, self._page = HeldPages(pool), pool.page
        self._windows, self._states = pool.windows, pool.states
        self.root = Node(0, np.empty(0, dtype=np.int64), [np.empty(0, dtype=np.int64) for _ in pool.windows], None)

    def walk(self, ids: np.ndarray) -> tuple[list[Node], int]:
        """Return the path of nodes that match ids (n,), and the length of the match.

        The last node may match in part.
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
        """Return the length of the longest prefix of a path's n tokens whose pages are held, and these pages.

        If the model has a state, the state after the prefix must be held too, and is returned. The length is a multiple
        of `step`, which is 1 or a page, or it is `most`, its bound, if the whole page there is held.

        In a group with a window, later tokens attend to the last tokens of the prefix; only their pages are needed.
        Pages are given for each group (P,); -1 where a page is not held.
        """
        n = min(n - n % step, most)
        tables = [self.table(group, path, n) for group in range(len(self._windows))]
        held = [Snapshot(length, slot) for node in path for length, slot in node.states.items()]
        found = [snapshot for snapshot in held if snapshot.length <= n and snapshot.length % step == 0]
        state, length = None, 0 if self._states.n_slots else self._reaches(n, tables)
        while length % step and length < most:  # a window lacks the page after the end of a node
            length = self._reaches(length - length % step, tables)
        for snapshot in sorted(found, reverse=True):
            if self._reaches(snapshot.length, tables) == snapshot.length:
                state, length = snapshot, snapshot.length
                break
        return length, [pages[: -(-length // self._page)] for pages, _ in tables], state

    def _reaches(self, n: int, tables: Sequence[tuple[np.ndarray, np.ndarray]]) -> int:
        """Return the length of the longest prefix, of n tokens, for which every group has the pages that are needed."""
        length, before = n, -1
        while length != before:
            before = length
            for window, (_, reach) in zip(self._windows, tables, strict=True):
                length = _longest(length, window, reach, self._page)
        return length

    def table(self, group: int, path: Sequence[Node], n: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the pages (P,) that cover n tokens of a path, and the position (P,) up to which each has tokens."""
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
        """Add token ids (n,), hold their pages where the tree has none, and return their path.

        Pages are given for each group (P,); -1 where a page does not exist any more.
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
        """Add a child without tokens, whose first id will be `first`."""
        parent.children[first] = Node(parent.end, parent.ids[:0], [pages[:0] for pages in parent.pages], parent)
        return parent.children[first]

    def _extend(self, leaf: Node, more: np.ndarray, pages: Sequence[np.ndarray]) -> None:
        """Append tokens to a leaf. Replace its partly filled last page by the new page, which has its tokens."""
        n_whole = leaf.end // self._page - leaf.start // self._page
        for group, new in enumerate(pages):
            new = new[leaf.end // self._page :]
            self.held.add(group, new)
            self.held.drop(group, leaf.pages[group][n_whole:])
            leaf.pages[group] = np.concatenate((leaf.pages[group][:n_whole], new))
        leaf.ids, leaf.evicted = np.concatenate((leaf.ids, more)), None

    def _split(self, node: Node, at: int) -> Node:
        """Split a node at a position inside it, and return the new upper node. Both nodes hold the page at the cut."""
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
        """Return whether a leaf holds its partly filled last page, and the new pages lack that page."""
        at = leaf.end // self._page
        is_partial = leaf.end % self._page > 0
        return is_partial and any(old[-1] >= 0 > new[at] for old, new in zip(leaf.pages, pages, strict=True))

    def _lacks(self, node: Node, n: int) -> bool:
        """Return whether position n is inside a page that a node does not hold."""
        at = n // self._page - node.start // self._page
        return n % self._page > 0 and any(pages[at] < 0 for pages in node.pages)

    def _fill(self, path: Sequence[Node], pages: Sequence[np.ndarray], n: int) -> None:
        """Hold pages of n tokens where nodes on their path lack them, in groups with a window."""
        for group, window in enumerate(self._windows):
            for node in path if window is not None else ():
                first = node.start // self._page
                # A page that the n tokens fill in part may lack tokens of the node.
                of_node = node.pages[group] if node.end <= n else node.pages[group][: n // self._page - first]
                new = pages[group][first : first + len(of_node)]
                (gaps,) = ((of_node < 0) & (new >= 0)).nonzero()
                self.held.add(group, new[gaps])
                of_node[gaps] = new[gaps]

    def keep(self, path: Sequence[Node], state: Snapshot) -> None:
        """Hold a state of the prefix of a path, unless a state of the same length is held."""
        for node in path:
            if node.start < state.length <= node.end and state.length not in node.states:
                self._states.retain(state.slot)
                node.states[state.length] = state.slot

    def cut(self, leaf: Node) -> None:
        """Drop the last page of a leaf and its tokens there; remove the leaf if no token is left."""
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
    """Return how many first entries of a and b are equal."""
    n = min(len(a), len(b))
    (differing,) = (a[:n] != b[:n]).nonzero()
    return int(differing[0]) if len(differing) else n


def _longest(length: int, window: int | None, reach: np.ndarray, page: int) -> int:
    """Return the largest number of tokens, at most `length`, for which a group has the pages that are needed."""
    while True:
        first = first_visible(window, length)
        numbers = np.arange(first // page, -(-length // page) if first < length else first // page)
        (lacking,) = (reach[numbers] < np.minimum((numbers + 1) * page, length)).nonzero()
        if not len(lacking):
            return length
        length = int(reach[numbers[lacking[0]]])


class HeldPages:
    """The references of a tree to pages of a pool; several nodes may refer to the same page.

    The methods take the first slots (n,) of different pages; entries of -1 are skipped.

    Attributes:
        pool: the pool of the pages.
        n_pages: the number of different pages held in each group.
        generations: how often each page of a group has been dropped. While this number is the same, the contents of a
            held page are unchanged.
    """

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self.n_pages = [0] * len(pool.windows)
        self._counts = [np.zeros(n, dtype=np.int64) for n in pool.n_pages]
        self.generations = [np.zeros(n, dtype=np.int64) for n in pool.n_pages]

    @property
    def nbytes(self) -> int:
        """Bytes of the pages held, in float32."""
        return sum(n * of_page for n, of_page in zip(self.n_pages, self.pool.page_nbytes, strict=True))

    def add(self, group: int, pages: np.ndarray) -> None:
        """Add a reference to pages of a group, which are in use."""
        pages = pages[pages >= 0]
        counts, numbers = self._counts[group], pages // self.pool.page
        self.n_pages[group] += int((counts[numbers] == 0).sum())
        counts[numbers] += 1
        self.pool.retain(group, pages)

    def drop(self, group: int, pages: np.ndarray) -> None:
        """Remove a reference from pages of a group, and free the pages whose count is then 0."""
        pages = pages[pages >= 0]
        counts, numbers = self._counts[group], pages // self.pool.page
        counts[numbers] -= 1
        self.n_pages[group] -= int((counts[numbers] == 0).sum())
        self.generations[group][numbers] += counts[numbers] == 0
        self.pool.give_back(group, pages)

    def in_use(self, group: int, pages: np.ndarray) -> np.ndarray:
        """Return which of the pages (n,) of a group, all held here, are held by a sequence too."""
        held: np.ndarray = self._counts[group][pages // self.pool.page]
        return np.asarray(self.pool.references(group, pages) > held)

    def unused(self, group: int) -> int:
        """Return the number of pages of a group that are held here and by no sequence."""
        counts, page = self._counts[group], self.pool.page
        (numbers,) = counts.nonzero()
        return int((self.pool.references(group, numbers * page) == counts[numbers]).sum())
