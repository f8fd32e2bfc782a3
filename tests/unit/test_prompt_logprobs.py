"""Log-probabilities of prompts: those of the logits, with the same bits in any chunks, batch and after a preemption."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import mlx_engine
from mlx_engine.cache.prefix import PrefixCache
from mlx_engine.errors import ContextLengthError, NotFiniteError, OptionError
from mlx_engine.loop.request import Request
from mlx_engine.loop.row_reader import PromptLogprobs
from mlx_engine.options import Options
from tests import scheduling
from tests.scheduling import MICRO

PROMPT = [int(i) for i in np.random.default_rng(5).integers(0, 400, 90)]


@pytest.fixture(scope="module", params=["simd", "parallel"])
def engine(request: pytest.FixtureRequest):
    with mlx_engine.load(MICRO, request.param) as found:
        yield found


def wanted(engine: mlx_engine.Engine, ids: list[int]) -> np.ndarray:
    """The log-softmax of the engine's logits in float64."""
    x = np.array(engine.logits(ids)).astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    x -= np.log(np.exp(x).sum(axis=1, keepdims=True))
    return x


def scores(request: Request) -> list[tuple[float, tuple[tuple[int, float], ...], int | None]]:
    return [(token.logprob, token.top, token.rank) for token in request.prompt_logprobs or []]


def scored(engine: mlx_engine.Engine, ids: list[int] = PROMPT, n: int = 0, **options: Any) -> Request:
    return engine.request(ids, Options.of(n, ignore_eos=True, prompt_logprobs=3, **options))


def alone(engine: mlx_engine.Engine, ids: list[int] = PROMPT) -> list[Any]:
    scheduler, request = scheduling.scheduler_of(engine), scored(engine, ids)
    scheduler.submit(request)
    scheduling.run(scheduler)
    return scores(request)


def test_they_are_the_log_softmax_of_the_logits(engine: mlx_engine.Engine):
    x, found = wanted(engine, PROMPT), engine.generate(PROMPT, 0, prompt_logprobs=5).prompt_logprobs or []
    assert len(found) == len(PROMPT) - 1
    for row, token, token_id in zip(x, found, PROMPT[1:], strict=False):
        assert token.token_id == token_id
        assert math.isclose(token.logprob, row[token_id], rel_tol=1e-6, abs_tol=1e-6)
        assert token.rank == 1 + (row > row[token_id]).sum()
        assert [i for i, _ in token.top] == np.argsort(-row, kind="stable")[:5].tolist()


def test_the_array_has_the_same_values_as_the_tokens(engine: mlx_engine.Engine):
    found = engine.logprobs(PROMPT)
    assert (str(found.dtype), found.shape) == ("mlx.core.float32", (len(PROMPT) - 1,))
    assert found.tolist() == [token.logprob for token in engine.generate(PROMPT, 0, prompt_logprobs=0).prompt_logprobs]
    assert engine.logprobs(PROMPT[:1]).shape == (0,)
    text = "hello there"
    assert engine.logprobs(text).tolist() == engine.logprobs(engine.prompt_ids(text)).tolist()
    with pytest.raises(ContextLengthError):
        engine.logprobs([1] * (engine.config.context_length + 1))
    with pytest.raises(OptionError, match="prompt_logprobs must be"):
        engine.generate(PROMPT, prompt_logprobs=21)


@pytest.mark.some(1)
@pytest.mark.parametrize("budget", [1, 7, 64])
def test_chunks_and_other_requests_change_no_bit(engine: mlx_engine.Engine, budget: int):
    scheduler = scheduling.scheduler_of(engine, budget=budget, shared_budget=budget)
    others = scheduling.requests(engine)
    found = [scored(engine), scored(engine, PROMPT[3:40], 4), scored(engine, PROMPT[:2])]
    for request in (*others[:2], *found, *others[2:]):
        scheduler.submit(request)
    scheduling.run(scheduler)
    assert [scores(request) for request in found] == [alone(engine, list(request.prompt_ids)) for request in found]
    assert scheduling.ids(others) == scheduling.alone(engine)


