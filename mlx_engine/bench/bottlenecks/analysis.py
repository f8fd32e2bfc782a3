"""Run profiled passes and analyse them: times per operation and layer, the machine's limits, possible gains, advice.

Times are in milliseconds. A span is the measured time of one call of an operation. An operation's time at the limit is
the time to read its bytes at the memory bandwidth or the time of its arithmetic at the peak, whichever is longer. Its
gain is its corrected time (see below) minus its time at the limit. A call's excess is its measured time minus its time
at the limit.

In a profiled pass, each operation is a separate call from Python, and the weights have evicted the interpreter from the
CPU caches before each call. So the operations together take longer than a plain pass (one without profiling). To
correct for this, the same time is subtracted from every call, but no operation is reduced below its limit. The
subtracted time is chosen so that the operations of a decode step add up to a plain step. It is at most twice the median
excess of a call, so that the correction does not hide that an operation is slow for another reason. The time found for
decode is also subtracted from each call of prefill. No time is computed from prefill itself, because its calls are few
and long, and their excess is mostly noise.
"""

from __future__ import annotations

import copy
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_engine.backends.observed import profiled
from mlx_engine.bench.cells import TimedTest
from mlx_engine.bench.samples import Test
from mlx_engine.engine import Engine
from mlx_engine.loop.metrics import Metrics
from mlx_engine.observe.profiler import Cost, Profiler, Span

# The parts of a pass, by which `Span.phase` groups operations. The "phases" of a report are decode and prefill instead.
PHASES = ("embedding", "layers", "norm", "projection", "sampling")


@dataclass
class Operation:
    """An operation in the profiled passes: all calls with the same role.

    Attributes:
        role: the names of the linear layers that are multiplied, such as "attn_q+k+v", or else the operation's name.
        phase: one of `PHASES`.
        samples: for each pass, the milliseconds of all calls of this operation.
        n_calls: number of calls in all passes.
        needed: the cost (FLOPs and bytes) of the calls in all passes.
    """

    role: str
    phase: str
    samples: list[float]
    n_calls: int = 0
    needed: Cost = field(default_factory=Cost)

    @property
    def ms(self) -> float:
        """Median milliseconds per pass."""
        return statistics.median(self.samples)

    @property
    def calls(self) -> float:
        """Calls per pass."""
        return self.n_calls / len(self.samples)

    @property
    def cost(self) -> Cost:
        """Cost per pass."""
        return Cost(self.needed.flops / len(self.samples), self.needed.nbytes / len(self.samples))


def spread(samples: Sequence[float]) -> dict[str, float | int]:
    """Return median, quartiles, extremes and number of samples."""
    several = len(samples) > 1
    q1, _, q3 = statistics.quantiles(samples, n=4, method="inclusive") if several else [samples[0]] * 3
    return {
        "median": statistics.median(samples), "q1": q1, "q3": q3, "min": min(samples), "max": max(samples),
        "n": len(samples),
    }  # fmt: skip


def operations(passes: Sequence[Pass]) -> list[Operation]:
    """Return the operations of passes of one kind (all decode or all prefill), in the order of their first call."""
    found: dict[str, Operation] = {}
    for i, taken in enumerate(passes):
        for span in taken.spans:
            # Backends compute the norm before the head with different operations, which all get the role "output_norm".
            # The block `norm_head`, which contains the norm and the head, keeps its own role.
            role = "output_norm" if span.phase == "norm" and span.op != "norm_head" else span.role
            op = found.setdefault(role, Operation(role, span.phase, [0.0] * len(passes)))
            op.samples[i] += span.own * 1e3
            op.n_calls += 1
            op.needed += span.cost
    return list(found.values())


def phases(taken: Pass) -> dict[str, float]:
    """Return the milliseconds of each of `PHASES`, of all operations ("sum"), and of the profiled pass ("watched")."""
    found = dict.fromkeys(PHASES, 0.0)
    for span in taken.spans:
        found[span.phase] += span.own * 1e3
    return {**found, "sum": sum(found.values()), "watched": taken.seconds * 1e3}


def layers(passes: Sequence[Pass]) -> list[dict[str, float]]:
    """For each layer, return the median milliseconds over all passes: of attention, of feed-forward, and of both.

    `jitter` is the layer's time in its slowest pass divided by its time in its fastest pass.
    """
    halves: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for taken in passes:
        of: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for span in taken.spans:
            if span.layer is not None:
                of[span.layer][is_feed_forward(span)] += span.own * 1e3
        for layer, (attention, feed_forward) in of.items():
            halves[layer].append((attention, feed_forward))
    return [_layer(layer, halves[layer]) for layer in sorted(halves)]


