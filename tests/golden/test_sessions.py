"""Sessions and the choice of a text: the bits of `logits` and `generate`, however tokens are divided among passes."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlx_engine
from mlx_engine import research
from mlx_engine.engine import Engine
from mlx_engine.errors import CacheFullError, ClosedError, ContextLengthError, NotCopyableError, OptionError
from tests.golden.goldens import DATA, engine

# Attention to all tokens; a window; states and attention; states in place of attention.
KINDS = ("llama", "gemma3", "qwen3_5", "lfm2")
IDS = [1, 5, 3, 2, 7]


def micro(name: str) -> Engine:
    return engine(DATA / f"{name}-micro" / "hf", "simd")


def last(model: Engine, ids: list[int]) -> bytes:
    return np.asarray(model.logits(ids))[-1].tobytes()


@pytest.fixture(scope="module")
def builtin() -> Iterator[Engine]:
    with mlx_engine.load("builtin", backend="simd") as loaded:
        yield loaded


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("logits"), st.lists(st.integers(0, 9), max_size=70)),
        st.tuples(st.just("rewind"), st.integers(0, 40)),
        st.tuples(st.just("fork"), st.booleans()),
    ),
    min_size=1,
    max_size=8,
)


@pytest.mark.some(1)
@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=20)
@given(STEPS)
def test_after_any_steps_the_bits_are_those_of_one_pass(name: str, steps: list[tuple[str, object]]):
    model = micro(name)
    session, ids, others = model.session(IDS, slots=10), list(IDS), []
    for kind, value in steps:
        if kind == "logits":
            ids = [*ids, *value][: model.config.context_length]
            found = session.logits(ids[len(session.ids) :])
            assert np.asarray(found).tobytes() == last(model, ids)
        elif kind == "rewind":
            n = min(value, len(ids) - 1)
            session.rewind(n)
            ids = ids[: len(ids) - n]
        else:  # go on with the fork, or with the session that was forked
            other = session.fork()
            session, other = (other, session) if value else (session, other)
            others.append((other, list(ids)))
        assert session.ids == ids
    for other, before in [(session, ids), *others]:
        assert np.asarray(other.logits()).tobytes() == last(model, before)
        other.close()


def test_a_greedy_loop_is_what_generate_returns(builtin: Engine):
    whole = builtin.generate("Once upon a time", 12, ignore_eos=True)
    with builtin.session("Once upon a time") as session:
        ids = [int(np.argmax(session.logits()))]
        while len(ids) < 12:
            ids.append(int(np.argmax(session.logits(ids[-1]))))
            assert session.n_kept == len(session.ids) == len(whole.prompt_ids) + len(ids) - 1
    assert ids == whole.token_ids


def test_only_new_tokens_are_run(builtin: Engine, monkeypatch: pytest.MonkeyPatch):
    lengths, forward = [], research.forward
    monkeypatch.setattr(
        research, "forward", lambda model, *parts: lengths.append(len(parts[0].ids)) or forward(model, *parts)
    )
    with builtin.session([1] * 100) as session:
        session.logits()
        session.logits([2, 3])
        session.logits()
        session.rewind(1)
        session.logits(4)
        session.fork().logits([5, 6, 7])
    assert lengths == [100, 2, 1, 3]


def test_a_call_that_fails_changes_nothing(builtin: Engine):
    with builtin.session([1, 2], slots=1) as session:
        before = np.asarray(session.logits()).tobytes()
        for wrong in ([-1], [builtin.config.vocab_size], ["a"], "abc", [1.5]):
            with pytest.raises(OptionError, match="next_ids must be token ids from 0 to 2047, not"):
                session.logits(wrong)
        with pytest.raises(
            ContextLengthError, match="the session has 2 tokens and gets 1,023 more; the model's context"
        ):
            session.logits([1] * 1023)
        with pytest.raises(OptionError, match="slots: all 1 slots for this session and its forks are in use"):
            session.fork()
        with pytest.raises(OptionError, match="rewind: n must be from 0 to 1, not 2; at least one token must be left"):
            session.rewind(2)
        assert (session.ids, np.asarray(session.logits()).tobytes()) == ([1, 2], before)


@pytest.mark.slow
def test_memory_is_shared_and_given_back(builtin: Engine):
    session = builtin.session([1] * 700, slots=3)
    session.logits()
    pool = session._family.pool
    used = pool.used_pages(0)
    forks = [session.fork() for _ in range(2)]
    assert pool.used_pages(0) == used + 2
    with pytest.raises(CacheFullError):  # two forks with 320 tokens of their own exceed one context
        [fork.logits([2] * 320) for fork in forks]
    assert [len(fork.ids) for fork in forks] == [1020, 700]
    forks.clear()
    gc.collect()
    assert (pool.used_pages(0), len(session._family.sessions)) == (used, 1)
    session.close()
    assert pool.used_pages(0) == 0
    with pytest.raises(ClosedError, match="the session has been closed"):
        session.logits()
    with pytest.raises(NotCopyableError, match="sessions cannot be pickled"):
        copy.copy(session)


@pytest.mark.parametrize("wrong", [{"slots": 0}, {"slots": None}, {"n_tokens": 0}, {"n_tokens": 1.5}])
def test_slots_and_tokens_are_whole_numbers(builtin: Engine, wrong: dict[str, object]):
    with pytest.raises(OptionError, match="must be a whole number of at least 1, not"):
        builtin.session([1, 2], **wrong)


def test_a_prompt_that_the_memory_does_not_hold_is_refused(builtin: Engine):
    with pytest.raises(
        OptionError, match="the memory for keys and values has room for 64 tokens, and the prompt has 65"
    ):
        builtin.session([1] * 65, n_tokens=64)
    with builtin.session([1] * 64, n_tokens=64, slots=1) as session:
        session.logits()
        with pytest.raises(CacheFullError):
            session.logits([2])
        assert session.ids == [1] * 64


def test_a_session_of_a_closed_engine_is_refused():
    with mlx_engine.load("builtin", backend="simd") as model:
        session = model.session([1, 2])
    with pytest.raises(ClosedError, match="the engine has been closed"):
        session.logits()


# ---- choose ----


@pytest.mark.parametrize("name", KINDS)
def test_each_text_has_the_log_probabilities_of_the_model(name: str, monkeypatch: pytest.MonkeyPatch):
    """Whatever their number and lengths; a pass has at most 6 rows and 3 texts here."""
    model = micro(name)
    monkeypatch.setattr(research, "MOST_ROWS", 6)
    monkeypatch.setattr(research, "MOST_TEXTS", 3)
    texts = [[4], [5, 6], [7, 1, 2, 3, 4, 5, 6, 7, 8], [9, 9, 9], [5, 6], [3] * 5, [2]]
    found = model.choose(IDS, texts)
    assert sorted(choice.index for choice in found) == list(range(len(texts)))
    for choice in found:
        ids = [*IDS, *texts[choice.index]]
        logits = np.asarray(model.logits(ids)).astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        every = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        expected = [every[i - 1, ids[i]] for i in range(len(IDS), len(ids))]
        np.testing.assert_allclose(choice.logprobs, expected, rtol=1e-6, atol=1e-6)
        assert choice.logprob == math.fsum(choice.logprobs)
        alone = model.choose(IDS, [texts[choice.index]])[0]
        assert (alone.logprobs, alone.share) == (choice.logprobs, 1.0)
    assert [choice.logprob for choice in found] == sorted((choice.logprob for choice in found), reverse=True)
    assert math.isclose(sum(choice.share for choice in found), 1.0)


def test_what_generate_writes_is_chosen_with_its_log_probabilities(builtin: Engine):
    whole = builtin.generate("Once upon a time", 4, ignore_eos=True, logprobs=0)
    best, *others = builtin.choose("Once upon a time", [" dog", whole.token_ids, " cat and dog", "!"])
    assert (best.index, best.text, best.token_ids) == (1, None, whole.token_ids)
    assert best.logprobs == [token.logprob for token in whole.logprobs]
    assert best.probability == math.exp(best.logprob) > others[0].probability
    assert {choice.text for choice in others} == {" dog", " cat and dog", "!"}
    assert others[0].token_ids == builtin.tokenizer.encode(others[0].text)


@pytest.mark.parametrize("texts", [[], [""], "abc", [[]]])
def test_texts_are_several_and_not_empty(builtin: Engine, texts: object):
    with pytest.raises(OptionError, match="texts must be a list of non-empty texts or non-empty lists of ids, not "):
        builtin.choose("a", texts)


def test_a_text_that_does_not_fit_is_refused(builtin: Engine):
    with pytest.raises(ContextLengthError):
        builtin.choose([1] * 1010, [[1] * 20])
