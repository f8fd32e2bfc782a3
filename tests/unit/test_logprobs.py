"""Log-probabilities: exact, the same bits on every backend and in every batch, and their digest."""

from __future__ import annotations

import hashlib
import math
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlx_engine
from mlx_engine.backends import create_backend
from mlx_engine.backends.numpy.scalar import ScalarBackend
from mlx_engine.backends.numpy.simd import SimdBackend
from mlx_engine.backends.sampling import largest
from mlx_engine.cache import SequenceInput
from mlx_engine.loop.forward import forward_logits
from mlx_engine.loop.logprobs import TokenLogprobs, digest, natural_log, token_logprobs
from mlx_engine.loop.sampler import Sampler
from mlx_engine.options import Sampling

PLAIN = SimdBackend()


def log_softmax(row: np.ndarray) -> np.ndarray:
    x = row.astype(np.float64)
    return x - x.max() - math.log(math.fsum(np.exp(x - x.max()).tolist()))


def normal(n: int, scale: float = 4.0) -> np.ndarray:
    return (np.random.default_rng(n).standard_normal(n) * scale).astype(np.float32)


# ---- values ----


@pytest.mark.parametrize("n", [1, 3, 500, 5000])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 6.0, 100.0])
def test_they_are_the_log_softmax_rounded_to_float32(n: int, scale: float):
    row = normal(n, scale)
    want = log_softmax(row)
    found = np.array([token_logprobs(PLAIN, row, i).logprob for i in range(0, n, max(1, n // 50))])
    exact = want[:: max(1, n // 50)]
    # Half a unit in the last place, and what a sum in float64 loses.
    assert (np.abs(found - exact) <= 0.5001 * np.spacing(np.abs(exact).astype(np.float32)) + 1e-12).all()
    assert (found.astype(np.float32) == found).all()


@pytest.mark.parametrize("shift", [0.0, 1000.0, -1000.0])
def test_large_logits_do_not_overflow(shift: float):
    row = np.array([shift, shift + 1, shift - 50], dtype=np.float32)
    want = log_softmax(row)
    for i in range(3):
        assert token_logprobs(PLAIN, row, i).logprob == pytest.approx(want[i], rel=1e-6)


def test_a_certain_token_has_log_probability_zero():
    assert token_logprobs(PLAIN, np.array([800, 0, 0], np.float32), 0, 1) == TokenLogprobs(0, 0.0, ((0, 0.0),))


@given(st.floats(1.0, 2e5) | st.floats(1e-300, 1e300))
@settings(max_examples=200)
def test_the_logarithm_is_the_c_library_s(x: float):
    assert natural_log(x) == pytest.approx(math.log(x), rel=4e-16, abs=1e-16)


# ---- the most likely tokens ----


# Few distinct values make many ties.
@given(st.integers(1, 5000), st.integers(0, 20), st.integers(1, 40), st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_the_top_is_sorted_by_likelihood_then_by_id(n: int, n_top: int, n_values: int, seed: int):
    row = np.random.default_rng(seed).integers(0, n_values, n).astype(np.float32)
    want = sorted(range(n), key=lambda i: (-row[i], i))[:n_top]
    found = token_logprobs(PLAIN, row, 0, n_top)
    assert [i for i, _ in found.top] == want
    assert [p for _, p in found.top] == [token_logprobs(PLAIN, row, i).logprob for i in want]


@pytest.mark.parametrize("n", [1, 1500, 3000])
def test_the_largest_of_as_many_values_as_there_are(n: int):
    values = normal(3000)
    assert largest(values, n).tolist() == np.argsort(-values, kind="stable")[:n].tolist()


# ---- every backend, every batch ----


@pytest.mark.parametrize("name", ["scalar", "simd", "parallel", "mlx"])
def test_every_backend_gives_the_same_bits_for_the_same_logits(name: str):
    row = normal(3000)
    be = ScalarBackend() if name == "scalar" else create_backend(name)
    want = token_logprobs(PLAIN, row, 7, 5)
    assert token_logprobs(be, be.host(be.array(row[None]))[0], 7, 5) == want
    sampler = Sampler(be, Sampling(temperature=2.0, seed=1, logit_bias={7: 100}, presence_penalty=1.0), [])
    with be.session():
        assert sampler(be.array(row[None])) == 7
        assert sampler.logprobs(5) == want
    assert sampler.probability() == pytest.approx(math.exp(want.logprob), rel=1e-6)


def test_each_row_of_a_batch_has_its_own():
    be, rows = PLAIN, np.stack([normal(100, scale) for scale in (1.0, 3.0, 9.0)])
    options = [Sampling(), Sampling(temperature=1.0, seed=3), Sampling(frequency_penalty=1.0, logit_bias={4: 9.0})]
    alone = [Sampler(be, sampling, [1, 2]) for sampling in options]
    together = [Sampler(be, sampling, [1, 2]) for sampling in options]
    for _ in range(5):
        ids = [sampler(row[None]) for sampler, row in zip(alone, rows, strict=True)]
        tokens = be.choose(rows, [sampler.draw() for sampler in together])
        choices = [s.add(token, rows, b) for b, (s, token) in enumerate(zip(together, tokens, strict=True))]
        assert [s.settle(choice) for s, choice in zip(together, choices, strict=True)] == ids
        assert [s.logprobs(3) for s in together] == [s.logprobs(3) for s in alone]


def test_before_the_first_token_there_are_none():
    sampler = Sampler(PLAIN, Sampling(), [1])
    assert sampler.probability() is None
    with pytest.raises(ValueError, match="expected a settled token"):
        sampler.logprobs(1)


@pytest.fixture(scope="module")
def engine() -> mlx_engine.Engine:
    return mlx_engine.load("builtin", "parallel")


def test_a_run_has_one_for_each_token(engine: mlx_engine.Engine):
    options = {"temperature": 1.5, "seed": 4, "presence_penalty": 1.0, "ignore_eos": True}
    plain = engine.generate("Once upon", max_tokens=12, **options)
    run = engine.generate("Once upon", max_tokens=12, logprobs=4, **options)
    assert plain.logprobs is None
    assert run.token_ids == plain.token_ids == [token.token_id for token in run.logprobs]
    whole = [*run.prompt_ids, *run.token_ids]
    logits = engine.backend.host(
        forward_logits(engine.model, SequenceInput(whole, engine.model.scratch_kv(len(whole)), None))
    )
    for i, token in enumerate(run.logprobs):
        row = logits[len(run.prompt_ids) - 1 + i]
        assert token == token_logprobs(PLAIN, row, run.token_ids[i], 4), "the plain sum has the same bits"
        assert token.logprob == pytest.approx(log_softmax(row)[run.token_ids[i]], rel=1e-6)


# ---- the digest ----


def test_the_digest_is_of_all_ids_then_all_log_probabilities():
    data = struct.pack("<3i3f", 5, 2**31 - 1, 0, -0.5, -1e-3, 0.0)
    logprobs = [-0.5, float(np.float32(-1e-3)), 0.0]
    assert digest([5, 2**31 - 1, 0], logprobs) == hashlib.sha256(data).hexdigest()
    assert digest([], []) == hashlib.sha256(b"").hexdigest()


def test_the_digest_changes_with_a_single_bit():
    next_up = float(np.nextafter(np.float32(-0.5), np.float32(0)))
    found = {digest([1, 2], [-0.5, -1.0]), digest([1, 2], [next_up, -1.0]), digest([2, 1], [-0.5, -1.0])}
    assert len(found) == 3


def test_a_digest_needs_a_log_probability_for_each_token():
    with pytest.raises(ValueError, match="each of 2 tokens, found 1"):
        digest([1, 2], [-0.5])
