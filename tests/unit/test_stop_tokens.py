"""Stop token ids, and which stop ended a run."""

import pytest

import mlx_engine
from mlx_engine.errors import OptionError
from mlx_engine.options import Options

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def engine():
    with mlx_engine.load("builtin", backend="simd") as loaded:
        yield loaded


@pytest.fixture(scope="module")
def whole(engine):
    return engine.generate(PROMPT, 12, ignore_eos=True, logprobs=0)


def test_a_stop_token_ends_the_run_with_its_id_and_without_its_text(engine, whole):
    end = whole.token_ids[7]
    n = whole.token_ids.index(end) + 1
    found = engine.generate(PROMPT, 12, stop_token_ids=[3, end], logprobs=0, ignore_eos=True)
    assert (found.finish_reason, found.stop) == ("stop", end)
    assert found.token_ids == whole.token_ids[:n]
    assert [token.logprob for token in found.logprobs] == [token.logprob for token in whole.logprobs[:n]]
    assert found.text == engine.tokenizer.decode(whole.token_ids[: n - 1], at_start=False)


def test_the_stop_string_that_ended_the_run_is_told(engine, whole):
    stop = whole.text[6:9]
    found = engine.generate(PROMPT, 12, stop=["never there", stop, stop[1:]])
    assert (found.text, found.finish_reason, found.stop) == (whole.text.partition(stop)[0], "stop", stop)


@pytest.mark.slow
def test_other_ends_have_no_stop(engine):
    limited = engine.generate(PROMPT, 3, stop="never there", stop_token_ids=[0])
    assert (limited.finish_reason, limited.stop) == ("length", None)
    ended = engine.generate(PROMPT, -1)
    assert (ended.finish_reason, ended.stop) == ("stop", None)
    eos = ended.token_ids[-1]
    assert engine.generate(PROMPT, -1, ignore_eos=True, stop_token_ids=eos).token_ids == ended.token_ids


def test_a_list_of_ids_is_for_all_prompts_and_a_list_of_lists_for_each(engine, whole):
    a, b = whole.token_ids[2], whole.token_ids[5]
    alike = engine.generate_batch([PROMPT, PROMPT], 12, stop_token_ids=[a])
    assert [found.stop for found in alike] == [a, a]
    each = engine.generate_batch([PROMPT, PROMPT], 12, stop_token_ids=[[a], [b]])
    assert [found.stop for found in each] == [a, b]


@pytest.mark.parametrize(
    ("given", "meant"), [(None, ()), (7, (7,)), ([7, 8, 7], (7, 8)), (["7"], (7,)), (range(3), (0, 1, 2)), ({5}, (5,))]
)
def test_one_id_or_several(given, meant):
    assert Options.of(stop_token_ids=given).stop_token_ids == meant


@pytest.mark.parametrize("given", [-1, [True], 1.5, ["x"], ["-1"], [None], "³"])
def test_what_is_no_id_is_refused(given):
    with pytest.raises(OptionError, match="stop_token_ids must be token ids of at least 0, not "):
        Options.of(stop_token_ids=given)


def test_an_id_outside_of_the_vocabulary_is_refused(engine):
    n = engine.config.vocab_size
    with pytest.raises(OptionError, match=f"stop_token_ids must be token ids from 0 to {n - 1}, not {n}"):
        engine.generate(PROMPT, 1, stop_token_ids=[n])
