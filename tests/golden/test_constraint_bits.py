"""A constrained answer does not depend on who else is answered, on the cache, or on memory: ids and log-probabilities.

Each request is answered alone, then with the others in several batches, with chunks of prompts, prefix hits, forks and
preemption, on one thread and on two, with compiled kernels and without. On mlx, whose sums depend on the batch, the
answers alone are the same whether passes overlap or not, and every answer of a batch is allowed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

import mlx_engine
from mlx_engine import Constraint
from mlx_engine.engine import Engine
from mlx_engine.loop.constraint import Matcher
from mlx_engine.loop.logprobs import digest
from mlx_engine.loop.request import Request
from mlx_engine.loop.runner import ModelRunner
from mlx_engine.loop.scheduler import Scheduler
from mlx_engine.options import Options

SCHEMA = Constraint.json_schema(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "likes": {"enum": ["cats", "dogs", "cake"]}},
        "required": ["name", "likes"],
        "additionalProperties": False,
    }
)
DIGITS = Constraint.regex("[0-9]{2,9}( [a-z]+){0,3}")
CHOICE = Constraint.choice(["yes", "no", "yes, but not today"])
STORY = "Once upon a time there was a little girl who had a red ball and a big dog, and "
WARM = {"temperature": 1.2, "top_k": 100, "presence_penalty": 0.3}

ASKED: list[tuple[str, int, Options]] = [
    (STORY * 4, 1, Options.of(30, logprobs=0, constraint=SCHEMA)),
    ("Tom", 2, Options.of(24, logprobs=0, constraint=SCHEMA, seed=3, **WARM)),
    (STORY, 1, Options.of(20, logprobs=0)),
    (STORY * 2, 3, Options.of(16, logprobs=0, constraint=DIGITS, seed=5, **WARM)),
    (STORY + "Tom", 1, Options.of(16, logprobs=0, constraint=CHOICE, seed=7, **WARM)),
    ("Lily", 1, Options.of(12, logprobs=0, constraint=DIGITS)),
]


@cache
def engine(backend: str, threads: int = 1, *, jit: bool = True) -> Engine:
    return mlx_engine.load("builtin", backend, threads=threads if backend == "parallel" else None, jit=jit)


def requests(of: Engine, which: Sequence[int] = range(len(ASKED))) -> list[Request]:
    return [of.request(ASKED[i][0], ASKED[i][2], n=ASKED[i][1]) for i in which]


def found(request: Request) -> list[tuple[str, list[float | None]]]:
    """The digest of each answer, and the probability that the masks left."""
    if request.error is not None:
        raise request.error
    return [
        (
            digest(output.token_ids, [token.logprob for token in output.logprobs or ()]),
            [token.allowed for token in output.logprobs or ()],
        )
        for output in request.outputs
    ]


def run(scheduler: Scheduler, asked: Sequence[Request], *, apart: int = 0) -> Scheduler:
    for request in asked:
        scheduler.submit(request)
        for _ in range(apart):
            scheduler.step()
    while scheduler.has_work:
        scheduler.step()
    return scheduler


@cache
def alone() -> list[list[tuple[str, list[float | None]]]]:
    """Each request for itself, in one pass over its prompt."""
    of, answers = engine("parallel", 2), []
    for i in range(len(ASKED)):
        (request,) = requests(of, [i])
        run(of.scheduler(slots=ASKED[i][1], prefix_cache=False), [request])
        answers.append(found(request))
    return answers


def allowed(request: Request) -> bool:
    """Whether the answers that ended by themselves are what their constraint describes."""
    texts = [output.text for output in request.outputs if output.finish_reason == "stop"]
    kind = request.options.constraint
    if kind == SCHEMA:
        return all(set(json.loads(text)) == {"name", "likes"} for text in texts)
    return kind is None or all(
        re.fullmatch(r"[0-9]{2,9}( [a-z]+){0,3}|yes|no|yes, but not today", text) for text in texts
    )


BATCHES = [
    {"slots": 9},
    {"slots": 4, "budget": 16, "shared_budget": 5},
    {"slots": 9, "budget": 64, "shared_budget": 7, "apart": 2, "prefix_cache": False},
    {"slots": 3, "apart": 1, "prefix_cache": True},
]


@pytest.mark.some(2)
@pytest.mark.parametrize("settings", BATCHES, ids=str)
def test_an_answer_is_the_same_in_every_batch(settings: dict[str, int]):
    options = dict(settings)
    apart, of = options.pop("apart", 0), engine("parallel", 1 + len(options) % 2)
    asked = requests(of)
    run(of.scheduler(**options), asked, apart=apart)
    assert [found(request) for request in asked] == alone()
    assert all(map(allowed, asked))
    assert any(value is not None and value < 0.5 for _, values in alone()[0] for value in values)


@pytest.mark.slow
def test_an_answer_is_the_same_after_prefix_hits_and_backwards():
    of = engine("parallel", 2)
    scheduler = of.scheduler(slots=9)
    run(scheduler, requests(of))
    again = requests(of, range(len(ASKED))[::-1])
    run(scheduler, again)
    assert any(request.n_cached for request in again)
    assert [found(request) for request in again[::-1]] == alone()


def test_an_answer_is_the_same_after_preemption():
    of = engine("parallel", 2)
    pool = of.model.new_pool(64, n_sequences=6, page=16)
    scheduler = Scheduler(of.model, pool, slots=6)
    which = [1, 1, 1]
    asked = requests(of, which)
    run(scheduler, asked)
    assert sum(request.n_preemptions for request in asked) > 0
    assert [found(request) for request in asked] == [alone()[i] for i in which]


@pytest.mark.some(1)
@pytest.mark.parametrize("jit", [True, False], ids=["compiled", "numpy"])
def test_an_answer_is_the_same_on_simd(jit: bool):
    of = engine("simd", jit=jit)
    asked = requests(of, [1, 4, 5])
    run(of.scheduler(slots=9), asked)
    if jit:
        assert [found(request) for request in asked] == [alone()[i] for i in (1, 4, 5)]
    assert all(map(allowed, asked))


@pytest.mark.some(1)
@pytest.mark.parametrize("name", ["parallel", "simd", "numpy"])
def test_a_checked_choice_is_the_choice_under_the_mask(name: str, monkeypatch: pytest.MonkeyPatch):
    """Greedy answers without log-probabilities compute few masks, those with log-probabilities one for each token."""
    of, masks = engine("simd" if name == "numpy" else name, jit=name != "numpy"), Matcher.mask
    n_masks = {None: 0, 0: 0}
    answers: dict[int | None, list[list[int]]] = {None: [], 0: []}
    for logprobs, found_ids in answers.items():

        def mask(self: Matcher, logprobs: int | None = logprobs) -> object:
            n_masks[logprobs] += 1
            return masks(self)

        monkeypatch.setattr(Matcher, "mask", mask)
        for constraint in (SCHEMA, DIGITS, CHOICE):
            request = of.request(STORY, Options.of(40, constraint=constraint, logprobs=logprobs))
            run(of.scheduler(slots=1, prefix_cache=False), [request])
            found_ids.append(request.output.token_ids)
    assert answers[None] == answers[0]
    assert n_masks[None] < sum(map(len, answers[0])) <= n_masks[0]


@pytest.mark.slow
def test_on_mlx_a_pass_ahead_changes_nothing():
    of, which = engine("mlx"), [4, 5]
    answers = []
    for overlap in (True, False):
        each = requests(of, which)
        for request in each:
            run(of.scheduler(slots=2, prefix_cache=False, overlap=overlap), [request])
        answers.append([found(request) for request in each])
    assert answers[0] == answers[1]
    together = requests(of, [4, 1, 5])
    run(of.scheduler(slots=9), together)
    assert all(map(allowed, together))
    assert all(output.token_ids for request in together for output in request.outputs)


@pytest.mark.slow
def test_on_mlx_a_choice_that_fails_behind_a_settled_pass_is_repeated(monkeypatch: pytest.MonkeyPatch):
    of, choose, n_calls = engine("mlx"), ModelRunner._choose_late, 0

    def answers() -> list[list[list[int]]]:
        each = requests(of, [4, 5])
        run(of.scheduler(slots=2, prefix_cache=False), each)
        return [[output.token_ids for output in request.outputs] for request in each]

    def fails_once(self: ModelRunner, submitted: Any) -> None:
        nonlocal n_calls
        n_calls += 1
        if n_calls == 3:
            raise MemoryError
        choose(self, submitted)

    want = answers()
    monkeypatch.setattr(ModelRunner, "_choose_late", fails_once)
    assert answers() == want
    assert n_calls > 4


def test_on_mlx_masks_are_computed_while_the_next_pass_runs(monkeypatch: pytest.MonkeyPatch):
    """The device has a pass to run whenever a mask is computed, but for the first ones and the last."""
    of, busy = engine("mlx"), []
    (request,) = requests(of, [5])
    scheduler = of.scheduler(slots=1, prefix_cache=False)
    masks = Matcher.mask

    def mask(self: Matcher) -> object:
        busy.append(not scheduler._runner.is_idle)
        return masks(self)

    monkeypatch.setattr(Matcher, "mask", mask)
    run(scheduler, [request])
    assert busy.count(True) >= len(request.output.token_ids) - 1 > 0
