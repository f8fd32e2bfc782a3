"""A whole model whose layers have sinks and soft caps: compiled programs, and every backend against `scalar`."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mlx_engine.backends import create_backend
from mlx_engine.backends.base import Backend
from mlx_engine.backends.batch import KVSpan, KVView
from mlx_engine.backends.numpy import simd
from mlx_engine.backends.numpy.simd import SimdBackend
from mlx_engine.backends.parameters import Scores
from mlx_engine.cache import SequenceInput
from mlx_engine.loop.forward import forward
from mlx_engine.quant import BY_NAME
from mlx_engine.quant.weight import Weight
from tests.contract.check import BACKENDS, load
from tests.golden.goldens import DATA

FILE = DATA / "qwen3-micro" / "model-f32.gguf"
IDS = np.random.default_rng(0).integers(0, 60, 14).tolist()


def with_sinks(backend: str, softcap: float | None = 3.0) -> Any:
    """Return a copy of a model whose layers have a soft cap, and sinks that differ from layer to layer."""
    model = copy.copy(load(backend, FILE).model)
    be, rng = model.backend, np.random.default_rng(1)
    changed = []
    for i, w in enumerate(model.layers):
        sinks = rng.standard_normal(model.config.n_heads).astype(np.float32) + 1
        with be.session():
            prepared = be.prepare(Weight.pack(f"blk.{i}.attn_sinks.weight", sinks, BY_NAME["F32"]))
        scores = replace(w.mix.scores, softcap=softcap, sinks=prepared)
        changed.append(w.with_mixers(lambda mixer, scores=scores: replace(mixer, scores=scores)))
    model.layers = changed
    model.run_on(be)  # compiles the layers again
    return model


def logits(model: Any) -> np.ndarray:
    """Return logits of a prompt of 12 tokens, and of two tokens after it."""
    kv = model.new_kv(16)
    with model.backend.session():
        rows = [forward(model, SequenceInput(ids, kv, wanted=None)) for ids in (IDS[:12], IDS[12:13], IDS[13:])]
        return np.concatenate([model.backend.host(row) for row in rows])


@pytest.mark.some(1)
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "scalar"])
def test_every_backend_has_the_logits_of_scalar(backend: str):
    want, found = logits(with_sinks("scalar")), logits(with_sinks(backend))
    assert np.linalg.norm(found - want) < 1e-5 * np.linalg.norm(want)
    assert np.abs(want - logits(load("scalar", FILE).model)).max() > 1e-2


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_compiled_program_has_the_bits_of_single_operations(softcap: float | None):
    pytest.importorskip("numba")
    from mlx_engine.backends.cpu.backend import CompiledProgram

    model = with_sinks("parallel", softcap)
    assert isinstance(model.program, CompiledProgram)
    found = logits(model)
    model.program = Backend.compile(model.backend, model.definition, model.width)
    np.testing.assert_array_equal(logits(model), found)


def test_sinks_of_the_wrong_number_are_refused():
    pytest.importorskip("numba")
    be, view = create_backend("simd"), KVView(np.zeros((2, 1, 4, 16), np.float32), 4, [KVSpan(np.zeros(1, int), 2, 1)])
    with be.session(), pytest.raises(ValueError, match=r"sinks must be \(2,\) of float32, not \(3,\) of float32"):
        be.attention(np.ones((1, 2, 16), np.float32), view, [1], Scores(1.0, None, np.zeros(3, np.float32)))


def test_a_chunk_of_heads_has_its_own_sinks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(simd, "WORTHWHILE", 1)
    rng = np.random.default_rng(2)
    store, q = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 3, 8, 16), (2, 6, 16)))
    view, scores = KVView(store, 8, [KVSpan(np.zeros(1, int), 8, 2)]), Scores(0.25, 2.0, np.arange(6, dtype=np.float32))
    found = create_backend("parallel", threads=2, jit=False).attention(q, view, [2], scores)
    np.testing.assert_allclose(found, SimdBackend().attention(q, view, [2], scores), rtol=1e-6)
