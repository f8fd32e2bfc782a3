"""The options of a run as keyword arguments: listed once, the same wherever they are given."""

import inspect
from dataclasses import fields

import pytest

from mlx_engine.backends.sampling import Sampling
from mlx_engine.decode.keywords import OptionValues
from mlx_engine.decode.options import Options
from mlx_engine.engine import Engine
from mlx_engine.errors import OptionError

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


def test_an_unknown_keyword_is_a_type_error():
    with pytest.raises(TypeError, match="temprature"):
        Options.of(temprature=1)
