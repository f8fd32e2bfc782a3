"""Words are wrapped on a terminal, not cut, while a text is written in pieces; elsewhere nothing changes."""

import io
import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_engine.commands import console as answer_printer
from mlx_engine.commands.console import TextWriter, width_of
from mlx_engine.observe import log

SEQUENCE = re.compile(r"\x1b\[(\d*)([A-Za-z])|(.)", re.DOTALL)


class Terminal(io.StringIO):
    """A terminal of some columns: rows of characters, and a cursor that waits in the last column after it is filled."""

    def __init__(self, columns):
        super().__init__()
        self.columns, self.rows, self.column, self.waits = columns, [[]], 0, False

    def isatty(self):
        return True

    def write(self, text):
        for number, command, character in SEQUENCE.findall(text):
            if command == "D":
                self.column, self.waits = max(0, self.column - int(number)), False
            elif command == "K":
                del self.rows[-1][self.column :]
            elif command:
                assert command == "m", command
            else:
                self.put(character)
        return len(text)

    def put(self, character):
        if character == "\n":
            self.rows.append([])
            self.column, self.waits = 0, False
            return
        if character == "\r":
            self.column, self.waits = 0, False
            return
        width = 8 - self.column % 8 if character == "\t" else width_of(character)
        if width == 0:
            return
        if self.waits or self.column + width > self.columns:
            self.rows.append([])
            self.column, self.waits = 0, False
        row = self.rows[-1]
        row[self.column :] = [character, *[""] * (width - 1)]
        self.column += width
        if self.column >= self.columns:
            self.column, self.waits = self.columns - 1, True

    @property
    def lines(self):
        return ["".join(row).rstrip(" ") for row in self.rows]


@pytest.fixture
def wrapped(monkeypatch):
    """Write pieces to a terminal of some columns and return its lines."""
    monkeypatch.setattr(answer_printer, "columns_of", lambda out: out.columns)
    monkeypatch.setenv("NO_COLOR", "")
    monkeypatch.setenv("TERM", "xterm")

    def lines(columns, *pieces, dim=()):
        terminal = Terminal(columns)
        writer = TextWriter(terminal)
        for piece in pieces:
            writer.write(piece, dim=piece in dim)
        return terminal.lines

    return lines


STORY = "Once upon a time there was a fox, who was fond of grapes."


def test_a_word_that_does_not_fit_moves_to_the_next_line_as_it_grows(wrapped):
    whole = ["Once upon a time", "there was a fox,", "who was fond of", "grapes."]
    assert wrapped(17, *STORY) == wrapped(17, STORY) == whole
    assert wrapped(17, *re.findall(r"\s?\w{1,3}|.", STORY)) == whole


def test_lines_of_the_text_and_indentations_stay(wrapped):
    text = "if x:\n    return [\n        first,\n        second]\n\ndone"
    assert wrapped(20, *text) == text.split("\n")
    assert wrapped(20, "a\r\nb") == ["a", "b"]


def test_a_line_that_is_just_full_is_not_followed_by_an_empty_one(wrapped):
    assert wrapped(10, *"abcd efgh \nij") == ["abcd efgh", "ij"]
    assert wrapped(10, *"abcd efgh  ij") == ["abcd efgh", "ij"]


def test_a_word_longer_than_a_line_begins_one_and_is_broken_by_the_terminal(wrapped):
    address = "https://example.org/a/path/that/is/long"
    assert wrapped(12, *f"See {address} now") == [
        "See",
        *[address[i : i + 12] for i in (0, 12, 24)],
        address[36:] + " now",
    ]
    assert wrapped(12, f"See {address}") == ["See", *[address[i : i + 12] for i in (0, 12, 24, 36)]]


def test_characters_of_two_columns_may_end_a_line_anywhere(wrapped):
    assert wrapped(10, *"狐狸和葡萄的故事") == ["狐狸和葡", "萄的故事"]
    assert wrapped(10, *"a fox 狐狸狐") == ["a fox 狐", "狸狐"]
    assert wrapped(8, *"a e\u0301e\u0301e\u0301 bcd") == ["a eee", "bcd"]


def test_a_word_of_prompt_and_answer_moves_with_its_colours(wrapped):
    assert wrapped(17, "[1] ", "Once upon a ti", "metable", dim=("Once upon a ti",)) == ["[1] Once upon a", "timetable"]


def test_a_terminal_that_gets_another_width_is_followed(monkeypatch):
    monkeypatch.setattr(answer_printer, "columns_of", lambda out: out.columns)
    terminal = Terminal(40)
    writer = TextWriter(terminal)
    writer.write("Once upon a time\nthere ")
    terminal.columns = 10
    writer.write("was a fox")
    assert terminal.lines == ["Once upon a time", "there was", "a fox"]


@pytest.mark.slow
@given(st.text(st.sampled_from("ab \n狐é"), max_size=60), st.integers(8, 20), st.lists(st.integers(1, 7), max_size=30))
def test_nothing_is_lost_and_no_word_is_cut(text, columns, cuts):
    words = [word for word in re.findall(r"[^ \n狐]+|狐", text) if len(word) < columns]
    terminal = Terminal(columns)
    before, answer_printer.columns_of = answer_printer.columns_of, lambda out: columns
    try:
        writer, left = TextWriter(terminal), text
        for cut in [*cuts, len(text) + 1]:
            writer.write(left[:cut])
            left = left[cut:]
    finally:
        answer_printer.columns_of = before
    assert "".join("".join(terminal.lines).split()) == "".join(text.split())
    shown = [word for line in terminal.lines for word in re.findall(r"[^ \n狐]+|狐", line)]
    if all(len(word) < columns for word in re.findall(r"[^ \n狐]+", text)):
        assert shown == words


@pytest.mark.parametrize("term", ["dumb", "xterm"])
def test_without_a_terminal_or_with_a_dumb_one_the_text_is_unchanged(term, monkeypatch):
    monkeypatch.setenv("TERM", term)
    out = io.StringIO()
    if term == "dumb":
        monkeypatch.setattr(out, "isatty", lambda: True)
        monkeypatch.setattr(os, "get_terminal_size", lambda fd: os.terminal_size((10, 10)))
    writer = TextWriter(out)
    for piece in (STORY, " \x1b" if term == "xterm" else " ", "狐" * 30):
        writer.write(piece, dim=True)
    assert out.getvalue() == STORY + (" \x1b" if term == "xterm" else " ") + "狐" * 30


def test_an_event_of_the_log_begins_a_line(monkeypatch):
    monkeypatch.setattr(answer_printer, "columns_of", lambda out: 40)
    terminal = Terminal(40)
    monkeypatch.setattr("sys.stderr", terminal)
    log.configure("info")
    try:
        with TextWriter(terminal) as writer:
            for piece in ("Once upon", " a time\n", "there"):
                writer.write(piece)
                log.event(log.logging.INFO, "token", step=1)
        log.event(log.logging.INFO, "end")
    finally:
        log.configure("off")
    token = "token step=1"
    assert terminal.lines == ["Once upon", token, " a time", token, "there", token, "end", ""]
