"""A step of several sequences: each gets the tokens that it would get alone, and a step that fails leaves no trace."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

import mlx_engine
from mlx_engine.backends.observed import tapped
from mlx_engine.cache import SequenceInput, begin
from mlx_engine.errors import CacheFullError
from mlx_engine.loop.forward import forward, forward_logits
from mlx_engine.loop.request import Sequence
from mlx_engine.loop.runner import ModelRunner
from mlx_engine.loop.sampler import Sampler, random_number
from mlx_engine.options import Sampling
from mlx_engine.weights.model import Model
from tests.decoding import sequence_of

MICRO = Path(__file__).parents[1] / "data" / "qwen3-micro" / "model-q8_0.gguf"
PROMPTS = [[5, 9, 300, 17, 2], [8], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [400, 3]]
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.5, seed=1),
    Sampling(repetition_penalty=1.7),
    Sampling(temperature=2.0, top_k=40, min_p=0.01, repetition_penalty=1.2, seed=2),
]
N = 12


def step(model: Model, running: list[Sequence]) -> list[int]:
    """Run the unread tokens of all sequences in one pass, and return the next token of each."""
    found = ModelRunner(model, overlap=False).step(lambda: [one.chunk(len(one.unread)) for one in running])
    return [ids[0] for _, ids in found.chosen]


# `parallel` runs the compiled program of `simd`.
@pytest.fixture(scope="module", params=["simd", pytest.param("parallel", marks=pytest.mark.slow), "mlx"])
def engine(request: pytest.FixtureRequest) -> mlx_engine.Engine:
    return mlx_engine.load(MICRO, request.param)


@pytest.fixture
def model(engine: mlx_engine.Engine) -> Model:
    return engine.model


def sequences(model: Model, *, room: int = N, page: int = 4) -> list[Sequence]:
    """A sequence for each prompt, which together have room for so many more tokens each."""
    n_tokens = sum(len(prompt) + room for prompt in PROMPTS)
    pool = model.new_pool(n_tokens, n_sequences=len(PROMPTS), page=page)
    return [
        sequence_of(pool.sequence(), Sampler(model.backend, sampling, prompt), list(prompt))
        for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True)
    ]


@pytest.fixture(scope="module")
def alone(engine: mlx_engine.Engine) -> list[list[int]]:
    """The tokens that each sequence gets alone."""
    options = [asdict(sampling) for sampling in SAMPLINGS]
    return [
        engine.generate(prompt, N, ignore_eos=True, **of).token_ids for prompt, of in zip(PROMPTS, options, strict=True)
    ]


@pytest.mark.some(1)
def test_each_gets_the_tokens_that_it_gets_alone(engine: mlx_engine.Engine, alone: list[list[int]]):
    running = sequences(engine.model)
    with engine.backend.session():
        steps = [step(engine.model, running) for _ in range(N)]
    assert [list(ids) for ids in zip(*steps, strict=True)] == alone
    assert [of.kv.length for of in running] == [len(prompt) + N - 1 for prompt in PROMPTS]


def test_a_sequence_may_come_later_and_another_may_go(engine: mlx_engine.Engine, alone: list[list[int]]):
    """The i-th begins at step 2 i, beside those that are at their later tokens, and ends with its last token."""
    waiting, running, found = list(enumerate(sequences(engine.model))), {}, [list[int]() for _ in PROMPTS]
    with engine.backend.session():
        for i in range(N + 2 * len(PROMPTS)):
            if waiting and i == 2 * waiting[0][0]:
                running |= dict([waiting.pop(0)])
            for number, token in zip(running, step(engine.model, list(running.values())), strict=True):
                found[number].append(token)
            for number in [number for number in running if len(found[number]) == N]:
                running.pop(number).kv.close()
            if not running:
                break
    assert found == alone


def test_a_sequence_that_is_computed_again_draws_the_same_tokens(engine: mlx_engine.Engine, alone: list[list[int]]):
    """Its pages were given back; its prompt then has the tokens that were written."""
    model = engine.model
    with engine.backend.session():
        for prompt, sampling, ids in zip(PROMPTS, SAMPLINGS, alone, strict=True):
            read = [*prompt, *ids[:5]]
            again = sequence_of(model.new_kv(40), Sampler(model.backend, sampling, read), read)
            assert [step(model, [again])[0] for _ in range(N - 5)] == ids[5:]


def state(running: list[Sequence]) -> list[tuple[int, int, list[int]]]:
    return [(of.kv.length, of.kv.pending, list(of.unread)) for of in running]


def test_without_room_for_all_no_sequence_changes(model: Model):
    """The pool has too few pages left when the last prompt wants some, once in prefill and once in decode."""
    running = sequences(model, room=0, page=1)
    spare, last = len(PROMPTS) - 1, running[-1]
    with model.backend.session():
        last.unread = PROMPTS[-1] * (1 + spare)
        before = state(running)
        with pytest.raises(CacheFullError):
            step(model, running)
        assert state(running) == before
        last.unread = list(PROMPTS[-1])
        step(model, running)
        before = state(running)
        with pytest.raises(CacheFullError):
            step(model, running)
        assert state(running) == before
        # As soon as another one goes, there is room.
        running.pop(0).kv.close()
        step(model, running)
    assert [of.kv.length for of in running] == [len(prompt) + 1 for prompt in PROMPTS[1:]]


class Interrupted(BaseException):
    """As KeyboardInterrupt, but no debugger mistakes it for the user's."""


