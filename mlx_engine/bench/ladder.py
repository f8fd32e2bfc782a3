"""The ladder: its rungs, slowest first, and the speedup of each. Pure arithmetic on rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Rung:
    """A backend with its settings; each rung adds one optimisation to the previous one."""

    title: str
    backend: str
    kv: bool = True
    jit: bool = True


RUNGS = (
    Rung("scalar, no cache", "scalar", kv=False),
    Rung("scalar", "scalar"),
    Rung("simd, NumPy", "simd", jit=False),
    Rung("simd, compiled", "simd"),
    Rung("parallel", "parallel"),
    Rung("mlx", "mlx"),
    Rung("metal", "metal"),
    Rung("cuda", "cuda"),
)
# Suffix for the best rung measured without a cache, which is not a rung of its own.
NO_CACHE = ", no cache"


@dataclass(frozen=True)
class Step:
    """The speedup of one test by one change."""

    test: str
    old: str
    new: str
    weights: str | None
    factor: float
    estimated: bool

    @property
    def text(self) -> str:
        """The text `simd, compiled -> parallel (Q8_0) x1.90`, with ~ if a rate was estimated."""
        weights = f" ({self.weights})" if self.weights else ""
        return f"{self.old} -> {self.new}{weights} {'~' if self.estimated else ''}x{figure(self.factor)}"


def measured(rows: Sequence[Row]) -> list[Row]:
    """Return the rows whose throughput was measured."""
    return [row for row in rows if not row["unavailable"]]


def steps(rows: Sequence[Row], test: str) -> list[Step]:
    """Return the speedups of a test: from rung to rung for each type of weights, then from F32 to quantised weights.

    A rung that dequantises all weights to F32 counts for every type of weights.
    """
    cells: dict[str, dict[str, Row]] = {}
    for row in measured(rows):
        if row["test"] == test:
            cells.setdefault(row["rung"], {})[row["weights"]] = row
    found = []
    names = list(cells)
    for old, new in itertools.pairwise(names):
        for weights, row in cells[new].items():
            before = cells[old].get(weights) or cells[old].get("F32")
            if before is not None:
                kind = weights if len(cells[new]) > 1 or weights != "F32" else None
                found.append(_step(test, old, new, kind, before, row))
    for name, kinds in cells.items():
        found += [
            _step(test, f"{name}: F32", weights, None, kinds["F32"], row)
            for weights, row in kinds.items()
            if weights != "F32" and "F32" in kinds
        ]
    return found


def _step(test: str, old: str, new: str, weights: str | None, before: Row, after: Row) -> Step:
    estimated = bool(before["estimated"] or after["estimated"])
    return Step(test, old, new, weights, after["median_ts"] / before["median_ts"], estimated)


def tests(rows: Sequence[Row]) -> tuple[list[str], list[str]]:
    """Return the prefill and decode tests that the rungs have in common, shortest first."""
    of_rungs = [row for row in rows if not row["n_depth"] and row["rung"] in {rung.title for rung in RUNGS}]
    by_prompt = {row["test"]: row["n_prompt"] for row in of_rungs if row["n_prompt"] and not row["n_gen"]}
    counts = {row["test"]: len({r["rung"] for r in of_rungs if r["test"] == row["test"]}) for row in of_rungs}
    by_gen = {row["test"]: row["n_gen"] for row in of_rungs if row["n_gen"] and not row["n_prompt"]}
    most = max((counts[name] for name in by_gen), default=0)
    return sorted(by_prompt, key=lambda n: by_prompt[n]), [n for n in by_gen if counts[n] == most]


def figure(value: float) -> str:
    """Format a number with three significant digits."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"
