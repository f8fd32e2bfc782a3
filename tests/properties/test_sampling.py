"""Sampling: the reference against a naive version and transformers, and every backend against the reference."""

import math
from fractions import Fraction

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mlx_engine.backends.mlx.backend import MlxBackend
from mlx_engine.backends.numpy.scalar import ScalarBackend
from mlx_engine.backends.numpy.simd import SimdBackend
from mlx_engine.backends.sampling import Draw, draw, penalize, probabilities
from mlx_engine.errors import OptionError
from mlx_engine.options import Sampling

SIMD, SCALAR, MLX, MLX_FLOAT32 = SimdBackend(), ScalarBackend(), MlxBackend(), MlxBackend()
# The precision of a GPU.
MLX_FLOAT32.name, MLX_FLOAT32._real = "mlx-float32", mx.float32
BACKENDS = (SCALAR, SIMD, MLX, MLX_FLOAT32)


def floats32(low, high):
    return st.floats(low, high, width=32).map(lambda v: round(v, 2))


LOGITS = st.lists(floats32(-12, 12), min_size=1, max_size=24).map(lambda v: np.array(v, dtype=np.float32))
DISTINCT = st.lists(st.integers(-300, 300), min_size=2, max_size=24, unique=True).map(
    lambda v: np.array(v, dtype=np.float32) / 32
)
TEMPERATURES = st.floats(0.05, 5.0)
FILTERS = st.fixed_dictionaries(
    {
        "temperature": TEMPERATURES,
        "top_k": st.none() | st.integers(1, 30),
        "top_p": st.just(1.0) | st.floats(0.01, 1.0),
        "min_p": st.just(0.0) | st.floats(0.0, 1.0),
    }
)
DRAWS = st.floats(0, 1, exclude_max=True)

# A cumulative sum this close to a limit may fall on either side by rounding.
ROUNDING = 1e-6


# ---- a naive version, from the descriptions of the options ----


def naive_penalty(logits, recent, penalty):
    return [
        (v / penalty if v > 0 else v * penalty) if i in recent else v
        for i, v in enumerate(np.asarray(logits, np.float64).tolist())
    ]


def naive_kept(logits, sampling):
    """Return the ids that pass the filters, and whether rounding may decide a limit."""
    top = max(logits)
    weights = {i: math.exp((v - top) / sampling.temperature) for i, v in enumerate(logits)}
    order = sorted(weights, key=lambda i: (-weights[i], i))
    close = False
    if sampling.top_k is not None:
        order = order[: sampling.top_k]
    total = math.fsum(weights[i] for i in order)
    if sampling.top_p < 1:
        kept, reached = [], 0.0
        for i in order:
            close = close or abs(reached - sampling.top_p) < ROUNDING
            if reached >= sampling.top_p:
                break
            kept.append(i)
            reached = math.fsum([reached, weights[i] / total])
        order = kept
    limit = sampling.min_p * weights[order[0]]
    close = close or any(abs(weights[i] - limit) < ROUNDING for i in order)
    return {i for i in order if weights[i] >= limit} | {order[0]}, close


def naive_probabilities(logits, sampling):
    kept, close = naive_kept(logits, sampling)
    top = max(logits)
    weights = [math.exp((v - top) / sampling.temperature) if i in kept else 0.0 for i, v in enumerate(logits)]
    total = math.fsum(weights)
    return np.array([w / total for w in weights]), close


@given(LOGITS, FILTERS)
@settings(max_examples=150)
def test_the_definition_is_the_naive_one(logits, filters):
    sampling = Sampling(**filters)
    want, close = naive_probabilities(logits.tolist(), sampling)
    assume(not close)
    assert probabilities(logits, sampling) == pytest.approx(want, rel=1e-9, abs=1e-15)


@given(LOGITS, st.lists(st.integers(0, 23), max_size=12), st.floats(0.1, 10))
@settings(max_examples=60)
def test_the_penalty_is_the_naive_one(logits, recent, penalty):
    recent = [i for i in recent if i < len(logits)]
    before = logits.copy()
    assert penalize(logits, recent, penalty) == pytest.approx(naive_penalty(logits, recent, penalty), rel=1e-6)
    assert np.array_equal(logits, before), "the caller's logits have changed"


