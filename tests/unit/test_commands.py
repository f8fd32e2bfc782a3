"""What all commands have in common: the list of backends, and the help."""

import json

import pytest
import typer

from mlx_engine.backends import auto, backend_names
from mlx_engine.commands import SUMMARIES, app
from tests.unit.test_command_generate import NO_METAL, cli


def test_backends_lists_every_backend_with_what_it_lacks():
    result = cli("backends")
    assert result.code == 0
    lines = result.out.splitlines()
    assert [line.split()[0] for line in lines] == [*backend_names(), "auto"]
    assert auto() in lines[-1]
    assert result.err == ""


def test_backends_as_json_gives_a_reason_or_null():
    answer = json.loads(cli("backends", "--json").out)
    assert [row["name"] for row in answer["backends"]] == backend_names()
    reasons = {row["name"]: row["unavailable"] for row in answer["backends"]}
    assert reasons["scalar"] is None
    assert reasons["simd"] is None
    assert reasons[answer["auto"]] is None
    if NO_METAL:
        assert "Apple" in reasons["metal"]


# ---- help ----


def test_the_help_of_every_command_begins_with_what_it_does():
    summaries = {
        "generate": "Generate text from a prompt.",
        "chat": "Talk with a model.",
        "serve": "Serve the HTTP APIs of OpenAI and Anthropic",
        "replay": "Run the requests of a journal again",
        "bench": "Measure prefill and decode",
        "perplexity": "Measure a model's perplexity on a text",
        "report": "Profile a model's forward passes",
        "quantize": "Quantise a model and write it as a GGUF file or a folder.",
        "inspect": "Show the header, metadata and tensors",
        "models": "List the supported architectures",
        "tokenize": "Convert text to token ids",
        "backends": "List the backends",
        "cache": "List and remove what is kept on disk",
        "kernels": "List, check and measure the GPU kernels",
        "plan": "Estimate the placement of layers on several machines",
    }
    commands = typer.main.get_command(app).commands
    assert commands.keys() == summaries.keys()
    assert [name for name, summary in summaries.items() if not commands[name].help.startswith(summary)] == []
    helps = {name: " ".join(command.help.split()) for name, command in commands.items()}
    assert [name for name, summary in SUMMARIES.items() if not helps[name].startswith(summary)] == []
    assert cli("--help").code == 0


@pytest.mark.parametrize("group", ["", "kernels", "tokenize", "cache"])
def test_a_group_without_a_command_prints_its_help(group):
    result = cli(*group.split())
    assert (result.code, result.out) == (2, cli(*group.split(), "--help").out)
    assert "Usage: " in result.out


def test_every_parameter_of_every_command_has_a_help_text():
    def without_help(command, path):
        for name, inner in getattr(command, "commands", {}).items():
            yield from without_help(inner, f"{path} {name}")
        if not command.help:
            yield path
        yield from (f"{path} {parameter.name}" for parameter in command.params if not parameter.help)

    assert list(without_help(typer.main.get_command(app), "")) == []


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (("generate", "x", "--quant-layer", "attn_v=nope"), "--quant-layer"),
        (("generate", "x", "--quant-layer", "attn_v"), "--quant-layer"),
        (("generate", "x", "--quant-min-dim", "many"), "--quant-min-dim"),
        (("quantize", "builtin", "out.gguf", "--layer", "attn_v=nope"), "--layer"),
        (("quantize", "builtin", "out.gguf", "--layer", "nope=q8_0"), "--layer"),
        (("quantize", "builtin", "out.gguf", "--layer", "attn_v"), "--layer"),
        (("quantize", "builtin", "out.gguf", "--min-dim", "many"), "--min-dim"),
    ],
)
def test_an_error_names_the_flag_of_its_command(tmp_path, monkeypatch, words, flag):
    monkeypatch.chdir(tmp_path)
    result = cli(*words)
    assert result.code == 2
    assert result.err.startswith((f"error: {flag}: ", f"error: {flag} must be"))
