"""The benchmark of several rows in one pass: its limit, and that every pass begins at the same place."""

from __future__ import annotations

import pytest

import mlx_engine
from benchmarks import rows
from mlx_engine.backends.batch import Batch


def test_the_limit_is_memory_for_few_rows_and_arithmetic_for_many():
    medians = {"1": 50.0, "4": 150.0, "512": 300.0}
    assert [rows.limit(medians, n) for n in (1, 4, 8, 512)] == [50, 200, 300, 300]


def test_passes_of_each_size_are_measured_behind_the_same_tokens(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("numba")
    engine = mlx_engine.load("builtin", "parallel", threads=1)
    forward, seen = engine.model.forward, []

    def watched(batch: Batch) -> object:
        seen.append((batch.positions[0], len(batch.ids)))
        return forward(batch)

    monkeypatch.setattr(engine.model, "forward", watched)
    monkeypatch.setattr(rows, "ROWS", (1, 3, 5))
    monkeypatch.setattr(rows, "ROUNDS", 2)
    found = rows.measure(engine)
    assert seen == [(0, rows.DEPTH), *[(rows.DEPTH, n) for _ in range(3) for n in (1, 3, 5)]]
    assert {n: len(rates) for n, rates in found["samples_ts"].items()} == {"1": 2, "3": 2, "5": 2}
