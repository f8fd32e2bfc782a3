"""A kernel that is refused is replaced by MLX's operations, once and aloud; a kernel that is wrong is not."""

from __future__ import annotations

import dataclasses
import importlib
import logging
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from kernels import emulator
from kernels.emulator import MemoryFaultError
from kernels.launch import counted
from mlx_engine.backends.metal import kernels as metal_kernels
from mlx_engine.backends.metal.backend import MetalBackend
from mlx_engine.backends.metal.kernels import Kernels
from mlx_engine.backends.metal.weights import split
from mlx_engine.cache import SequenceInput
from mlx_engine.checkpoint.model_files import open_checkpoint
from mlx_engine.loop.forward import forward
from mlx_engine.quant import BY_NAME
from mlx_engine.quant.weight import Weight
from mlx_engine.weights.model import load_model
from tests.contract.check import EMULATED, load
from tests.contract.check import backend as shared

pytestmark = pytest.mark.skipif(emulator.unavailable() is not None, reason=str(emulator.unavailable()))

MICRO = Path(__file__).parents[1] / "data" / "qwen3-micro" / "model-q8_0.gguf"
NAMES = ("embed_rows", "norm_qkv", "head_norm_rope", "project_add", "norm_gate_up", "norm_project", "norm_rows")
TOKENS = list(range(9))


def plant(monkeypatch, name: str, source: str) -> None:
    """Another text for a kernel."""
    module = importlib.import_module(f"kernels.metal.{name}")
    monkeypatch.setattr(module, "KERNEL", dataclasses.replace(module.KERNEL, source=source))


def run(model) -> list[np.ndarray]:
    """Nine tokens at once, for the kernels for many, then one more."""
    be, kv = model.backend, model.new_kv(10)
    with be.session():
        return [be.host(forward(model, SequenceInput(ids, kv))) for ids in (TOKENS, [1])]


@pytest.fixture(scope="module")
def wanted() -> list[np.ndarray]:
    shared(EMULATED)
    return run(load(EMULATED, MICRO).model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["norm_qkv", *(pytest.param(n, marks=pytest.mark.slow) for n in NAMES if n != "norm_qkv")]
)
def test_a_kernel_that_does_not_compile_is_replaced_and_the_rest_is_not(monkeypatch, caplog, wanted, name: str):
    plant(monkeypatch, name, "this is no kernel;")
    model = load_model(open_checkpoint(MICRO), MetalBackend("emulator"))
    with caplog.at_level(logging.WARNING), counted() as counts:
        found = run(model)
        found_again = run(model)
    for want, got, again in zip(wanted, found, found_again, strict=True):
        assert np.linalg.norm(got - want) < 2e-6 * np.linalg.norm(want)
        np.testing.assert_array_equal(got, again)
    assert list(model.backend.kernels.refused) == [name]
    (record,) = caplog.records
    assert name in record.getMessage()
    assert "does not compile" in record.getMessage()
    assert counts[name] == 1  # the attempt
    assert set(counts) >= set(NAMES) - {name}


@pytest.mark.slow
@pytest.mark.usefixtures("many_cores")
def test_what_is_refused_is_known_when_the_model_is_loaded(monkeypatch, caplog):
    load(EMULATED, MICRO)
    plant(monkeypatch, "norm_gate_up", "nor is this;")
    with caplog.at_level(logging.WARNING):
        engine = load(EMULATED, MICRO)
    assert list(engine.backend.kernels.refused) == ["norm_gate_up"]
    assert len(caplog.records) == 1


def test_a_kernel_that_reads_beyond_its_inputs_is_no_refusal(monkeypatch):
    plant(monkeypatch, "embed_rows", "y[thread_position_in_grid.x] = float(ws[1 << 24]) + float(wq[0] + ids[0]);")
    with pytest.raises(MemoryFaultError, match="embed_rows"):
        load(EMULATED, MICRO)


@pytest.mark.parametrize("executor", ["metal", "cuda"])
@pytest.mark.parametrize("error", [RuntimeError("Unable to build metal library"), ValueError("Thread group size")])
def test_what_a_gpu_says_is_a_refusal(monkeypatch, caplog, executor, error: Exception):
    """On a GPU, errors show when a result is looked at; the attempt looks."""
    calls = []

    def matvec(x, weight, *, dtype=None, tuning=None):
        calls.append(x)
        raise error

    monkeypatch.setattr(metal_kernels, "matvec", matvec)
    kernels = Kernels(executor)
    weight = Weight.pack("w", np.ones((5, 32)), BY_NAME["Q8_0"])
    matrix, want = split(weight, kernels), weight.dequantize().sum(axis=1)
    with caplog.at_level(logging.WARNING):
        for n in (1, 1, 2):
            y = matrix.multiply(mx.ones((n, 32)))
            np.testing.assert_allclose(np.asarray(y), np.tile(want, (n, 1)), rtol=1e-6)
    assert len(calls) == len(caplog.records) == 1
    assert kernels.refused == {"matvec": str(error)}


def test_an_attempt_asks_for_nothing_that_a_graph_promises(monkeypatch):
    """What is tried are zeros: the graph so far is neither evaluated, nor blamed for its own errors."""
    seen = []

    def matvec(x, weight, *, dtype=None, tuning=None):
        seen.append(x)
        return mx.zeros((len(x), 5))

    monkeypatch.setattr(metal_kernels, "matvec", matvec)
    matrix = split(Weight.pack("w", np.ones((5, 32)), BY_NAME["Q8_0"]), Kernels("emulator"))

    def promised(x: mx.array) -> mx.array:
        return matrix.multiply(x * 2)

    mx.export_function(lambda node: None, promised, mx.ones((1, 32)))  # fails if anybody looks
    assert len(seen) == 2
    assert not np.asarray(seen[0]).any()
