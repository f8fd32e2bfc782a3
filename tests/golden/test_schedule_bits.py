"""An answer does not depend on who else is answered, on the cache, or on memory: ids and log-probabilities, to the bit.

One request is answered alone, in one pass over its prompt. Then it is answered at every place of batches of 2 to 32,
together with the others or after them, with several budgets and page sizes, after prefix hits of every length, after
eviction and after preemption, on one thread and on two. Its digest is the same every time.

    python -m tests.golden.test_schedule_bits

runs all cases for all models, of which the tests run a part. Run it with NUMBA_CPU_NAME=haswell
NUMBA_CPU_FEATURES= too (AVX2 alone): the last line is the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache

import numpy as np
import pytest

pytest.importorskip("numba")

from mlx_engine.backends import create_backend
from mlx_engine.cache.prefix import PrefixCache
from mlx_engine.loop.logprobs import digest
from mlx_engine.loop.request import Request
from mlx_engine.loop.scheduler import Scheduler
from mlx_engine.options import Options
from mlx_engine.weights.model import Model
from tests.random_models import SAMPLED, SETTINGS, VOCAB, random_model
from tests.streams import request_of

TYPES = ("F32", "Q8_0", "Q4_K")
SEQUENCES = (2, 5, 8, 9, 32)
BUDGETS = (16, 100, 512)
PAGES = (16, 64, 256)
# Tokens of the prompt that is compared, and of its answer.
LENGTH, N = 75, 10
# Into how many parts the batches are divided; each architecture is run in one.
PARTS = 6
KINDS = (Options.of(logprobs=0), Options.of(logprobs=0, temperature=1.3, top_k=50, seed=11, presence_penalty=0.5))


@lru_cache(4)
def model(architecture: str, type_name: str, threads: int = 2, *, jit: bool = True) -> Model:
    return random_model(architecture, type_name, create_backend("parallel", threads=threads, jit=jit))


def ids(seed: int, n: int = LENGTH) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, VOCAB, n)]


def requests(place: int, n: int, kind: int) -> list[Request]:
    """n requests, of which the one at this place is compared; the others are of other lengths and kinds."""
    return [
        request_of(ids(0), KINDS[kind], max_tokens=N)
        if i == place
        else request_of(ids(i + 1, 1 + (37 * (i + 1)) % 140), KINDS[i % 2], max_tokens=1 + (5 * i) % 14)
        for i in range(n)
    ]


def found(request: Request) -> str:
    if request.error is not None:
        raise request.error
    logprobs = request.output.logprobs
    return digest(request.output.token_ids, [of.logprob for of in logprobs or ()])


def run(
    of: Model, asked: Sequence[Request], *, slots: int, page: int = 64, n_tokens: int | None = None, apart: int = 0,
    prefix: bool = False, whole_pages: bool = False, **options: int,
) -> Scheduler:  # fmt: skip
    """Answer requests, together or so many steps apart."""
    pool = of.new_pool(n_tokens or sum(request.longest for request in asked), n_sequences=slots, page=page)
    cache = PrefixCache(pool, whole_pages=whole_pages) if prefix else None
    scheduler = Scheduler(of, pool, slots=slots, prefix=cache, **options)
    for request in asked:
        scheduler.submit(request)
        for _ in range(apart):
            scheduler.step()
    while scheduler.has_work:
        scheduler.step()
    return scheduler


@cache
def alone(architecture: str, type_name: str, kind: int, *, jit: bool = True) -> str:
    (request,) = requests(0, 1, kind)
    run(model(architecture, type_name, jit=jit), [request], slots=1)
    return found(request)


def batches(*, every: bool) -> Iterator[tuple[int, int, dict[str, int]]]:
    """Numbers of requests, the place of the one that is compared, and the settings of the scheduler."""
    settings = [
        {"budget": budget, "shared_budget": shared, "page": page, "apart": apart}
        for budget, shared, page, apart in zip(
            BUDGETS * 6, (1, 64, 512, 7, 16, 100), PAGES * 6, (0, 1, 3, 0, 2, 0), strict=False
        )
    ]
    step = 6 if every else len(settings)
    for n in SEQUENCES:
        for place in range(n) if every else sorted({0, n // 2, n - 1}):
            for of in settings[(n + place) % step :: step]:
                yield n, place, of


def in_batches(
    architecture: str, type_name: str, *, every: bool, part: int | None = None, jit: bool = True
) -> Iterator[bool]:
    """Yield whether the answer differs from the one alone, in all batches or in one of `PARTS` parts."""
    for i, (n, place, settings) in enumerate(batches(every=every)):
        if part is not None and i % PARTS != part:
            continue
        for kind in range(len(KINDS)) if every else [i % len(KINDS)]:
            asked = requests(place, n, kind)
            run(
                model(architecture, type_name, 1 + i % 2 if jit else 2, jit=jit),
                asked,
                slots=max(2, n - i % 3),
                **settings,
            )
            yield found(asked[place]) != alone(architecture, type_name, kind, jit=jit)


def after_hits(architecture: str, type_name: str, lengths: Sequence[int], page: int) -> int:
    """Return how many answers differ from the one alone, after a hit of each length: the rest of the prompt differs."""
    wrong = n_hits = 0
    for length in lengths:
        first = request_of([*ids(0)[:length], (ids(0)[length] + 1) % VOCAB, 3], KINDS[0], max_tokens=2)
        second = requests(0, 1, length % 2)[0]
        pool = run(
            model(architecture, type_name),
            [first, second],
            slots=1,
            page=page,
            n_tokens=256 + 4 * page,
            prefix=True,
            budget=BUDGETS[length % 3],
        ).pool
        # A layer with a window may have given back a page that the tokens at the hit's end need. A prefix with a state
        # is reused where the state is held: at the end of a chunk, or at a page boundary in the last.
        assert second.n_cached in ((0, length) if any(pool.windows) else (length,)) or pool.states.n_slots
        assert second.n_cached <= length
        n_hits += second.n_cached > 0
        wrong += found(second) != alone(architecture, type_name, length % 2)
    assert n_hits > len(lengths) // 2
    return wrong


def short_of_memory(architecture: str, type_name: str) -> tuple[int, int, int]:
    """Return how many answers differ, how often an answer was preempted, and how many pages were evicted."""
    asked = [r for i in range(3) for r in (*requests(1, 3, i % 2), request_of(ids(0), KINDS[i % 2], max_tokens=N))]
    kinds = [0, 0, 1, 1, 0, 0]
    want = [asked[i] for i in (1, 3, 5, 7, 9, 11)]
    scheduler = run(model(architecture, type_name), asked, slots=3, page=16, n_tokens=160, prefix=True, budget=40)
    assert scheduler.prefix is not None
    wrong = sum(found(r) != alone(architecture, type_name, kind) for r, kind in zip(want, kinds, strict=True))
    return wrong, sum(request.n_preemptions for request in asked), scheduler.prefix.stats.evicted_pages


ALL = [pytest.param(name, marks=[pytest.mark.slow] * (name in SAMPLED)) for name in SETTINGS]


@pytest.mark.some(2)
@pytest.mark.parametrize("architecture", ALL)
def test_an_answer_has_the_same_bits_in_every_batch(architecture: str):
    part = list(SETTINGS).index(architecture) % PARTS
    assert sum(in_batches(architecture, "Q8_0", every=False, part=part)) == 0


@pytest.mark.some(2)
@pytest.mark.parametrize("architecture", ALL)
def test_an_answer_has_the_same_bits_after_a_prefix_hit(architecture: str):
    assert after_hits(architecture, "Q8_0", [1, 15, 16, 17, 48, 63, 64, 73, 74], 16) == 0


@pytest.mark.some(2)
@pytest.mark.parametrize("architecture", ALL)
def test_a_next_turn_reuses_whole_pages_alone_and_has_the_same_bits(architecture: str):
    """Also those of the answer: a model with a state needs the state there."""
    of, prompt = model(architecture, "Q8_0"), ids(0)[:37]
    first = request_of(prompt, KINDS[0], max_tokens=30)
    run(of, [first], slots=1)
    turn = [*prompt, *first.output.token_ids[:29], 3, 4]
    again, second, cold = (request_of(ids, KINDS[0], max_tokens=n) for ids, n in ((prompt, 30), (turn, N), (turn, N)))
    pool = run(of, [again, second], slots=1, page=16, n_tokens=256, prefix=True, whole_pages=True).pool
    assert second.n_cached in ((0, 16, 32, 48, 64) if any(pool.windows) else (64,))
    run(of, [cold], slots=1)
    assert found(second) == found(cold)


@pytest.mark.some(1)
@pytest.mark.parametrize("architecture", ["qwen3", "gemma3", "qwen35"])
def test_an_answer_has_the_same_bits_after_eviction_and_preemption(architecture: str):
    wrong, n_preemptions, n_evicted = short_of_memory(architecture, "Q8_0")
    assert wrong == 0
    assert n_evicted > 0
    assert n_preemptions > 0


def test_products_whose_order_depends_on_the_shape_are_found_out():
    """Plain NumPy has other kernels for one row than for several."""
    assert any(in_batches("qwen3", "Q8_0", every=False, jit=False))


def main() -> None:
    """Run all cases for all models."""
    n, wrong, all_digests = 0, 0, hashlib.sha256()
    for architecture in SETTINGS:
        for type_name in TYPES:
            wrong += sum(in_batches(architecture, type_name, every=True))
            for page in PAGES:
                wrong += after_hits(architecture, type_name, range(LENGTH), page)
            short, n_preemptions, n_evicted = short_of_memory(architecture, type_name)
            wrong += short
            for kind in range(len(KINDS)):
                all_digests.update(alone(architecture, type_name, kind).encode())
            n += 1
            print(
                f"{architecture:<9}{type_name:<6}{wrong} differ so far; {n_preemptions} preemptions, "
                f"{n_evicted} evicted pages", flush=True,
            )  # fmt: skip
    n_batches = sum(1 for _ in batches(every=True)) * len(KINDS)
    n_hits = len(PAGES) * LENGTH
    print(f"{n} models, {n_batches} batches and {n_hits} prefix hits each: {wrong} differ; digest "
          f"{all_digests.hexdigest()[:16]}")  # fmt: skip


if __name__ == "__main__":
    main()
