"""The method section of a report, and the command that reproduces it."""

from __future__ import annotations

import shlex
from typing import Any

Report = dict[str, Any]

# The command-line option of each setting.
OPTIONS = {
    "model": "--model", "backend": "--backend", "quant": "--quant", "quant_min_dim": "--quant-min-dim",
    "threads": "--threads", "n_prompt": "-p", "n_gen": "-n", "depth": "--depth", "repetitions": "-r",
    "budget": "--budget",
}  # fmt: skip


def command(settings: Report) -> str:
    """Return the command that reproduces the report."""
    given = [(OPTIONS[name], value) for name, value in settings.items() if name in OPTIONS and value is not None]
    given += [("--quant-layer", f"{name}={quant}") for name, quant in settings["quant_layers"].items()]
    given += [("--allow-setting", name) for name in settings.get("allow_settings", ())]
    return shlex.join(["python", "cli.py", "report", *(str(word) for pair in given for word in pair)])


def method(report: Report) -> str:
    """Describe what was run, what is excluded, and how the limits were measured."""
    at, rounds = report["settings"], report["rounds"]
    excluded = "after a warm-up round" if rounds > 1 or at["repetitions"] == 1 else "the budget allowed only one"
    limits = (
        "The limits are medians of samples between all runs: memory bandwidth of a kernel that only reads the model's "
        "matrices, and multiply-adds in registers, both on as many threads as the backend has."
        if report["limits"] is not None
        else "The device's limits are unknown, and none are assumed."
    )
    lines = [
        *report.get("notes", ()),
        f"{rounds} rounds, {excluded}. Each is a plain run, as in `generate`, and a profiled run: every operation is "
        "timed, layers run operation by operation, and a lazy backend waits for each operation.",
        "Whole passes are medians of the plain runs; prefill and decode are reported separately, and every decode step "
        "counts.",
        "Operations are medians of the profiled passes. Together they take longer than the plain step, so the same "
        "time is subtracted from each call until their sum equals the plain step: at most twice the median call's time "
        "beyond its limit, and no operation gets below its limit. The same time is subtracted from calls of prefill.",
        "Bytes count each input and the result once; operations are multiplications and additions, in attention only "
        "for visible keys.",
        "At the limit, an operation takes the time to read its bytes or the time of its arithmetic, whichever is "
        "longer; its gain is the rest of its time. Data in the processor's cache can be read faster than this limit.",
        limits,
        "Tokens are random, end tokens are ignored, and text is not tokenised.",
    ]
    again = f"```sh\n{command(at)}\n```"
    return "\n".join(f"- {line}" for line in lines) + f"\n\nTo reproduce:\n\n{again}"
