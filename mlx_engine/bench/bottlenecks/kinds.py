"""Analyse one kind of pass, prefill or decode step: operations, parts, layers, and possible gains."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_engine.bench.bottlenecks import apart, gains
from mlx_engine.bench.bottlenecks.advice import advice, between
from mlx_engine.bench.bottlenecks.apart import Operation, spread
from mlx_engine.bench.bottlenecks.gains import BETWEEN, Limits, Line
from mlx_engine.bench.bottlenecks.runs import Pass, Round

Report = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """All passes of one kind, by round: profiled passes, and the milliseconds of plain passes."""

    apart: Sequence[Sequence[Pass]]
    plain: Sequence[Sequence[float]]

    @property
    def whole(self) -> float:
        """Median milliseconds of a plain pass."""
        return statistics.median(ms for passes in self.plain for ms in passes)

    def operations(self) -> list[Operation]:
        """The operations of the profiled passes."""
        return apart.operations([taken for passes in self.apart for taken in passes])

    def beyond(self) -> list[float]:
        """The plain pass minus the sum of the operations in each round, where both are measured close in time."""
        sums = [statistics.median(apart.phases(taken)["sum"] for taken in passes) for passes in self.apart]
        return [statistics.median(plain) - ms for plain, ms in zip(self.plain, sums, strict=True)]


def kinds(rounds: Sequence[Round]) -> dict[str, Kind]:
    """Group the passes into decode steps (if any) and prefill."""
    found = {}
    if len(rounds[0].apart) > 1:
        plain = [[seconds * 1e3 for seconds in round_.plain.passes[1:]] for round_ in rounds]
        found["decode"] = Kind([round_.apart[1:] for round_ in rounds], plain)
    plain = [[round_.plain.passes[0] * 1e3] for round_ in rounds]
    return {**found, "prefill": Kind([round_.apart[:1] for round_ in rounds], plain)}


def off_every_call(found: Mapping[str, Kind], limits: Limits | None) -> float:
    """Return the profiling overhead per call in ms, determined from decode; 0 without decode steps."""
    decode = found.get("decode")
    if decode is None:
        return 0.0
    return gains.off_every_call(decode.operations(), limits, too_much=-statistics.median(decode.beyond()))


def phase(kind: Kind, limits: Limits | None, off: float, held: Mapping[str, float], *, lazy: bool) -> Report:
    """Return this kind's part of the report; `held` has the bits per weight by role."""
    ops, passes = kind.operations(), [taken for passes in kind.apart for taken in passes]
    lines = gains.lines(ops, limits, off)
    n_calls = sum(op.calls for op in ops)
    taken_off = sum(line.measured - line.ms for line in lines)
    rest = spread([ms + taken_off for ms in kind.beyond()])
    says = {line.op.role: advice(line, _bits(line.op, held)) for line in lines}
    says[BETWEEN] = between(n_calls, rest, lazy=lazy)
    # Time that may be noise is not a bottleneck.
    left = kind.whole - sum(line.ms for line in lines)
    # Shares are of the longer one of plain pass and sum, so that they never exceed 100%.
    longer = max(kind.whole, kind.whole - left)
    ranking = gains.ranked(lines, longer, left if rest["q1"] > 0 else 0.0)
    return {
        "plain_ms": spread([ms for passes in kind.plain for ms in passes]),
        "watched_ms": spread([taken.seconds * 1e3 for taken in passes]),
        "operations_ms": sum(op.ms for op in ops),
        "off_every_call_us": off * 1e3,
        "calls": n_calls,
        "bytes": sum(op.cost.nbytes for op in ops),
        "flops": sum(op.cost.flops for op in ops),
        "between_ms": left,
        "between_by_round_ms": rest,
        "parts": parts(lines),
        "operations": [operation(line, longer, held) for line in lines],
        "ranking": [{**row, "says": says[str(row["role"])]} for row in ranking],
        "layers": apart.layers(passes),
    }


def parts(lines: Iterable[Line]) -> dict[str, float]:
    """Return the milliseconds of each phase."""
    found = dict.fromkeys(apart.PHASES, 0.0)
    for line in lines:
        found[line.op.phase] += line.ms
    return found


def operation(line: Line, whole: float, held: Mapping[str, float]) -> Report:
    """Return an operation as JSON fields; rates refer to the corrected time `ms`."""
    op = line.op
    is_known = line.ms > 0 and (line.floor is None or line.bound is not None)
    return {
        "role": op.role,
        "phase": op.phase,
        "calls": op.calls,
        "measured_ms": spread(op.samples),
        "ms": line.ms,
        "share": line.ms / whole,
        "bytes": op.cost.nbytes,
        "flops": op.cost.flops,
        "gbs": op.cost.nbytes / line.ms / 1e6 if is_known else None,
        "gflops": op.cost.flops / line.ms / 1e6 if is_known else None,
        "bits": _bits(op, held),
        "bound": line.bound,
        "limit_ms": line.floor,
        "reached": line.reached,
        "gain_ms": line.gain,
    }


def _bits(op: Operation, held: Mapping[str, float]) -> float | None:
    """Return the bits per weight of the operation's first linear layer."""
    return held.get(op.role.split("+")[0])