def test_a_token_seen_twice_is_penalized_once():
    assert penalize(np.array([4.0, -4.0], np.float32), [0, 0, 1, 1, 1], 2.0).tolist() == [2.0, -8.0]


# ---- Hugging Face transformers ----


@pytest.fixture(scope="module")
def warpers():
    """Return transformers' processors as functions of NumPy logits; skip the test without transformers."""
    torch = pytest.importorskip("torch")
    processors = pytest.importorskip("transformers.generation.logits_process")

    def run(name, logits, *args, recent=()):
        ids = torch.tensor([list(recent)], dtype=torch.long)
        scores = torch.tensor(np.asarray(logits, np.float32))[None].double()
        return getattr(processors, name)(*args)(ids, scores)[0].numpy()

    return run


def transformed(warpers, logits, sampling, recent):
    """Return the probabilities after transformers' processors in their order."""
    if sampling.repetition_penalty != 1:
        logits = warpers("RepetitionPenaltyLogitsProcessor", logits, sampling.repetition_penalty, recent=recent)
    logits = warpers("TemperatureLogitsWarper", logits, float(sampling.temperature))
    if sampling.top_k is not None:
        logits = warpers("TopKLogitsWarper", logits, sampling.top_k)
    if sampling.top_p < 1:
        logits = warpers("TopPLogitsWarper", logits, sampling.top_p)
    if sampling.min_p > 0:
        logits = warpers("MinPLogitsWarper", logits, sampling.min_p)
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


@given(DISTINCT, FILTERS, st.sampled_from([1.0, 1.3, 0.5]), st.lists(st.integers(0, 23), min_size=1, max_size=8))
@settings(max_examples=80)
def test_the_definition_is_that_of_transformers(warpers, logits, filters, penalty, recent):
    """Logits are distinct: of equal logits at the limit, transformers' top-k keeps all, ours the lowest ids."""
    recent = [i for i in recent if i < len(logits)]
    sampling = Sampling(**filters, repetition_penalty=penalty)
    penalized = penalize(logits, recent, penalty)
    assume(len(set(penalized.tolist())) == len(logits))
    _, close = naive_kept(penalized.tolist(), sampling)
    assume(not close)
    want = transformed(warpers, logits, sampling, recent)
    assert probabilities(penalized, sampling) == pytest.approx(want, rel=2e-5, abs=1e-9)


@given(DISTINCT, st.lists(st.integers(0, 23), min_size=1, max_size=8), st.floats(0.1, 10))
@settings(max_examples=50)
def test_the_penalty_is_that_of_transformers(warpers, logits, recent, penalty):
    recent = [i for i in recent if i < len(logits)]
    want = warpers("RepetitionPenaltyLogitsProcessor", logits, penalty, recent=recent)
    assert penalize(logits, recent, penalty) == pytest.approx(want, rel=1e-6)


# ---- exactly the defined set of candidates ----


@given(LOGITS, st.integers(1, 30), TEMPERATURES)
@settings(max_examples=60)
def test_top_k_keeps_the_k_most_likely_and_of_equal_ones_the_lowest_ids(logits, k, temperature):
    kept = np.flatnonzero(probabilities(logits, Sampling(temperature, top_k=k)))
    assert kept.tolist() == sorted(sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:k])


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (0, [1]),
        (0.01, [1]),
        (0.49, [1]),
        (0.51, [1, 3]),
        (0.74, [1, 3]),
        (0.76, [0, 1, 3]),
        (0.88, [0, 1, 2, 3]),
        (1.0, [0, 1, 2, 3]),
    ],
)
def test_top_p_keeps_the_token_that_reaches_p_and_none_after_it(top_p, kept):
    # Probabilities 1/8, 1/2, 1/8, 1/4; of the equal ones the lower id comes first.
    logits = np.log(np.array([1, 4, 1, 2], dtype=np.float64)).astype(np.float32)
    exact = np.array([1, 4, 1, 2]) / 8
    p = probabilities(logits, Sampling(1.0, top_p=top_p))
    assert np.flatnonzero(p).tolist() == kept
    assert p[kept] == pytest.approx(exact[kept] / exact[kept].sum(), rel=1e-6)


