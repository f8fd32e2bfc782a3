"""Types of keys and values: rounding, whole models, and bits that depend on nothing but the numbers that are stored."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlx_engine
from mlx_engine.backends import create_backend, kv_type_of
from mlx_engine.cache.pool import KVLayer
from mlx_engine.errors import OptionError
from mlx_engine.quant import key_values
from tests.golden.goldens import DATA

MICRO = DATA / "qwen3-micro" / "model-q8_0.gguf"
ROUNDED = ("f16", "bf16", "q8_0")
# Relative errors of the logits of the built-in model; measured ones are less than half of these.
LARGEST_ERROR = {"f16": 4e-4, "bf16": 4e-3, "q8_0": 8e-3}


def written(be: Any, k: np.ndarray, v: np.ndarray, slots: np.ndarray, n_slots: int) -> np.ndarray:
    """Return a store (2, G, slots, row) after a write; slots that are not written hold zeros."""
    with be.session():
        store = be.kv_empty(k.shape[1], k.shape[2], n_slots)
        store = be.kv_write(store, np.arange(n_slots), *[be.array(np.zeros((n_slots, *k.shape[1:])))] * 2)
        store = be.kv_write(store, slots, be.array(k), be.array(v))
        return np.array(store)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), type_=st.sampled_from(ROUNDED), n=st.integers(1, 40))
def test_compiled_kernels_and_mlx_round_as_numpy_does(seed, type_, n):
    """Numbers of every size, whole blocks of zeros, subnormal ones, infinities; slots in random order."""
    rng = np.random.default_rng(seed)
    exponents = rng.uniform(-44, 38, (2, n, 2, 1))
    with np.errstate(over="ignore"):
        k, v = (rng.standard_normal((2, n, 2, 64)) * 10.0**exponents).astype(np.float32)
    k[0, 0, :32], k[n // 2, 1, 3] = 0, np.inf
    slots = rng.permutation(50)[:n].astype(np.int64)
    by_numpy, compiled = (create_backend("simd", jit=jit, kv_type=type_) for jit in (False, True))
    expected, found = (written(be, k, v, slots, 50) for be in (by_numpy, compiled))
    np.testing.assert_array_equal(found.view(np.uint8), expected.view(np.uint8))
    if type_ != "bf16":  # NumPy has no bfloat16 of MLX; devices may flush subnormal numbers
        k, v = (np.clip(x, -1e4, 1e4) * (abs(x) > 1e-3) for x in (k, v))
        expected, found = (written(be, k, v, slots, 50) for be in (by_numpy, create_backend("mlx", kv_type=type_)))
        np.testing.assert_array_equal(found.view(np.uint8), expected.view(np.uint8))


def test_bfloat16_is_rounded_to_the_nearest_even_number_and_nan_stays():
    x = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, np.nan, np.inf, -3.3e38, 0.0, -1e-40] * 2, np.float32)
    found = key_values.expanded(key_values.stored(x, "bf16"), "bf16")
    np.testing.assert_array_equal(found[:3], np.array([1, 1, 1 + 2**-6], np.float32))
    assert np.isnan(found[3])
    assert found[4] == np.inf


@pytest.mark.some(1)
@pytest.mark.parametrize("type_", ROUNDED)
def test_answers_depend_on_neither_batch_nor_threads_nor_pieces_of_the_prompt(type_):
    prompts = ["Once upon a time", "The cat " * 90, "One day, a girl named Lily went to the park " * 3]
    how: dict[str, Any] = {"max_tokens": 8, "temperature": 0.8, "seed": 3}
    with mlx_engine.load("builtin", "simd", kv_type=type_) as engine:
        alone = [engine.generate(prompt, **how).token_ids for prompt in prompts]
        logits = engine.logits(engine.tokenizer.encode(prompts[1]))
    with mlx_engine.load("builtin", "parallel", threads=3, kv_type=type_) as engine:
        together = [run.token_ids for run in engine.generate_batch(prompts, **how)]
        np.testing.assert_array_equal(engine.logits(engine.tokenizer.encode(prompts[1])), logits)
    assert together == alone


def test_types_proposals_and_prefixes_on_disk_change_no_bit_together(tmp_path):
    """Cold, with proposed tokens, and with a prefix that an earlier engine wrote."""
    text = "The cat sat on the mat. The dog sat on the log. " * 12 + "The cat"
    how: dict[str, Any] = {"kv_type": "q8_0", "activations": "i16"}
    found, cached = [], []
    for more in ({}, {"speculate": "lookup", "prefix_dir": tmp_path}, {"speculate": "lookup", "prefix_dir": tmp_path}):
        with mlx_engine.load("builtin", "parallel", **how, **more) as engine:
            run = engine.generate(text, max_tokens=24, logprobs=0)
            sampled = engine.generate_batch([text, text[:200]], max_tokens=12, temperature=0.8, seed=5, logprobs=0)
            found.append([each.digest for each in (run, *sampled)])
            cached.append(run.n_cached)
    assert found[1:] == found[:1] * 2
    assert cached == [0, 0, 128]


@pytest.mark.some(1)
@pytest.mark.parametrize(("backend", "jit"), [("simd", True), ("simd", False), ("mlx", True), ("scalar", True)])
@pytest.mark.parametrize("type_", ROUNDED)
def test_logits_are_as_far_from_float32_as_the_type_rounds(backend, jit, type_):
    source = "builtin" if backend != "scalar" else MICRO
    with mlx_engine.load(source, "simd") as exact, mlx_engine.load(source, backend, jit=jit, kv_type=type_) as rounded:
        ids = exact.tokenizer.encode("Once upon a time there was a dog")[: 64 if backend != "scalar" else 6]
        expected, found = (np.asarray(engine.logits(ids), np.float64) for engine in (exact, rounded))
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    # A small model with random weights amplifies rounding more.
    assert 1e-6 < error <= LARGEST_ERROR[type_] * (1 if source == "builtin" else 3)


def test_the_default_goes_with_the_activations():
    assert [kv_type_of(name) for name in ("f32", "i16", "f16", "bf16")] == ["f32", "f32", "f16", "bf16"]
    assert kv_type_of("bf16", "f32") == "f32"
    be = create_backend("mlx", activations="bf16", kv_type="q8_0")
    assert be.description == f"mlx ({be.device}), activations bf16, keys and values q8_0"
    assert create_backend("simd", kv_type="f32").description == "simd (cpu)"


def test_bytes_of_a_token():
    sizes = {type_: KVLayer(2, 64, None, type_).token_nbytes for type_ in ("f32", "f16", "bf16", "q8_0")}
    assert sizes == {"f32": 1024, "f16": 512, "bf16": 512, "q8_0": 272}
    with mlx_engine.load("builtin", "simd", kv_type="q8_0") as engine:
        stores = engine.model.new_pool(64).stores.layers
        assert sum(store.nbytes for store in stores) == 64 * sum(of.token_nbytes for of in engine.model.kv_layers)


def test_what_does_not_fit_is_refused():
    with pytest.raises(OptionError, match="kv_type must be f32, f16, bf16 or q8_0, not 'q4'"):
        mlx_engine.load("builtin", "simd", kv_type="q4")
    with pytest.raises(OptionError, match="q8_0 stores keys and values in blocks of 32 elements of a head, and"):
        mlx_engine.load(DATA / "qwen3-mha", "simd", kv_type="q8_0")
