"""The machine's limit for a step: the shortest time in which its bytes can be read and its products computed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Roofline:
    """What a machine can do, and what a pass of a model takes. All numbers are measured or counted elsewhere.

    Attributes:
        bandwidth: memory bandwidth, bytes per second.
        weights: bytes of weights that every pass reads once, for any number of rows.
        kv: bytes of keys and values per token, summed over the layers with one window, by that window; None is the
            window of layers that see every token.
        flops: peak arithmetic, operations per second; None if it was not measured.
        row_flops: operations of one row, without attention.
    """

    bandwidth: float
    weights: float
    kv: Mapping[int | None, float]
    flops: float | None = None
    row_flops: float = 0.0

    def seconds(self, n_rows: int, lengths: Iterable[int]) -> float:
        """Return the shortest time of a pass.

        Args:
            n_rows: tokens in the pass.
            lengths: the tokens that each sequence of the pass attends to.
        """
        seen = list(lengths)
        cached = sum(
            nbytes * (sum(seen) if window is None else sum(min(window, length) for length in seen))
            for window, nbytes in self.kv.items()
        )
        reading = (self.weights + cached) / self.bandwidth
        return reading if self.flops is None else max(reading, n_rows * self.row_flops / self.flops)
