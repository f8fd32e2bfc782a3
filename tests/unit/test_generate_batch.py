"""`generate_batch`: what each prompt gives alone, with options for all or for each."""

from __future__ import annotations

from pathlib import Path

import pytest

import mlx_engine
from mlx_engine.errors import ContextLengthError, OptionError

MICRO = Path(__file__).parents[1] / "data" / "qwen3-micro" / "model-q8_0.gguf"
PROMPTS = [[5, 9, 300, 17, 2], "Once upon a time", [8], [400, 3]]


@pytest.fixture(scope="module", params=["parallel", "mlx"])
def engine(request: pytest.FixtureRequest) -> mlx_engine.Engine:
    return mlx_engine.load(MICRO, request.param)


def test_each_is_what_the_prompt_gives_alone(engine: mlx_engine.Engine):
    options = {"temperature": 1.2, "seed": 4, "ignore_eos": True}
    found = engine.generate_batch(PROMPTS, 12, **options)
    want = [engine.generate(prompt, 12, **options) for prompt in PROMPTS]
    assert [(one.token_ids, one.text, one.finish_reason) for one in found] == [
        (one.token_ids, one.text, one.finish_reason) for one in want
    ]
    assert [one.prompt_ids for one in found] == [one.prompt_ids for one in want]


def test_log_probabilities_have_the_same_bits():
    engine = mlx_engine.load(MICRO, "parallel")
    found = engine.generate_batch(PROMPTS, 9, logprobs=2, ignore_eos=True)
    assert [one.logprobs for one in found] == [
        engine.generate(prompt, 9, logprobs=2, ignore_eos=True).logprobs for prompt in PROMPTS
    ]


def test_a_list_has_an_option_for_each_prompt(engine: mlx_engine.Engine):
    seeds, lengths, stops = [1, 2, None, 3], [3, 5, 1, 8], [None, ["a"], None, "b"]
    options = {"temperature": [1.5, 0.0, 0.0, 1.5], "ignore_eos": True}
    found = engine.generate_batch(PROMPTS, lengths, seed=seeds, stop=stops, **options)
    for one, prompt, n, seed, stop, t in zip(
        found, PROMPTS, lengths, seeds, stops, options["temperature"], strict=True
    ):
        want = engine.generate(prompt, n, seed=seed, stop=stop, temperature=t, ignore_eos=True)
        assert (one.token_ids, one.finish_reason) == (want.token_ids, want.finish_reason)


def test_a_list_of_strings_stops_every_prompt(engine: mlx_engine.Engine):
    text = engine.generate(PROMPTS[0], 12, ignore_eos=True).text
    found = engine.generate_batch(PROMPTS, 12, stop=[text[3:5], "never"], ignore_eos=True)
    assert found[0].finish_reason == "stop"
    assert found[0].text == text[: text.index(text[3:5])]


def test_without_a_cache(engine: mlx_engine.Engine):
    found = engine.generate_batch(PROMPTS, 4, kv=False, ignore_eos=True)
    assert [one.token_ids for one in found] == [
        engine.generate(prompt, 4, ignore_eos=True).token_ids for prompt in PROMPTS
    ]


def test_more_prompts_than_fit_into_a_pass(monkeypatch: pytest.MonkeyPatch):
    engine = mlx_engine.load(MICRO, "simd")
    monkeypatch.setattr("mlx_engine.engine.BATCH_SLOTS", 2)
    found = engine.generate_batch(PROMPTS, 6, ignore_eos=True)
    assert [one.token_ids for one in found] == [
        engine.generate(prompt, 6, ignore_eos=True).token_ids for prompt in PROMPTS
    ]


def test_wrong_input_is_refused_before_anything_runs(engine: mlx_engine.Engine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine.model, "forward", None)
    assert engine.generate_batch([], 4) == []
    with pytest.raises(OptionError, match="seed must be one value for all 4 prompts, or 4 values"):
        engine.generate_batch(PROMPTS, 4, seed=[1, 2])
    with pytest.raises(OptionError, match="kv"):
        engine.generate_batch(PROMPTS, 4, kv=[True, False, True, True])
    with pytest.raises(OptionError, match="temperature"):
        engine.generate_batch(PROMPTS, 4, temperature=[0.0, 0.0, -1.0, 0.0])
    with pytest.raises(ContextLengthError):
        engine.generate_batch([*PROMPTS, [1] * 5000], 4)
