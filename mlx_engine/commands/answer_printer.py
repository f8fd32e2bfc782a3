"""Print text as it is generated: with words wrapped on a terminal, and the reasoning of an answer set apart."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, TextIO, TypeVar

from mlx_engine.commands.console import is_plain, safe_for
from mlx_engine.observe import log

if TYPE_CHECKING:
    from mlx_engine.tokenizer.thinking import Piece

Self = TypeVar("Self", bound="TextWriter")

DIM, NORMAL = "\x1b[2m", "\x1b[0m"

# Line ends, spaces, printable ASCII between them, and any other character alone.
PARTS = re.compile(r"\r?\n|\t| +|[!-~]+|.", re.DOTALL)
TAB = 8


class TextWriter:
    """Writes text piece by piece. On a terminal, a word that grows past the end of its line moves to the next line.

    A line also ends before or after a character of two columns: Chinese and Japanese have no spaces. The terminal
    breaks words that are longer than a line. Elsewhere, text is written unchanged.

    While the writer is entered, it ends its line before an event of the log is printed on the same terminal.
    """

    def __init__(self, out: TextIO | None) -> None:
        self._out, self._has_colors = out, not is_plain(out)
        self._width = self._column = 0
        self._word: list[str] = []  # the parts of the last word, which may still grow
        self._word_width = 0
        self._is_in_line = False

    def __enter__(self: Self) -> Self:
        if all(stream is not None and stream.isatty() for stream in (self._out, sys.stderr)):
            log.before_event = self.end_line
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        log.before_event = None

    def write(self, text: str, *, dim: bool = False) -> None:
        """Write more text, dimmed if the terminal has colours."""
        text, dim = safe_for(self._out, text), dim and self._has_colors
        if not text:
            return
        self._is_in_line = not text.endswith("\n")
        if self._fit_to_terminal():
            text = "".join(self._placed(part, dim=dim) for part in PARTS.findall(text))
        elif dim:
            text = f"{DIM}{text}{NORMAL}"
        print(text, end="", file=self._out, flush=True)

    def end_line(self) -> None:
        """Begin a new line, unless the text is at the beginning of one."""
        if self._is_in_line:
            self.write("\n")

    def _fit_to_terminal(self) -> bool:
        """Return whether words are wrapped. The terminal may have another width than before, and has then reflowed."""
        width = columns_of(self._out)
        if width != self._width and width:
            self._column %= width
            if self._column < self._word_width:  # the terminal has broken the word
                self._word, self._word_width = [], 0
        self._width = width
        return width > 0

    def _placed(self, part: str, *, dim: bool) -> str:
        """Return what to write for a part of the text, and move the position in the line.

        The last column stays free: terminals differ in where the cursor is after a character in it.
        """
        if part.endswith("\n"):
            self._column, self._word, self._word_width = 0, [], 0
            return part
        width = TAB - self._column % TAB if part == "\t" else width_of(part)
        fits = self._column + width < self._width
        if part[0] in " \t":
            self._word, self._word_width = [], 0
            self._column += width  # spaces at the end of a full line are left out, and the next word begins a line
            return part if fits else ""
        shown = f"{DIM}{part}{NORMAL}" if dim else part
        if width == 2 and len(part) == 1:
            self._word, self._word_width = [], 0
            self._column = self._column + width if fits else width
            return shown if fits else f"\n{shown}"
        return self._grown(part, shown, width, fits=fits)

    def _grown(self, part: str, shown: str, width: int, *, fits: bool) -> str:
        """Return what to write for another part of the last word."""
        grown, earlier = self._word_width + width, "".join(self._word)
        self._word.append(shown)
        before, self._word_width = self._word_width, grown
        if fits:
            self._column += width
            return shown
        if grown < self._width:
            self._column = grown
            return (f"\x1b[{before}D\x1b[K" if before else "") + f"\n{earlier}{shown}"
        begins = not before and self._column > 0
        self._column = 0 if begins else self._column
        for character in part:
            wide = width_of(character)
            self._column = wide + (self._column if self._column + wide <= self._width else 0)
        return f"\n{shown}" if begins else shown


class AnswerPrinter(TextWriter):
    """Prints the pieces of one answer: reasoning dimmed in a terminal, else on stderr, or nowhere with `quiet`."""

    def __init__(self, *, quiet: bool) -> None:
        super().__init__(sys.stdout)
        self._quiet, self._is_reasoning = quiet, False

    def print(self, pieces: Iterable[Piece]) -> None:
        """Print more pieces."""
        for text, is_reasoning in pieces:
            if self._is_reasoning and not is_reasoning:
                self._print("\n\n", is_reasoning=True)
            self._is_reasoning = is_reasoning
            self._print(text, is_reasoning=is_reasoning)

    def _print(self, text: str, *, is_reasoning: bool) -> None:
        if self._has_colors or not is_reasoning:
            self.write(text, dim=is_reasoning)
        elif not self._quiet and sys.stderr is not None:
            print(safe_for(sys.stderr, text), end="", file=sys.stderr, flush=True)


def columns_of(out: TextIO | None) -> int:
    """Return the width of the terminal behind a stream; 0 if there is none, or it cannot move its cursor."""
    if out is None or not out.isatty() or os.environ.get("TERM") == "dumb":
        return 0
    try:
        return os.get_terminal_size(out.fileno()).columns
    except (OSError, ValueError):
        return 0


def width_of(text: str) -> int:
    """Return the number of columns of a text: two for a Chinese character, none for an accent over a letter."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)
