"""The shell commands of README and docs: every one exists with its options, and those that can run here run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from mlx_engine.commands import app

ROOT = Path(__file__).parents[2]
DOCS = sorted(path.name for path in (ROOT / "docs").glob("*.md"))
PAGES = ("README.md", "CONTRIBUTING.md", "kernels/emulator/README.md", *(f"docs/{name}" for name in DOCS))
COMMANDS = typer.main.get_command(app)
# Options of mlx.launch, pip and mkdocs, and those that typer adds to `mlx-engine`.
OTHERS = {"--hostfile", "--install-completion", "--show-completion", "--help"}
# Commands that need a server, a GPU, several processes or a model that is not there, by their first words.
NOT_RUN = (
    "serve",
    "replay",
    "kernels",
    "bench --concurrency",
    "bench --compare",
    "bench -m model.gguf --speculate",
    "report --against",
    "chat",
    "bench -b all",
    "cache remove",
)
# Words of commands that need several processes, an adapter, or a model with experts.
NOT_HERE = {"--shard", "FILE", "NAME", "--adapter", "--experts-memory"}


def commands_of(page: str) -> Iterator[list[str]]:
    """Yield the arguments after `cli.py` of every command in a page: in blocks of shell commands and in the text."""
    text = (ROOT / page).read_text(encoding="utf-8")
    lines = [line for block in re.findall(r"```sh\n(.*?)\n```", text, re.DOTALL) for line in block.splitlines()]
    lines += [code.replace("\n", " ") for code in re.findall(r"`((?:\w+=\S+\s)?python\scli\.py\s[^`]+)`", text)]
    for line in lines:
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        joined = shlex.join(lexer).replace("'|'", "|").replace("'&&'", "&&")
        for command in re.split(r"\s(?:\|{1,2}|&{1,2}|;)\s", joined):
            found = shlex.split(command)
            if "cli.py" in [Path(word).name for word in found]:
                yield found[[Path(word).name for word in found].index("cli.py") + 1 :]


def parse(arguments: list[str]) -> None:
    """Parse a command as typer does, without running it."""
    command, *rest = arguments
    found = COMMANDS.commands[command]  # type: ignore[attr-defined]
    while hasattr(found, "commands"):
        command, *rest = rest
        found = found.commands[command]
    found.make_context(command, rest)


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_exists_with_its_options(page: str):
    for arguments in commands_of(page):
        if arguments != ["COMMAND"]:
            parse(arguments)


def test_the_commands_are_found_and_wrong_ones_are_refused():
    found = [arguments for page in PAGES for arguments in commands_of(page)]
    assert len(found) > 60
    assert ["generate", "-n", "-1", "--no-echo", "-q"] in found  # after a pipe
    assert ["generate", "--backend", "metal", "--kv"] in found  # after an installation
    assert ["generate", "Once upon a time", "--shard", "pipeline"] in found  # after mlx.launch
    for wrong in (["generat"], ["generate", "--kvv"], ["bench", "-r", "many"], ["cache", "lost"]):
        with pytest.raises((KeyError, Exception), match=r"generat|No such option|valid integer|lost"):
            parse(wrong)


def flags(command: object) -> Iterator[str]:
    """Yield every flag of a command and of the commands below it."""
    for parameter in command.params:  # type: ignore[attr-defined]
        yield from (*parameter.opts, *parameter.secondary_opts)
    for below in getattr(command, "commands", {}).values():
        yield from flags(below)


@pytest.mark.parametrize(
    "page", ["README.md", *(f"docs/{name}" for name in DOCS if name not in ("found.md", "kernels.md"))]
)
def test_every_option_in_the_text_of_a_page_is_one_of_a_command(page: str):
    text = (ROOT / page).read_text(encoding="utf-8")
    code = re.findall(r"`([^`\n]+)`", text)
    named = {flag for words in code for flag in re.findall(r"(?<!\S)--[a-z][a-z0-9-]+", words)}
    assert named - {*flags(COMMANDS)} - OTHERS == set()


def runnable() -> list[list[str]]:
    """Return the commands of all pages that this machine can run, each once."""
    found = {tuple(arguments): arguments for page in PAGES for arguments in commands_of(page)}
    kept = [words for words in found.values() if words != ["COMMAND"] and not shlex.join(words).startswith(NOT_RUN)]
    return [words for words in kept if len(words) > 1 and not NOT_HERE & {*words}]


def here(arguments: list[str], folder: Path) -> list[str]:
    """Return the command with the built-in model, its files in a folder, and quick measurements."""
    model = re.compile(r"~/models/.*|(model|small)\.gguf|MODEL|(Qwen|google)/[\w.-]+(:\w+)?|shape:.*")
    words = ["builtin" if model.fullmatch(word) else word for word in arguments]
    if words[0] == "quantize":
        words[2] = str(folder / Path(arguments[2]).name)
        words = [*words, "--allow-mixed"] if "mlx-4bit" in words or "mlx-8bit" in words else words
    if words[:2] == ["bench", "--sweep"]:
        words = [*words, "--out", str(folder / "out"), "--budget", "1"]
    if words[0] == "bench" and "--speculate" not in words:
        words = [*words, "-p", "8", "-n", "4", "-r", "1"]
    if words[0] == "report":
        words = ["report", "-m", "builtin", "--out", str(folder / "report")]
    if words[0] == "plan":
        words[2] = "builtin"
    if "--reference" in words:
        words[words.index("--reference") + 1] = "builtin"
    for i, word in enumerate(words):
        if re.fullmatch(r"\w+\.(txt|bin|kv)", word):
            words[i] = str(folder / word)
            if word.endswith(".txt"):
                Path(words[i]).write_text("Once upon a time\n" * 40)
    for option in {"-b", "--backend"} & {*words}:
        del words[words.index(option) : words.index(option) + 2]
    return words


@pytest.mark.slow
@pytest.mark.parametrize("arguments", runnable(), ids=shlex.join)
def test_a_command_runs(arguments: list[str], tmp_path: Path):
    result = CliRunner().invoke(app, here(arguments, tmp_path), input="Once upon a time")
    assert result.exit_code == 0, result.output


def test_the_environment_is_activated_before_a_command_needs_it():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert ". .venv/bin/activate" in readme[: readme.index("\npython cli.py ")]
    (use,) = re.findall(r"\n## Use\n\n```sh\n(.*)\n", readme)
    assert use.startswith(". .venv/bin/activate ")
