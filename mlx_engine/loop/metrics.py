"""Metrics of a run: times of its forward passes, and the rates computed from them.

In this module, a pass is all work for one new token, or for several if proposed tokens were right. It ends when
the token ids are on the host. The first pass is the whole prefill, even if the prompt was run in several chunks, and
does not count in the decode rate. A metric that cannot be computed is None, printed as a dash.

Time that the caller spends between two tokens counts only if the device computes meanwhile: see `PassTimer`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")

# If the host waits at most this many seconds for token ids, they are assumed to have been ready before.
AT_ONCE = 1e-4


@dataclass
class Metrics:
    """The times of one run (the generation of one answer), in seconds.

    Attributes:
        passes: the time of each pass, in order.
        shares: this run's part of the time of each pass. The shares of all runs in a pass add up to the pass's time.
        sampling: the time of choosing each token, a part of the time of its pass; empty on a lazy backend, because its
            device chooses the tokens.
        phases: maps the name of each phase outside of passes, such as load, warm_up and tokenize, to its time.
        n_more: number of new tokens minus number of passes. A pass gives several tokens if proposed ones were right.
    """

    clock: Callable[[], float] = field(default=time.perf_counter, repr=False, compare=False)
    passes: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    sampling: list[float] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)
    n_more: int = 0

    def record_pass(
        self, seconds: float, *, share: float | None = None, sampling: float | None = None, n_tokens: int = 1
    ) -> None:
        """Record a pass that gave `n_tokens` new tokens.

        `share` is this run's part of `seconds`, by default all of it. `sampling` is the part of `seconds` in which the
        tokens were chosen; None if it was not measured.
        """
        self.n_more += n_tokens - 1
        self.passes.append(seconds)
        self.shares.append(seconds if share is None else share)
        if sampling is not None:
            self.sampling.append(sampling)

    def record_phase(self, name: str, work: Callable[[], T]) -> T:
        """Run and time a phase, and return its result."""
        start = self.clock()
        result = work()
        self.phases[name] = self.clock() - start
        return result

    @property
    def time_to_first_token_ms(self) -> float | None:
        """Milliseconds of the first pass; None before it has ended."""
        return self.passes[0] * 1e3 if self.passes else None

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Tokens after the first, divided by the time of their passes; None if no token follows the first."""
        rest = sum(self.passes[1:])
        return (len(self.passes) - 1 + self.n_more) / rest if rest > 0 else None

    @property
    def per_forward_ms(self) -> dict[str, float] | None:
        """Minimum, maximum and mean milliseconds of a pass, and the number of passes; None before the first ends."""
        if not self.passes:
            return None
        ms = [seconds * 1e3 for seconds in self.passes]
        return {"min": min(ms), "max": max(ms), "mean": sum(ms) / len(ms), "n": len(ms)}

    def summary(self) -> dict[str, object]:
        """Return all metrics as a dictionary for JSON."""
        return {
            **{f"{name}_ms": seconds * 1e3 for name, seconds in self.phases.items()},
            "sampling_ms": sum(self.sampling) * 1e3 if self.sampling else None,
            "time_to_first_token_ms": self.time_to_first_token_ms,
            "decode_tokens_per_second": self.decode_tokens_per_second,
            "per_forward_ms": self.per_forward_ms,
            "per_pass_ms": [seconds * 1e3 for seconds in self.passes],
        }

    def text(self, *, per_pass: bool) -> str:
        """Return all metrics as text; with `per_pass`, also one line per pass, numbered from 1."""
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


class PassTimer:
    """Measures passes on a lazy backend, where the host submits the next pass before it waits for the previous one."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ended: float | None = None
        self._waited_for = 0.0

    def restart(self) -> None:
        """Record that no pass is in progress: the device waits for the host."""
        self._ended = None

    def interval(self, resumed: float, asked: float) -> float:
        """Return the seconds of the pass that ends now, on a device that starts each pass when the previous one ends.

        If the host had to wait for the token ids, the device was busy since the end of the previous pass, and this pass
        took all of that time. Otherwise the device may have been idle while the caller's code ran. Then the pass is
        assumed to have taken as long as the last pass for which the host had to wait, but at least the time since
        `resumed`, and at most the time since the end of the previous pass. So a slow caller does not change the decode
        rate.

        Args:
            resumed: the time when the caller's code, which runs between two steps, returned to the engine.
            asked: the time when the host began to wait for the token ids.
        """
        now = self._clock()
        whole, inside = now - (resumed if self._ended is None else self._ended), now - resumed
        if self._ended is None or now - asked > AT_ONCE:
            self._waited_for = whole
        self._ended = now
        return max(inside, min(whole, self._waited_for))
