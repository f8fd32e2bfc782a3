"""The options of a run as keyword arguments: listed once, the same wherever they are given."""

import inspect
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest
import typer

import mlx_engine
from mlx_engine.commands import app
from mlx_engine.commands.options.groups import parameters_of
from mlx_engine.commands.options.model import ComputeOptions
from mlx_engine.conversation import Conversation
from mlx_engine.engine import Engine, load
from mlx_engine.errors import OptionError
from mlx_engine.options import BatchOptionValues, Options, OptionValues, Sampling, aliases, declared
from mlx_engine.serve.parameters import ChatRequest
from tests.unit.test_command_generate import cli

PACKAGE = Path(mlx_engine.__file__).parent
FIELDS = {f.name: f.default for kind in (Sampling, Options) for f in fields(kind)}


def test_there_is_a_keyword_for_every_option():
    assert {"max_tokens", "sampling", *OptionValues.__annotations__} == set(FIELDS)
    assert list(BatchOptionValues.__annotations__) == list(OptionValues.__annotations__)


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
    groups = (*parameters_of(Options), *parameters_of(ComputeOptions))
    assert {p.name for p in groups} >= FIELDS.keys() - {
        "sampling",
        *(f.name for f, about in declared() if not about.has_flag),
    }
    for parameter in groups:
        option = parameter.annotation.__metadata__[0]
        flags = [flag for given in (option.default, *option.param_decls) for flag in given.split("/")]
        words = {flag.removeprefix("--").replace("-", "_") for flag in flags if flag.startswith("--")}
        for word in words - known - {"no_kv", "no_cache"}:  # the second is of the command line alone
            # A list in Python has the plural of an option that may be repeated.
            assert aliases().get(word, word + "s") in known, (parameter.name, word)


def test_every_option_is_declared_with_what_its_uses_need():
    """The bounds are numbers that the default is within, and the type of a keyword is that of its field."""
    keywords, hints = get_type_hints(OptionValues), get_type_hints(Sampling) | get_type_hints(Options)
    for f, about in declared():
        assert about.help.endswith("."), f.name
        assert about.kind is None or f.default is None or about.allows(f.default), f.name
        if about.kind is not None and f.name != "max_tokens":
            assert keywords[f.name] == hints[f.name], f.name
        if about.parameter is not None:
            assert f.name in ChatRequest.__struct_fields__


def test_a_flag_is_the_same_on_every_command():
    commands = typer.main.get_command(app).commands
    generate, chat = ({p.name: p.opts for p in commands[name].params} for name in ("generate", "chat"))
    names = [f.name for f, about in declared() if about.has_flag]
    assert {name: generate[name] for name in names} == {name: chat[name] for name in names}


def test_an_error_names_the_option_as_its_place_spells_it():
    with pytest.raises(OptionError, match=r"^top_p must be a number from 0 to 1, not 3$") as caught:
        Options.of(top_p=3)
    assert (caught.value.option, caught.value.expected, caught.value.found) == ("top_p", "a number from 0 to 1", 3)
    for words, message in (
        (("--top-p", "3"), "error: --top-p must be a number from 0 to 1, not 3.0\n"),
        (("-n", "-2"), "error: --max-tokens must be a whole number of at least 0, or -1, not -2\n"),
        (("--logit-bias", "x"), "error: --logit-bias must be ID=VALUE, such as 1234=-100, not 'x'\n"),
        (("--temperature", "-1"), "error: --temp must be a number of at least 0, not -1.0\n"),
    ):
        assert cli("generate", "a", *words).err == message


def test_only_options_of_several_values_may_be_repeated():
    parameters = {p.name: p for p in typer.main.get_command(app).commands["generate"].params}
    repeated = {f.name for f, about in declared() if about.has_flag and parameters[f.name].multiple}
    assert repeated == {"logit_bias", "stop", "stop_token_ids"}
    assert cli("generate", "a", "-n", "1", "--prediction", "a text").code == 0


def test_an_option_of_sampling_is_named_by_its_declaration_and_its_arithmetic_alone():
    naming = [path for path in PACKAGE.rglob("*.py") if re.search(r"\bmin_p\b", path.read_text(encoding="utf-8"))]
    assert {str(path.relative_to(PACKAGE)) for path in naming} == {
        "options.py",
        "backends/sampling.py",
        "backends/numpy/scalar.py",
        "backends/mlx/backend.py",
    }


PROGRAM = """
import numpy as np
import mlx_engine

def f(ids: list[int], logits: np.ndarray) -> np.ndarray:
    return logits

engine = mlx_engine.load("builtin")
engine.generate("a", processors=[f], stop_token_ids=[1], seed=3)
engine.generate_batch(["a", "b"], [1, 2], temperature=[0.0, 1.0], processors=[[f], None], stop=[["a"], None], seed=1)
n: int = engine.config.vocab_size
engine.generate_batch(["a"], temprature=1.0)  # error
engine.generate("a", stop_token_id=3)  # error
engine.astream("a", top_k="many")  # error
s: str = engine.config.vocab_size  # error
"""


@pytest.mark.slow
def test_mypy_finds_wrong_options_in_a_program_of_a_user(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", ".mypy_cache/user", tmp_path / "program.py"]
    out = subprocess.run(command, capture_output=True, text=True, cwd=PACKAGE.parent).stdout
    wrong = [n for n, line in enumerate(PROGRAM.splitlines(), start=1) if line.endswith("# error")]
    assert [int(line.split(":")[1]) for line in out.splitlines() if ": error:" in line] == wrong
