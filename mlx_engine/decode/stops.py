"""Stop strings in a stream: text that may be the beginning of a stop string is held back until that is decided."""

from __future__ import annotations

from array import array
from collections.abc import Sequence


class StopStrings:
    """Ends a stream of text before the first complete stop string, which may span several pieces.

    If several stop strings end at the same character, the longest counts. Each character of the stream takes constant
    time per stop string, whatever its length.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held, self.found = [_Matcher(stop) for stop in stops], "", False

    def add(self, piece: str) -> str:
        """Return the text that can be output now; after a stop string, always ""."""
        if self.found:
            return ""
        text = self._held + piece
        ends = [(end, -len(stop.text)) for stop in self._stops if (end := stop.read(piece)) is not None]
        if ends:
            self.found, held, self._held = True, len(self._held), ""
            end, length = min(ends)
            return text[: held + end + length]
        keep = max((stop.n_matched for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Return the text that was held back and is not a stop string."""
        held, self._held = self._held, ""
        return held


class _Matcher:
    """The automaton of Knuth, Morris and Pratt for one string.

    Attributes:
        text: the string.
        n_matched: the length of the longest prefix of `text` that ends what has been read.
    """

    def __init__(self, text: str) -> None:
        self.text, self.n_matched = text, 0
        # For each prefix, the length of the longest shorter prefix that ends it.
        self._shorter = array("H", [0] * len(text))
        for i in range(1, len(text)):
            self._shorter[i] = self._after(self._shorter[i - 1], text[i])

    def read(self, piece: str) -> int | None:
        """Read a piece; return where in it the string ends first, None if it does not."""
        for i, character in enumerate(piece):
            self.n_matched = self._after(self.n_matched, character)
            if self.n_matched == len(self.text):
                return i + 1
        return None

    def _after(self, n: int, character: str) -> int:
        """Return the length of the prefix that is matched when a character follows a match of n characters."""
        while n and self.text[n] != character:
            n = self._shorter[n - 1]
        return n + (self.text[n] == character)
