"""Stop strings: any way of cutting a text into pieces gives the text before the first of them."""

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlx_engine.decode.stops import StopStrings

LAW = settings(max_examples=100)

# Two letters make overlaps and false starts likely.
TEXTS = st.text("ab", max_size=30)
STOPS = st.text("ab", min_size=1, max_size=5)


def fed(stops, pieces):
    """What leaves after each piece, and at last what `finish` gives."""
    cutter = StopStrings(stops)
    return [*map(cutter.add, pieces), cutter.finish()], cutter.found


def cut(text, places):
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


def first_completed(text, stops):
    """The text before the stop string whose last character comes first; of those that end together, the longest."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


@LAW
@given(TEXTS, STOPS, st.lists(st.integers(0, 30), max_size=8))
@example("aab", "ab", [1, 2])
@example("abab", "abb", [1, 2, 3])
def test_one_stop_string_ends_the_text_before_its_first_occurrence(text, stop, places):
    left, found = fed([stop], cut(text, places))
    assert "".join(left) == text.partition(stop)[0]
    assert found == (stop in text)


@LAW
@given(TEXTS, st.lists(STOPS, max_size=3), st.lists(st.integers(0, 30), max_size=8))
@example("abb", ["abb", "b"], [])
@example("abb", ["abb", "b"], [1, 2])
def test_several_stop_strings_end_the_text_alike_however_it_is_cut(text, stops, places):
    left, found = fed(stops, cut(text, places))
    assert ("".join(left), found) == first_completed(text, stops)


@LAW
@given(TEXTS, st.lists(STOPS, max_size=3), st.lists(st.integers(0, 30), max_size=8))
def test_nothing_of_a_stop_string_leaves_early(text, stops, places):
    pieces = cut(text, places)
    left, _ = fed(stops, pieces)
    for n in range(len(pieces)):
        gone, read = "".join(left[: n + 1]), "".join(pieces[: n + 1])
        if first_completed(read, stops)[1]:
            break
        # Whatever comes next: each stop string that may begin in what has left must be impossible by now.
        for stop in stops:
            unread = [read[at:] for at in range(len(gone)) if stop.startswith(read[at:])]
            assert not unread, f"{stop!r} may still begin with {unread[0]!r}, of which a part has left"


@LAW
@given(TEXTS, STOPS, st.lists(st.integers(0, 30), max_size=8))
def test_no_more_is_held_back_than_could_become_a_stop_string(text, stop, places):
    pieces = cut(text, places)
    left, _ = fed([stop], pieces)
    for n in range(len(pieces)):
        read, gone = "".join(pieces[: n + 1]), "".join(left[: n + 1])
        if stop not in read:
            assert stop.startswith(read[len(gone) :])
            assert len(read) - len(gone) < len(stop)


@LAW
@given(st.lists(st.text(max_size=6), max_size=8))
def test_without_stop_strings_every_piece_passes_at_once(pieces):
    left, found = fed([], pieces)
    assert left == [*pieces, ""]
    assert not found


def test_after_a_stop_string_nothing_leaves():
    cutter = StopStrings(["END"])
    assert cutter.add("one EN") == "one "
    assert cutter.add("D two") == ""
    assert cutter.found
    assert cutter.add("three") == ""
    assert cutter.finish() == ""


def test_a_false_start_is_let_go():
    cutter = StopStrings(["END"])
    assert cutter.add("EN") == ""
    assert cutter.add("GINE") == "ENGIN"
    assert cutter.finish() == "E"
    assert cutter.finish() == ""


@pytest.mark.parametrize("stop", ["\n\n", "é", "🙂", "<|im_end|>"])
def test_a_stop_string_of_any_characters_is_found(stop):
    left, found = fed([stop], list("one" + stop + "two"))
    assert ("".join(left), found) == ("one", True)
