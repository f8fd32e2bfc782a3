"""Times of passes, and what they add up to. Pure arithmetic: the clock is handed in, and nothing here knows a model.

A pass ends when its token's id is on the host. The first pass is prefill, however it was chunked; it is never mixed
into the decode rate. What cannot be computed is None, which is not zero, and shows as a dash.

What the caller does between two ids is no part of a pass, unless the device works on meanwhile: see `record_interval`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")

# An id that is on the host within so many seconds was there when it was asked for.
AT_ONCE = 1e-4


@dataclass
class Metrics:
    """Seconds of one run.

    Attributes:
        passes: every pass, in order.
        sampling: the choosing of a token, which is part of its pass; empty where a backend chooses on the device.
        phases: what happens once and outside of all passes, by name: load, warm_up, tokenize.
    """

    clock: Callable[[], float] = field(default=time.perf_counter, repr=False, compare=False)
    passes: list[float] = field(default_factory=list)
    sampling: list[float] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)
    _ended: float | None = field(default=None, repr=False, compare=False)
    _waited_for: float = field(default=0.0, repr=False, compare=False)

    def record_timed(self, work: Callable[[], T]) -> T:
        """Time one pass and return what it returned; a pass that fails is not recorded."""
        seconds, result = self._timed(work)
        self.passes.append(seconds)
        return result

    def record_interval(self, resumed: float, asked: float) -> None:
        """Record a pass that ends now, of a device that works on from one pass to the next.

        It began when the pass before it ended. The caller went away then, came back at `resumed`, and the id was asked
        for at `asked`. If somebody had to wait for it, the device was busy all the time, and the pass is the whole
        interval. If it was there at once, the device may have been idle for a part of it, because the caller was slow:
        then the pass is taken to be as long as the last one that was waited for, but no shorter than what happened
        since `resumed`. Neither a slow caller nor a pass hidden behind one changes the rate.
        """
        now = self.clock()
        whole, inside = now - (resumed if self._ended is None else self._ended), now - resumed
        if self._ended is None or now - asked > AT_ONCE:
            self._waited_for = whole
        self.passes.append(max(inside, min(whole, self._waited_for)))
        self._ended = now

    def record_forward_share(self, wall: float, n: int) -> None:
        """A sequence's share of a pass of `wall` seconds that n sequences took together; for n = 0 there is none."""
        if n > 0:
            self.passes.append(wall / n)

    def record_sampling(self, work: Callable[[], T]) -> T:
        """Time one choice and return it."""
        seconds, result = self._timed(work)
        self.sampling.append(seconds)
        return result

    def record_phase(self, name: str, work: Callable[[], T]) -> T:
        """Time something that happens once and return what it returned."""
        self.phases[name], result = self._timed(work)
        return result

    def _timed(self, work: Callable[[], T]) -> tuple[float, T]:
        start = self.clock()
        result = work()
        return self.clock() - start, result

    @property
    def time_to_first_token_ms(self) -> float | None:
        """Milliseconds of the first pass; None before it."""
        return self.passes[0] * 1e3 if self.passes else None

    @property
    def decode_tokens_per_second(self) -> float | None:
        """The (n - 1) tokens after the first over the time of their passes; None when there are none."""
        rest = sum(self.passes[1:])
        return (len(self.passes) - 1) / rest if rest > 0 else None

    @property
    def per_forward_ms(self) -> dict[str, float] | None:
        """Shortest, longest and mean pass in milliseconds, and their number; None before the first."""
        if not self.passes:
            return None
        ms = [seconds * 1e3 for seconds in self.passes]
        return {"min": min(ms), "max": max(ms), "mean": sum(ms) / len(ms), "n": len(ms)}

    def summary(self) -> dict[str, object]:
        """Everything, as JSON takes it."""
        return {
            **{f"{name}_ms": seconds * 1e3 for name, seconds in self.phases.items()},
            "sampling_ms": sum(self.sampling) * 1e3 if self.sampling else None,
            "time_to_first_token_ms": self.time_to_first_token_ms,
            "decode_tokens_per_second": self.decode_tokens_per_second,
            "per_forward_ms": self.per_forward_ms,
            "per_pass_ms": [seconds * 1e3 for seconds in self.passes],
        }

    def text(self, *, per_pass: bool) -> str:
        """The same for people; with `per_pass` a line for every pass, counted from 1."""
        forward = self.per_forward_ms
        spread = "—" if forward is None else "min {min:.3f} max {max:.3f} mean {mean:.3f} (n={n})".format(**forward)
        lines = [
            "metrics:",
            *(f"  {name}_ms: {seconds * 1e3:.3f}" for name, seconds in self.phases.items()),
            f"  time_to_first_token_ms: {_number(self.time_to_first_token_ms)}",
            f"  decode_tokens_per_second: {_number(self.decode_tokens_per_second)}",
            f"  per_forward_ms: {spread}",
        ]
        if self.sampling:
            lines.append(f"  sampling_ms: {sum(self.sampling) * 1e3:.3f}")
        if per_pass:
            lines += [f"  forward {i}: {seconds * 1e3:.3f} ms" for i, seconds in enumerate(self.passes, start=1)]
        return "\n".join(lines)


def _number(value: float | None) -> str:
    return "—" if value is None else f"{value:.3f}"
