"""Stop strings in a stream: text that may be the beginning of a stop string is held back until that is decided."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Ends a stream of text before the first complete stop string, which may span several pieces.

    If several stop strings end at the same character, the longest counts.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held, self.found = tuple(stops), "", False

    def add(self, piece: str) -> str:
        """Return the text that can be output now; after a stop string, always ""."""
        if self.found:
            return ""
        text = self._held + piece
        ends = [(text.find(stop) + len(stop), -len(stop)) for stop in self._stops if stop in text]
        if ends:
            self.found, self._held = True, ""
            end, length = min(ends)
            return text[: end + length]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Return the text that was held back and is not a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest proper prefix of `stop` that ends `text`."""
    return next(n for n in range(min(len(text), len(stop) - 1), -1, -1) if text.endswith(stop[:n]))
