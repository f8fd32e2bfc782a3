"""Stop strings: any way of cutting a text into pieces gives the text before the first of them."""

import itertools
from array import array

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlx_engine.errors import OptionError
from mlx_engine.loop.output import StopStrings, _Matcher
from mlx_engine.options import Options

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
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return text[: end - len(longest := max(ended, key=len))], longest
    return text, None


@pytest.mark.slow
@LAW
@given(TEXTS, STOPS, st.lists(st.integers(0, 30), max_size=8))
@example("aab", "ab", [1, 2])
@example("abab", "abb", [1, 2, 3])
def test_one_stop_string_ends_the_text_before_its_first_occurrence(text, stop, places):
    left, found = fed([stop], cut(text, places))
    assert "".join(left) == text.partition(stop)[0]
    assert found == (stop if stop in text else None)


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


@pytest.mark.slow
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


class Searched:
    """Stop strings by searching all that is held back: the definition, whose time grows with length and number."""

    def __init__(self, stops):
        self.stops, self.held, self.found = stops, "", None

    def add(self, piece):
        if self.found:
            return ""
        text = self.held + piece
        if ends := [(text.find(stop) + len(stop), -len(stop), stop) for stop in self.stops if stop in text]:
            self.held = ""
            end, length, self.found = min(ends)
            return text[: end + length]
        begun = (n for stop in self.stops for n in range(len(stop)) if text.endswith(stop[:n]))
        keep = max(begun, default=0)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]


@LAW
@given(TEXTS, st.lists(STOPS, max_size=16), st.lists(st.integers(0, 30), max_size=8))
def test_every_piece_is_the_one_that_searching_gives(text, stops, places):
    searched, pieces = Searched(stops), cut(text, places)
    expected = [*map(searched.add, pieces), searched.held]
    assert fed(stops, pieces) == (expected, searched.found)


@pytest.mark.parametrize("stop", ["a" * 999 + "b", "ab" * 500, "a" * 500 + "b" + "a" * 499])
def test_each_character_takes_constant_time(stop):
    """Steps are counted, not seconds: as many as characters, and as many again for what is let go."""
    matcher, steps = _Matcher(stop), 0

    class Counted(array):
        def __getitem__(self, i):
            nonlocal steps
            steps += 1
            return super().__getitem__(i)

    matcher._shorter = Counted("H", matcher._shorter)
    text = ("a" * 998 + "ab" * 499 + "c") * 5
    assert matcher.read(text) == (text.index(stop) + len(stop) if stop in text else None)
    assert steps <= len(text)


@pytest.mark.parametrize(
    ("stops", "found"),
    [
        (["x"] * 17, "stop must be at most 16 strings, not 17"),
        (["x", "y" * 1001], "stop must be strings of at most 1,000 characters, not 1,001"),
        ("y" * 1001, "stop must be strings of at most 1,000 characters, not 1,001"),
    ],
    ids=["many", "long", "one long"],
)
def test_number_and_length_are_bounded(stops, found):
    with pytest.raises(OptionError, match=found):
        Options.of(stop=stops)


def test_the_bounds_are_allowed():
    assert len(Options.of(stop=["y" * 1000] * 16).stop) == 16


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
    assert cutter.found == "END"
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
    assert ("".join(left), found) == ("one", stop)
