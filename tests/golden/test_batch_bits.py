"""A token's logits do not depend on who else is in the forward pass, for every architecture and kind of weights.

One sequence is read alone. Then it is put at every place of batches of 1 to 32 sequences with 1 to 512 tokens together,
in pages of several sizes, on one thread and on two: each of its rows has the same bits everywhere.

    python -m tests.golden.test_batch_bits

runs all batches for all models, of which the tests run a part, and prints a digest of all logits. The digest is the
same on every processor, and on a newer one with NUMBA_CPU_NAME=haswell NUMBA_CPU_FEATURES= (AVX2 alone).
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache

import numpy as np
import pytest

pytest.importorskip("numba")

from mlx_engine.backends import create_backend
from mlx_engine.backends.cpu.backend import CompiledBackend
from mlx_engine.backends.cpu.kernels import load_kernels
from mlx_engine.cache import SequenceInput
from mlx_engine.loop.forward import forward
from mlx_engine.weights.model import Model
from tests.random_models import SAMPLED, SETTINGS, VOCAB, random_model

TYPES = ("F32", "Q8_0", "Q4_K")
TOKENS = (1, 2, 3, 5, 8, 9, 16, 77, 512)
SEQUENCES = (1, 2, 5, 9, 32)
PAGES = (16, 64, 256)
# Tokens of the sequence that is compared, and how many of them are read before the batch.
LENGTH, READ = 300, 150
# What is run by default in fixed point.
FIXED_CASES = {("qwen3", "Q4_K"), ("qwen35moe", "Q8_0")}
# Of how many sizes a case runs one.
PART = 7


CASES = [
    pytest.param(name, *case, marks=[pytest.mark.slow] * (name in SAMPLED))
    for name in SETTINGS
    for case in itertools.product(TYPES, (1, 2))
]


@lru_cache(4)
def model(architecture: str, type_name: str, threads: int) -> Model:
    return random_model(architecture, type_name, create_backend("parallel", threads=threads))


def ids(seed: int, n: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, VOCAB, n)]


@lru_cache(4)
def fixed(architecture: str, type_name: str, threads: int) -> Model:
    """Return the same model with activations in fixed point."""
    library = load_kernels()
    assert library is not None
    return random_model(architecture, type_name, CompiledBackend(library, "parallel", threads, "i16"))


@lru_cache(4)
def alone(architecture: str, type_name: str, made: Callable[..., Model] = model) -> np.ndarray:
    """Logits at every position of the sequence, read in one pass on two threads."""
    of = made(architecture, type_name, 2)
    with of.backend.session():
        return np.array(of.backend.host(forward(of, SequenceInput(ids(0, LENGTH), of.scratch_kv(LENGTH), wanted=None))))


def shares(rng: np.random.Generator, n_tokens: int, n_sequences: int) -> list[int]:
    """Numbers of tokens, at least one each, that add up."""
    edges = sorted(rng.choice(np.arange(1, n_tokens), n_sequences - 1, replace=False).tolist())
    return np.diff([0, *edges, n_tokens]).tolist()


def batches(*, every_place: bool) -> Iterator[tuple[int, list[int], int, int]]:
    """Of each batch a seed, the numbers of new tokens, the place of the sequence that is compared, and the page.

    Places are all, or the first, one in the middle and the last.
    """
    rng = np.random.default_rng(1)
    sizes = [(t, b) for t, b in itertools.product(TOKENS, SEQUENCES) if b <= t]
    for seed, (n_tokens, n_sequences) in enumerate(sizes):
        for place in range(n_sequences) if every_place else sorted({0, n_sequences // 2, n_sequences - 1}):
            counts = shares(rng, n_tokens, n_sequences)
            counts[place] = min(counts[place], LENGTH - READ)
            yield seed, counts, place, PAGES[(seed + place) % len(PAGES)]


def differing(of: Model, want: np.ndarray, seed: int, counts: Sequence[int], place: int, page: int) -> list[int]:
    """The positions at which the compared sequence has other bits in this batch than alone."""
    rng = np.random.default_rng(seed)
    pool = of.new_pool(len(counts) * 640, n_sequences=len(counts), page=page)
    read = [READ if b == place else int(rng.integers(0, 60)) for b in range(len(counts))]
    texts = [ids(0 if b == place else 100 + b, n + m) for b, (n, m) in enumerate(zip(read, counts, strict=True))]
    sequences = [pool.sequence() for _ in counts]
    with of.backend.session():
        before = [
            SequenceInput(text[:n], kv, wanted=0) for text, n, kv in zip(texts, read, sequences, strict=True) if n
        ]
        forward(of, *before)
        new = [SequenceInput(text[n:], kv, wanted=None) for text, n, kv in zip(texts, read, sequences, strict=True)]
        logits = np.array(of.backend.host(forward(of, *new)))
    first = sum(counts[:place])
    found = logits[first : first + counts[place]]
    return [READ + i for i, row in enumerate(found) if not np.array_equal(row, want[READ + i])]


def wrong(of: Model, want: np.ndarray, some: Iterable[tuple[int, list[int], int, int]]) -> dict[object, list[int]]:
    """The batches in which some position differs, by (tokens, sequences, place, page)."""
    return {
        (sum(counts), len(counts), place, page): at
        for seed, counts, place, page in some
        if (at := differing(of, want, seed, counts, place, page))
    }


@pytest.mark.some(2)
@pytest.mark.parametrize(("architecture", "type_name", "threads"), CASES)
def test_a_sequence_has_the_same_bits_at_any_place_of_every_batch(architecture: str, type_name: str, threads: int):
    of, want = model(architecture, type_name, threads), alone(architecture, type_name)
    assert np.isfinite(want).all()
    assert len(np.unique(want[:, 0])) > LENGTH // 2
    # A part of the batches in each case: together every size meets every model.
    start = (list(SETTINGS).index(architecture) + TYPES.index(type_name) + threads) % PART
    some = itertools.islice(batches(every_place=False), start, None, PART)
    assert wrong(of, want, some) == {}


@pytest.mark.parametrize(
    ("architecture", "type_name"),
    [
        pytest.param(name, type_name, marks=[pytest.mark.slow] * ((name, type_name) not in FIXED_CASES))
        for name in SETTINGS
        for type_name in TYPES[1:]
    ],
)
def test_a_sequence_has_the_same_bits_in_fixed_point(architecture: str, type_name: str):
    """On one thread in batches as on two alone, and close to float32, but not equal."""
    want, exact = alone(architecture, type_name, fixed), alone(architecture, type_name)
    error = np.linalg.norm(want - exact) / np.linalg.norm(exact)
    assert 0 < error < 5e-4
    start = list(SETTINGS).index(architecture) % PART
    some = itertools.islice(batches(every_place=False), start, None, PART)
    assert wrong(fixed(architecture, type_name, 1), want, some) == {}


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_a_sequence_has_the_same_bits_at_all_places(threads: int):
    of, want = model("gemma3", "Q8_0", threads), alone("gemma3", "Q8_0")
    assert wrong(of, want, batches(every_place=True)) == {}


@pytest.mark.parametrize("name", ["cohere2", "hunyuan-dense", "nanochat"])
def test_a_batch_of_two_sequences_has_their_bits(name: str):
    """A sample for the architectures of which `-m slow` runs all cases: parallel blocks, norms after the rotation."""
    assert differing(model(name, "Q8_0", 2), alone(name, "Q8_0"), 0, [3, 4], 1, 16) == []


def test_a_batch_that_shows_through_is_seen(monkeypatch: pytest.MonkeyPatch):
    """Keys of the sequence before, which attention must not see, change bits."""
    of, want = model("qwen3", "Q8_0", 2), alone("qwen3", "Q8_0")
    take = type(of.new_pool(16)).take
    monkeypatch.setattr(type(of.new_pool(16)), "take", lambda self, group, n: np.zeros_like(take(self, group, n)))
    assert differing(of, want, 0, [3, 4], 1, 16)


def main() -> None:
    """Run all batches; exit with 1 if any bit differs."""
    digest, n_wrong, n_batches = hashlib.sha256(), 0, sum(1 for _ in batches(every_place=True))
    for architecture, type_name in itertools.product(SETTINGS, TYPES):
        want = alone(architecture, type_name)
        digest.update(want.tobytes())
        for threads in (1, 2):
            n_wrong += len(wrong(model(architecture, type_name, threads), want, batches(every_place=True)))
    n_models = len(SETTINGS) * len(TYPES)
    print(
        f"{n_models} models, {n_batches} batches, 1 and 2 threads: {n_wrong} differ; digest {digest.hexdigest()[:16]}"
    )
    raise SystemExit(n_wrong > 0)


if __name__ == "__main__":
    main()
