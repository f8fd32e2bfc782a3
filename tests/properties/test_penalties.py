"""Presence and frequency penalties and the logit bias: the definition, and every backend against it."""

from __future__ import annotations

import math
from collections import Counter

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mlx_engine.backends.mlx import backend as mlx_backend
from mlx_engine.backends.mlx.backend import MlxBackend
from mlx_engine.backends.numpy import scalar
from mlx_engine.backends.numpy.scalar import ScalarBackend
from mlx_engine.backends.numpy.simd import SimdBackend
from mlx_engine.backends.sampling import Draw, adjust, probabilities
from mlx_engine.errors import OptionError
from mlx_engine.options import Sampling

SCALAR, SIMD, MLX, MLX_FLOAT32 = ScalarBackend(), SimdBackend(), MlxBackend(), MlxBackend()
# The precision of a GPU.
MLX_FLOAT32.name, MLX_FLOAT32._real = "mlx-float32", mx.float32
BACKENDS = (SCALAR, SIMD, MLX, MLX_FLOAT32)
V = 24
FAST = settings(max_examples=80)
# An example on a lazy backend takes milliseconds.
ON_BACKENDS = settings(FAST, max_examples=40)

# Multiples of 1/32: sums and differences are exact, so that backends of different precision see the same ties.
LOGITS = st.lists(st.integers(-300, 300), min_size=V, max_size=V).map(lambda v: np.array(v, dtype=np.float32) / 32)
IDS = st.lists(st.integers(0, V - 1), max_size=12)
PENALTIES = st.integers(-16, 16).map(lambda n: n / 8)
BIASES = st.dictionaries(st.integers(0, V - 1), st.integers(-800, 800).map(lambda n: n / 8), max_size=5)
OPTIONS = st.fixed_dictionaries(
    {
        "presence_penalty": st.just(0.0) | PENALTIES,
        "frequency_penalty": st.just(0.0) | PENALTIES,
        "logit_bias": st.just({}) | BIASES,
        "repetition_penalty": st.sampled_from([1.0, 2.0, 0.5]),
    }
)
# A number that `random_number` gives: 0 has a probability of 2**-53.
DRAWS = st.floats(2**-53, 1 - 2**-20)


def naive(logits: np.ndarray, prompt: list[int], generated: list[int], sampling: Sampling) -> np.ndarray:
    """Follow the descriptions of the options, one token at a time."""
    row = [float(v) for v in logits]
    for token, bias in sampling.logit_bias:
        row[token] += bias
    for token in {*prompt, *generated}:
        row[token] *= 1 / sampling.repetition_penalty if row[token] > 0 else sampling.repetition_penalty
    for token, count in Counter(generated).items():
        row[token] -= count * sampling.frequency_penalty
        row[token] -= sampling.presence_penalty
    return np.array(row)


def draw_of(sampling: Sampling, prompt: list[int], generated: list[int], u: float = 0.5) -> Draw:
    return Draw(sampling, [*prompt, *generated], u, len(prompt))


ADJUST = {
    "definition": adjust,
    "scalar": lambda logits, draw: np.array(scalar._adjusted(logits.tolist(), draw), dtype=np.float32),
    "mlx": lambda logits, draw: np.array(mlx_backend.adjust(mx.array(logits), draw)),
}


@pytest.mark.some(1)
@pytest.mark.parametrize("adjusted", ADJUST.values(), ids=ADJUST)
@given(LOGITS, IDS, IDS, OPTIONS)
@FAST
def test_logits_are_adjusted_as_the_naive_version_does(adjusted, logits, prompt, generated, options):
    before, sampling = logits.copy(), Sampling(**options)
    found = adjusted(logits, draw_of(sampling, prompt, generated))
    assert found.tolist() == naive(logits, prompt, generated, sampling).tolist()
    assert found.dtype == np.float32
    assert logits.tobytes() == before.tobytes(), "the caller's logits have changed"


@given(LOGITS, IDS, IDS)
@FAST
def test_without_penalties_not_a_bit_changes(logits, prompt, generated):
    assert adjust(logits, draw_of(Sampling(temperature=1.0), prompt, generated)) is logits
    of_zero = Sampling(presence_penalty=0, frequency_penalty=0.0, logit_bias={})
    assert of_zero.is_argmax
    assert of_zero == Sampling()


@pytest.mark.slow
@given(LOGITS, IDS, OPTIONS)
@FAST
def test_the_prompt_counts_for_the_repetition_penalty_alone(logits, prompt, options):
    only_repetition = Sampling(repetition_penalty=options["repetition_penalty"], logit_bias=options["logit_bias"])
    found = adjust(logits, draw_of(Sampling(**options), prompt, []))
    assert found.tobytes() == adjust(logits, draw_of(only_repetition, prompt, [])).tobytes()


def test_the_penalties_are_those_of_the_openai_api():
    logits = np.array([1.0, 2.0, 3.0, 4.0], dtype=np.float32)
    sampling = Sampling(presence_penalty=0.5, frequency_penalty=0.25)
    assert adjust(logits, draw_of(sampling, [3, 3], [1, 2, 1, 1])).tolist() == [1.0, 0.75, 2.25, 4.0]


