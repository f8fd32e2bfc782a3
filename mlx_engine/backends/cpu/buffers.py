"""The buffers of a compiled program: which memory holds each intermediate array, and for which steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlx_engine.kernels.cpu.build import layout


@dataclass(eq=False)
class Buffer:
    """Scratch memory of one value: `width` floats per token; `at` is its offset in floats, for one token."""

    width: int
    at: int = -1

    @property
    def end(self) -> int:
        """Return the offset after the buffer; widths are rounded up, so that the next buffer begins a cache line."""
        return self.at + layout.whole_vectors(self.width)


@dataclass(frozen=True)
class Place:
    """The location of a value: columns [column, column + width) of a buffer, for all tokens or the wanted rows only.

    `head_dim` is the head dim if the value has been split into heads, and 0 if not.
    """

    buffer: Buffer
    column: int
    width: int
    is_wanted: bool
    head_dim: int = 0

    @property
    def is_whole(self) -> bool:
        """Return whether the rows are contiguous."""
        return self.width == self.buffer.width


def allocate(steps: Sequence[dict[int, Any]], x: Buffer, y: Buffer) -> int:
    """Set the offset of each buffer, so that buffers in use at the same time do not overlap; return the total size."""
    last_step = {x: 0}
    for i, step in enumerate(steps):
        last_step |= {word: i for word in step.values() if isinstance(word, Buffer)}
    last_step[y] = len(steps)
    live: list[Buffer] = []

    def place(buffer: Buffer) -> None:
        buffer.at = 0
        for other in sorted(live, key=lambda other: other.at):
            if buffer.end <= other.at:
                break
            buffer.at = max(buffer.at, other.end)
        live.append(buffer)

    place(x)
    size = x.end
    for i, step in enumerate(steps):
        for word in (layout.OUT, layout.OUT_2):
            if word in step:
                place(step[word])
                size = max(size, step[word].end)
        live = [buffer for buffer in live if last_step[buffer] > i]
    return size
