"""The user's side of `chat`: messages of several lines, through a pipe and in the line editor."""

import sys

import pytest
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from mlx_engine.commands.chat import completer, from_lines, from_terminal, history_file, kept_history, session
from mlx_engine.commands.console import notice, safe_for
from mlx_engine.errors import OptionError

SCRIPTS = {
    "one line each": (b"a\n\nb\r\nc", ["a", "", "b", "c"]),
    "backslashes": (b"a\\\nb \\\n\nc\n", ["a\nb \n", "c"]),
    "quotes": (b'"""\na\n\n  b\\\n"""\nc\n', ["a\n\n  b\\", "c"]),
    "quotes on one line": (b'"""a"""\n"""b\nc"""\n', ["a", "b\nc"]),
    "an end inside": (b'"""\na\n', ["a"]),
    "a backslash at the end": (b"a\\\n", ["a"]),
    "other languages": ("ü 😀 \u2028x\n".encode(), ["ü 😀 \u2028x"]),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_lines_of_a_pipe_become_messages(name):
    script, want = SCRIPTS[name]
    assert list(from_lines(script.splitlines(keepends=True))) == want


def test_a_pipe_that_is_not_utf_8_is_refused():
    with pytest.raises(OptionError, match="UTF-8"):
        list(from_lines([b"\xff\n"]))


ENTER, ALT_ENTER, CTRL_C, CTRL_D = "\r", "\x1b\r", "\x03", "\x04"


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("keys", "want"),
    [
        (f"a{ENTER}b{ENTER}", ["a", "b"]),
        (f"a{ALT_ENTER}b{ENTER}", ["a\nb"]),
        (f"a\\{ENTER}b{ENTER}", ["a\nb"]),
        (f'"""{ENTER}a{ENTER}b{ENTER}"""{ENTER}', ["a\nb"]),
        (f"gone{CTRL_C}b{ENTER}", ["b"]),
    ],
    ids=["enter", "alt-enter", "backslash", "quotes", "ctrl-c"],
)
def test_keys_become_messages(keys, want):
    with create_pipe_input() as keyboard:
        keyboard.send_text(keys + CTRL_D)
        assert list(from_terminal(session(source=keyboard, screen=DummyOutput()).prompt)) == want


def test_the_line_editor_remembers_what_was_typed():
    with create_pipe_input() as keyboard:
        keyboard.send_text(f"first{ENTER}second{ALT_ENTER}line{ENTER}{CTRL_D}")
        editor = session(source=keyboard, screen=DummyOutput())
        assert len(list(from_terminal(editor.prompt))) == 2
    assert editor.history.get_strings() == ["first", "second\nline"]


class Terminal:
    def __init__(self, is_terminal):
        self.isatty = lambda: is_terminal


def test_control_characters_of_a_model_do_not_reach_a_terminal():
    text = "a\x1b[2J\r\x9b\x07b\n\tü\u200d😀"
    assert safe_for(Terminal(True), text) == "a\\x1b[2J\\x0d\\x9b\\x07b\n\tü\u200d😀"
    assert safe_for(Terminal(False), text) == text
    assert safe_for(None, text) == text


def test_control_characters_of_a_file_do_not_reach_a_terminal_in_a_notice(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    notice("error: name\x1b[2J")
    assert capsys.readouterr().err == "error: name\\x1b[2J\n"


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("keys", "want"),
    [
        ("/he\t\r", "/help"),
        ("/sy\tx\r", "/systemx"),
        ("/set temp\t0.5\r", "/set temperature0.5"),
        ("/load {folder}/sav\t\r", "/load {folder}/saved.json"),
        ("help /he\t\r", "help /he"),
    ],
)
def test_tab_completes_commands_options_and_files(keys, want, tmp_path):
    (tmp_path / "saved.json").touch()
    with create_pipe_input() as keyboard:
        keyboard.send_text(keys.format(folder=tmp_path) + CTRL_D)
        editor = session(source=keyboard, screen=DummyOutput(), completer=completer())
        assert list(from_terminal(editor.prompt)) == [want.format(folder=tmp_path)]


def test_the_history_is_kept_in_a_file_that_only_the_user_can_read(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    history_file().parent.mkdir(parents=True)
    history_file().touch(mode=0o644)
    for keys, before in (
        (f"first{ENTER}second{ALT_ENTER}line{ENTER}{CTRL_D}", []),
        (CTRL_D, ["first", "second\nline"]),
    ):
        with create_pipe_input() as keyboard:
            keyboard.send_text(keys)
            editor = session(source=keyboard, screen=DummyOutput(), history=kept_history())
            list(from_terminal(editor.prompt))
        assert editor.history.get_strings()[: len(before)] == before
    assert history_file().stat().st_mode & 0o777 == 0o600
    kept_history().store_string("\udcff")  # a byte that is not UTF-8


def test_without_a_place_for_the_history_a_line_says_so(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert kept_history() is None
    assert "messages are not kept for later runs" in capsys.readouterr().err


def test_a_history_that_is_no_file_is_left_as_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    history_file().parent.mkdir(parents=True)
    other = tmp_path / "other"  # in place of /dev/null, whose permissions every user needs
    other.mkdir(mode=0o755)
    history_file().symlink_to(other)
    assert kept_history() is None
    assert "not kept" in capsys.readouterr().err
    assert other.stat().st_mode & 0o777 == 0o755


def test_a_user_without_a_home_has_no_history(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as it does without HOME and without such a user
    assert kept_history() is None
    assert "no home" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
