"""The shell commands of the documents: every command and option exists, and its value has the right type."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from mlx_engine.commands import app

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "docs/kernels.md", "docs/plan.md", "kernels/emulator/README.md")
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = typer.main.get_command(app)


def commands_of(page):
    """Return the arguments after `cli.py` of every command in a page: in blocks of shell commands and in the text."""
    text = (ROOT / page).read_text(encoding="utf-8")
    lines = [line for block in re.findall(r"```sh\n(.*?)\n```", text, re.DOTALL) for line in block.splitlines()]
    lines += [code.replace("\n", " ") for code in re.findall(r"`((?:\w+=\S+\s)?python\scli\.py\s[^`]+)`", text)]
    for line in lines:
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words = list(lexer)
        for command in re.split(
            r"\s(?:\|{1,2}|&{1,2}|;)\s", shlex.join(words).replace("'|'", "|").replace("'&&'", "&&")
        ):
            found = shlex.split(command)
            if "cli.py" in [Path(word).name for word in found]:
                yield found[[Path(word).name for word in found].index("cli.py") + 1 :]


def parse(arguments):
    """Parse a command as typer does, without running it."""
    command, *rest = arguments
    found = COMMANDS.commands[command]
    while hasattr(found, "commands"):
        command, *rest = rest
        found = found.commands[command]
    found.make_context(command, rest)


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_exists_with_its_options(page):
    found = list(commands_of(page))
    assert found or page == "kernels/emulator/README.md"
    for arguments in found:
        parse(arguments)


def test_the_commands_are_found_and_wrong_ones_are_refused():
    found = list(commands_of("README.md"))
    assert len(found) > 40
    assert ["generate", "-n", "-1", "--no-echo", "-q"] in found  # after a pipe
    assert ["generate", "--backend", "metal", "--kv"] in found  # after an installation
    assert ["generate", "Once upon a time", "--shard", "pipeline"] in found  # after mlx.launch
    for wrong in (["generat"], ["generate", "--kvv"], ["bench", "-r", "many"], ["cache", "lost"]):
        with pytest.raises((KeyError, Exception), match=r"generat|No such option|valid integer|lost"):
            parse(wrong)


def flags(command):
    """Yield every flag of a command and of the commands below it."""
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    for below in getattr(command, "commands", {}).values():
        yield from flags(below)


# Options of mlx.launch and of pip, and those that typer adds to `mlx-engine`.
OTHERS = {"--hostfile", "--install-completion", "--show-completion", "--help"}


def test_every_option_in_the_text_of_the_readme_is_one_of_a_command():
    named = {
        flag for code in re.findall(r"`([^`\n]+)`", README) for flag in re.findall(r"(?<!\S)--[a-z][a-z0-9-]+", code)
    }
    assert len(named) > 40
    assert named - {*flags(COMMANDS)} - OTHERS == set()


def test_the_environment_is_activated_before_a_command_needs_it():
    first = README.index("\npython cli.py ")
    assert ". .venv/bin/activate" in README[:first]
    (use,) = re.findall(r"\n## Use\n\n```sh\n(.*)\n", README)
    assert use.startswith(". .venv/bin/activate ")
