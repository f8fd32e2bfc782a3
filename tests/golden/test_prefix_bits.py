"""Logits after a hit of the prefix cache are bit-identical to those of a run without it, for hits of every length."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import cast

import numpy as np
import pytest

pytest.importorskip("numba")

from mlx_engine.kernels.cpu.build.library import Library

from mlx_engine.backends import create_backend
from mlx_engine.backends.base import Backend
from mlx_engine.backends.cpu.backend import CompiledBackend
from mlx_engine.backends.cpu.kernels import load_kernels
from mlx_engine.backends.metal.backend import MetalBackend
from mlx_engine.cache import KVSequence, PrefixCache, SequenceInput
from mlx_engine.loop.forward import forward
from mlx_engine.weights.model import Model
from tests.random_models import VOCAB, WINDOW, random_model

# Longer than a page of 64 tokens, and than two windows.
LENGTH = 90
ARCHITECTURES = ("gemma2", "gemma3", "gpt2", "qwen3")
BACKENDS = {
    "parallel": lambda: create_backend("parallel", threads=2),
    "simd": lambda: create_backend("simd"),
    "fixed": lambda: CompiledBackend(cast(Library, load_kernels()), "parallel", 2, "i16"),
    "plain": lambda: create_backend("simd", jit=False),
    "mlx": lambda: create_backend("mlx"),
    "metal": lambda: MetalBackend("emulator"),
}
IDS = [int(i) for i in np.random.default_rng(0).integers(0, VOCAB, LENGTH)]
assert 2 * WINDOW < LENGTH


@cache
def model(architecture: str, backend: str) -> Model:
    made: Backend = BACKENDS[backend]()
    return random_model(architecture, "Q8_0", made)


def logits(of: Model, kv: KVSequence, ids: list[int], chunk: int = LENGTH) -> np.ndarray:
    """Return logits at the positions of new tokens, which are run in chunks."""
    with of.backend.session():
        parts = [forward(of, SequenceInput(ids[at : at + chunk], kv, wanted=None)) for at in range(0, len(ids), chunk)]
        return np.concatenate([np.array(of.backend.host(part)) for part in parts])


def filled(of: Model, page: int, ids: list[int]) -> PrefixCache:
    """Return a prefix cache that has a prompt, inserted after each chunk, and an answer."""
    pool = of.new_pool(8 * LENGTH, n_sequences=8, page=page, longest_pass=LENGTH)
    prefixes, kv = PrefixCache(pool), pool.sequence()
    for n in range(0, len(ids), 20):
        logits(of, kv, ids[n : n + 20], 20)
        prefixes.insert(ids[: n + 20], kv)
    logits(of, kv, [5, 6, 7], 1)
    prefixes.insert([*ids, 5, 6, 7], kv)
    kv.close()
    return prefixes


def rests(of: Model, prefixes: PrefixCache, ids: list[int], lengths: range) -> Iterator[tuple[int, np.ndarray]]:
    """Yield lengths of hits, and the logits of the remaining tokens."""
    for n in lengths:
        kv = prefixes.pool.sequence()
        assert prefixes.attach(kv, ids[:n]).length == n
        yield n, logits(of, kv, ids[n:])
        kv.close()


@pytest.mark.some(1)
@pytest.mark.parametrize(("backend", "page"), [("parallel", 16), ("parallel", 64), ("simd", 16), ("fixed", 16)])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_hits_of_every_length_give_the_same_bits(architecture: str, backend: str, page: int):
    of = model(architecture, backend)
    want = logits(of, of.new_kv(LENGTH), IDS)
    assert np.isfinite(want).all()
    prefixes = filled(of, page, IDS)
    wrong = [n for n, rest in rests(of, prefixes, IDS, range(1, LENGTH)) if not np.array_equal(rest, want[n:])]
    assert wrong == []


@pytest.mark.some(2)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_forks_give_the_same_bits(architecture: str):
    """Both continue in other ways, in one batch, then the first takes back some of its tokens."""
    of = model(architecture, "parallel")
    prompt, answers = IDS[:37], (IDS[40:60], IDS[50:65])
    want = [logits(of, of.new_kv(LENGTH), [*prompt, *ids])[37:] for ids in answers]
    pool = of.new_pool(4 * LENGTH, n_sequences=2, page=16)
    kv = pool.sequence()
    logits(of, kv, prompt)
    twin = kv.fork()
    with of.backend.session():
        both = forward(
            of, *(SequenceInput(ids, of_one, wanted=None) for ids, of_one in zip(answers, (kv, twin), strict=True))
        )
    np.testing.assert_array_equal(np.array(of.backend.host(both)), np.concatenate(want))
    third = kv.fork()
    # To a place inside a page that both have; a window does not let a sequence go back so far.
    length = 56 if architecture.startswith("gemma") else 45
    kv.truncate(length)
    np.testing.assert_array_equal(logits(of, kv, answers[0][length - 37 :], 1), want[0][length - 37 :])
    third.truncate(length)
    np.testing.assert_array_equal(logits(of, third, answers[0][length - 37 :]), want[0][length - 37 :])


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "backend"), [("gemma3", "plain"), ("gemma3", "mlx"), ("gpt2", "mlx")])
def test_hits_on_backends_without_the_bits(architecture: str, backend: str):
    """Their order of summation depends on the pass; keys and values of the prefix are still copied exactly."""
    of = model(architecture, backend)
    want = logits(of, of.new_kv(LENGTH), IDS)
    for n, rest in rests(of, filled(of, 16, IDS), IDS, range(5, LENGTH, 40)):
        np.testing.assert_allclose(rest, want[n:], rtol=1e-4, atol=1e-4 * float(np.abs(want).max()))


@pytest.mark.slow
def test_hits_on_emulated_metal():
    """Most of the time is spent on compiling the kernels for this model."""
    of, ids = model("qwen3", "metal"), IDS[:20]
    want = logits(of, of.new_kv(LENGTH), ids)
    for n, rest in rests(of, filled(of, 16, ids), ids, range(14, 19)):
        np.testing.assert_array_equal(rest, want[n:])


def test_a_wrong_token_in_a_prefix_is_seen():
    of = model("gemma3", "parallel")
    want = logits(of, of.new_kv(LENGTH), IDS)
    wrong = [*IDS[:60], (IDS[60] + 1) % VOCAB, *IDS[61:]]
    kv = (pool := of.new_pool(4 * LENGTH)).sequence()
    logits(of, kv, wrong[:70])
    prefixes = PrefixCache(pool)
    prefixes.insert(IDS[:70], kv)
    assert not any(np.array_equal(rest, want[n:]) for n, rest in rests(of, prefixes, IDS, range(61, 70)))
