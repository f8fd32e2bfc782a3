"""Mutants of what measures and of the command line."""

from tests.mutants.plant import Mutant

MUTANTS = [
    Mutant(
        "scores where nothing is visible",
        "mlx_engine/backends/costs.py",
        "_n_pairs",
        "whole * most + rest * most - rest * (rest + 1) // 2",
        "whole * most + rest * most",
    ),
    Mutant(
        "a factor of the new to the old",
        "mlx_engine/bench/bottlenecks/against.py",
        "line",
        'f"x{figure(before / after)}"',
        'f"x{figure(after / before)}"',
    ),
    Mutant(
        "calls of all passes",
        "mlx_engine/bench/bottlenecks/apart.py",
        "Operation.calls",
        "self.n_calls / len(self.samples)",
        "self.n_calls",
    ),
    Mutant("the weaker of two limits counts", "mlx_engine/bench/bottlenecks/gains.py", "Limits.floor", "max", "min"),
    Mutant(
        "all of the time is a gain",
        "mlx_engine/bench/bottlenecks/gains.py",
        "Line.gain",
        "max(0.0, self.ms - self.floor)",
        "self.ms",
    ),
    Mutant(
        "the share of the limit upside down",
        "mlx_engine/bench/bottlenecks/gains.py",
        "Line.reached",
        "self.floor / self.ms",
        "self.ms / self.floor",
    ),
    Mutant(
        "a slow operation is taken for slow calls",
        "mlx_engine/bench/bottlenecks/gains.py",
        "off_every_call",
        "min(off, UNUSUAL * _usual(beyond))",
        "off",
    ),
    Mutant(
        "operations below their limit",
        "mlx_engine/bench/bottlenecks/gains.py",
        "_line",
        "max(op.ms - off * op.calls, min(op.ms, floor))",
        "op.ms - off * op.calls",
    ),
    Mutant(
        "what takes longest is first",
        "mlx_engine/bench/bottlenecks/gains.py",
        "gain_of",
        'row["ms"] if row["gain_ms"] is None else row["gain_ms"]',
        'row["ms"]',
    ),
    Mutant(
        "chance is a bottleneck",
        "mlx_engine/bench/bottlenecks/kinds.py",
        "phase",
        'left if rest["q1"] > 0 else 0.0',
        "left",
    ),
    Mutant(
        "the sum of operations is another round's",
        "mlx_engine/bench/bottlenecks/kinds.py",
        "Kind.beyond",
        "zip(self.plain, sums, strict=True)",
        "zip(self.plain, reversed(sums), strict=True)",
    ),
    Mutant(
        "blank lines are prompts",
        "mlx_engine/commands/prompts.py",
        "PromptOptions.read",
        '[line for line in text.replace("\\r\\n", "\\n").split("\\n") if line.strip()]',
        '[line for line in text.replace("\\r\\n", "\\n").split("\\n")]',
    ),
    Mutant(
        "blocks count what their primitives do",
        "mlx_engine/observe/profiler.py",
        "Profiler.record",
        "cost.without(span.counted)",
        "cost",
    ),
]
