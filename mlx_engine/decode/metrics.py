"""Times of passes, and what they add up to. Pure arithmetic: the clock is handed in, and nothing here knows a model.

A pass ends when its token's id is on the host. The first pass is prefill, however it was chunked; it is never mixed
into the decode rate. What cannot be computed is None, which is not zero.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


@dataclass
class Metrics:
    """Seconds of every pass of one run, in order."""

    clock: Callable[[], float] = time.perf_counter
    passes: list[float] = field(default_factory=list)

    def record_timed(self, work: Callable[[], T]) -> T:
        """Time one pass and return what it returned; a pass that fails is not recorded."""
        start = self.clock()
        result = work()
        self.passes.append(self.clock() - start)
        return result

    @property
    def time_to_first_token_ms(self) -> float | None:
        """Milliseconds of the first pass; None before it."""
        return self.passes[0] * 1e3 if self.passes else None

    @property
    def decode_tokens_per_second(self) -> float | None:
        """The (n - 1) tokens after the first over the time of their passes; None when there are none."""
        rest = sum(self.passes[1:])
        return (len(self.passes) - 1) / rest if rest > 0 else None

    def summary(self) -> dict[str, object]:
        """Everything, as JSON takes it."""
        return {
            "time_to_first_token_ms": self.time_to_first_token_ms,
            "decode_tokens_per_second": self.decode_tokens_per_second,
            "passes": len(self.passes),
            "per_pass_ms": [seconds * 1e3 for seconds in self.passes],
        }