@pytest.mark.some(2)
@pytest.mark.parametrize("at", ["blk.0.attn_q", "blk.2.layer_out"])
def test_an_interrupted_step_counts_for_no_sequence(engine: mlx_engine.Engine, alone: list[list[int]], at: str):
    model, running = engine.model, sequences(engine.model)
    original = model.backend

    def interrupt(name: str, _: object) -> None:
        if name == at:
            raise Interrupted

    with original.session():
        steps = [step(model, running) for _ in range(3)]
        before = state(running)
        model.run_on(tapped(original, interrupt))
        try:
            with pytest.raises(Interrupted):
                step(model, running)
        finally:
            model.run_on(original)
        assert state(running) == before
        steps += [step(model, running) for _ in range(N - 3)]
    assert [list(ids) for ids in zip(*steps, strict=True)] == alone


def test_a_step_that_is_interrupted_in_the_choice_counts_for_no_sequence(
    engine: mlx_engine.Engine, monkeypatch: pytest.MonkeyPatch, alone: list[list[int]]
):
    """A lazy backend computes the pass there. The step that follows gives what it would have given."""
    running, be = sequences(engine.model), engine.backend

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with be.session():
        found = [step(engine.model, running) for _ in range(3)]
        for method in ("choose", "wait"):
            monkeypatch.setattr(be, method, interrupted)
            with pytest.raises(KeyboardInterrupt):
                step(engine.model, running)
            monkeypatch.undo()
        assert [one.kv.length for one in running] == [len(prompt) + 2 for prompt in PROMPTS]
        found += [step(engine.model, running) for _ in range(N - 3)]
    assert [list(tokens) for tokens in zip(*found, strict=True)] == alone


def test_a_refused_batch_keeps_no_pages(model: Model):
    """What was found for its first sequence is free for the second alone."""
    pool = model.new_pool(12, n_sequences=2, page=4)  # four pages
    a, b = pool.sequence(), pool.sequence()
    with model.backend.session():
        with pytest.raises(CacheFullError, match="in its free pages; close another sequence"):
            forward(model, SequenceInput([1] * 12, a), SequenceInput([1] * 8, b))
        assert (a.n_pages, b.n_pages, pool.free_pages(0)) == (0, 0, 4)
        forward(model, SequenceInput([1] * 12, b))


def test_logits_that_nobody_wants_are_refused_before_the_pass(model: Model):
    kv = model.new_kv(4)
    with model.backend.session(), pytest.raises(ValueError, match="wanted tokens"):
        forward_logits(model, SequenceInput([1, 2], kv, wanted=0))
    assert (kv.length, kv.pending) == (0, 0)


def test_a_sequence_with_a_pass_under_way_is_not_closed(model: Model):
    kv = model.new_kv(8)
    batch = begin([SequenceInput([1, 2], kv)])
    with pytest.raises(ValueError, match="close: expected no pending tokens, found 2"):
        kv.close()
    batch.roll_back()
    kv.close()


def test_scratch_memory_takes_one_pass(model: Model):
    kv = model.scratch_kv(8)
    with model.backend.session():
        forward(model, SequenceInput([1, 2], kv))
        with pytest.raises(ValueError, match="stores are not kept"):
            forward(model, SequenceInput([3], kv))


def test_of_new_tokens_any_number_of_logits_may_be_wanted(model: Model):
    pool = model.new_pool(40, n_sequences=3)
    with model.backend.session():
        first, second, third = (pool.sequence() for _ in range(3))
        assert forward(model, SequenceInput([1, 2], first, 0), SequenceInput([3], second, 0)) is None
        logits = forward(
            model, SequenceInput([3, 4, 5], first, 2), SequenceInput([4], second, 0), SequenceInput([1, 2], third, None)
        )
        rows = model.backend.host(logits)
        want = [model.backend.host(forward(model, SequenceInput(ids, model.scratch_kv(len(ids)), n))) for ids, n in
                (([1, 2, 3, 4, 5], 2), ([1, 2], 2))]  # fmt: skip
    want = np.concatenate(want)
    assert rows.shape == (4, model.config.vocab_size)
    assert np.linalg.norm(rows - want) <= 1e-6 * np.linalg.norm(want)


def test_what_is_no_batch_is_refused(model: Model):
    pool = model.new_pool(20, n_sequences=2)
    kv, other = pool.sequence(), pool.sequence()
    stranger = model.new_kv(4)
    with pytest.raises(ValueError, match="expected 2 different sequences, found one of them twice"):
        begin([SequenceInput([1], kv), SequenceInput([2], kv)])
    with pytest.raises(ValueError, match="expected sequences of one pool"):
        begin([SequenceInput([1], kv), SequenceInput([2], stranger)])
    for wanted in (-1, 3):
        with pytest.raises(ValueError, match=r"expected at most .* wanted logits"):
            begin([SequenceInput([1, 2], other), SequenceInput([1, 2], kv, wanted)])
    with pytest.raises(ValueError, match="at least one new token"):
        begin([SequenceInput([1], kv), SequenceInput([], other, 0)])
    assert (kv.pending, other.pending, stranger.pending) == (0, 0, 0)


def test_numbers_of_a_draw_are_uniform_and_depend_on_seed_and_position():
    drawn = np.array([[random_number(seed, position) for position in range(100)] for seed in range(40)])
    assert ((drawn >= 0) & (drawn < 1)).all()
    assert len(np.unique(drawn)) == drawn.size
    assert abs(drawn.mean() - 0.5) < 0.02
    assert np.abs(np.bincount((drawn * 10).astype(int).ravel(), minlength=10) - 400).max() < 100
    assert random_number(2**64 - 1, 10**6) == random_number(2**64 - 1, 10**6)
