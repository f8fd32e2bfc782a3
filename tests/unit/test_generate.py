"""Generation through the engine, with the real tokenizer: ids, seeds, stop strings, the context, what is refused."""

import dataclasses

import pytest

import mlx_engine
from mlx_engine.errors import ContextLengthError, OptionError
from mlx_engine.options import DEFAULT_MAX_TOKENS, Options
from tests.unit.test_decode import DATA


@pytest.fixture(scope="module")
def engine():
    return mlx_engine.load(DATA / "model-f32.gguf", backend="simd")


@pytest.mark.parametrize("kv", [True, False], ids=["cache", "no-cache"])
def test_generate_gives_the_golden_ids(engine, golden, kv):
    result = engine.generate(golden["prompt1"].tolist(), 24, kv=kv)
    assert result.token_ids == golden["greedy1"].tolist()
    assert (result.finish_reason, result.prompt_ids) == ("length", golden["prompt1"].tolist())
    assert len(result.metrics.passes) == 24


def test_the_pieces_of_a_stream_join_to_the_text_of_generate(engine):
    options = {"temperature": 2.0, "seed": 3, "ignore_eos": True}
    stream = engine.stream([5, 6, 7], 120, **options)
    pieces = list(stream)
    result = engine.generate([5, 6, 7], 120, **options)
    assert "".join(pieces) == stream.generation.text == result.text
    assert result.text == engine.tokenizer.decode(result.token_ids)
    assert len(pieces) > 10


def test_seeds_reproduce_a_run_and_tell_runs_apart(engine):
    def ids(seed):
        return engine.generate([5, 6, 7], 40, temperature=2.0, seed=seed, ignore_eos=True).token_ids

    assert ids(1) == ids(1)
    assert ids(1) != ids(2)


def test_a_stop_string_of_the_text_cuts_it_there(engine):
    options = {"temperature": 2.0, "seed": 3, "ignore_eos": True}
    whole = engine.generate([5, 6, 7], 60, **options)
    stop = whole.text[7:10]
    cut = engine.generate([5, 6, 7], 60, stop=stop, **options)
    assert cut.text == whole.text.partition(stop)[0]
    assert cut.finish_reason == "stop"
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]


@pytest.fixture
def short(monkeypatch):
    """The model with a context of 32, and the ids of every pass it runs."""
    engine, passes = mlx_engine.load(DATA / "model-f32.gguf", backend="simd"), []
    engine.model.config = engine.prompts.config = dataclasses.replace(engine.model.config, context_length=32)
    forward = engine.model.forward
    monkeypatch.setattr(engine.model, "forward", lambda batch: (passes.append(batch.ids), forward(batch))[1])
    return engine, passes


@pytest.mark.parametrize(("n_prompt", "max_tokens"), [(3, 30), (32, 1), (37, None), (32, None), (1, 10**9)])
def test_what_exceeds_the_context_is_refused_before_any_pass(short, n_prompt, max_tokens):
    engine, passes = short
    with pytest.raises(ContextLengthError, match="32"):
        engine.generate([1] * n_prompt, max_tokens)
    assert passes == []


def test_the_context_can_be_filled_to_its_end(short):
    engine, passes = short
    assert len(engine.generate([1] * 3, 29, ignore_eos=True).token_ids) == 29
    assert len(engine.generate([1] * 31, 1, ignore_eos=True).token_ids) == 1
    assert engine.generate([1] * 32, 0).token_ids == []
    assert passes


@pytest.mark.parametrize("kv", [True, False])
def test_no_token_is_an_empty_text_after_the_prompt_was_run(short, kv):
    engine, passes = short
    found = engine.generate([1, 2, 3], max_tokens=0, kv=kv, logprobs=2)
    assert (found.text, found.token_ids, found.logprobs, found.finish_reason) == ("", [], [], "length")
    assert passes == [[1, 2, 3]]
    assert list(engine.stream([1, 2, 3], max_tokens=0, kv=kv)) == []
    texts = [one.token_ids for one in engine.generate_batch([[1, 2], [3]], max_tokens=[0, 2], ignore_eos=True)]
    assert [len(ids) for ids in texts] == [0, 2]


def test_without_a_cap_there_are_256_tokens_or_what_the_context_leaves(engine, short):
    assert DEFAULT_MAX_TOKENS == 256
    assert len(engine.generate([1, 2], ignore_eos=True).token_ids) == 256
    assert len(short[0].generate([1] * 20, ignore_eos=True).token_ids) == 12


@pytest.mark.parametrize("prompt", [[], [512], [-1], [1, 2, 10**12], ""], ids=repr)
def test_an_impossible_prompt_is_refused(engine, prompt):
    with pytest.raises(OptionError) as caught:
        engine.generate(prompt, 4)
    assert caught.value.option == "prompt"


@pytest.mark.parametrize(
    ("option", "value"),
    [*(("max_tokens", n) for n in (-5, 2.5, float("nan"))), ("stop", [""]), ("stop", ["a", ""])],
    ids=repr,
)
def test_an_impossible_option_is_refused(option, value):
    with pytest.raises(OptionError) as caught:
        Options(**{option: value})
    assert caught.value.option == option