def test_several_answers_share_the_scores_of_their_prompt(engine: mlx_engine.Engine):
    scheduler = scheduling.scheduler_of(engine)
    request = engine.request(PROMPT, Options.of(3, prompt_logprobs=3, temperature=1, seed=1), n=3)
    scheduler.submit(request)
    scheduling.run(scheduler)
    assert scores(request) == alone(engine)


def test_a_preempted_prompt_is_scored_once(engine: mlx_engine.Engine):
    scheduler = scheduling.scheduler_of(engine, 100, budget=16, shared_budget=16)
    first, second = engine.request([7] * 30, scheduling.options(0, 40)), scored(engine)
    scheduler.submit(first)
    scheduler.submit(second)
    scheduling.run(scheduler)
    assert second.n_preemptions > 0
    assert scores(second) == alone(engine)


def test_a_scored_prompt_is_computed_and_kept_in_the_prefix_cache(engine: mlx_engine.Engine):
    pool = engine.model.new_pool(400, n_sequences=4, page=4)
    scheduler = scheduling.Scheduler(engine.model, pool, slots=4, prefix=PrefixCache(pool))
    counts = []
    for request in (scored(engine), scored(engine), engine.request(PROMPT, scheduling.options(0, 2))):
        scheduler.submit(request)
        while scheduler.has_work:
            scheduler.step()
        counts.append(request.n_cached)
        if request.reader is not None:
            assert scores(request) == alone(engine)
    assert counts == [0, 0, len(PROMPT) - 1]


def test_a_pass_has_no_more_rows_of_logits_than_allowed(engine: mlx_engine.Engine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mlx_engine.loop.scheduler.MOST_BYTES", 4 * 10 * engine.config.vocab_size)
    scheduler, forward, n_rows = scheduling.scheduler_of(engine), engine.model.forward, []
    monkeypatch.setattr(engine.model, "forward", lambda batch: (n_rows.append(len(batch.rows)), forward(batch))[1])
    requests = [scored(engine), scored(engine, PROMPT[5:])]
    for request in requests:
        scheduler.submit(request)
    scheduling.run(scheduler)
    assert max(n_rows) == 10
    assert scores(requests[0]) == alone(engine)


def test_without_a_cache_they_are_the_same(engine: mlx_engine.Engine):
    found = engine.generate(PROMPT[:20], 3, ignore_eos=True, kv=False, prompt_logprobs=0).prompt_logprobs or []
    assert [token.logprob for token in found] == engine.logprobs(PROMPT[:20]).tolist()


def test_rows_that_are_not_finite_fail_the_request_alone(engine: mlx_engine.Engine, monkeypatch: pytest.MonkeyPatch):
    forward, be = engine.model.forward, engine.backend

    def spoiled(batch: Any) -> Any:
        logits = np.array(be.host(forward(batch)))
        if len(batch.rows) > 1:
            logits[batch.rows.index(5), 7] = np.nan  # after a row of the other request
        return be.array(logits)

    monkeypatch.setattr(engine.model, "forward", spoiled)
    first, *rest = engine.run_requests([scored(engine, PROMPT[:20], 2), engine.request([5], Options.of(2))])
    with pytest.raises(NotFiniteError, match="after 5 tokens"):
        list(first)
    assert len(list(rest[0])) > 0


def test_rows_that_come_again_are_skipped():
    class Reader(PromptLogprobs):
        def read_row(self, backend: Any, position: int, row: np.ndarray) -> None:
            seen.append((position, int(row[0])))

    seen: list[tuple[int, int]] = []
    reader, rows = Reader(range(8)), np.arange(8)[:, None]
    assert [reader.n_wanted(0, 3), reader.n_wanted(6, 1), reader.n_wanted(7, 1)] == [3, 1, 0]
    for first, last in ((0, 3), (1, 5), (3, 8)):
        reader.read(None, first, rows[first:last])  # type: ignore[arg-type]
    assert seen == [(i, i) for i in range(7)]
    assert [reader.n_wanted(0, 8), reader.start] == [0, 7]


def test_they_are_part_of_no_digest_and_of_the_result(engine: mlx_engine.Engine):
    with_, without = (engine.generate(PROMPT, 4, logprobs=0, prompt_logprobs=n) for n in (0, None))
    assert replace(with_, prompt_logprobs=None, metrics=without.metrics) == without
