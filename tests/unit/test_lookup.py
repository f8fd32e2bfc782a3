"""Lookup: what it finds, in how much time and memory, and how many tokens are proposed."""

from __future__ import annotations

import random
from time import thread_time
from types import SimpleNamespace

import pytest

from mlx_engine.loop.lookup import CANDIDATES, KEY, LONGEST, MOST_OTHERS, Lookup, Lookups, Text


def slow_longest(ids, last):
    """The definition: of the last places of the last pair that are followed by an id, the longest agreement."""
    pair = list(last[-KEY:])
    ends = [end for end in range(len(ids), KEY - 1, -1) if list(ids[end - KEY : end]) == pair]
    found, length = 0, 0
    for end in ends:
        if end == len(ids):
            continue
        n = 0
        while n < min(end, len(last), LONGEST) and ids[end - 1 - n] == last[-1 - n]:
            n += 1
        if n > length:
            found, length = end, n
    return found, length


def test_the_longest_occurrence_is_that_of_the_definition():
    """With fewer occurrences of each pair than are compared, and after the index has grown."""
    for seed in range(40):
        rng = random.Random(seed)
        ids = [rng.randrange(40) for _ in range(rng.randrange(2, 300))]
        grown = Text(ids[: rng.randrange(len(ids))])
        for token in ids[len(grown.ids) :]:
            grown.append(token)
        assert grown.ids == Text(ids).ids
        for _ in range(20):
            at = rng.randrange(len(ids))
            last = [rng.randrange(40) for _ in range(3)] + ids[at : at + rng.randrange(2, 8)]
            pairs = sum(ids[i : i + 2] == last[-2:] for i in range(len(ids)))
            if pairs < CANDIDATES:
                assert grown.longest(last) == Text(ids).longest(last) == slow_longest(ids, last)


def proposed(prompt, answer, most=8, others=()):
    lookup = Lookup(Text(prompt), [Text(other) for other in others])
    lookup.extend(answer)
    ids, strength = lookup.propose(most)
    return list(ids), strength


def test_what_followed_before_is_proposed():
    assert proposed([1, 2, 3, 4, 5, 6, 7], [9, 2, 3]) == ([4, 5, 6, 7], 2)
    assert proposed([1, 2, 3, 4], [5, 6]) == ([], 0)
    assert proposed([1, 2, 3, 4, 1, 2, 8], [1, 2]) == ([8, 1, 2, 8, 1, 2, 8, 1][:1], 2)  # of two, the last


def test_a_longer_match_counts_more_than_a_later_one():
    prompt = [5, 1, 2, 7, 7, 6, 1, 2, 9]
    assert proposed(prompt, [5, 1, 2]) == ([7, 7, 6, 1, 2, 9], 3)
    assert proposed(prompt, [4, 1, 2], others=[[4, 1, 2, 3]]) == ([3], 3)


def test_an_answer_that_repeats_itself_is_continued():
    assert proposed([1], [2, 3, 4, 2, 3, 4, 2], 7) == ([3, 4, 2, 3, 4, 2, 3], 4)
    assert proposed([1], [6, 6, 6, 6], 5) == ([6] * 5, 3)


def test_a_match_becomes_longer_without_a_search(monkeypatch):
    prompt = list(range(100))
    lookup = Lookup(Text(prompt))
    lookup.extend([10, 11])
    monkeypatch.setattr(Text, "longest", lambda *_: pytest.fail("a search"))
    lookup.extend(range(12, 60))
    assert lookup.propose(3) == ([60, 61, 62], LONGEST)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["equal", "two", "random", "alternating tails"])
def test_no_text_takes_quadratic_time_or_much_memory(kind):
    n = 100_000
    rng = random.Random(1)
    ids = {
        "equal": [7] * n,
        "two": [7, 8] * (n // 2),
        "random": [rng.randrange(150_000) for _ in range(n)],
        "alternating tails": [7 if i % 37 else i for i in range(n)],
    }[kind]
    started = thread_time()
    lookup = Lookup(Text(ids[: n // 2]))
    lookup.extend(ids[n // 2 :])
    for _ in range(100):
        lookup.propose(8)
    assert thread_time() - started < 3  # constant time per token takes about 0.3 s
    for text in lookup._texts:
        assert text.nbytes <= 16 * len(text.ids)


def sequence(prompt, answer, n_cached=0, predicted=()):
    class Request(SimpleNamespace):
        __hash__ = object.__hash__

    request = Request(prompt_ids=prompt, predicted_ids=predicted, n_cached=n_cached)
    return SimpleNamespace(request=request, ids=[*prompt, *answer])


def test_predicted_texts_and_other_sequences_are_searched():
    made = Lookups(keeps_others=True)
    one = sequence([1, 2], [3, 4], predicted=[50, 51, 52])
    drafter = made(one)
    drafter.extend([50, 51])
    assert drafter.propose(4) == ([52], 2)
    made.end(sequence([20, 21, 22], [23, 24]))
    drafter.extend([21, 22])
    assert drafter.propose(4) == ([23, 24, -1], 2)  # the end of a sequence is no token
    kept = Lookups()
    kept.end(sequence([20, 21, 22], [23, 24]))
    alone = kept(sequence([1], []))
    alone.extend([21, 22])
    assert alone.propose(4) == ((), 0)


def test_other_sequences_take_bounded_memory(monkeypatch):
    monkeypatch.setattr("mlx_engine.loop.lookup.MOST_OTHERS", 1000)
    made = Lookups(keeps_others=True)
    for i in range(30):
        made.end(sequence(list(range(i * 100, i * 100 + 90)), []))
    assert len(made._others.ids) <= 1000 + 91
    assert MOST_OTHERS >= 1000
