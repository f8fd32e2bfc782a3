"""The options of a run as keyword arguments: listed once, the same wherever they are given."""

import inspect
from dataclasses import fields
from typing import get_type_hints

import pytest

from mlx_engine.backends.sampling import Sampling
from mlx_engine.commands.options.model import EngineOptions
from mlx_engine.commands.options.run import RunOptions, SamplingOptions
from mlx_engine.conversation import Conversation
from mlx_engine.engine import Engine, load
from mlx_engine.errors import OptionError
from mlx_engine.options import ALIASES, Options, OptionValues

FIELDS = {f.name: f.default for kind in (Sampling, Options) for f in fields(kind)}


def test_there_is_a_keyword_for_every_option():
    assert {"max_tokens", "sampling", *OptionValues.__annotations__} == set(FIELDS)


@pytest.mark.parametrize(("method", "own"), [("generate", []), ("stream", ["progress"])])
def test_a_method_shows_the_options_and_their_defaults(method, own):
    shown = inspect.signature(getattr(Engine, method)).parameters
    assert list(shown) == ["self", "prompt", "max_tokens", *own, *OptionValues.__annotations__]
    assert {name: shown[name].default for name in OptionValues.__annotations__} == {
        name: FIELDS[name] for name in OptionValues.__annotations__
    }
    assert shown["top_k"].annotation == int | None


def test_keywords_become_options_of_the_run_and_of_sampling():
    made = Options.of(3, temperature=0.5, top_k=4, seed=1, kv=False, stop="a", timeout=2.0)
    assert made == Options(3, Sampling(0.5, top_k=4, seed=1), kv=False, stop=("a",), timeout=2.0)
    assert Options.of() == Options()


@pytest.mark.parametrize(("stop", "meant"), [(None, ()), ("ab", ("ab",)), (["a", "b"], ("a", "b")), ([], ())])
def test_stop_is_one_string_or_several(stop, meant):
    assert Options.of(stop=stop).stop == meant


REFUSED = [
    {"stop": 3}, {"top_p": -0.1}, {"timeout": -1.0}, {"logit_bias": {3: 1000}}, {"presence_penalty": 3},
    *({"logprobs": n} for n in (-1, 21, 1.5, "3", True)),
]  # fmt: skip


@pytest.mark.parametrize("given", REFUSED, ids=repr)
def test_a_value_that_makes_no_sense_is_refused_by_name(given):
    with pytest.raises(OptionError) as caught:
        Options.of(**given)
    assert [caught.value.option] == list(given)


@pytest.mark.parametrize("n", [None, 0, 20])
def test_log_probabilities_come_with_up_to_20_alternatives_or_none(n):
    assert Options.of(logprobs=n).logprobs == n
    assert Options.of().logprobs is None


MEANT = [
    (Engine.generate, "max_new_tokens", r"Engine\.generate\(\) has .* the option is max_tokens"),
    (Engine.generate, "temprature", r"Engine\.generate\(\) has .* did you mean temperature\?"),
    (Engine.generate, "zzz", r"Engine\.generate\(\) has .* it has prompt, max_tokens, temperature, "),
    (Engine.stream, "n_predict", r"Engine\.stream\(\) has .* the option is max_tokens"),
    (Engine.generate_batch, "repeat_penalty", r"Engine\.generate_batch\(\) has .* the option is repetition_penalty"),
    (Options.of, "temp", r"Options\.of\(\) has .* the option is temperature"),
    (load, "model", r"load\(\) has .* the option is source"),
    (load, "thread", r"load\(\) has .* did you mean threads\?"),
    (Conversation, "sytem", r"Conversation\(\) has .* did you mean system\?"),
    (Conversation, "temperature", r"Conversation\(\) has .* pass options=Options\.of\(temperature=\.\.\.\)"),
]


@pytest.mark.parametrize(("function", "wrong", "message"), MEANT, ids=[wrong for _, wrong, _ in MEANT])
def test_an_unknown_keyword_is_a_type_error_that_names_the_function_and_the_option(function, wrong, message):
    with pytest.raises(TypeError, match=message):
        function(**{wrong: [1]})


def test_names_of_options_on_the_command_line_are_known_in_python():
    known = {*FIELDS, *inspect.signature(load).parameters}
    for group in (RunOptions, SamplingOptions, EngineOptions):
        for name, hint in get_type_hints(group, include_extras=True).items():
            option = hint.__metadata__[0]
            flags = [flag for given in (option.default, *option.param_decls) for flag in given.split("/")]
            words = {flag.removeprefix("--").replace("-", "_") for flag in flags if flag.startswith("--")}
            for word in words - known - {"no_kv", "no_cache"}:  # the second is of the command line alone
                # A list in Python has the plural of an option that may be repeated.
                assert ALIASES.get(word, word + "s") in known, (name, word)