def _layer(layer: int, halves: Sequence[tuple[float, float]]) -> dict[str, float]:
    whole = [sum(both) for both in halves]
    return {
        "layer": layer,
        "attention": statistics.median(both[0] for both in halves),
        "feed_forward": statistics.median(both[1] for both in halves),
        "ms": statistics.median(whole),
        "min": min(whole),
        "max": max(whole),
        "jitter": max(whole) / min(whole) if min(whole) > 0 else 0.0,
    }


def is_feed_forward(span: Span) -> bool:
    """Return whether a span belongs to the FFN half of its layer."""
    return span.part.startswith(("ffn", "post_ffw"))


# In the ranking, the role of the row for the time outside of operations.
BETWEEN = "between operations"
# The largest time to subtract from a call, as a multiple of the median excess of a call.
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
    """The times of an operation in milliseconds per pass.

    Attributes:
        measured: the median of the profiled passes.
        ms: the corrected time: `measured` without profiling overhead.
        floor: the time at the machine's limit, or None if the limit is unknown.
        bound: "memory" or "arithmetic"; "calls" if `floor` is less than a tenth (`CALLS`) of `ms`; None if the limit is
            unknown, or the correction reduced the time to the limit.
    """

    op: Operation
    measured: float
    ms: float
    floor: float | None
    bound: str | None

    @property
    def gain(self) -> float | None:
        """The milliseconds that would be saved if the operation ran at the limit."""
        return None if self.floor is None else max(0.0, self.ms - self.floor)

    @property
    def reached(self) -> float | None:
        """The time at the limit divided by `ms`; None if `bound` is None."""
        return None if self.floor is None or self.bound is None or self.ms <= 0 else self.floor / self.ms


# If the time at the limit is less than this share of the corrected time, the operation is bound by call overhead.
CALLS = 0.1


def lines_of(ops: Sequence[Operation], limits: Limits | None, off: float) -> list[Line]:
    """Return the times of every operation, with `off` ms subtracted from each of its calls."""
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


def overhead_per_call(ops: Sequence[Operation], limits: Limits | None, too_much: float) -> float:
    """Return the milliseconds to subtract from every call.

    `too_much` is the sum of the operations minus the time of a plain pass, in milliseconds.
    """
    pairs = zip(ops, floors(ops, limits), strict=True)
    excess = sorted((max(0.0, op.ms - floor) / op.calls, op.calls) for op, floor in pairs)
    off, calls = 0.0, sum(n for _, n in excess)
    if too_much <= 0:
        return 0.0
    for most, n in excess:
        # `most` is an operation's excess per call; operations are in ascending order of `most`. If a total reduction of
        # at most `most` per remaining call is enough, the loop ends. Otherwise each remaining call is reduced by `most`
        # in total: the calls of this operation are then at their limit, so only later operations are reduced further.
        if too_much <= (most - off) * calls:
            off += too_much / calls
            break
        too_much, off, calls = too_much - (most - off) * calls, most, calls - n
    return min(off, UNUSUAL * _usual(excess))


def _usual(excess: Sequence[tuple[float, float]]) -> float:
    """Return the median of all calls' excess; `excess` has (excess per call, number of calls), in ascending order."""
    half, counted = sum(n for _, n in excess) / 2, 0.0
    for ms, n in excess:
        counted += n
        if counted >= half:
            return ms
    return 0.0


def ranked(
    found: Sequence[Line], whole: float, between: float, *, is_sure: bool = True
) -> list[dict[str, float | str | None]]:
    """Rank operations and the time between them by gain, or by time if the limits are unknown.

    A row's share is its gain (or time) divided by `whole` ms. `between` is the ms between operations. If `is_sure` is
    false, `between` may be noise: if the limits are known, its gain is set to 0.
    """
    rows: list[dict[str, float | str | None]] = [
        {"role": line.op.role, "ms": line.ms, "limit_ms": line.floor, "gain_ms": line.gain} for line in found
    ]
    is_limited = all(line.floor is not None for line in found)
    limit, gain = (0.0, between if is_sure else 0.0) if is_limited else (None, None)
    rows.append({"role": BETWEEN, "ms": between, "limit_ms": limit, "gain_ms": gain})
    for row in rows:
        row["share"] = gain_of(row) / whole
    return sorted(rows, key=gain_of, reverse=True)