@given(LOGITS, st.floats(0.01, 0.99), TEMPERATURES)
@settings(max_examples=60)
def test_top_p_is_the_smallest_set_that_reaches_p(logits, top_p, temperature):
    p = probabilities(logits, Sampling(temperature))
    kept = set(np.flatnonzero(probabilities(logits, Sampling(temperature, top_p=top_p))).tolist())
    likely = [Fraction(float(p[i])) for i in sorted(kept, key=lambda i: -p[i])]
    assert sum(likely) >= top_p - ROUNDING
    assert sum(likely[:-1]) < top_p + ROUNDING
    assert all(p[i] >= p[j] for i in kept for j in set(range(len(p))) - kept)


@pytest.mark.parametrize(("min_p", "kept"), [(0.0, 4), (0.24, 4), (0.26, 2), (0.51, 1), (1.0, 1)])
def test_min_p_is_relative_to_the_most_likely(min_p, kept):
    logits = np.log(np.array([1, 4, 1, 2], dtype=np.float64)).astype(np.float32)
    assert np.count_nonzero(probabilities(logits, Sampling(1.0, min_p=min_p))) == kept


def test_min_p_of_1_keeps_all_that_are_most_likely():
    logits = np.array([3.0, 1.0, 3.0, 3.0], dtype=np.float32)
    assert np.flatnonzero(probabilities(logits, Sampling(1.0, min_p=1.0))).tolist() == [0, 2, 3]


@given(LOGITS, FILTERS)
@settings(max_examples=60)
def test_probabilities_sum_to_1_and_the_most_likely_always_stays(logits, filters):
    p = probabilities(logits, Sampling(**filters))
    assert p.sum() == pytest.approx(1, abs=1e-12)
    assert p[int(np.argmax(logits))] > 0


@given(LOGITS, FILTERS, DRAWS)
@settings(max_examples=60)
def test_a_draw_is_a_token_that_was_kept_at_its_place_in_the_running_sum(logits, filters, u):
    p = probabilities(logits, Sampling(**filters))
    chosen = draw(p, u)
    assert p[chosen] > 0
    assert math.fsum(p[:chosen]) <= u + 1e-12
    assert u < math.fsum(p[: chosen + 1]) + 1e-12


def test_a_draw_just_below_1_is_the_last_possible_token():
    assert draw(np.array([0.25, 0.0, 0.75, 0.0]), 1 - 2**-53) == 2
    assert draw(np.full(10, 0.1), 1 - 2**-53) == 9
    assert draw(np.array([0.0, 1.0]), 0.0) == 1


# ---- every backend ----


def chosen(backend, logits, sampling, recent, u):
    return backend.token_id(backend.sample(backend.array(logits[None]), Draw(sampling, recent, u)))


@pytest.mark.some(1)
@pytest.mark.parametrize("other", BACKENDS[1:], ids=lambda b: b.name)
@given(LOGITS, FILTERS, st.sampled_from([1.0, 1.2, 0.7]), st.lists(st.integers(0, 23), max_size=6), DRAWS)
@settings(max_examples=150)
def test_every_backend_chooses_what_scalar_does_for_the_same_draw(other, logits, filters, penalty, recent, u):
    recent = [i for i in recent if i < len(logits)]
    sampling = Sampling(**filters, repetition_penalty=penalty)
    a, b = (chosen(backend, logits, sampling, recent, u) for backend in (SCALAR, other))
    if a == b:
        return
    # The only allowed difference: a limit or the draw is within rounding of the cumulative sum.
    penalized = naive_penalty(logits, recent, penalty)
    want, close = naive_probabilities(penalized, sampling)
    nearest_edge = np.abs(np.cumsum(want) - u).min()
    tie = np.diff(np.sort(penalized)).min() < ROUNDING
    assert close or tie or nearest_edge < ROUNDING, f"scalar chose {a}, {other.name} {b}, far from any edge"


@pytest.mark.some(2)
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
@given(LOGITS, st.lists(st.integers(0, 23), max_size=6), st.sampled_from([1.0, 1.5]), DRAWS)
@settings(max_examples=60)
def test_temperature_0_is_argmax_after_the_penalty(backend, logits, recent, penalty, u):
    recent = [i for i in recent if i < len(logits)]
    got = chosen(backend, logits, Sampling(repetition_penalty=penalty), recent, u)
    penalized = naive_penalty(logits, recent, penalty)
    assert penalized[got] == pytest.approx(max(penalized), rel=1e-6)
    if penalty == 1:
        assert got == backend.token_id(backend.argmax(backend.array(logits[None]))) == int(np.argmax(logits))


