"""Prompts on emulated `metal` with float16 and bfloat16, by `simdgroup_matrix` and by `matmul2d`, in whole models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest

import mlx_engine
from kernels import emulator
from kernels.launch import counted
from mlx_engine.backends import VARIABLE
from mlx_engine.backends.experts import Routing
from mlx_engine.backends.metal import rounded
from mlx_engine.backends.mlx import experts
from mlx_engine.errors import OptionError
from mlx_engine.loop.memory import linears
from tests.contract.test_activations import ROUNDOFF
from tests.golden.test_activations import FOLDERS, MOST_ROUNDINGS, error_in_roundings
from tests.golden.test_table import mixed

pytestmark = pytest.mark.skipif(emulator.unavailable() is not None, reason=str(emulator.unavailable()))

# More than a tile of 64 rows, if the model's context has them; and fewer than the kernels of prompts take.
LONG = [(7 * i * i + 31 * i) % 60 for i in range(66)]
SHORT = LONG[:9]
WAYS = {"prompt_product": "off", "prompt_product_tensors": "on"}
SAMPLE = (("qwen3-micro", "f16", "prompt_product"), ("llama-micro", "bf16", "prompt_product_tensors"))
EVERY = [
    pytest.param(*cell, marks=[] if cell in SAMPLE else pytest.mark.slow)
    for cell in product(sorted(FOLDERS), ROUNDOFF, WAYS)
]


@cache
def loaded(source: Path) -> mlx_engine.Engine:
    return mlx_engine.load(source, "mlx", quant="q8_0", quant_min_dim=0)


@cache
def exact(source: Path) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the logits in float32, and the experts (T, C) that the routers of all layers choose."""
    chosen, route = list[np.ndarray](), experts.route

    def record(logits: mx.array, routing: Routing) -> tuple[mx.array, mx.array]:
        ids, weights = route(logits, routing)
        chosen.append(np.array(ids))
        return ids, weights

    with mock.patch.object(experts, "route", record):
        return np.asarray(loaded(source).logits(prompt(source))), chosen


def prompt(source: Path) -> list[int]:
    return LONG[: loaded(source).config.context_length]


@contextmanager
def routed_as(chosen: list[np.ndarray]) -> Iterator[None]:
    """Let routers choose these experts in the next forward pass, and weigh them by their own logits.

    Random weights make logits so close that rounding chooses other experts, whose outputs have nothing in common.
    """
    left, route = iter(chosen), experts.route

    def replay(logits: mx.array, routing: Routing) -> tuple[mx.array, mx.array]:
        ids = mx.array(next(left))
        bias = 1e3 * (ids[..., None] == mx.arange(logits.shape[1])).any(axis=1)
        found, weights = route(logits, replace(routing, bias=bias, groups=None))
        assert mx.array_equal(found, ids)
        return found, weights

    with mock.patch.object(experts, "route", replay):
        yield
    assert next(left, None) is None


@cache
def on_metal(source: Path, activations: str, way: str, quant: str = "q8_0") -> mlx_engine.Engine:
    with mock.patch.dict("os.environ", {VARIABLE: "emulate", rounded.VARIABLE: WAYS[way]}):
        engine = mlx_engine.load(source, "metal", quant=quant, quant_min_dim=0, activations=activations)
    engine.logits(LONG[: engine.config.context_length])  # each instantiation runs once on zeros
    return engine


@pytest.mark.some(1)
@pytest.mark.parametrize(("name", "activations", "way"), EVERY)
def test_prompts_of_every_architecture_are_rounded_a_few_times(name: str, activations: str, way: str) -> None:
    """Matrices are Q8_0, so that the kernels multiply them."""
    source = FOLDERS[name]
    expected, chosen = exact(source)
    engine = on_metal(source, activations, way)
    with counted() as launches, routed_as(chosen):
        found = np.asarray(engine.logits(prompt(source)))
    assert set(launches) == {way}
    assert 1 / 8 <= error_in_roundings(expected, found, activations) <= MOST_ROUNDINGS


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_each_product_of_a_layer_is_one_launch_for_a_prompt_and_none_of_ours_for_a_few_rows(way: str) -> None:
    """MLX's products, which these replace, are one dispatch each, too."""
    engine = on_metal(FOLDERS["qwen3-micro"], "f16", way)
    with counted() as launches:
        engine.logits(LONG)
    n_products = len(linears(engine.model.layers))
    assert n_products == 7 * engine.config.n_layers
    assert launches == {way: n_products + 1}  # and the head
    with counted() as launches:
        engine.logits(SHORT)
    assert launches == {}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["prompt_product_tensors", pytest.param("prompt_product", marks=pytest.mark.slow)])
@pytest.mark.parametrize("activations", ["f16", pytest.param("bf16", marks=pytest.mark.slow)])
def test_a_mix_of_types_is_multiplied_as_it_is_stored(way: str, activations: str, tmp_path: Path) -> None:
    """MLX's format has no Q6_K: with few rows our own kernel multiplies it, and reads what the file has."""
    stored, expanded = mixed("llama", tmp_path)
    reference = np.asarray(mlx_engine.load(expanded, "mlx").logits(LONG))
    engine = on_metal(stored, activations, way, "keep")
    model: Any = engine.model
    weights = [linear.weight for linear in linears([model.layers, model.output])]
    assert {type(weight) for weight in weights} == {rounded.PromptMatrix, rounded.StoredPromptMatrix}
    kept = [weight for weight in weights if isinstance(weight, rounded.StoredPromptMatrix)]
    assert all(256 * weight.nbytes == 210 * weight.shape[0] * weight.shape[1] for weight in kept)  # a file's bytes
    engine.logits(SHORT)  # each instantiation runs once on zeros
    for ids, launched in ((LONG, {way, "embed_rows"}), (SHORT, {"matvec", "embed_rows"})):
        with counted() as launches:
            found = np.asarray(engine.logits(ids))
        assert set(launches) == launched
        assert launches.get("matvec", len(kept)) == len(kept)  # MLX's product of floats is one dispatch, too
        assert 1 / 8 <= error_in_roundings(reference[: len(ids)], found, activations) <= MOST_ROUNDINGS


@pytest.mark.slow
def test_a_refused_kernel_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    engine = on_metal.__wrapped__(FOLDERS["qwen3-micro"], "f16", "prompt_product_tensors")
    engine.backend.prompts.refused["prompt_product_tensors"] = "no such header"  # type: ignore[attr-defined]
    with counted() as launches:
        engine.logits(LONG)
    assert set(launches) == {"prompt_product"}
    engine.backend.prompts.refused["prompt_product"] = "too many registers"  # type: ignore[attr-defined]
    with counted() as launches:
        engine.logits(LONG)
    assert launches == {}


def test_the_kernel_is_chosen_by_the_gpu_or_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounded, "has_accelerators", lambda: True)
    monkeypatch.delenv(rounded.VARIABLE, raising=False)
    assert rounded.uses_tensors("metal")
    assert not rounded.uses_tensors("emulator")
    monkeypatch.setenv(rounded.VARIABLE, "off")
    assert not rounded.uses_tensors("metal")
    monkeypatch.setenv(rounded.VARIABLE, "on")
    assert rounded.uses_tensors("emulator")
    monkeypatch.setenv(rounded.VARIABLE, "yes")
    with pytest.raises(OptionError, match="MLX_ENGINE_TENSORS must be 'on', 'off' or unset, not 'yes'"):
        rounded.uses_tensors("metal")