def gain_of(row: dict[str, float | str | None]) -> float:
    """Return the gain of a row of the ranking, or its time if the limits are unknown."""
    gain = row["ms"] if row["gain_ms"] is None else row["gain_ms"]
    return float(gain or 0.0)


# If an operation reaches this share of a limit, it is regarded as running at the limit.
NEAR = 0.9
# If a call takes fewer microseconds than this, the time to dispatch its jobs to threads may dominate.
SHORT = 500
# Bits per weight of a 4-bit block format.
FOUR_BITS = 4.5


def between(n_calls: float, by_round: Mapping[str, float], *, lazy: bool) -> str:
    """Return the advice for the time between operations; `by_round` is this time's `spread` over the rounds, in ms."""
    what = "building the graph, submitting it to the device and waiting" if lazy else "interpreter and dispatch"
    sure = f"{by_round['q1']:.3g} to {by_round['q3']:.3g} ms from round to round"
    end = "Fewer and larger calls reduce it." if by_round["q1"] > 0 else "It may be noise."
    return f"Time outside of operations: {what} of {n_calls:,.0f} calls, {sure}. {end}"


def advice(line: Line, bits: float | None) -> str:
    """Return the advice for an operation; `bits` are its bits per weight, None if it reads no weight matrix."""
    per_call = line.ms / line.op.calls * 1e3
    if line.floor is None:
        return f"The limits of this device are unknown: {line.op.calls:,.0f} calls of {per_call:,.0f} us."
    reached, mbytes = line.reached or 0.0, line.op.cost.nbytes / 1e6
    if line.bound == "calls":
        return (
            f"Little to read or to compute, yet {per_call:,.0f} us per call: write faster code for it, or fuse it with "
            "a neighbouring operation."
        )
    if line.bound == "arithmetic":
        more = (
            "only fewer operations help" if reached >= NEAR else "a kernel with better register use would gain the rest"
        )
        return f"Arithmetic: {line.op.cost.flops / 1e9:,.1f} GFLOP at {reached:.0%} of the peak; {more}."
    text = f"Memory: {mbytes:,.1f} MB at {reached:.0%} of the memory bandwidth; "
    if bits is None:
        return text + ("only fewer bytes help." if reached >= NEAR else "computing takes longer than reading.")
    if reached >= NEAR:
        text += "only fewer bytes help."
    else:
        jobs = f" or dispatching jobs of {per_call:,.0f} us" if per_call < SHORT else ""
        text += f"unpacking {bits:.1f}-bit weights{jobs} takes longer than reading."
    if bits > FOUR_BITS + 1:
        text += f" In 4 bits the limit would be {line.floor * (1 - FOUR_BITS / bits):.2f} ms lower."
    return text


Report = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """All passes of one kind (decode or prefill), by round: profiled passes, and the milliseconds of plain passes."""

    profiled: Sequence[Sequence[Pass]]
    plain: Sequence[Sequence[float]]

    @property
    def whole(self) -> float:
        """Median milliseconds of a plain pass."""
        return statistics.median(ms for passes in self.plain for ms in passes)

    def operations(self) -> list[Operation]:
        """Return the operations of the profiled passes."""
        return operations([taken for passes in self.profiled for taken in passes])

    def beyond(self) -> list[float]:
        """For each round, return the median ms of plain passes minus the median ms of all operations of a pass."""
        sums = [statistics.median(phases(taken)["sum"] for taken in passes) for passes in self.profiled]
        return [statistics.median(plain) - ms for plain, ms in zip(self.plain, sums, strict=True)]


def kinds(rounds: Sequence[Round]) -> dict[str, Kind]:
    """Group the passes into decode steps (if any) and prefill."""
    found = {}
    if len(rounds[0].profiled) > 1:
        plain = [[seconds * 1e3 for seconds in round_.plain.passes[1:]] for round_ in rounds]
        found["decode"] = Kind([round_.profiled[1:] for round_ in rounds], plain)
    plain = [[round_.plain.passes[0] * 1e3] for round_ in rounds]
    return {**found, "prefill": Kind([round_.profiled[:1] for round_ in rounds], plain)}


