"""What is multiplied in one job is counted when a model is loaded, and told."""

from __future__ import annotations

from pathlib import Path

import pytest

import mlx_engine
from mlx_engine.backends.program import Fused
from tests.contract.check import BACKENDS, EMULATED, load
from tests.golden.convert import convert

DATA = Path(__file__).parents[1] / "data"
QWEN3 = DATA / "qwen3-micro" / "model-q8_0.gguf"
compiled = pytest.mark.parametrize("backend", [name for name in BACKENDS if name in ("simd", "parallel")])


@compiled
@pytest.mark.parametrize("name", ["gemma2", "gemma3", "llama", "mistral", "qwen2"])
def test_all_layers_with_a_gate_have_both(name: str, backend: str):
    pytest.importorskip("numba")
    engine = mlx_engine.load(DATA / f"{name}-micro" / "hf", backend)
    n = engine.config.n_layers
    assert engine.model.program.fused == Fused(gate_up=n, qkv=n)
    assert f"fused {n} gate+up pairs, {n} q,k,v triples" in engine.notes


@compiled
def test_without_a_gate_there_are_no_pairs(backend: str):
    pytest.importorskip("numba")
    assert mlx_engine.load(DATA / "gpt2-micro" / "hf", backend).model.program.fused == Fused(gate_up=0, qkv=3)


@pytest.mark.parametrize("backend", [name for name in BACKENDS if "--no-jit" in name or name in ("scalar", "mlx")])
def test_backends_that_multiply_one_by_one_say_nothing(backend: str):
    engine = load(backend, QWEN3)
    assert engine.model.program.fused == Fused()
    assert not [note for note in engine.notes if "fused" in note]


@pytest.mark.skipif(EMULATED not in BACKENDS, reason="there is no emulator here")
def test_metal_fuses_what_is_stored_in_q8_0_and_has_no_bias(tmp_path: Path):
    engine = load(EMULATED, QWEN3)
    assert engine.model.program.fused == Fused(gate_up=engine.config.n_layers, qkv=engine.config.n_layers)
    assert load(EMULATED, QWEN3.with_name("model-f32.gguf")).model.program.fused == Fused()
    # Its queries, keys and values have biases.
    convert(DATA / "qwen2-micro" / "hf", tmp_path / "qwen2.gguf", "Q8_0")
    assert load(EMULATED, tmp_path / "qwen2.gguf").model.program.fused == Fused(gate_up=3, qkv=0)
