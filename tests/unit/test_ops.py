"""Operation by operation: only the call is timed, and the page says what was found."""

from __future__ import annotations

import math

import numpy as np
import pytest

import mlx_engine
from benchmarks import ops, sections
from benchmarks.ops import Call, operations, recorded, seconds_per_call
from mlx_engine.backends.numpy.simd import SimdBackend
from tests.contract.cases import CASES, OpCase
from tests.golden.goldens import DATA

BE = SimdBackend()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_case_calls_its_operation_and_can_be_repeated(case: OpCase):
    calls = recorded(case, BE)
    assert calls
    assert {call.op for call in calls} == {case.op}
    with BE.session():
        for call in calls:
            call.on(BE)


def test_building_the_inputs_is_not_timed():
    built = []

    def slow(be, rng):
        built.append("an input")
        return be.silu(be.array(np.ones((1, 4))))

    calls = recorded(OpCase("silu", "slow", slow), BE)
    samples = seconds_per_call(BE, calls, samples=3)
    assert len(built) == 1
    assert len(samples) == 3


def test_a_sample_is_the_mean_of_calls_that_together_take_long_enough():
    now = [0.0]

    class Slow(SimdBackend):
        def add(self, a, b):
            now[0] += a

    calls = [Call("add", (0.0002, None), {}), Call("add", (0.0004, None), {})]
    assert seconds_per_call(Slow(), calls, clock=lambda: now[0], samples=2) == pytest.approx([0.0003, 0.0003])


def test_a_lazy_backend_is_waited_for():
    class Lazy(SimdBackend):
        lazy = True
        waited = 0

        def wait(self, x):
            self.waited += 1

    be = Lazy()
    Call("silu", (np.ones((1, 2), dtype=np.float32),), {}).on(be)
    assert be.waited == 1


def test_sizes_count_what_an_operation_has_to_do(monkeypatch):
    monkeypatch.setattr(ops, "MANY", 8)
    monkeypatch.setattr(ops, "DEPTH", 40)
    engine = mlx_engine.load(DATA / "qwen3-micro" / "model-q8_0.gguf", "simd", jit=False)
    found = {item.label: item for item in operations(engine)}
    assert len(found) == 16
    for item in found.values():
        assert item.flops > 0
        assert item.nbytes > 0
        for call in item.calls:
            call.on(engine.backend)
    gate = found["linear, ffn_gate, T=8"]
    assert gate.flops == 2 * 8 * 160 * 64
    assert gate.nbytes == 4 * (160 * 64 + 8 * 160 + 8 * 64)
    # 4 heads of 32; keys and values of 2 heads.
    assert found["attention, 40 tokens, T=1"].flops == 4 * 4 * 32 * 40
    assert found["attention, 40 tokens, T=8"].flops == 4 * 4 * 32 * (8 * 40 - 28)
    assert found["attention, 40 tokens, T=1"].nbytes == 2 * 4 * 2 * 32 * 40 + 2 * 4 * 4 * 32
    assert len({id(call.args[1].store) for call in found["attention, 40 tokens, T=1"].calls}) == 4


COMMON = {
    "time": "2026-01-02", "commit": "abc", "versions": {"mlx-engine": "1"},
    "machine": {"processor": "P", "cores": 2, "memory_bytes": 2**34, "system": "S"},
}  # fmt: skip


def cases_row(backend: str, *microseconds: float, when: str = "2026-01-02"):
    found = [{"id": f"op-{i}", "seconds": [us * 1e-6] * 3} for i, us in enumerate(microseconds)]
    return {**COMMON, "time": when, "kind": "cases", "backend": backend, "found": found}


def test_the_page_has_the_newest_cases_with_their_factor_over_scalar():
    rows = [cases_row("scalar", 1, 1, when="2026-01-01"), cases_row("scalar", 40, 90), cases_row("simd", 10, 2.5)]
    text = sections.operations(rows)
    assert f"| simd | 6.25 | 10 | {math.sqrt(4 * 36):.3g} |" in text
    assert "| op-1 | 90 | 2.5 (x36) |" in text
    assert "Operations of a model's size" not in text


def test_the_page_has_rates_of_the_sizes():
    entry = {"label": "linear", "flops": 4e9, "nbytes": 1e9, "seconds": [0.5, 0.25, 0.1]}
    text = sections.operations([{**COMMON, "kind": "sizes", "backend": "simd", "found": [entry]}])
    assert "| linear | 250,000 | 4 | 16 |" in text
