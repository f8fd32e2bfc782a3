"""The prefix cache: what a match is, who leaves first, what stays, and what is reported."""

from __future__ import annotations

import numpy as np
import pytest

from mlx_engine.cache import KVPool, KVSequence, PrefixCache
from mlx_engine.errors import CacheFullError
from tests.prefix_model import BACKEND, Prefixes, check_references, evict, longest, new_pool

PREFIXES = Prefixes()


def made(pool: KVPool, ids: list[int], cache: PrefixCache | None = None, *, chunk: int = 1000) -> KVSequence:
    """Return a sequence with these tokens; they are inserted into the cache after each chunk."""
    kv = pool.sequence()
    for at in range(0, len(ids), chunk):
        PREFIXES.append(kv, ids[:at], ids[at : at + chunk])
        if cache is not None:
            cache.insert(ids[: at + chunk], kv)
    return kv


def kept(pool: KVPool, cache: PrefixCache, *prompts: list[int]) -> None:
    for ids in prompts:
        made(pool, ids, cache).close()


# ---- matches ----


def test_a_match_ends_at_the_first_token_that_differs():
    pool = new_pool(400, 16)
    cache = PrefixCache(pool)
    kept(pool, cache, list(range(100)), [*range(50), 7, 8, 9])
    for n in (0, 1, 15, 16, 17, 49, 50, 51, 99, 100):
        match = cache.match([*range(n), 1000])
        assert (match.length, match.agreeing) == (n, n)
        assert [len(pages) for pages in match.pages] == [-(-n // 16)]
    assert cache.match(list(range(200))).length == 100
    assert cache.match([5, *range(100)]).length == 0


def test_a_match_says_how_the_tree_continues():
    pool = new_pool(400, 16)
    cache = PrefixCache(pool)
    kept(pool, cache, list(range(100)))
    assert cache.match([0, 1, 2, 9]).expected == tuple(range(3, 11))
    assert cache.match(list(range(100))).expected == ()
    assert cache.match([*range(97), 5]).expected == (97, 98, 99)
    kept(pool, cache, [*range(50), 7, 8, 9])
    assert cache.match([*range(48), 3]).expected == (48, 49, 7, 8, 9), "the branch that was used last"
    cache.attach(pool.sequence(), list(range(60)))
    assert cache.match([*range(50), 3]).expected == tuple(range(50, 58))


def test_two_branches_inside_a_page_have_a_page_each():
    pool = new_pool(200, 16)
    cache = PrefixCache(pool)
    texts = [[*range(20), *([n] * 5)] for n in (91, 92, 93)]
    kept(pool, cache, *texts)
    # The page of positions 0 to 15 of the first branch and of others that computed it too, and a page for each branch.
    pages = [cache.match(ids).pages[0].tolist() for ids in texts]
    assert len({of[0] for of in pages}) == 1
    assert len({of[1] for of in pages}) == 3
    PREFIXES.check_nodes(cache)
    assert [node["n_tokens"] for node in cache.snapshot()] == [20, 5, 5, 5]
    assert cache.held_pages(0) == 4


@pytest.mark.some(1)
@pytest.mark.parametrize("page", [1, 5, 16])
def test_matches_of_random_texts_are_the_longest(page: int):
    rng = np.random.default_rng(page)
    pool = new_pool(4000, page, (None, 7, 19), n_sequences=40)
    cache = PrefixCache(pool)
    texts = [rng.integers(0, 2, rng.integers(1, 40)).tolist() for _ in range(25)]
    for ids in texts:
        made(pool, ids, cache, chunk=int(rng.integers(3, 40))).close()
    for _ in range(60):
        ids = rng.integers(0, 2, 30).tolist() if rng.random() < 0.3 else [*texts[rng.integers(0, 25)][:-1], 1, 0, 1]
        assert cache.match(ids).length == longest(cache, ids)


# ---- whole pages ----


def test_prefixes_of_whole_pages_alone_are_kept_and_found():
    pool = new_pool(400, 16)
    cache = PrefixCache(pool, whole_pages=True)
    kept(pool, cache, list(range(100)))
    assert (cache.n_tokens, cache.held_pages(0)) == (96, 6)
    for n in range(101):
        match = cache.match([*range(n), 1000])
        assert (match.length, [len(pages) for pages in match.pages]) == (
            n - n % 16 if n < 96 else 96,
            [min(n, 96) // 16],
        )
    kv = pool.sequence()
    assert cache.attach(kv, [*range(50), 7]).length == 48
    PREFIXES.append(kv, list(range(48)), [48, 49, 7])
    PREFIXES.check_sequence(kv, [*range(50), 7])
    PREFIXES.check_nodes(cache)
    check_references(pool, [kv], cache)


@pytest.mark.parametrize("windows", [(None,), (None, 32), (33, 20), (1,), (17, 16)])
@pytest.mark.parametrize("most", [31, 40, 47, 48])
def test_the_beginning_of_a_whole_page_is_found_if_all_of_the_page_agrees(windows: tuple[int | None, ...], most: int):
    pool = new_pool(400, 16, windows)
    cache = PrefixCache(pool, whole_pages=True)
    made(pool, list(range(100)), cache, chunk=16).close()
    for ids in (list(range(48)), [*range(47), 1000]):
        kv = pool.sequence()
        whole = 32 if ids[-1] == 1000 and most > 32 else most
        match = cache.attach(kv, ids, most)
        assert match.length == whole
        assert match.end == ("differs" if whole == most - 16 else "whole")
        PREFIXES.check_sequence(kv, ids[:whole])
        PREFIXES.append(kv, ids[:whole], [*ids[whole:], 7])
        PREFIXES.check_sequence(kv, [*ids, 7])
        PREFIXES.check_nodes(cache)
        check_references(pool, [kv], cache)
        kv.close()


def test_the_pages_that_are_kept_do_not_tell_how_many_tokens_of_a_page_agree():
    """Another prompt of 60 tokens: as long as it differs in the same page, all counts are the same."""
    found = set()
    for agreeing in (48, 49, 55, 60):
        pool = new_pool(400, 16)
        cache = PrefixCache(pool, whole_pages=True)
        kept(pool, cache, list(range(100)), [*range(agreeing), *[999] * (60 - agreeing)])
        found.add((cache.held_pages(0), pool.free_pages(0), *vars(cache.stats).values()))
    assert len(found) == 1


@pytest.mark.parametrize("page", [1, 5, 16])
def test_matches_of_whole_pages_are_the_longest(page: int):
    rng = np.random.default_rng(page)
    pool = new_pool(4000, page, (None, 7, 19), n_sequences=40)
    cache = PrefixCache(pool, whole_pages=True)
    texts = [rng.integers(0, 2, rng.integers(1, 40)).tolist() for _ in range(25)]
    for ids in texts:
        made(pool, ids, cache, chunk=int(rng.integers(3, 40))).close()
    for _ in range(60):
        ids = rng.integers(0, 2, 30).tolist() if rng.random() < 0.3 else [*texts[rng.integers(0, 25)][:-1], 1, 0, 1]
        assert cache.match(ids).length == longest(cache, ids, page)


# ---- windows ----


def test_without_the_pages_of_a_window_a_prefix_is_shorter():
    pool = new_pool(400, 4, (None, 8), n_sequences=4, longest_pass=100)
    cache = PrefixCache(pool)
    kept(pool, cache, list(range(50)))
    # The sequence has given back the pages before position 43: it keeps those from slot 40 on.
    found = {n: cache.match(list(range(n))) for n in range(51)}
    assert [n for n in range(51) if found[n].length == n] == [0, 47, 48, 49, 50]
    assert {found[n].length for n in range(1, 47)} == {0}
    assert all(found[n].agreeing == n for n in range(51))
    kv = pool.sequence()
    assert cache.attach(kv, list(range(49))).length == 49
    assert kv._firsts == [0, 10]
    assert found[49].pages[1][:10].tolist() == [-1] * 10


def test_with_chunks_inserted_every_prefix_is_found():
    pool = new_pool(400, 4, (None, 8), n_sequences=8, longest_pass=100)
    cache = PrefixCache(pool)
    made(pool, list(range(50)), cache, chunk=4).close()
    assert all(cache.match(list(range(n))).length == n for n in range(51))


def test_an_answer_leaves_the_end_of_its_prompt_usable():
    """The sequence has given back the page at the end of its prompt, which the tree still holds."""
    pool = new_pool(400, 4, (None, 8), n_sequences=4, longest_pass=100)
    cache, ids = PrefixCache(pool), list(range(60))
    kv = pool.sequence()
    for n, m in ((0, 30), (30, 60)):
        PREFIXES.append(kv, ids[:n], ids[n:m])
        cache.insert(ids[:m], kv)
    assert [n for n in range(61) if cache.match(ids[:n]).length == n] == [0, 27, 28, 29, 30, 59, 60]
    assert [node["n_tokens"] for node in cache.snapshot()] == [30, 30]
    PREFIXES.check_nodes(cache)


def test_pages_of_a_window_leave_alone():
    """They are fewer, and needed by a running sequence; the tokens stay in the tree."""
    pool = new_pool(400, 4, (None, 8), n_sequences=8, longest_pass=16)
    cache = PrefixCache(pool)
    kv = made(pool, list(range(50)), cache, chunk=4)
    assert pool.used_pages(1) == 13
    assert evict(cache, pool.n_pages[1]) == 10
    assert cache.held_pages(1) == 3, "what the sequence sees is in use"
    assert cache.n_tokens == 50
    kv.close()
    assert cache.match(list(range(30))).length == 0
    # A sequence that computes the prefix again brings the pages back, also inside the edge.
    made(pool, list(range(30)), cache, chunk=4).close()
    assert all(cache.match(list(range(n))).length == n for n in range(31))
    assert cache.match(list(range(50))).length == 50


# ---- why a match ends ----


def test_why_a_match_ends():
    pool = new_pool(400, 10)
    cache = PrefixCache(pool)
    assert cache.match([1]).end == "new"
    kept(pool, cache, list(range(30)))
    wanted = {"whole": list(range(20)), "new": list(range(31)), "differs": [*range(20), 7]}
    assert {end: cache.match(ids).end for end, ids in wanted.items()} == {end: end for end in wanted}
    assert cache.match(list(range(20))).expected == tuple(range(20, 28))


def test_a_match_that_ends_where_tokens_were_evicted():
    pool = new_pool(120, 10)
    cache = PrefixCache(pool)
    kept(pool, cache, list(range(75)), [*range(75), 99], [7] * 5)
    evict(cache, 10)
    assert cache.match(list(range(75))).length == 10
    assert cache.match(list(range(75))).end == "evicted"
    assert cache.match([*range(10), 50]).end == "new", "that one was never held"
    kept(pool, cache, list(range(40)))
    assert cache.match([*range(40), 10]).end == "new", "the 10 followed another token"
    evict(cache, 12)
    assert cache.match([0, 1]).end == "evicted"
    assert cache.match([7]).end == "new", "only the last one is remembered"
    cache.clear()
    assert cache.match([0, 1]).end == "new"


def test_a_match_that_a_window_ends():
    pool = new_pool(400, 10, (None, 8))
    cache = PrefixCache(pool)
    kept(pool, cache, list(range(50)))
    found = cache.match(list(range(30)))
    assert (found.length, found.agreeing, found.end) == (0, 30, "window")


# ---- eviction, pins, bound ----


def test_the_least_recently_used_prefix_leaves_first():
    pool = new_pool(64, 16)
    cache = PrefixCache(pool)
    texts = [[n] * 16 for n in (1, 2, 3, 4)]
    kept(pool, cache, *texts)
    cache.attach(pool.sequence(), texts[0])
    made(pool, [5])  # takes the only page that can be freed first
    assert [cache.match(ids).length for ids in texts] == [16, 0, 16, 16]
    assert cache.stats.evicted_pages == 1
    cache.match(texts[2])  # a match alone is no use
    assert evict(cache, 1) == 1
    assert [cache.match(ids).length for ids in texts] == [16, 0, 0, 16]


def test_a_prefix_is_shortened_from_its_end():
    pool = new_pool(120, 10)
    cache = PrefixCache(pool)
    kept(pool, cache, list(range(75)), [*range(30), 99])
    assert pool.free_pages(0) == 3
    assert evict(cache, 5) == 2
    assert cache.match(list(range(75))).length == 60
    assert cache.match([*range(30), 99]).length == 31


def test_pages_of_a_sequence_stay():
    pool = new_pool(100, 10)
    cache = PrefixCache(pool)
    kept(pool, cache, list(range(40)), [7] * 40)
    kv = pool.sequence()
    assert cache.attach(kv, list(range(35))).length == 35
    assert cache.evictable_pages(0) == 5
    assert evict(cache, 10) == 5
    PREFIXES.check_sequence(kv, list(range(35)))
    assert cache.match(list(range(40))).length == 30
    assert cache.match([7]).length == 0
    cache.clear()
    PREFIXES.check_sequence(kv, list(range(35)))
    check_references(pool, [kv], cache)


def test_pages_before_used_ones_can_be_freed_too():
    """Two sequences computed the same prompt: the tree has the pages of the first, and the end of the second."""
    pool = new_pool(120, 10)
    cache = PrefixCache(pool)
    second = made(pool, [*range(40), 1, 2])
    kept(pool, cache, list(range(40)))
    cache.insert([*range(40), 1, 2], second)
    assert (cache.held_pages(0), cache.evictable_pages(0)) == (5, 4)
    assert evict(cache, 7) == 4
    assert pool.free_pages(0) == 7


def test_no_page_for_a_copy():
    """Then the whole pages are shared."""
    pool = new_pool(40, 10)
    cache = PrefixCache(pool)
    kv = made(pool, list(range(35)), cache)
    other = pool.sequence()
    found = cache.attach(other, list(range(33)))
    assert (found.length, found.agreeing, found.end) == (30, 33, "memory")
    assert other.n_pages == 3
    with pytest.raises(CacheFullError) as caught:
        kv.fork()
    assert (caught.value.length, caught.value.wanted, caught.value.capacity) == (0, 35, 30)
    check_references(pool, [kv, other], cache)
    other.close()
    other = pool.sequence(capacity=25)
    assert cache.attach(other, list(range(33))).length == 20, "not more than the sequence may have"


@pytest.mark.some(1)
@pytest.mark.parametrize("windows", [(None,), (None, 9)])
def test_the_bound_holds(windows: tuple[int | None, ...]):
    rng = np.random.default_rng(0)
    pool = new_pool(1000, 8, windows, n_sequences=8, longest_pass=60)
    cache = PrefixCache(pool, max_nbytes=20 * pool.page_nbytes[0] + 1)
    running = made(pool, [0] * 30)
    for i in range(400):
        ids = rng.integers(0, 3, rng.integers(1, 60)).tolist()
        kept(pool, cache, ids)
        assert cache.nbytes <= cache.max_nbytes
        if i % 100 == 0:
            cache.insert([0] * 30, running)
            assert cache.match([0] * 30).length == 30, "the newest stays"
    assert cache.nbytes > cache.max_nbytes // 2
    check_references(pool, [running], cache)


def test_a_prefix_that_exceeds_the_bound_keeps_its_beginning():
    pool = new_pool(200, 10)
    cache = PrefixCache(pool, max_nbytes=3 * pool.page_nbytes[0])
    kept(pool, cache, [1], list(range(100)))
    assert cache.match(list(range(100))).length == 30
    assert cache.match([1]).length == 0


# ---- costs, reports and refusals ----


def test_longer_and_longer_prefixes_share_pages_and_stay_one_node():
    pool = new_pool(600, 16)
    cache = PrefixCache(pool)
    kv = made(pool, list(range(200)), cache, chunk=3)
    assert len(cache.snapshot()) == 1
    assert cache.held_pages(0) == kv.n_pages == pool.used_pages(0) == 13
    made(pool, [*range(200), *range(50)], cache).close()
    assert len(cache.snapshot()) == 1


def test_a_page_goes_on_being_filled_after_it_was_shared():
    pool = new_pool(64, 16)
    cache = PrefixCache(pool)
    kv = pool.sequence()
    PREFIXES.append(kv, [], [1, 2, 3])
    cache.insert([1, 2, 3], kv)
    before = pool.free_pages(0)
    PREFIXES.append(kv, [1, 2, 3], [4])
    assert pool.free_pages(0) == before, "no copy: the slot is not the tree's"
    kv.truncate(2)
    PREFIXES.append(kv, [1, 2], [9])
    assert pool.free_pages(0) == before - 1, "a copy: the tree has another third token"
    PREFIXES.check_sequence(kv, [1, 2, 9])
    PREFIXES.check_nodes(cache)
    cache.clear()
    kv.truncate(1)
    PREFIXES.append(kv, [1], [8])
    assert pool.used_pages(0) == 1, "no copy: nobody else has the page"


@pytest.mark.parametrize("length", [16, 20])
def test_a_page_that_others_read_is_copied_before_it_is_written(length: int):
    pool = new_pool(400, 16)
    cache, ids = PrefixCache(pool), list(range(60))
    kv = made(pool, ids, cache)
    fork, attached = kv.fork(), pool.sequence()
    assert cache.attach(attached, ids).length == 60
    for other, token in ((fork, 101), (attached, 102), (kv, 103)):
        other.truncate(length)
        PREFIXES.append(other, ids[:length], [token])
        assert cache.match(ids).length == 60
        PREFIXES.check_nodes(cache)
    for other, token in ((fork, 101), (attached, 102), (kv, 103)):
        PREFIXES.check_sequence(other, [*ids[:length], token])
    check_references(pool, [kv, fork, attached], cache)


def test_figures():
    pool = new_pool(64, 16)
    cache = PrefixCache(pool)
    kept(pool, cache, list(range(20)))
    sequences = [pool.sequence() for _ in range(3)]
    asked = ([0, 1, 2], [5], [*range(18), 3])
    assert [cache.attach(kv, ids).length for kv, ids in zip(sequences, asked, strict=True)] == [3, 0, 18]
    stats = cache.stats
    assert (stats.queries, stats.hits, stats.queried_tokens, stats.cached_tokens) == (3, 2, 23, 21)
    assert (cache.n_tokens, cache.held_pages(0), cache.nbytes) == (20, 2, 2 * pool.page_nbytes[0])
    assert (pool.used_pages(0), pool.free_pages(0)) == (4, 0)
    cache.insert(list(range(18)), sequences[2])
    assert cache.snapshot() == [
        {"parent": -1, "start": 0, "n_tokens": 20, "ids": list(range(8)), "pages": [2], "in_use": [1], "references": 2,
         "last_use": 5},
    ]  # fmt: skip


def test_what_is_refused():
    pool = new_pool(64, 16)
    cache = PrefixCache(pool)
    with pytest.raises(ValueError, match="without a prefix cache"):
        PrefixCache(pool)
    with pytest.raises(ValueError, match="another pool"):
        cache.attach(new_pool(64).sequence(), [1])
    kv = made(pool, [1, 2, 3])
    with pytest.raises(ValueError, match="at most the 3 committed tokens, found 4"):
        cache.insert([1, 2, 3, 4], kv)
    cache.insert([1, 2], kv)
    with pytest.raises(ValueError, match="empty sequence"):
        cache.attach(kv, [1, 2])
    with pytest.raises(ValueError, match="kept"):
        PrefixCache(KVPool(BACKEND, [], 10, kept=False))
    kv.close()
    with pytest.raises(ValueError, match="expected pages that are in use"):
        pool.give_back(0, np.array([16]))
