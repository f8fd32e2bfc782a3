"""Prompts from files and pipes: the last line end and a byte order mark, a pipe without `-`, and no prompt at all."""

import json
import os
import sys

import pytest

from mlx_engine.commands import generate as prompts
from mlx_engine.commands.chat import from_lines
from mlx_engine.commands.generate import DEFAULT_PROMPT, PromptOptions
from mlx_engine.errors import OptionError
from tests.unit.test_command_generate import generate

NO_PROMPT = "no prompt was given"

TEXTS = [
    ("a b\n", "a b"),
    ("a b\r\n", "a b"),
    ("a b", "a b"),
    ("a\n\n", "a\n"),
    ("a\n\r\n", "a\n"),
    ("a\r", "a\r"),
    ("\n a \n", "\n a "),
    ("\ufeffa\n", "a"),
    ("\ufeff\ufeffa", "\ufeffa"),
]


@pytest.fixture
def stdin(monkeypatch):
    """Make stdin a pipe that has some bytes; its end comes after them unless `is_open` is set."""
    streams = []

    def pipe(data, *, is_open=False):
        reader, writer = os.pipe()
        os.write(writer, data)
        if is_open:
            streams.append(os.fdopen(writer, "wb"))
        else:
            os.close(writer)
        streams.append(os.fdopen(reader, encoding="utf-8"))
        monkeypatch.setattr(sys, "stdin", streams[-1])
        return streams[-2] if is_open else None

    yield pipe
    for stream in streams:
        stream.close()


def read(options, *, is_example=False):
    return options.read(is_example=is_example)


@pytest.mark.parametrize(("given", "prompt"), TEXTS, ids=map(repr, TEXTS))
def test_one_line_end_and_a_byte_order_mark_are_no_part_of_a_prompt(tmp_path, stdin, given, prompt):
    path = tmp_path / "prompt.txt"
    path.write_bytes(given.encode())
    assert read(PromptOptions(prompt_file=path)) == [prompt]
    for options in (PromptOptions("-"), PromptOptions()):
        stdin(given.encode())
        assert read(options) == [prompt]


def test_an_argument_is_a_prompt_as_it_is():
    assert read(PromptOptions("\ufeffa\n")) == ["\ufeffa\n"]


def test_a_batch_has_no_byte_order_mark(tmp_path, stdin):
    (tmp_path / "batch.txt").write_bytes("\ufeffone\r\ntwo\n".encode())
    assert read(PromptOptions(batch_file=tmp_path / "batch.txt")) == ["one", "two"]
    stdin("\ufeffone\n".encode())
    assert read(PromptOptions(batch_file="-")) == ["one"]


def test_a_pipe_is_read_if_there_is_no_prompt():
    piped = generate("-n", 4, "--json", stdin="The end\n")
    assert json.loads(piped.out)["prompt_ids"] == json.loads(generate("The end", "-n", 4, "--json").out)["prompt_ids"]
    assert piped.err == ""


def test_a_prompt_leaves_a_pipe_alone(stdin):
    stdin(b"other", is_open=True)
    assert read(PromptOptions("a")) == ["a"]
    assert sys.stdin.read(1) == "o"


def test_no_prompt_at_all_is_told_and_the_example_is_run(stdin, capsys):
    stdin(b"")
    assert read(PromptOptions()) == [DEFAULT_PROMPT]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(NO_PROMPT)
    assert all(way in line for way in ("an argument", "-f FILE", "a pipe", repr(DEFAULT_PROMPT)))


def test_a_line_end_alone_is_an_empty_prompt(stdin, capsys):
    stdin(b"\n")
    assert read(PromptOptions()) == [""]
    assert capsys.readouterr().err == ""
    assert generate("-", stdin="\n").code == 2


def test_a_pipe_that_is_not_utf_8_is_wrong_use(stdin):
    stdin(b"\xff")
    with pytest.raises(OptionError, match="UTF-8"):
        read(PromptOptions())


@pytest.mark.skipif(os.name != "posix", reason="terminals as POSIX has them")
def test_a_terminal_is_not_read(monkeypatch, capsys):
    ours, theirs = os.openpty()
    try:
        with os.fdopen(theirs, encoding="utf-8") as terminal:
            monkeypatch.setattr(sys, "stdin", terminal)
            assert read(PromptOptions()) == [DEFAULT_PROMPT]
    finally:
        os.close(ours)
    assert capsys.readouterr().err.startswith(NO_PROMPT)


@pytest.mark.skipif(os.name != "posix", reason="pipes as POSIX has them")
def test_a_silent_pipe_is_waited_for_unless_the_example_is_run(stdin, monkeypatch, capsys):
    monkeypatch.setattr(prompts, "PATIENCE", 0.05)
    stdin(b"", is_open=True)
    assert read(PromptOptions(), is_example=True) == [DEFAULT_PROMPT]
    assert capsys.readouterr().err.startswith(NO_PROMPT)
    written, notice = [], prompts.notice
    silent = stdin(b"", is_open=True)

    def noticed(text):
        """Write to the pipe, and close it, when it is said that it is waited for."""
        notice(text)
        written.append(silent.write(b"late"))
        silent.close()

    monkeypatch.setattr(prompts, "notice", noticed)
    assert read(PromptOptions()) == ["late"]
    assert written == [4]
    assert capsys.readouterr().err.startswith("waiting for a prompt on stdin\n")


def test_a_chat_script_may_begin_with_a_byte_order_mark():
    assert list(from_lines(["\ufeffHello\n".encode(), "\ufeffb\n".encode()])) == ["Hello", "\ufeffb"]
