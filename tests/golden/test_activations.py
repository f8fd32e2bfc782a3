"""Logits of every architecture with rounded activations: i16 on `simd`, and f16 and bf16 on `mlx`."""

import copy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlx_engine
from mlx_engine.backends import VARIABLE, create_backend
from mlx_engine.backends.observed import tapped
from mlx_engine.backends.parameters import Linear
from mlx_engine.cache import SequenceInput
from mlx_engine.errors import NotFiniteError
from mlx_engine.loop.forward import forward
from mlx_engine.quant import BY_NAME
from mlx_engine.quant.weight import Weight
from tests.contract.test_activations import DTYPES, ROUNDOFF
from tests.decoding import greedy_ids, prefill
from tests.golden.goldens import DATA, GOLDENS, relative_errors

# The largest relative error of the logits in fixed point.
MOST_FIXED = 5e-4
# The largest error of the logits in roundings of the type. A rounding of a number is at most 1, and about 0.4 in the
# root mean square; weights, inputs and outputs of all products are rounded.
MOST_ROUNDINGS = 8
FOLDERS = {folder.parent.name: folder for folder in sorted(DATA.glob("*/hf"))}
# Random weights make the router's logits so close that rounding chooses other experts.
ROUTES_OTHERWISE = ("afmoe-micro", "gptoss-micro", "hunyuanmoe-micro")
IDS = [5, 9, 30, 17, 2, 44, 8, 21, 3]
ROUNDING = pytest.mark.parametrize("activations", ROUNDOFF)


@cache
def engine(source: Path, activations: str) -> mlx_engine.Engine:
    return mlx_engine.load(source, "mlx", activations=activations)


@cache
def logits(source: Path, activations: str) -> np.ndarray:
    return np.asarray(engine(source, activations).logits(IDS))


def error_in_roundings(expected: np.ndarray, found: np.ndarray, activations: str) -> float:
    return float(np.sqrt(np.mean(relative_errors(expected, found) ** 2))) / ROUNDOFF[activations]


@pytest.mark.slow
@ROUNDING
def test_logits_of_every_architecture_are_rounded_a_few_times(activations: str):
    errors = {
        name: error_in_roundings(logits(folder, "f32"), logits(folder, activations), activations)
        for name, folder in FOLDERS.items()
        if name not in ROUTES_OTHERWISE
    }
    assert len(errors) > 20
    assert {name: error for name, error in errors.items() if not 1 / 8 <= error <= MOST_ROUNDINGS} == {}


@pytest.mark.slow
@ROUNDING
def test_almost_all_tokens_are_the_most_likely_ones_of_float32(activations: str):
    pairs = [(logits(folder, "f32"), logits(folder, activations)) for folder in FOLDERS.values()]
    agree = np.concatenate([exact.argmax(-1) == rounded.argmax(-1) for exact, rounded in pairs])
    assert agree.mean() >= (0.98 if activations == "f16" else 0.95)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "activations"), [("mlx", "f16"), ("mlx", "bf16"), ("metal", "bf16")])
