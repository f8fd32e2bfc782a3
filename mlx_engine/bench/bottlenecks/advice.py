"""Word the advice for a line of the ranking: what bounds the operation, and what would make it faster."""

from __future__ import annotations

from collections.abc import Mapping

from mlx_engine.bench.bottlenecks.gains import Line

# From this share of a limit on, an operation counts as at the limit: the rest is noise and the ends of calls.
NEAR = 0.9
# For a job shorter than this in microseconds, dispatching it to the threads may dominate.
SHORT = 500
# Bits per weight of a 4-bit block format.
FOUR_BITS = 4.5


def between(n_calls: float, by_round: Mapping[str, float], *, lazy: bool) -> str:
    """Return the advice for the time between operations. `by_round` is its spread over the rounds, in ms."""
    what = "building the graph, submitting it to the device and waiting" if lazy else "interpreter and dispatch"
    sure = f"{by_round['q1']:.3g} to {by_round['q3']:.3g} ms from round to round"
    return f"Time outside of operations: {what} of {n_calls:,.0f} calls, {sure}. Fewer and larger calls reduce it."


def advice(line: Line, bits: float | None) -> str:
    """Return the advice for an operation; `bits` per weight if it reads a weight matrix."""
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
        jobs = f", or dispatching jobs of {per_call:,.0f} us" if per_call < SHORT else ""
        text += f"unpacking {bits:.1f}-bit weights takes longer{jobs}."
    if bits > FOUR_BITS + 1:
        text += f" In 4 bits the limit would be {line.floor * (1 - FOUR_BITS / bits):.2f} ms lower."
    return text
