"""Suggested sampling: what files say, what overrides it, and which commands use it."""

import json
import re
from pathlib import Path

import pytest

from mlx_engine.checkpoint.gguf import open_gguf
from mlx_engine.checkpoint.gguf_writer import write_gguf
from mlx_engine.commands.options.suggested import checked, described, suggested_sampling
from mlx_engine.commands.serve import suggestions
from mlx_engine.errors import FormatError, OptionError
from mlx_engine.options import Sampling
from mlx_engine.serve.parameters import ChatRequest
from tests.unit.test_command_generate import MODEL, cli


def folder(tmp_path, **config):
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.fixture(scope="module")
def hot(tmp_path_factory):
    """The micro model, whose file suggests a high temperature."""
    path = tmp_path_factory.mktemp("model") / "hot.gguf"
    with open_gguf(MODEL) as file:
        more = {"general.sampling.temp": 1.5, "general.sampling.top_k": 0, "general.sampling.min_p": 0.01}
        write_gguf(path, {**file.typed_metadata(), **more}, [file.weight(name) for name in file.tensors])
    return path


CASES = [
    (
        {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2]},
        {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    ),
    ({"do_sample": True, "top_k": 64}, {"temperature": 1.0, "top_k": 64}),
    ({"temperature": 0.15}, {"temperature": 0.15}),
    ({"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.05}, {"repetition_penalty": 1.05}),
    ({"top_p": 0.9}, {}),
    ({"do_sample": True, "top_k": 0, "min_p": None}, {"temperature": 1.0, "top_k": None}),
    ({}, {}),
]


@pytest.mark.parametrize(("config", "values"), CASES)
def test_a_folder_suggests_what_its_generation_config_says(tmp_path, config, values):
    assert suggested_sampling(folder(tmp_path, **config)).values == values


def test_settings_that_are_not_implemented_are_named_unless_they_are_off(tmp_path):
    config = {"typical_p": 0.9, "num_beams": 1, "suppress_tokens": [3], "bad_words_ids": None, "max_new_tokens": 9}
    assert suggested_sampling(folder(tmp_path, **config)).unused == ("typical_p", "suppress_tokens")


def test_a_folder_without_the_file_suggests_nothing(tmp_path):
    assert suggested_sampling(tmp_path).values == {}


@pytest.mark.parametrize(
    "value", ["warm", True, [1], float("inf"), float("nan"), 10**400], ids=lambda value: str(value)[:9]
)
def test_what_is_no_number_is_refused(tmp_path, value):
    with pytest.raises(FormatError, match=r"generation_config.json: expected a number as temperature.*--no-suggested"):
        suggested_sampling(folder(tmp_path, temperature=value))


def test_what_is_out_of_range_is_refused(tmp_path):
    with pytest.raises(OptionError, match=r"generation_config.json: top_p must be a number from 0 to 1, not 7; --no-s"):
        checked(folder(tmp_path, do_sample=True, top_p=7))


def test_a_gguf_file_suggests_what_its_metadata_says(hot):
    suggested = suggested_sampling(hot)
    assert suggested.values == {"temperature": 1.5, "top_k": None, "min_p": pytest.approx(0.01)}
    assert suggested_sampling(Path(MODEL)).values == {}


@pytest.mark.slow
def test_chat_samples_as_suggested_and_shows_it(hot):
    run = cli("chat", "--model", hot, "--backend", "simd", "-n", 2, "--seed", 1, stdin="Hi\n/stats\n")
    assert "sampling as hot.gguf suggests: temperature 1.5, top_k None, min_p 0.01; --no-suggested" in run.err
    assert "sampling: temperature 1.5, min_p 0.01, seed 1" in run.err
    run = cli("chat", "--model", hot, "--backend", "simd", "-n", 2, "--no-suggested", stdin="Hi\n/stats\n")
    assert "suggests" not in run.err
    assert "sampling: greedy" in run.err


def test_an_option_that_is_given_overrides_the_suggestion_also_at_its_default(hot):
    run = cli("chat", "--model", hot, "--backend", "simd", "-n", 2, "--temp", 0, stdin="/stats\n")
    assert "suggests: top_k None, min_p 0.01;" in run.err
    assert "sampling: greedy, min_p 0.01" in run.err


def test_generate_samples_as_suggested_only_if_asked_to(hot):
    greedy = cli("generate", "--model", hot, "--backend", "simd", "-n", 8, "Hi")
    assert greedy.out == cli("generate", "--model", MODEL, "--backend", "simd", "-n", 8, "Hi").out
    offers = [line for line in greedy.err.splitlines() if "--suggested" in line]
    assert offers == [
        "hint: hot.gguf suggests temperature 1.5, top_k None, min_p 0.01; --suggested uses these values, "
        "--no-suggested omits this line"
    ]
    asked = ("-n", 8, "--seed", 3, "Hi")
    as_suggested = cli("generate", "--model", hot, "--backend", "simd", "--suggested", *asked)
    by_hand = cli("generate", "--model", hot, "--backend", "simd", "--temp", 1.5, "--min-p", 0.01, *asked)
    assert as_suggested.out == by_hand.out
    assert "sampling as hot.gguf suggests" in as_suggested.err


@pytest.mark.some(2)
@pytest.mark.parametrize("more", [("--no-suggested",), ("--temp", 0), ("--temp", 0.7), ("-q",), ("--json",)], ids=str)
def test_no_sampling_is_offered_to_who_has_chosen(hot, more):
    run = cli("generate", "--model", hot, "--backend", "simd", "-n", 2, *more, "Hi")
    assert (run.code, "suggest" in run.err) == (0, False)


def test_a_file_that_suggests_the_impossible_is_an_error_only_if_it_is_used(tmp_path):
    with open_gguf(MODEL) as file:
        metadata = {**file.typed_metadata(), "general.sampling.top_p": 7.0}
        write_gguf(tmp_path / "odd.gguf", metadata, [file.weight(name) for name in file.tensors])
    options = ("generate", "--model", tmp_path / "odd.gguf", "--backend", "simd", "-n", 2, "Hi")
    run = cli(*options)
    assert (run.code, "hint: odd.gguf" in run.err) == (0, False)
    assert cli(*options, "--suggested").code == 2


def test_asking_for_suggestions_of_a_file_without_any_is_a_warning():
    run = cli("generate", "--model", MODEL, "--backend", "simd", "-n", 2, "--suggested", "-q", "Hi")
    assert re.fullmatch("warning: .*model-f32.gguf suggests no sampling, so --suggested has no effect\n", run.err)
    run = cli("chat", "--model", MODEL, "--backend", "simd", stdin="")
    assert (run.code, "suggests" in run.err) == (0, False)


IDLE = "no effect at temperature 0, which always takes the most likely token; --temp T samples\n"


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("options", "warning"),
    [
        (("--top-k", 40), f"warning: --top-k has {IDLE}"),
        (("--top-p", 0.9, "--min-p", 0.1), f"warning: --top-p, --min-p have {IDLE}"),
        (("--seed", 0, "--temp", 0), f"warning: --seed has {IDLE}"),
        (("--seed", 1, "--temp", 0.5), ""),
        (("--top-p", 1, "--repetition-penalty", 1.1), ""),
    ],
    ids=str,
)
def test_options_that_do_nothing_without_a_temperature_are_a_warning(options, warning):
    for how in ("-q", "--json"):
        assert cli("generate", "--model", MODEL, "--backend", "simd", "-n", 1, how, *options, "Hi").err == warning
    assert cli("chat", "--model", MODEL, "--backend", "simd", "-q", *options, stdin="").err == warning


@pytest.mark.slow
def test_a_suggested_temperature_gives_the_other_options_an_effect(hot):
    for more, warned in (((), False), (("--no-suggested",), True), (("--temp", 0), True)):
        run = cli("chat", "--model", hot, "--backend", "simd", "--seed", 1, *more, stdin="")
        assert ("warning: --seed has no effect" in run.err) == warned
    # The suggested values themselves are no options that somebody has given.
    assert "warning" not in cli("chat", "--model", hot, "--backend", "simd", "--temp", 0, stdin="").err


def test_the_server_takes_suggestions_for_what_a_request_leaves_out(hot):
    class Engine:
        path = hot

    values, (line,) = suggestions(Engine)
    assert "temperature 1.5" in line
    request = ChatRequest(messages=[], min_p=0.5)
    assert {"temperature": 1.5, "min_p": 0.5}.items() <= request.options(values).items()
    assert request.options()["temperature"] == 1.0
    assert ChatRequest(messages=[], temperature=0.0).options(values)["temperature"] == 0.0


def test_sampling_is_described_by_what_differs_from_greedy():
    assert described(Sampling()) == "greedy"
    assert described(Sampling(temperature=0.6, top_k=20)) == "temperature 0.6, top_k 20"
