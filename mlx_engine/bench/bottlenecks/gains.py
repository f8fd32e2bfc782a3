"""What each operation would gain at the machine's limit, and what to do about it. Pure arithmetic; times in ms.

At the limit an operation takes as long as its bytes take to read or its arithmetic to do, whichever is longer. Its gain
is the rest of its time.

Taken apart, operations take longer together than the plain pass does: each is a call of its own then, from an
interpreter that the weights have pushed out of the processor's caches. So the same time is taken off every call, until
a decode step's sum is that of the plain one, but never more than twice what the median call takes beyond the limit, and
no operation gets below its limit. One that is slow for another reason keeps its time. A call of prefill is made the
same way, and the same time is taken off it; its own excess would be mostly noise, spread over few and long calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_engine.bench.bottlenecks.apart import Operation

# What has no operation of its own, as a line of the ranking.
BETWEEN = "between operations"
# Nothing takes so many times what the median call takes beyond its limit for being a call.
UNUSUAL = 2


@dataclass(frozen=True)
class Limits:
    """What the machine reaches: bytes and floating-point operations per second."""

    read: float
    peak: float

    def floor(self, op: Operation) -> float:
        """The milliseconds that an operation takes at least."""
        return 1e3 * max(op.cost.nbytes / self.read, op.cost.flops / self.peak)

    def bound(self, op: Operation) -> str:
        """Which of the two it is bound by."""
        return "memory" if op.cost.nbytes / self.read >= op.cost.flops / self.peak else "arithmetic"


@dataclass(frozen=True)
class Line:
    """An operation of a pass beside its limit.

    Attributes:
        measured: the median of the passes that were taken apart.
        ms: the same without what being taken apart adds.
        floor: at the machine's limit, or None where that is not known.
        bound: "memory" or "arithmetic"; "calls" where the limit is next to nothing beside the time; None where nothing
            is known, or nothing is left of what it took.
    """

    op: Operation
    measured: float
    ms: float
    floor: float | None
    bound: str | None

    @property
    def gain(self) -> float | None:
        """What would be gained at the limit."""
        return None if self.floor is None else max(0.0, self.ms - self.floor)

    @property
    def reached(self) -> float | None:
        """The share of the limit that it reaches."""
        return None if self.floor is None or self.bound is None or self.ms <= 0 else self.floor / self.ms


# An operation that needs less of its time than this share is not bound by what it reads or computes.
CALLS = 0.1


def lines(ops: Sequence[Operation], limits: Limits | None, off: float) -> list[Line]:
    """Every operation beside its limit, after `off` ms were taken off each of its calls."""
    return [_line(op, off, floor, limits) for op, floor in zip(ops, floors(ops, limits), strict=True)]


def floors(ops: Sequence[Operation], limits: Limits | None) -> list[float]:
    """The milliseconds that each takes at least; 0 where no limit is known."""
    return [limits.floor(op) if limits is not None else 0.0 for op in ops]


def _line(op: Operation, off: float, floor: float, limits: Limits | None) -> Line:
    ms = max(op.ms - off * op.calls, min(op.ms, floor))
    if limits is None:
        return Line(op, op.ms, ms, None, None)
    absorbed = ms <= floor < op.ms
    return Line(op, op.ms, ms, floor, None if absorbed else "calls" if floor < CALLS * ms else limits.bound(op))


def off_every_call(ops: Sequence[Operation], limits: Limits | None, too_much: float) -> float:
    """The milliseconds to take off every call where the operations are longer than a plain pass by `too_much`."""
    pairs = zip(ops, floors(ops, limits), strict=True)
    beyond = sorted((max(0.0, op.ms - floor) / op.calls, op.calls) for op, floor in pairs)
    off, calls = 0.0, sum(n for _, n in beyond)
    if too_much <= 0:
        return 0.0
    for most, n in beyond:
        # Up to here every call that is left can give as much as this one.
        if too_much <= (most - off) * calls:
            off += too_much / calls
            break
        too_much, off, calls = too_much - (most - off) * calls, most, calls - n
    return min(off, UNUSUAL * _usual(beyond))


def _usual(beyond: Sequence[tuple[float, float]]) -> float:
    """The median call's time beyond its limit."""
    half, seen = sum(n for _, n in beyond) / 2, 0.0
    for ms, n in beyond:
        seen += n
        if seen >= half:
            return ms
    return 0.0


def ranked(found: Sequence[Line], plain: float, between: float) -> list[dict[str, float | str | None]]:
    """Operations and what is between them, what would gain most first; by time where no limit is known."""
    rows: list[dict[str, float | str | None]] = [
        {"role": line.op.role, "ms": line.ms, "limit_ms": line.floor, "gain_ms": line.gain} for line in found
    ]
    if between > 0:
        rows.append({"role": BETWEEN, "ms": between, "limit_ms": 0.0, "gain_ms": between})
    for row in rows:
        row["share"] = gain_of(row) / plain
    return sorted(rows, key=gain_of, reverse=True)


def gain_of(row: dict[str, float | str | None]) -> float:
    """What a row of the ranking is ranked by."""
    gain = row["ms"] if row["gain_ms"] is None else row["gain_ms"]
    return float(gain or 0.0)
