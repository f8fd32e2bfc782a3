"""Logits do not depend on how a prompt is cut into passes, on threads, or on the processor: bit for bit.

`simd` and `parallel` with compiled kernels. The order of summation that gives this is in `kernels/cpu/tile.py` and
`kernels/cpu/attention.py`.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba")

import mlx_engine
from mlx_engine.backends.base import Backend
from mlx_engine.backends.compiled import CompiledBackend
from mlx_engine.backends.parameters import Visible
from mlx_engine.backends.simd import SimdBackend
from tests.golden.goldens import DATA
from tests.golden.test_formats import random_weights, write

# Models of random blocks; "mixed" has matrices of several formats.
RANDOM = ("Q4_0", "Q4_K", "Q6_K", "mixed")
# By name: formats, and architectures. Gemma 3 has a window of 8 tokens, GPT-2 layer norms and biases.
STORED: dict[str, str | Path] = {
    "builtin": "builtin",
    "qwen3-F32": DATA / "qwen3-micro" / "model-f32.gguf",
    "qwen3-F16": DATA / "qwen3-micro" / "model-f16.gguf",
    "qwen3-Q8_0": DATA / "qwen3-micro" / "model-q8_0.gguf",
    "gemma3": DATA / "gemma3-micro" / "hf",
    "gpt2": DATA / "gpt2-micro" / "hf",
    "llama": DATA / "llama-micro" / "hf",
    "mistral": DATA / "mistral-micro" / "hf",
    "qwen2": DATA / "qwen2-micro" / "hf",
}
BACKENDS = [("parallel", 2), ("parallel", 1), ("simd", 1)]
# Tokens of a pass; beyond the prompt's length there is one pass.
PASSES = (1, 2, 3, 5, 7, 8, 9, 16, 77, 100, 1000)
# More than one block of keys, where a model's context allows it.
LENGTH = 150


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("same_bits")
    for name in RANDOM:
        write(made / f"{name}.gguf", random_weights(name), expanded=False, context=512)
    return made


@cache
def engine(source: str | Path, backend: str, threads: int, *, jit: bool = True) -> mlx_engine.Engine:
    return mlx_engine.load(source, backend, threads=threads, jit=jit)


def prompt(of: mlx_engine.Engine) -> list[int]:
    rng = np.random.default_rng(8)
    return [int(token) for token in rng.integers(0, of.config.vocab_size, min(LENGTH, of.config.context_length))]


def in_passes(of: mlx_engine.Engine, lengths: list[int]) -> np.ndarray:
    """Logits at every position of the prompt, which goes through a cache in passes of these lengths."""
    ids, model = prompt(of), of.model
    cached, edges = model.new_cache(len(ids)), [0, *itertools.accumulate(lengths)]
    with model.backend.session():
        parts = [model.forward(ids[a:b], cached, every=True) for a, b in itertools.pairwise(edges)]
        return np.concatenate([np.array(model.backend.host(part)) for part in parts])


def cut(n: int, by: int) -> list[int]:
    return [min(by, n - at) for at in range(0, n, by)]


def differing(of: mlx_engine.Engine, want: np.ndarray) -> list[int]:
    """The lengths of passes with which some bit is another one."""
    n = len(prompt(of))
    return [length for length in PASSES if not np.array_equal(in_passes(of, cut(n, length)), want)]


@pytest.mark.parametrize("name", [*STORED, *RANDOM])
def test_passes_of_any_length_on_any_number_of_threads(name: str, folder: Path):
    source = STORED.get(name, folder / f"{name}.gguf")
    want = np.asarray(engine(source, *BACKENDS[0]).logits(prompt(engine(source, *BACKENDS[0]))))
    assert np.isfinite(want).all()
    for backend, threads in BACKENDS:
        of = engine(source, backend, threads)
        assert isinstance(of.backend, CompiledBackend)
        assert differing(of, want) == [], f"{backend}, {threads} threads"


@pytest.mark.parametrize("name", ["builtin", "gemma3"])
def test_passes_of_mixed_lengths(name: str):
    """As a prefix, chunks of a prompt and single tokens follow each other."""
    of, rng = engine(STORED[name], *BACKENDS[0]), np.random.default_rng(2)
    want = in_passes(of, [LENGTH])
    for _ in range(5):
        edges = np.unique([0, LENGTH, *rng.integers(1, LENGTH, 12)])
        np.testing.assert_array_equal(in_passes(of, np.diff(edges).tolist()), want)


@pytest.mark.parametrize("name", RANDOM)
def test_stored_weights_give_the_bits_of_expanded_ones(name: str, folder: Path):
    expanded = folder / f"{name}-expanded.gguf"
    write(expanded, random_weights(name), expanded=True, context=512)
    stored, dense = engine(folder / f"{name}.gguf", *BACKENDS[0]), engine(expanded, *BACKENDS[0])
    for length in (1, 9, LENGTH):
        np.testing.assert_array_equal(in_passes(stored, cut(LENGTH, length)), in_passes(dense, cut(LENGTH, length)))


# ---- an order that depends on the pass is seen ----


def test_products_of_numpy_are_seen():
    """BLAS adds up a row alone otherwise than among others."""
    plain = engine("builtin", "simd", 1, jit=False)
    assert 1 in differing(plain, in_passes(plain, [LENGTH]))


def test_attention_of_numpy_in_large_passes_is_seen(monkeypatch: pytest.MonkeyPatch):
    of = engine("builtin", *BACKENDS[0])
    want = in_passes(of, [LENGTH])
    monkeypatch.setattr(CompiledBackend, "attention", SimdBackend.attention)
    monkeypatch.setattr(of.model, "program", Backend.compile(of.backend, of.model.definition))
    assert set(differing(of, want)) >= {77, 100, 1000}


def test_blocks_of_keys_that_begin_at_a_slot_are_seen(monkeypatch: pytest.MonkeyPatch):
    """Every second call counts blocks from one position later, as if a cache forgot a token that it has dropped."""
    of, attention, calls = engine("builtin", *BACKENDS[0]), CompiledBackend.attention, itertools.count()
    want = in_passes(of, [LENGTH])

    def shifted(self: CompiledBackend, q: np.ndarray, seen: Visible, scale: float) -> np.ndarray:
        return attention(self, q, replace(seen, first=seen.first + next(calls) % 2), scale)

    monkeypatch.setattr(CompiledBackend, "attention", shifted)
    monkeypatch.setattr(of.model, "program", Backend.compile(of.backend, of.model.definition))
    assert set(differing(of, want)) >= {77, 100, 1000}


# ---- on another processor ----


def digest() -> str:
    """Return the digest of all logits of three models, in passes of 1, 8 and all tokens.

    `test_cpu_library.py`, where the kernels are compiled for another processor, compares it between the two.
    """
    found = hashlib.sha256()
    for name in ("builtin", "qwen3-Q8_0", "gemma3"):
        of = engine(STORED[name], *BACKENDS[0])
        for length in (1, 8, LENGTH):
            found.update(in_passes(of, cut(LENGTH, length)).tobytes())
    return found.hexdigest()
