"""Compute how much time each operation would gain at the machine's limit, and rank the operations. Times in ms.

At the limit, an operation takes the time to read its bytes or the time of its arithmetic, whichever is longer. Its gain
is its time minus that.

Profiled operations together take longer than the plain pass, because each is a separate call from an interpreter whose
code and data the weights have evicted from the CPU caches. To correct for this, the same time is subtracted from every
call, until the sum equals the plain decode step. It is at most twice the median call's time beyond its limit, and no
operation gets below its limit, so an operation that is slow for another reason keeps its time. The same correction
per call is applied to prefill: its own excess would be mostly noise, spread over few and long calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_engine.bench.bottlenecks.apart import Operation

# The ranking's line for time outside of operations.
BETWEEN = "between operations"
# The correction is at most this multiple of the median call's time beyond its limit.
UNUSUAL = 2


@dataclass(frozen=True)
class Limits:
    """The machine's limits: bytes and floating-point operations per second."""

    read: float
    peak: float

    def floor(self, op: Operation) -> float:
        """Return an operation's milliseconds at the limit."""
        return 1e3 * max(op.cost.nbytes / self.read, op.cost.flops / self.peak)

    def bound(self, op: Operation) -> str:
        """Return "memory" or "arithmetic", whichever takes longer."""
        return "memory" if op.cost.nbytes / self.read >= op.cost.flops / self.peak else "arithmetic"


@dataclass(frozen=True)
class Line:
    """An operation of a pass with its limit.

    Attributes:
        measured: the median of the profiled passes.
        ms: the same, without profiling overhead.
        floor: time at the machine's limit, or None if the limit is unknown.
        bound: "memory" or "arithmetic"; "calls" if the limit is negligible compared with the time; None if the limit
            is unknown, or the corrected time is 0.
    """

    op: Operation
    measured: float
    ms: float
    floor: float | None
    bound: str | None

    @property
    def gain(self) -> float | None:
        """The milliseconds gained at the limit."""
        return None if self.floor is None else max(0.0, self.ms - self.floor)

    @property
    def reached(self) -> float | None:
        """The time at the limit divided by the measured time."""
        return None if self.floor is None or self.bound is None or self.ms <= 0 else self.floor / self.ms


# If the limit is a smaller share of the time than this, the operation is bound by call overhead.
CALLS = 0.1


def lines(ops: Sequence[Operation], limits: Limits | None, off: float) -> list[Line]:
    """Return every operation with its limit, with `off` ms subtracted from each of its calls."""
    return [_line(op, off, floor, limits) for op, floor in zip(ops, floors(ops, limits), strict=True)]


def floors(ops: Sequence[Operation], limits: Limits | None) -> list[float]:
    """Return each operation's milliseconds at the limit; 0 if the limits are unknown."""
    return [limits.floor(op) if limits is not None else 0.0 for op in ops]


def _line(op: Operation, off: float, floor: float, limits: Limits | None) -> Line:
    ms = max(op.ms - off * op.calls, min(op.ms, floor))
    if limits is None:
        return Line(op, op.ms, ms, None, None)
    absorbed = ms <= floor < op.ms
    return Line(op, op.ms, ms, floor, None if absorbed else "calls" if floor < CALLS * ms else limits.bound(op))


def off_every_call(ops: Sequence[Operation], limits: Limits | None, too_much: float) -> float:
    """Return the milliseconds to subtract from every call, if the operations exceed the plain pass by `too_much`."""
    pairs = zip(ops, floors(ops, limits), strict=True)
    beyond = sorted((max(0.0, op.ms - floor) / op.calls, op.calls) for op, floor in pairs)
    off, calls = 0.0, sum(n for _, n in beyond)
    if too_much <= 0:
        return 0.0
    for most, n in beyond:
        # All remaining calls can be reduced by at least as much as this one.
        if too_much <= (most - off) * calls:
            off += too_much / calls
            break
        too_much, off, calls = too_much - (most - off) * calls, most, calls - n
    return min(off, UNUSUAL * _usual(beyond))


def _usual(beyond: Sequence[tuple[float, float]]) -> float:
    """Return the median call's time beyond its limit."""
    half, seen = sum(n for _, n in beyond) / 2, 0.0
    for ms, n in beyond:
        seen += n
        if seen >= half:
            return ms
    return 0.0


def ranked(found: Sequence[Line], plain: float, between: float) -> list[dict[str, float | str | None]]:
    """Rank operations and the time between them by gain, or by time if the limits are unknown."""
    rows: list[dict[str, float | str | None]] = [
        {"role": line.op.role, "ms": line.ms, "limit_ms": line.floor, "gain_ms": line.gain} for line in found
    ]
    if between > 0:
        rows.append({"role": BETWEEN, "ms": between, "limit_ms": 0.0, "gain_ms": between})
    for row in rows:
        row["share"] = gain_of(row) / plain
    return sorted(rows, key=gain_of, reverse=True)


def gain_of(row: dict[str, float | str | None]) -> float:
    """Return the sort key of a row of the ranking."""
    gain = row["ms"] if row["gain_ms"] is None else row["gain_ms"]
    return float(gain or 0.0)
