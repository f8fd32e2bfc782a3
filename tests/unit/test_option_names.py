"""The names of options that users of other programs type, and `-n -1`."""

import json

import pytest
import typer

import mlx_engine
from mlx_engine.commands import app
from tests.unit.test_command_generate import MODEL, cli, generate, only_line

ALIASES = {
    "max_tokens": {"--max-tokens", "-n", "--n-predict", "--max-new-tokens"},
    "context_len": {"--context-len", "-c", "--ctx-size", "--context"},
    "temperature": {"--temp", "--temperature"},
    "repetition_penalty": {"--repetition-penalty", "--repeat-penalty"},
}


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_the_names_of_other_programs_are_known(command):
    parameters = {p.name: set(p.opts) for p in typer.main.get_command(app).commands[command].params}
    assert {name: parameters[name] for name in ALIASES} == ALIASES


def test_the_context_of_a_server_has_the_same_names():
    parameters = {p.name: set(p.opts) for p in typer.main.get_command(app).commands["serve"].params}
    assert parameters["context_len"] == ALIASES["context_len"]


def test_no_command_has_a_name_twice():
    def repeated(command, path):
        for name, inner in getattr(command, "commands", {}).items():
            yield from repeated(inner, f"{path} {name}")
        names = [name for p in command.params if p.param_type_name == "option" for name in (*p.opts, *p.secondary_opts)]
        yield from (f"{path} {name}" for name in set(names) if names.count(name) > 1)

    assert list(repeated(typer.main.get_command(app), "")) == []


def test_the_names_mean_the_same():
    def run(*options):
        return json.loads(generate("Once", "--ignore-eos", "--json", "--seed", 1, *options).out)["token_ids"]

    ours = run("--max-tokens", 6, "--temp", 2.0, "--repetition-penalty", 1.3, "--context-len", 30)
    assert len(ours) == 6
    for tokens in ("--n-predict", "--max-new-tokens"):
        assert run(tokens, 6, "--temperature", 2.0, "--repeat-penalty", 1.3, "-c", 30) == ours
    assert run("--ctx-size", 6) == run("--context-len", 6)


# ---- the prompt ----


def test_a_prompt_may_be_an_option():
    want = generate("Once", "-n", 4, "-q").out
    for name in ("-p", "--prompt"):
        assert generate(name, "Once", "-n", 4, "-q").out == want
    assert generate("-p", "-", "-n", 4, "-q", stdin="Once\n").out == want


@pytest.mark.parametrize("other", [("b",), ("-f", "x.txt"), ("--batch-file", "x.txt")], ids=" ".join)
def test_a_prompt_and_another_are_wrong_use(other):
    result = generate("-p", "a", *other, model="nope.gguf")
    assert (result.code, "nope" in only_line(result)) == (2, False)


# ---- -n -1 ----


@pytest.mark.slow
def test_minus_one_token_is_all_that_the_context_leaves():
    def run(*options):
        return json.loads(generate("Once", "--ignore-eos", "--json", *options).out)

    filled = run("-n", -1, "-c", 300)
    assert (len(filled["prompt_ids"]) + len(filled["token_ids"]), filled["finish_reason"]) == (300, "length")
    assert len(run("-c", 300)["token_ids"]) == 256
    script = cli("chat", "-m", "builtin", "-b", "simd", "-n", -1, "-c", 64, "--ignore-eos", stdin="Hello\n/stats\n")
    assert "context: 64 of 64 tokens" in script.err
    engine = mlx_engine.load(MODEL, "simd")
    assert len(engine.generate([1, 2], -1, context_len=9, ignore_eos=True).token_ids) == 7


def test_minus_one_needs_room_for_one_token():
    result = generate("One two three four five", "-n", -1, "-c", 2)
    assert (result.code, "--context-len allows 2 for prompt and answer" in only_line(result)) == (2, True)


def test_other_negative_numbers_are_refused_with_what_is_possible():
    line = only_line(generate("a", "-n", -2, model="nope.gguf"))
    assert "--max-tokens must be a whole number of at least 0, or -1, not -2" in line
    line = only_line(generate("a", "-c", -1, model="nope.gguf"))
    assert "--context-len must be a whole number of at least 1, not -1" in line


# ---- other commands ----


def test_inspect_takes_the_model_as_an_option_too():
    for name in ("-m", "--model"):
        assert cli("inspect", name, MODEL, "--tensors").out == cli("inspect", MODEL, "--tensors").out
    assert cli("inspect", "--tensors").out == cli("inspect", "builtin", "--tensors").out
    assert (cli("inspect", MODEL, "-m", MODEL).code, cli("inspect", "-m", "").code) == (2, 1)


def test_the_version_has_a_short_name():
    for name in ("-V", "--version"):
        assert cli(name).out == f"mlx-engine {mlx_engine.__version__}\n"