def test_the_bias_comes_before_the_repetition_penalty_and_the_temperature():
    logits = np.array([-1.0, 0.0], dtype=np.float32)
    sampling = Sampling(temperature=2.0, repetition_penalty=2.0, logit_bias={0: 3.0})
    adjusted = adjust(logits, draw_of(sampling, [0], []))
    assert adjusted.tolist() == [1.0, 0.0]
    assert probabilities(adjusted, sampling)[0] == pytest.approx(1 / (1 + math.exp(-0.5)))


@pytest.mark.some(2)
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
@given(LOGITS, IDS, IDS, OPTIONS, st.sampled_from([0.0, 0.5, 1.5]), DRAWS)
@ON_BACKENDS
def test_every_backend_chooses_by_the_definition(backend, logits, prompt, generated, options, temperature, u):
    sampling = Sampling(temperature=temperature, **options)
    adjusted = naive(logits, prompt, generated, sampling)
    chosen = backend.token_id(
        backend.sample(backend.array(logits[None]), draw_of(sampling, prompt, generated, u)),
    )
    if sampling.is_greedy:
        assert chosen == int(np.argmax(adjusted))
        return
    total = np.cumsum(probabilities(adjusted.astype(np.float32), sampling))
    assume(np.abs(total - u).min() > 1e-6)
    assert chosen == int(np.searchsorted(total, u, side="right"))


@pytest.mark.some(2)
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
@given(LOGITS, st.integers(0, V - 1), st.sampled_from([0.0, 0.7, 1.0, 2.0]), DRAWS)
@ON_BACKENDS
def test_a_bias_of_100_forces_and_of_minus_100_bans(backend, logits, token, temperature, u):
    def chosen(bias: float) -> int:
        sampling = Sampling(temperature=temperature, logit_bias={token: bias})
        return backend.token_id(backend.sample(backend.array(logits[None]), Draw(sampling, [], u)))

    assert chosen(100) == token
    assert chosen(-100) != token


@pytest.mark.slow
@given(st.lists(st.tuples(LOGITS, IDS, IDS, OPTIONS, st.sampled_from([0.0, 1.0]), DRAWS), min_size=2, max_size=6))
@ON_BACKENDS
def test_a_batch_of_rows_with_different_options_equals_one_by_one(rows):
    draws = [
        draw_of(Sampling(temperature=t, **options), prompt, generated, u)
        for _, prompt, generated, options, t, u in rows
    ]
    logits = np.stack([row[0] for row in rows])
    for backend in BACKENDS:
        together = backend.choose(backend.array(logits), draws)
        alone = [backend.choose(backend.array(logits[i : i + 1]), [draw])[0] for i, draw in enumerate(draws)]
        assert [*map(backend.token_id, together)] == [*map(backend.token_id, alone)]


# ---- validation ----

NAN, INF = math.nan, math.inf
BAD = [
    *((name, v) for name in ("presence_penalty", "frequency_penalty") for v in (-2.01, 2.01, NAN, INF, "a", None)),
    *(("logit_bias", {5: v}) for v in (-100.5, 101, NAN, INF, "a", None, True)),
    *(("logit_bias", {i: 1.0}) for i in (-1, 1.5, "5", None, True)),
    *(("logit_bias", v) for v in (3, "5=1", [5, 1], [(5, 1.0, 2)], [(5, 1.0), (5, 2.0)], None)),
]


@pytest.mark.parametrize(("option", "value"), BAD, ids=str)
def test_a_value_outside_its_range_is_refused_by_name(option, value):
    with pytest.raises(OptionError) as caught:
        Sampling(**{option: value})
    assert caught.value.option == option


def test_the_ends_of_the_ranges_are_inside():
    Sampling(presence_penalty=-2, frequency_penalty=2.0, logit_bias={0: -100, 1: 100.0})


def test_a_bias_is_stored_as_sorted_pairs_and_can_be_hashed():
    made = Sampling(logit_bias={9: 1, 2: -3.5})
    assert made.logit_bias == ((2, -3.5), (9, 1.0))
    assert made == Sampling(logit_bias=made.logit_bias) == Sampling(logit_bias=[(9, 1.0), (2, -3.5)])
    assert len({made, Sampling(logit_bias={9: 1.0, 2: -3.5}), Sampling()}) == 2


def test_ids_of_a_bias_are_checked_against_the_vocabulary():
    Sampling(logit_bias={9: 1}).check_vocabulary(10)
    with pytest.raises(OptionError, match="token ids from 0 to 8, not 9"):
        Sampling(logit_bias={2: 1, 9: 1}).check_vocabulary(9)


@pytest.mark.parametrize("options", [{"presence_penalty": 0.1}, {"frequency_penalty": -1}, {"logit_bias": {0: 1}}])
def test_a_greedy_choice_with_a_penalty_is_no_plain_argmax(options):
    assert Sampling(**options).is_greedy
    assert not Sampling(**options).is_argmax