def test_a_greedy_text_takes_the_most_likely_token_of_float32_or_one_as_likely(
    backend: str, activations: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(VARIABLE, "emulate")
    prompt, rounded = "Once upon a time", mlx_engine.load("builtin", backend, activations=activations)
    chosen = rounded.generate(prompt, 48, ignore_eos=True).token_ids
    ids = [*rounded.prompt_ids(prompt), *chosen]
    rows = np.asarray(mlx_engine.load("builtin", "mlx").logits(ids[:-1]))[-len(chosen) :]
    behind = rows.max(-1) - rows[np.arange(len(chosen)), list(chosen)]
    assert behind.max() <= 8 * ROUNDOFF[activations] * np.abs(rows).max()
    assert (behind == 0).mean() >= 0.9


@pytest.mark.some(3)
@ROUNDING
@pytest.mark.parametrize("golden", [g for g in GOLDENS if g.name in ("mha", "mqa-q8_0", "micro-q8_0")], ids=str)
def test_logits_agree_with_another_program(golden: Any, activations: str):
    found = np.asarray(engine(golden.checkpoint, activations).logits(golden.prompt(0)))
    assert error_in_roundings(golden.logits(0), found, activations) <= MOST_ROUNDINGS


@pytest.mark.some(1)
@ROUNDING
def test_no_value_between_layers_becomes_float32(activations: str):
    """An operation whose result is float32 by mistake makes all products after it float32, too."""
    wrong: dict[str, str] = {}
    for folder in FOLDERS.values():
        model = copy.copy(engine(folder, activations).model)

        def tap(name: str, x: Any, folder: Path = folder) -> None:
            if x.dtype != DTYPES[activations]:
                wrong[f"{folder.parent.name} {name}"] = str(x.dtype)

        model.run_on(tapped(model.backend, tap))
        with model.backend.session():
            forward(model, SequenceInput(IDS, model.scratch_kv(len(IDS)), wanted=None))
    assert wrong == {}


@ROUNDING
@pytest.mark.parametrize("chunk", [1, 4])
def test_a_chunked_prompt_is_the_same_within_roundings(activations: str, chunk: int):
    """MLX's order of sums depends on the number of rows: bits are not promised, in float32 neither."""
    source = FOLDERS["qwen3-micro"]
    model = engine(source, activations).model
    with model.backend.session():
        found = model.backend.host(prefill(model, IDS, model.new_kv(16), chunk=chunk))
    assert error_in_roundings(logits(source, activations)[-1:], found, activations) <= MOST_ROUNDINGS


@ROUNDING
def test_keys_and_values_have_the_type_and_half_the_bytes(activations: str):
    exact, rounded = (engine(FOLDERS["qwen3-micro"], name).model for name in ("f32", activations))
    stores = rounded.new_pool(128).stores.layers
    assert {store.dtype for store in stores} == {DTYPES[activations]}
    assert 2 * rounded.new_pool(128).nbytes == exact.new_pool(128).nbytes
    assert 2 * sum(rounded.new_pool(128).page_nbytes) == sum(exact.new_pool(128).page_nbytes)


def test_float16_that_overflows_is_an_error_and_bfloat16_is_not():
    loaded = {name: mlx_engine.load(FOLDERS["qwen3-micro"], "mlx", activations=name) for name in ROUNDOFF}
    for each in loaded.values():
        table: Any = each.model
        table.token_embd = table.token_embd * 1e7
    assert np.isfinite(np.asarray(loaded["bf16"].logits(IDS))).all()
    with pytest.raises(NotFiniteError, match="embed"):
        loaded["f16"].logits(IDS)


# ---- i16 ----


@cache
def quantised(folder: Path, activations: str) -> mlx_engine.Engine:
    return mlx_engine.load(folder, "simd", quant="q8_0", quant_min_dim=0, activations=activations)


def relative_error(expected: np.ndarray, found: np.ndarray) -> float:
    return float(np.sqrt(np.mean(relative_errors(expected, found) ** 2)))


def test_fixed_point_is_within_5e_4_in_every_architecture_and_chooses_the_same_tokens():
    """An error below 1e-6 would be that of float32."""
    errors = dict[str, float]()
    for folder in FOLDERS.values():
        exact, found = (np.asarray(quantised(folder, name).logits(IDS)) for name in ("f32", "i16"))
        errors[folder.parent.name] = relative_error(exact, found)
        assert np.array_equal(exact.argmax(-1), found.argmax(-1)), folder
    assert len(errors) > 20
    assert {name: error for name, error in errors.items() if not 1e-6 < error < MOST_FIXED} == {}


@pytest.mark.parametrize("golden", [g for g in GOLDENS if g.name in ("mqa-q8_0", "micro-q8_0")], ids=str)
def test_fixed_point_agrees_with_another_program(golden: Any):
    loaded = mlx_engine.load(golden.checkpoint, "simd", activations="i16")
    for i in range(golden.prompts()):
        assert 1e-6 < relative_error(golden.logits(i), np.asarray(loaded.logits(golden.prompt(i)))) < MOST_FIXED
        assert greedy_ids(loaded.model, golden.prompt(i), len(golden.greedy(i)), kv=True) == golden.greedy(i)


def test_float_matrices_keep_float32_arithmetic():
    golden = next(g for g in GOLDENS if g.name == "micro-f32")
    exact, found = (mlx_engine.load(golden.checkpoint, "simd", activations=name) for name in ("f32", "i16"))
    assert np.array_equal(*(np.asarray(each.logits(golden.prompt(0))) for each in (exact, found)))


def test_a_long_prompt_in_fixed_point_has_the_bits_of_its_chunks():
    """A program's scratch memory holds all packed rows of a pass."""
    loaded = mlx_engine.load("builtin", "simd", activations="i16")
    ids = [(7 * i * i + 31 * i) % 2000 for i in range(300)]
    with loaded.backend.session():
        whole, chunked = (
            np.array(loaded.backend.host(prefill(loaded.model, ids, loaded.model.new_kv(300), chunk=chunk)))
            for chunk in (300, 60)
        )
    assert np.isfinite(whole).all()
    assert np.array_equal(whole, chunked)


@pytest.mark.parametrize("type_", ["Q8_0", "Q4_K"])
def test_an_outlier_of_1000_takes_digits_from_the_others_of_its_block(type_: str):
    """docs/precision.md has the figures: relative to the products, and to what they are without the outlier."""
    rng = np.random.default_rng(0)
    weight = Weight.pack("w", rng.standard_normal((256, 1024)).astype(np.float32), BY_NAME[type_])
    x, at = rng.standard_normal((64, 1024)).astype(np.float32), (np.arange(64), rng.integers(0, 1024, 64))
    x[at] = 1000
    rest, w = x.astype(np.float64), weight.dequantize().astype(np.float64)
    exact = rest @ w.T
    rest[at] = 0
    be = create_backend("simd", activations="i16")
    with be.session():
        y = be.host(be.linear(be.as_activations(x), Linear("w", be.prepare(weight))))
    error = np.linalg.norm(y - exact)
    assert error / np.linalg.norm(exact) == pytest.approx(4.9e-5, rel=0.05)
    assert error / np.linalg.norm(rest @ w.T) == pytest.approx(1.54e-3, rel=0.05)
