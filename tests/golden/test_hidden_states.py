"""Hidden states: the values of transformers' golden files, with the bits of every other pass, in any chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mlx_engine
from mlx_engine import research
from mlx_engine.backends.base import Backend
from mlx_engine.engine import Engine
from mlx_engine.errors import ContextLengthError, ModelError, OptionError
from mlx_engine.research import MEANINGS
from tests.contract.check import EMULATED
from tests.golden.goldens import BACKENDS, DATA, engine, first_divergence

# One of each kind of layer: windows and norms after, experts, shared experts, states, inputs of layers, layer norms.
KINDS = ("gemma3", "gemma4e", "gemma4moe", "gpt2", "gptoss", "lfm2", "qwen2moe", "qwen3_5", "qwen3_5moe")
IDS = [1, 5, 3, 2, 7, 5, 4]


def loaded(name: str, backend: str) -> Engine:
    return engine(DATA / f"{name}-micro" / "hf", backend)


def same(a: Any, b: Any) -> bool:
    return np.array_equal(np.asarray(a), np.asarray(b), equal_nan=True)


@pytest.mark.some(2)
@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != EMULATED])
def test_the_values_are_those_of_transformers(backend: str):
    folder = DATA / "llama-micro"
    with np.load(folder / "taps.npz") as arrays, np.load(folder / "golden.npz") as golden:
        expected = dict(arrays)
        ids = golden["prompt1"].tolist()[: len(expected["embed"])]
    found = engine(folder / "hf", backend).hidden_states(ids, "*")
    assert set(found) == {*expected, "logits"}
    assert first_divergence(expected, {name: np.asarray(values) for name, values in found.items()}) is None


@pytest.mark.some(2)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("backend", ["simd", "parallel", "scalar"])
def test_the_logits_have_the_bits_of_the_ordinary_pass(backend: str, name: str):
    model = loaded(name, backend)
    assert same(model.hidden_states(IDS, "logits")["logits"], model.logits(IDS))


@pytest.mark.some(2)
@pytest.mark.parametrize("name", KINDS)
def test_each_value_is_the_result_of_its_own_block(name: str, monkeypatch: pytest.MonkeyPatch):
    """What the composed form hands to the taps is what the fused block computes, but for the exceptions."""
    model, differences = loaded(name, "simd"), []

    def twice(composed: Callable[..., Any], fused: Callable[..., Any]) -> Callable[..., Any]:
        def block(self: Backend, *args: Any, **kwargs: Any) -> Any:
            beside, result = composed(self, *args, **kwargs), fused(*args, **kwargs)
            if fused.__name__ in ("norm_project", "project_norm", "project_add", "project_norm_add", "norm_head"):
                parts = zip(beside, result, strict=True) if isinstance(result, list) else [(beside, result)]
                differences.extend(fused.__name__ for a, b in parts if not same(a, b))
            return result

        return block

    monkeypatch.setattr("mlx_engine.backends.observed._twice", twice)
    model.hidden_states(IDS, "*")
    assert differences == []


@pytest.mark.some(2)
@pytest.mark.parametrize("name", KINDS)
def test_chunks_do_not_change_a_bit(name: str, monkeypatch: pytest.MonkeyPatch):
    """NumPy computes the delta rule, whose result alone has a name, inside of linear attention."""
    model = loaded(name, "simd")
    whole = model.hidden_states(IDS, "*")
    monkeypatch.setattr(research, "LONGEST_PASS", 3)
    pieces = model.hidden_states(IDS, "*")
    assert list(pieces) == list(whole) == [tap.name for tap in model.tap_names()]
    differ = {name for name, values in whole.items() if not same(values, pieces[name])}
    assert {name.split(".", 2)[-1] for name in differ} <= {"ssm_norm"}
    for name in differ:
        np.testing.assert_allclose(np.asarray(pieces[name]), np.asarray(whole[name]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", KINDS)
def test_every_value_is_listed_with_its_shape_and_meaning(name: str):
    model = loaded(name, "simd")
    taps, found = model.tap_names(), model.hidden_states(IDS, "*")
    assert {tap.name: (len(IDS), *tap.shape) for tap in taps} == {n: tuple(v.shape) for n, v in found.items()}
    assert {tap.name.split(".", 2)[-1] for tap in taps} <= set(MEANINGS)
    assert all(np.asarray(values).dtype == np.float32 for values in found.values())
    assert str(taps[1]).split()[1] == "(T,"


def test_names_are_patterns_and_text_is_a_prompt():
    with mlx_engine.load("builtin", backend="simd") as model:
        n, ids = model.config.n_layers, model.prompt_ids("Once upon")
        chosen = model.hidden_states("Once upon", ["blk.*.attn_out", "blk.0.*_rope"])
        assert list(chosen)[:3] == ["blk.0.q_rope", "blk.0.k_rope", "blk.0.attn_out"]
        assert len(chosen) == n + 2
        layers = model.hidden_states(ids)
        assert list(layers) == ["embed", *(f"blk.{i}.layer_out" for i in range(n))]
        with pytest.raises(OptionError, match=r"names: this model has no value 'blk\.\*\.attn_outs'; close are blk"):
            model.hidden_states(ids, ["blk.*.attn_outs"])
        with pytest.raises(ContextLengthError):
            model.hidden_states([1] * (model.config.context_length + 1))


def test_a_model_that_processes_share_is_refused(monkeypatch: pytest.MonkeyPatch):
    model = loaded("gemma3", "simd")
    monkeypatch.setattr(model.model, "is_shared", True, raising=False)
    with pytest.raises(ModelError, match="hidden states: expected a model that one process runs alone, found one that"):
        research.hidden_states(model.model, IDS, ["embed"])


def test_the_head_is_left_out_where_nobody_reads_it(monkeypatch: pytest.MonkeyPatch):
    model = loaded("gemma3", "simd")
    monkeypatch.setattr(type(model.model), "head", None)  # cannot be called
    assert list(model.hidden_states(IDS, "blk.1.layer_out")) == ["blk.1.layer_out"]
