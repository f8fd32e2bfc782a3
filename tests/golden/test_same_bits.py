"""Logits are bit-identical for any chunking, batch, page layout, number of threads and processor.

`simd` and `parallel` with compiled kernels. The order of summation that gives this is in `tile.py` and
`attention.py` of kernels/cpu.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba")

import mlx_engine
from mlx_engine.backends.base import Backend
from mlx_engine.backends.batch import KVSpan, KVView
from mlx_engine.backends.cpu.backend import CompiledBackend
from mlx_engine.backends.numpy.simd import SimdBackend
from mlx_engine.backends.parameters import Scores
from mlx_engine.cache import SequenceInput
from mlx_engine.loop.forward import forward
from tests.golden.goldens import DATA
from tests.golden.test_formats import random_weights, write

# Models of random blocks; the mixed ones have matrices of several formats.
RANDOM = ("Q4_0", "Q4_K", "Q6_K", "mixed", "mixed K", "mixed 32")
# By name: formats and architectures. Gemma 2 to 4 have a sliding window of 8 tokens, Gemma 2 soft caps, Gemma 4 layers
# that share keys and values or experts beside the FFN, GPT-2 layer norms and biases.
STORED: dict[str, str | Path] = {
    "builtin": "builtin",
    "qwen3-F32": DATA / "qwen3-micro" / "model-f32.gguf",
    "qwen3-F16": DATA / "qwen3-micro" / "model-f16.gguf",
    "qwen3-Q8_0": DATA / "qwen3-micro" / "model-q8_0.gguf",
    "gemma2": DATA / "gemma2-micro" / "hf",
    "gemma3": DATA / "gemma3-micro" / "hf",
    "gemma4": DATA / "gemma4-micro" / "hf",
    "gemma4e": DATA / "gemma4e-micro" / "hf",
    "gemma4moe": DATA / "gemma4moe-micro" / "hf",
    "gpt2": DATA / "gpt2-micro" / "hf",
    "llama": DATA / "llama-micro" / "hf",
    "mistral": DATA / "mistral-micro" / "hf",
    "qwen2": DATA / "qwen2-micro" / "hf",
    "mlx-4bit": DATA / "mlx-4bit" / "hf",
    "mlx-mixed": DATA / "mlx-mixed" / "hf",
}
BACKENDS = [("parallel", 2), ("parallel", 1), ("simd", 1)]
# Chunk lengths; a length beyond the prompt's means one pass. By default one thread has a part of them.
PASSES = (1, 2, 3, 5, 7, 8, 9, 16, 77, 100, 1000)
PART = {("parallel", 2): PASSES, ("parallel", 1): (1, 9), ("simd", 1): (5, 1000)}
# More than one block of keys, where a model's context allows it.
LENGTH = 150
pytestmark = pytest.mark.usefixtures("many_cores")


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


def in_passes(of: mlx_engine.Engine, lengths: list[int], **options: int) -> np.ndarray:
    """Return logits at every position, computed in passes of these lengths; the options are those of the pool."""
    ids, model = prompt(of), of.model
    kv, edges = model.new_kv(len(ids), **options), [0, *itertools.accumulate(lengths)]
    with model.backend.session():
        parts = [forward(model, SequenceInput(ids[a:b], kv, wanted=None)) for a, b in itertools.pairwise(edges)]
        return np.concatenate([np.array(model.backend.host(part)) for part in parts])


def cut(n: int, by: int) -> list[int]:
    return [min(by, n - at) for at in range(0, n, by)]


def differing(of: mlx_engine.Engine, want: np.ndarray, lengths: Sequence[int] = PASSES) -> list[int]:
    """Return the chunk lengths for which a bit differs."""
    n = len(prompt(of))
    return [length for length in lengths if not np.array_equal(in_passes(of, cut(n, length)), want)]


@pytest.mark.some(2)
@pytest.mark.parametrize("name", [*STORED, *RANDOM])
def test_passes_of_any_length_on_any_number_of_threads(name: str, folder: Path):
    source = STORED.get(name, folder / f"{name}.gguf")
    want = np.asarray(engine(source, *BACKENDS[0]).logits(prompt(engine(source, *BACKENDS[0]))))
    assert np.isfinite(want).all()
    for (backend, threads), lengths in PART.items():
        of = engine(source, backend, threads)
        assert isinstance(of.backend, CompiledBackend)
        assert differing(of, want, lengths) == [], f"{backend}, {threads} threads"


@pytest.mark.slow
@pytest.mark.parametrize("name", [*STORED, *RANDOM])
def test_passes_of_every_length_on_one_thread(name: str, folder: Path):
    source = STORED.get(name, folder / f"{name}.gguf")
    want = np.asarray(engine(source, *BACKENDS[0]).logits(prompt(engine(source, *BACKENDS[0]))))
    for backend, threads in BACKENDS[1:]:
        assert differing(engine(source, backend, threads), want) == [], f"{backend}, {threads} threads"


@pytest.mark.parametrize("name", ["builtin", "gemma3"])
def test_passes_of_mixed_lengths(name: str):
    """A cached prefix, then chunks of a prompt, then single tokens."""
    of, rng = engine(STORED[name], *BACKENDS[0]), np.random.default_rng(2)
    want = in_passes(of, [LENGTH])
    for _ in range(5):
        edges = np.unique([0, LENGTH, *rng.integers(1, LENGTH, 12)])
        np.testing.assert_array_equal(in_passes(of, np.diff(edges).tolist()), want)


@pytest.mark.some(2)
@pytest.mark.parametrize("page", [1, 3, 64, 100, 1000])
@pytest.mark.parametrize("name", ["builtin", "gemma3"])
def test_pages_of_any_size(name: str, page: int):
    of = engine(STORED[name], *BACKENDS[0])
    want = in_passes(of, [LENGTH])
    for length in (1, 8, LENGTH):
        np.testing.assert_array_equal(in_passes(of, cut(LENGTH, length), page=page, longest_pass=length), want)


# ---- batches ----


def in_batches(of: mlx_engine.Engine, texts: Sequence[list[int]], seed: int) -> list[np.ndarray]:
    """Return logits at every position of each text; each pass has the next tokens of a random subset of texts."""
    rng, model, at = np.random.default_rng(seed), of.model, [0] * len(texts)
    page = int(rng.choice([1, 7, 16, 64]))
    pool = model.new_pool(sum(map(len, texts)), n_sequences=len(texts), page=page)
    sequences, rows = [pool.sequence() for _ in texts], [list[np.ndarray]() for _ in texts]
    with model.backend.session():
        while unread := [i for i, text in enumerate(texts) if at[i] < len(text)]:
            chosen = rng.permutation(unread)[: rng.integers(1, len(unread) + 1)].tolist()
            # One token of each, as in decode, or chunks of prompts among them.
            most = int(rng.choice([1, 4, 40]))
            ids = [texts[i][at[i] : at[i] + int(rng.integers(1, most + 1))] for i in chosen]
            logits = forward(
                model, *(SequenceInput(new, sequences[i], wanted=None) for new, i in zip(ids, chosen, strict=True))
            )
            ends = list(itertools.accumulate(map(len, ids)))
            for i, new, end in zip(chosen, ids, ends, strict=True):
                rows[i].append(np.array(model.backend.host(logits)[end - len(new) : end]))
                at[i] += len(new)
    return [np.concatenate(of_text) for of_text in rows]


@pytest.mark.some(2)
@pytest.mark.parametrize("name", [*STORED, *RANDOM])
def test_texts_in_batches_are_as_each_alone(name: str, folder: Path):
    source = STORED.get(name, folder / f"{name}.gguf")
    for seed, (backend, threads) in enumerate(BACKENDS):
        of = engine(source, backend, threads)
        ids = prompt(of)
        texts = [ids, ids[::-1], ids[5:20], ids[:1], ids[20:100]]
        alone = [np.asarray(of.logits(text)) for text in texts]
        for want, found in zip(alone, in_batches(of, texts, seed), strict=True):
            np.testing.assert_array_equal(found, want, err_msg=f"{backend}, {threads} threads")


@pytest.mark.some(1)
@pytest.mark.parametrize("name", RANDOM)
def test_stored_weights_give_the_bits_of_expanded_ones(name: str, folder: Path):
    expanded = folder / f"{name}-expanded.gguf"
    write(expanded, random_weights(name), expanded=True, context=512)
    stored, dense = engine(folder / f"{name}.gguf", *BACKENDS[0]), engine(expanded, *BACKENDS[0])
    for length in (1, 9, LENGTH):
        np.testing.assert_array_equal(in_passes(stored, cut(LENGTH, length)), in_passes(dense, cut(LENGTH, length)))


# ---- an order of summation that depends on the pass is detected ----


@pytest.mark.slow
def test_products_of_numpy_are_seen():
    """BLAS sums a single row in another order than a row of a matrix."""
    plain = engine("builtin", "simd", 1, jit=False)
    assert differing(plain, in_passes(plain, [LENGTH]), [1]) == [1]


def test_attention_of_numpy_in_large_passes_is_seen(monkeypatch: pytest.MonkeyPatch):
    of = engine("builtin", *BACKENDS[0])
    want = in_passes(of, [LENGTH])
    monkeypatch.setattr(CompiledBackend, "attention", SimdBackend.attention)
    monkeypatch.setattr(of.model, "program", Backend.compile(of.backend, of.model.definition, of.model.width))
    assert differing(of, want, PASSES[-3:]) == [77, 100, 1000]


def test_blocks_of_keys_that_begin_elsewhere_are_seen(monkeypatch: pytest.MonkeyPatch):
    """Every second call has an extra, invisible page before the first one, which shifts the blocks of keys."""
    of, attention, calls = engine("builtin", *BACKENDS[0]), CompiledBackend.attention, itertools.count()
    want = in_passes(of, [LENGTH])

    def shifted(self: CompiledBackend, q: np.ndarray, kv: KVView, counts: Sequence[int], scores: Scores) -> np.ndarray:
        if next(calls) % 2:
            return attention(self, q, kv, counts, scores)
        (span,), rows = kv.spans, []
        for row, length in zip(q, range(span.length - len(q) + 1, span.length + 1), strict=True):
            later = KVSpan(np.concatenate((span.pages[:1], span.pages)), length + kv.page, 1)
            rows.append(attention(self, row[None], kv._replace(spans=[later], window=length), [1], scores))
        return np.concatenate(rows)

    monkeypatch.setattr(CompiledBackend, "attention", shifted)
    monkeypatch.setattr(of.model, "program", Backend.compile(of.backend, of.model.definition, of.model.width))
    assert differing(of, want, PASSES[-3:]) == [77, 100, 1000]


# ---- on another processor ----


def digest() -> str:
    """Return the digest of all logits of four models, in passes of 1, 8 and all tokens.

    `test_cpu_library.py`, where the kernels are compiled for another processor, compares it between the two.
    """
    found = hashlib.sha256()
    for name in ("builtin", "qwen3-Q8_0", "gemma2", "gemma3"):
        of = engine(STORED[name], *BACKENDS[0])
        for length in (1, 8, LENGTH):
            found.update(in_passes(of, cut(LENGTH, length)).tobytes())
    return found.hexdigest()