@pytest.mark.some(2)
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
@given(DISTINCT, st.floats(1e-9, 1, exclude_max=True), st.sampled_from([1e-4, 1e-8, 1e-30, 1e-300]))
@settings(max_examples=50)
def test_a_tiny_temperature_is_argmax(backend, logits, u, temperature):
    assert chosen(backend, logits, Sampling(temperature), [], u) == int(np.argmax(logits))


@pytest.mark.some(3)
@pytest.mark.parametrize("backend", BACKENDS[:2], ids=lambda b: b.name)
@pytest.mark.parametrize(
    "options", [{}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_k": 6, "top_p": 0.9, "min_p": 0.05}], ids=str
)
def test_frequencies_are_the_probabilities_by_chi_squared(backend, options):
    rng = np.random.default_rng(20)
    logits = rng.normal(0, 1.2, 8).astype(np.float32)
    sampling = Sampling(temperature=0.9, **options)
    n = 2000
    counts = np.bincount([chosen(backend, logits, sampling, [], float(u)) for u in rng.random(n)], minlength=8)
    p = naive_probabilities(logits.tolist(), sampling)[0]
    assert counts[p == 0].sum() == 0
    possible = p > 0
    chi2 = float(((counts[possible] - n * p[possible]) ** 2 / (n * p[possible])).sum())
    # The 99.99 % quantile of chi-squared, by Wilson and Hilferty; the seed is fixed, so the test is deterministic.
    df = max(1, np.count_nonzero(possible) - 1)
    assert chi2 < df * (1 - 2 / (9 * df) + 3.719 * math.sqrt(2 / (9 * df))) ** 3


# ---- validation ----

NAN, INF = math.nan, math.inf
BAD = [
    *(("temperature", v) for v in (-0.1, -1, NAN, INF, -INF)),
    *(("top_k", v) for v in (0, -1, NAN)),
    *(("top_p", v) for v in (-0.5, 1.0001, NAN, INF, -INF)),
    *(("min_p", v) for v in (-0.1, 1.1, NAN, INF, -INF)),
    *(("repetition_penalty", v) for v in (0, -1.0, NAN, INF, -INF)),
    *(("seed", v) for v in (-1, NAN)),
]
WRONG_TYPES = [
    *(("top_k", v) for v in (2.5, INF, "3")),
    *(("seed", v) for v in (1.5, INF, "3")),
    *((name, "hot") for name in ("temperature", "top_p", "min_p", "repetition_penalty")),
    *((name, None) for name in ("temperature", "top_p", "min_p", "repetition_penalty")),
]


@pytest.mark.parametrize(("option", "value"), BAD, ids=str)
def test_a_value_outside_its_range_is_refused_by_name(option, value):
    with pytest.raises(OptionError) as caught:
        Sampling(**{option: value})
    assert caught.value.option == option
    assert option in str(caught.value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(("option", "value"), WRONG_TYPES, ids=str)
def test_a_value_of_the_wrong_type_is_refused_by_name(option, value):
    with pytest.raises(OptionError) as caught:
        Sampling(**{option: value})
    assert caught.value.option == option


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0}, {"temperature": 1e300}, {"top_k": 1}, {"top_p": 1}, {"min_p": 0}, {"min_p": 1}, {"seed": 0}],
    ids=str,
)
def test_the_edges_of_the_ranges_are_inside(options):
    assert all(getattr(Sampling(**options), name) == value for name, value in options.items())


@pytest.mark.parametrize("recent", [[0, 1], [0, 1, 2, 3, 4]])
@pytest.mark.parametrize("penalty", [1e-320, 1e-38, 1e-3, 1e3, 1e30, 1e300])
def test_an_extreme_penalty_still_chooses_a_token(penalty, recent):
    logits = np.array([1.0, -2.0, 3.0, -4.0, 0.0], dtype=np.float32)
    sampling = Sampling(temperature=1.0, repetition_penalty=penalty)
    assert np.isfinite(penalize(logits, recent, penalty)).all()
    assert len({chosen(be, logits, sampling, recent, 0.5) for be in BACKENDS}) == 1
