"""One or two sentences to a line of the ranking: what it is bound by, and what could be done about it."""

from __future__ import annotations

from collections.abc import Mapping

from mlx_engine.bench.bottlenecks.gains import Line

# From this share of a limit on, an operation is at it: what is left is noise and the ends of calls.
NEAR = 0.9
# A job of fewer microseconds may be short beside its hand-out.
SHORT = 500
# A 4-bit block format, as bits per weight.
FOUR_BITS = 4.5


def between(n_calls: float, by_round: Mapping[str, float], *, lazy: bool) -> str:
    """Of the time that no operation has, whose spread from round to round is in ms."""
    what = "building the graph, handing it to the device and waiting for it" if lazy else "interpreter and hand-out"
    sure = f"{by_round['q1']:.3g} to {by_round['q3']:.3g} ms from round to round"
    return f"No operation has this time: {what} of {n_calls:,.0f} calls, {sure}. Fewer and larger calls gain it."


def advice(line: Line, bits: float | None) -> str:
    """Of an operation; `bits` per weight where it multiplies with any."""
    per_call = line.ms / line.op.calls * 1e3
    if line.floor is None:
        return f"No limit of this device is known: {line.op.calls:,.0f} calls of {per_call:,.0f} us."
    reached, mbytes = line.reached or 0.0, line.op.cost.nbytes / 1e6
    if line.bound == "calls":
        return (
            f"Next to nothing to read or to compute, yet {per_call:,.0f} us a call: faster code for it, or in one call "
            "with what stands next to it."
        )
    if line.bound == "arithmetic":
        more = (
            "only less of it helps" if reached >= NEAR else "the rest is for a kernel that keeps the registers busier"
        )
        return f"Arithmetic: {line.op.cost.flops / 1e9:,.1f} GFLOP at {reached:.0%} of the peak; {more}."
    text = f"Memory: {mbytes:,.1f} MB at {reached:.0%} of the read rate; "
    if bits is None:
        return text + (
            "only fewer bytes help." if reached >= NEAR else "what is done with them takes longer than that."
        )
    if reached >= NEAR:
        text += "only fewer bytes help."
    else:
        jobs = f", or handing out jobs of {per_call:,.0f} us" if per_call < SHORT else ""
        text += f"unpacking {bits:.1f}-bit weights takes longer{jobs}."
    if bits > FOUR_BITS + 1:
        text += f" In 4 bits the limit would be {line.floor * (1 - FOUR_BITS / bits):.2f} ms lower."
    return text
