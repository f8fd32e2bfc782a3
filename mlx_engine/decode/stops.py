"""Stop strings in a stream: nothing that might be the beginning of one leaves before that is decided."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Cuts a stream of text before the first stop string that is complete in it, however the text is cut in pieces.

    Of several that end at the same character the longest counts.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held, self.found = tuple(stops), "", False

    def add(self, piece: str) -> str:
        """The text that can leave now; after a stop string was found, nothing more does."""
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
        """What was held back and never became a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """How many of the last characters of `text` are the first of `stop`."""
    return next(n for n in range(min(len(text), len(stop) - 1), -1, -1) if text.endswith(stop[:n]))