def profiling_overhead(found: Mapping[str, Kind], limits: Limits | None) -> float:
    """Return the profiling overhead per call in ms, determined from decode; 0 without decode steps."""
    decode = found.get("decode")
    if decode is None:
        return 0.0
    return overhead_per_call(decode.operations(), limits, too_much=-statistics.median(decode.beyond()))


def phase(kind: Kind, limits: Limits | None, off: float, held: Mapping[str, float], *, lazy: bool) -> Report:
    """Return the entry in the report's "phases" for the passes of this kind, decode or prefill.

    `off` is the milliseconds to subtract from every call; `held` maps roles to bits per weight.
    """
    ops, passes = kind.operations(), [taken for passes in kind.profiled for taken in passes]
    lines = lines_of(ops, limits, off)
    n_calls = sum(op.calls for op in ops)
    taken_off = sum(line.measured - line.ms for line in lines)
    rest = spread([ms + taken_off for ms in kind.beyond()])
    says = {line.op.role: advice(line, _bits(line.op, held)) for line in lines}
    says[BETWEEN] = between(n_calls, rest, lazy=lazy)
    left = kind.whole - sum(line.ms for line in lines)
    # Shares are relative to the plain pass or to the sum of the operations, whichever is longer, so that no share
    # exceeds 100%.
    longer = max(kind.whole, kind.whole - left)
    ranking = ranked(lines, longer, max(0.0, left), is_sure=rest["q1"] > 0)
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
        "layers": layers(passes),
    }


def parts(lines: Iterable[Line]) -> dict[str, float]:
    """Return the corrected milliseconds of each of `PHASES`."""
    found = dict.fromkeys(PHASES, 0.0)
    for line in lines:
        found[line.op.phase] += line.ms
    return found


def operation(line: Line, whole: float, held: Mapping[str, float]) -> Report:
    """Return an operation as JSON fields; shares and rates refer to the corrected time `ms`."""
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
    """Return the bits per weight of the operation's first linear layer, or None if it has no linear layer."""
    return held.get(op.role.split("+")[0])


Clock = Callable[[], float]


@dataclass(frozen=True)
class Pass:
    """A profiled pass: its spans, and its total seconds, including profiling."""

    spans: Sequence[Span]
    seconds: float


@dataclass(frozen=True)
class Round:
    """A plain run and a profiled run. The first pass of each run is prefill."""

    plain: Metrics
    profiled: Sequence[Pass]


def measure(
    engine: Engine,
    test: Test,
    repetitions: int,
    *,
    budget: float | None = None,
    between: Callable[[], None] = lambda: None,
    progress: Callable[[int, int], None] = lambda done, of: None,
    clock: Clock = time.perf_counter,
) -> list[Round]:
    """Run a warm-up round, then `repetitions` rounds. Start no round that would probably end after `budget` seconds.

    The warm-up round is always run. Return it only if the budget allows no other round; otherwise return the others.
    `between` is called before every run and after the last one.
    """
    ids = random.Random(0).choices(range(engine.config.vocab_size), k=test.depth + test.n_prompt)
    start, rounds = time.perf_counter(), list[Round]()
    progress(0, repetitions + 1)
    while len(rounds) <= repetitions:
        between()
        plain = run_plain(engine, test, ids, clock)
        between()
        rounds.append(Round(plain, run_profiled(engine, test, ids, clock)))
        progress(len(rounds), repetitions + 1)
        spent = time.perf_counter() - start
        if budget is not None and spent + spent / len(rounds) > budget:
            break
    between()
    return rounds[1:] or rounds


def run_plain(engine: Engine, test: Test, ids: Sequence[int], clock: Clock) -> Metrics:
    """Run the test as `generate` does, without profiling."""
    with engine.backend.session():
        return TimedTest(engine.model, test, ids, clock=clock).run()


def run_profiled(engine: Engine, test: Test, ids: Sequence[int], clock: Clock) -> list[Pass]:
    """Run the test, with every operation timed."""
    profiler = Profiler(clock, keep=True)
    model = copy.copy(engine.model)
    model.run_on(profiled(engine.backend, profiler))
    found = list[Pass]()
    with model.backend.session():
        timed = TimedTest(model, test, ids, clock=clock)
        profiler.take_spans()  # discard the spans of the passes over the test's context
        while not timed.request.has_ended:
            timed.step()
            if timed.n_passes > len(found):
                found.append(Pass(profiler.take_spans(), timed.request.metrics.passes[-1]))
    return found
