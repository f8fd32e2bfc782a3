"""The ladder: its rungs, slowest first, and which of them moved a rate by how much. Pure arithmetic on rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Rung:
    """One way to compute a model; each differs from the one before by one idea."""

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
# Behind the title of the best rung when it is measured without a cache, which is no rung of its own.
NO_CACHE = ", no cache"


@dataclass(frozen=True)
class Step:
    """What one change did to the rate of one test."""

    test: str
    old: str
    new: str
    weights: str | None
    factor: float
    estimated: bool

    @property
    def text(self) -> str:
        """`simd, compiled -> parallel (Q8_0) x1.90`, with ~ where a rate was estimated."""
        weights = f" ({self.weights})" if self.weights else ""
        return f"{self.old} -> {self.new}{weights} {'~' if self.estimated else ''}x{figure(self.factor)}"


def measured(rows: Sequence[Row]) -> list[Row]:
    """Those that have a rate."""
    return [row for row in rows if not row["unavailable"]]


def steps(rows: Sequence[Row], test: str) -> list[Step]:
    """Every change that was measured with this test: from rung to rung for each kind of weights, then of the weights.

    A rung that expands all weights to F32 stands for every kind of weights.
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
    """The names of the prefill tests and of the decode tests, shortest first, that the rungs have in common."""
    of_rungs = [row for row in rows if not row["n_depth"] and row["rung"] in {rung.title for rung in RUNGS}]
    by_prompt = {row["test"]: row["n_prompt"] for row in of_rungs if row["n_prompt"] and not row["n_gen"]}
    counts = {row["test"]: len({r["rung"] for r in of_rungs if r["test"] == row["test"]}) for row in of_rungs}
    by_gen = {row["test"]: row["n_gen"] for row in of_rungs if row["n_gen"] and not row["n_prompt"]}
    most = max((counts[name] for name in by_gen), default=0)
    return sorted(by_prompt, key=lambda n: by_prompt[n]), [n for n in by_gen if counts[n] == most]


def figure(value: float) -> str:
    """Three digits that mean something."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"
