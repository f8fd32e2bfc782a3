"""How the figures of a report were made, and the command that makes them again."""

from __future__ import annotations

import shlex
from typing import Any

Report = dict[str, Any]

# Options of the command by the name of the setting.
OPTIONS = {
    "model": "--model", "backend": "--backend", "quant": "--quant", "quant_min_dim": "--quant-min-dim",
    "threads": "--threads", "n_prompt": "-p", "n_gen": "-n", "depth": "--depth", "repetitions": "-r",
    "budget": "--budget",
}  # fmt: skip


def command(settings: Report) -> str:
    """The exact command."""
    given = [(OPTIONS[name], value) for name, value in settings.items() if name in OPTIONS and value is not None]
    given += [("--quant-layer", f"{name}={quant}") for name, quant in settings["quant_layers"].items()]
    return shlex.join(["python", "cli.py", "report", *(str(word) for pair in given for word in pair)])


def method(report: Report) -> str:
    """What was run, what was left out, and how the limits were taken."""
    at, rounds = report["settings"], report["rounds"]
    excluded = (
        "a first round is not counted" if rounds > 1 or at["repetitions"] == 1 else "there was time for one alone"
    )
    limits = (
        "The limits are the medians of samples between all runs: a kernel that only reads, over the bytes that a pass "
        "multiplies with, and multiplications and additions in registers, both on as many threads as the backend has."
        if report["limits"] is not None
        else "The device's limits are not known here, and none are assumed."
    )
    lines = [
        f"{rounds} rounds, {excluded}. Each is a plain run, as `generate` runs it, and one that is taken apart: every "
        "operation has a stopwatch, layers run operation by operation, and a lazy backend waits for each.",
        "Whole passes are the medians of the plain runs; the first pass, prefill, is never mixed into decode, and "
        "every decode step counts.",
        "Operations are the medians of the passes that were taken apart. As they take longer together than the plain "
        "step does, the same time is taken off each call, until the sum is that of the plain step: at most twice "
        "what the median call takes beyond its limit, and nothing that would bring one below it. Calls of prefill lose "
        "as much.",
        "Bytes are each input once and the result once; operations are multiplications and additions, those of "
        "attention where something is visible.",
        "At the limit an operation takes as long as its bytes take to read or its arithmetic to do, whichever is "
        "longer; its gain is the rest of its time. What is in the processor's cache can be read faster than that.",
        limits,
        "Tokens are random, end tokens are ignored, and text is not tokenised.",
    ]
    again = f"```sh\n{command(at)}\n```"
    return "\n".join(f"- {line}" for line in lines) + f"\n\nAgain:\n\n{again}"
