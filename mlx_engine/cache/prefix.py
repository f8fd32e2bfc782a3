"""The prefix cache: keys and values of earlier prompts and answers, reused by sequences with the same first tokens.

Each edge of a radix tree (`radix.py`) is a run of tokens; the node at its end holds the pages of these tokens. The
longest common prefix is found down to the token. Its whole pages are shared; a partly used page is copied into a page
of the new sequence. With `whole_pages`, only full pages are kept and reused. Without it, a client could guess another
client's prompt token by token, from the counts of cached tokens or from latency. The last token of a prompt is always
computed, for its logits. If it is the last of a page that is held, the page's other tokens are reused.

When the pool has too few free pages, or the cache exceeds its bound, the cache drops its references to pages, least
recently used first. A page that no sequence holds is then free; one that a sequence also holds stays allocated. The
order of uses is recorded with a counter, not with the time of day.

In layers with a window, a sequence frees the pages that have left the window. So a prefix can be reused only if the
tree still holds the pages just before the prefix's end. The caller must therefore call `insert` after each prompt
chunk.

A model with a state needs the state at exactly the end of the prefix. `insert` keeps the states that the sequence has:
the state after the last token, and the state at the last page boundary in its last chunk. So a prefix ends where a
prompt chunk or an answer ended, or at such a boundary. States are shared, not copied; `nbytes` includes them.
When slots run out, a state is freed first if its own node also holds a state for a longer prefix. Among the others, the
least recently used is freed first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, NamedTuple

import numpy as np

from mlx_engine.cache.disk import STATE, DiskPrefixes, Saver
from mlx_engine.cache.pool import KVPool
from mlx_engine.cache.radix import Node, RadixTree
from mlx_engine.cache.sequence import KVSequence
from mlx_engine.cache.states import Snapshot
from mlx_engine.errors import CacheFullError

# The reason why no more tokens can be reused: see `Match.end`.
End = Literal["whole", "new", "differs", "evicted", "window", "state", "memory"]

# The number of token ids that `Match.expected` and a node of `snapshot` show.
SHOWN = 8
# The bits of a node's ids that are the token's; those above are the adapter's.
ID = (1 << 32) - 1


class Match(NamedTuple):
    """The longest prefix of some token ids that the cache holds.

    Attributes:
        length: number of tokens that can be reused.
        agreeing: number of tokens that the tree has in common with the ids. It is larger than `length` if needed
            pages or the state are not held, if `whole_pages` rounds `length` down, or if no page was free for a copy.
        pages: for each group of layers (P,), the first slot of each page that covers some of `length` tokens.
        expected: the ids, at most 8, with which the tree continues after `agreeing` tokens; of several branches the
            most recently used one.
        end: why no more tokens can be reused. "whole": all ids are held. "new": the tree has nothing after them.
            "differs": the tree continues with other tokens. "evicted": the next token was held, and was evicted.
            "window": pages that a window needs are not held. "state": no state is held for more tokens. "memory": no
            page was free for a copy.
        state: the state after `length` tokens, for models that have one.
        from_disk: how many of the `length` tokens were read from files by this look-up.
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
        queried_tokens: tokens that were looked up.
        cached_tokens: tokens that were found, and so are not computed again.
        evicted_pages: pages, over all groups, that the cache has dropped because the pool lacked free pages or
            `max_nbytes` was exceeded; sequences may still hold some of them.
    """

    queries: int = 0
    hits: int = 0
    queried_tokens: int = 0
    cached_tokens: int = 0
    evicted_pages: int = 0


class PrefixCache:
    """The prefixes that are held in the pages of a pool. The pool reclaims pages from it when they run out.

    Attributes:
        pool: the pool.
        max_nbytes: the most bytes of pages and states that the cache holds, None for no bound. Pages that sequences
            also hold are included.
        whole_pages: whether only whole pages are kept and reused.
        stats: counters of look-ups, hits and evictions.
        disk: the files of prefixes that a later start finds again, or None.
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
            raise ValueError("expected a pool with kept stores and without a prefix cache, found another one")
        self.pool, self.max_nbytes, self.stats = pool, max_nbytes, PrefixStats()
        self.disk = disk
        self.whole_pages, self._step = whole_pages, pool.page if whole_pages else 1
        self._tree = RadixTree(pool)
        # All nodes but the root, least recently used first. A use marks the deepest node first, so children come before
        # their parents.
        self._nodes: dict[Node, None] = {}
        self._clock = 0
        pool.reclaim, pool.states.reclaim = self._reclaim, self._reclaim_states

    @property
    def n_tokens(self) -> int:
        """Number of tokens in the tree."""
        return sum(len(node.ids) for node in self._nodes)

    @property
    def n_nodes(self) -> int:
        """Number of nodes in the tree, without the root."""
        return len(self._nodes)

    @property
    def nbytes(self) -> int:
        """Bytes of the pages and states that the cache holds, whether or not sequences hold them too."""
        return self._tree.held.nbytes + self.n_states * self.pool.states.nbytes_each

    @property
    def n_states(self) -> int:
        """The number of states that the cache holds."""
        return sum(len(node.states) for node in self._nodes) if self.pool.states.n_slots else 0

    def held_pages(self, group: int) -> int:
        """Return the number of pages of a group that the cache holds, whether or not sequences hold them too."""
        return self._tree.held.n_pages[group]

    def evictable_pages(self, group: int) -> int:
        """Return the number of pages of a group that the cache holds and no sequence does."""
        return self._tree.held.unused(group)

    def match(self, ids: Sequence[int] | np.ndarray) -> Match:
        """Return the longest prefix of ids that can be reused. Nothing is marked as used."""
        return self._match(ids)[0]

    def _match(self, ids: Sequence[int] | np.ndarray, most: int | None = None) -> tuple[Match, list[Node]]:
        """Return the match, of which at most `most` tokens are reused, and the nodes of its `length` tokens."""
        most = len(ids) if most is None else most
        path, n = self._tree.walk(np.asarray(ids, dtype=np.int64))
        length, pages, state = self._tree.usable(path, n, self._step, most)
        full, n = min(n - n % self._step, most), min(n, most)
        path = [node for node in path if node.start < n]
        expected = self._after(path, n)
        lacking: End = "state" if self.pool.states.n_slots else "window"
        end: End = lacking if length < full else "whole" if n == most else "differs" if expected else "new"
        if end in ("differs", "new") and self._was_evicted(path, n, ids[n]):
            end = "evicted"
        return Match(length, n, pages, expected, end, state), [node for node in path if node.start < length]

    def _was_evicted(self, path: Sequence[Node], n: int, token: int) -> bool:
        """Return whether a token was evicted that followed the n tokens of a path."""
        node = path[-1] if path else self._tree.root
        return n == node.end and node.evicted == token

    def _after(self, path: Sequence[Node], n: int) -> tuple[int, ...]:
        """Return the first ids after n tokens of a path."""
        node = path[-1] if path else self._tree.root
        found = node.ids[n - node.start :]
        while len(found) < SHOWN and node.children:
            node = max(node.children.values(), key=lambda child: child.last_use)
            found = np.concatenate((found, node.ids))
        return tuple((found[:SHOWN] & ID).tolist())

    def attach(self, kv: KVSequence, ids: Sequence[int], most: int | None = None, *, is_busy: bool = False) -> Match:
        """Begin an empty sequence with the longest prefix of ids that can be reused, and return the match.

        At most `most` tokens are reused: logits are not cached, so the last token of a prompt must be computed. The
        ids after them are compared up to the end of their page: if the whole page is held, its first tokens are reused.
        If nothing is found, the sequence stays empty. If no page is free for the copy of a partly used page, the prefix
        ends before that page. With `is_busy`, because other requests wait for this thread, files are read in pieces;
        `has_more` asks for another look-up.
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
            self.disk.stats.tokens += found.from_disk
        return found

    def _load(self, disk: DiskPrefixes, ids: np.ndarray, most: int, *, is_busy: bool) -> tuple[int, int, bool]:
        """Add to the tree what the disk has of a prefix of ids, of which at most `most` tokens will be reused.

        Return the range of its tokens, and whether there are more.

        With `is_busy`, add one piece. A prefix with windows or states can end at few positions, so it is a single
        piece.
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

        The sequence may continue. Calls with longer and longer prefixes of one sequence cost little more than one.

        Args:
            ids: (N,) the first N tokens of the sequence, all committed.
            kv: the sequence.
            on_disk: whether to write the whole pages and the states to the disk, if there is one.
        """
        self._check(kv)
        ids = _of_adapter(ids[: len(ids) - len(ids) % self._step], kv.adapter)
        path = self._share(ids, kv)
        if self.disk is not None and on_disk:
            self._offer(self.disk, ids, path)
        while self.max_nbytes is not None and self.nbytes > self.max_nbytes:
            self._cut(next(iter(self._nodes)))

    def _share(self, ids: np.ndarray, kv: KVSequence) -> list[Node]:
        """Add the first tokens (n,) of a sequence to the tree, and return their path."""
        path = self._tree.insert(ids, kv.lend(len(ids)))
        self._use(path)
        for state in kv.state.snapshots(len(ids)):
            self._tree.keep(path, state)
        return path

    def save(self, saver: Saver, ids: np.ndarray) -> None:
        """Offer what the cache holds of token ids (n,) to a file."""
        path, n = self._tree.walk(ids)
        self._offer(saver, ids[:n], path)

    def _offer(self, disk: DiskPrefixes | Saver, ids: np.ndarray, path: Sequence[Node]) -> None:
        """Offer the whole pages of a path to the disk, and the states that are held after a whole page."""
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
        """Free pages, least recently used first, until n pages of a group are free or sequences hold all others."""
        if self.pool.windows[group] is not None:
            self._thin(group, n)
            return
        held = self._tree.held
        # The first round skips pages that sequences use. The second round also drops nodes whose pages are in use
        # from the tree, to reach ancestors with unused pages.
        for spared in (True, False):
            for node in list(self._nodes):
                while self.pool.free_pages(group) < n and len(node.ids) and not node.children:
                    if held.in_use(group, node.pages[group][-1:])[0] and (spared or not held.unused(group)):
                        break
                    self._cut(node)

    def _reclaim_states(self, n: int) -> None:
        """Free slots of states until n are free or sequences hold all others."""
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
        """Free pages of a group with a window, but keep their nodes.

        Within a node, the pages at its end are freed last.
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
        """Drop the last page of a leaf."""
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
        """Return the nodes as plain data, each after its parent and the most recently used first, at most `most`.

        Keys: `parent`, the parent's index in this list, or -1; `start`, the position of the node's first token;
        `n_tokens`, its number of tokens; `ids`, its first token ids, at most 8; `pages`, the number of pages held in
        each group; `in_use`, how many of these sequences hold too; `references`, the most references to one of its
        pages; `last_use`.
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
    """Return the ids (n,) by which the tree knows tokens: keys and values depend on the adapter that computed them."""
    return np.asarray(ids, dtype=np.int64) + (adapter << ID.bit_length())


def _adopted(kv: KVSequence, match: Match) -> bool:
    try:
        kv.adopt(match.pages, match.length, match.state)
    except CacheFullError:
        return False
    return True
