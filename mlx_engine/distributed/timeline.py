"""The time line of a pipeline: which rank computed which pass when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# How many parts of passes a rank remembers at least.
MOST_SPANS = 4096
# The characters of a drawing, and how many of the latest passes it shows.
WIDTH, LATEST = 96, 12
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
IDLE = "."


class Span(NamedTuple):
    """A rank's part of a pass: the number of the pass, its tokens, and when it began and ended, in seconds.

    The clock is that of the rank's machine: between machines, a drawing is as exact as their clocks agree.
    """

    number: int
    n_rows: int
    began: float
    ended: float


def drawing(ranks: Sequence[Sequence[Span]], latest: int = LATEST) -> list[str]:
    """Return a line for each rank: the last digit (in base 36) of the pass that it computed, and dots where it waited.

    Each line ends with the share of the time in which the rank computed.
    """
    if not all(ranks):
        return []
    first = max(0, ranks[-1][-1].number + 1 - latest)
    shown = [[span for span in spans if span.number >= first] for spans in ranks]
    start, end = min(spans[0].began for spans in shown), max(spans[-1].ended for spans in shown)
    scale, lines = WIDTH / max(end - start, 1e-9), [f"passes from {first} on, {(end - start) * 1e3:.1f} ms:"]
    for rank, spans in enumerate(shown):
        cells = [IDLE] * WIDTH
        for span in spans:
            left = min(WIDTH - 1, int((span.began - start) * scale))
            right = max(left + 1, min(WIDTH, round((span.ended - start) * scale)))
            cells[left:right] = DIGITS[span.number % len(DIGITS)] * (right - left)
        lines.append(f"rank {rank} {''.join(cells)} {busy(spans, start, end):.0%}")
    return lines


def busy(spans: Sequence[Span], start: float, end: float) -> float:
    """Return the share of the time from start to end in which a rank computed."""
    return sum(span.ended - span.began for span in spans) / max(end - start, 1e-9)
