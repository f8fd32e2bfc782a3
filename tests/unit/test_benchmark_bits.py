"""The benchmark of bits: every way to read the prompt is read, and different results are seen."""

from __future__ import annotations

import pytest

import mlx_engine
from benchmarks import bits


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    few = {"LENGTH": 20, "CHUNKS": (1, 7, 20), "PAGES": (16,), "SEQUENCES": (1, 2)}
    for name, value in few.items():
        monkeypatch.setattr(bits, name, value)


@pytest.mark.slow
def test_compiled_kernels_have_one_result():
    pytest.importorskip("numba")
    found = list(bits.results(mlx_engine.load("builtin", "parallel", threads=1)))
    assert [(way["chunk"], way["sequences"]) for way in found] == [(1, 1), (1, 2), (7, 1), (7, 2), (20, 1), (20, 2)]
    assert len(bits.distinct([{"found": found}])) == 1


@pytest.mark.slow
def test_an_order_that_depends_on_the_pass_is_seen():
    found = list(bits.results(mlx_engine.load("builtin", "simd", jit=False)))
    assert len(bits.distinct([{"found": found}])) > 1
