"""The user's side of `chat`: messages of one or more lines, from a terminal or a pipe.

A message ends with its line, unless the line ends with a backslash, or the message begins with three double quotes:
then it ends with the next three. In a terminal Alt-Enter also begins a new line, and messages are kept for later runs.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_engine.commands.console import BOM, notice
from mlx_engine.errors import OptionError, Words

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import Completer
    from prompt_toolkit.history import History
    from prompt_toolkit.input import Input
    from prompt_toolkit.key_binding import KeyPressEvent
    from prompt_toolkit.output import Output

QUOTES = '"""'


def is_complete(text: str) -> bool:
    """Return whether a message ends here, or another line follows."""
    stripped = text.strip()
    if stripped.startswith(QUOTES):
        return stripped.endswith(QUOTES) and len(stripped) >= 2 * len(QUOTES)
    return not text.endswith("\\")


def unwrapped(text: str) -> str:
    """Return a message without the quotes around it, or without the backslashes at the ends of its lines.

    A message in quotes is no command: a space is put before a slash at its beginning.
    """
    stripped = text.strip()
    if stripped.startswith(QUOTES):
        quoted = stripped.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")
        return f" {quoted}" if quoted.startswith("/") else quoted
    return text.replace("\\\n", "\n").removesuffix("\\")


def messages(completer: Callable[[], Completer], *, keeps_history: bool = True) -> Iterator[str]:
    """Yield the messages of the user until the input ends.

    Args:
        completer: makes what completes a line in a terminal.
        keeps_history: keep the messages typed in a terminal for later runs, and offer those of earlier ones.

    Raises:
        OptionError: there is no standard input, or it is not UTF-8.
    """
    if sys.stdin is None:
        raise OptionError(option="stdin", expected="a terminal or a pipe", found=Words("nothing"))
    if not sys.stdin.isatty():
        return from_lines(sys.stdin.buffer)
    history = kept_history() if keeps_history else None
    return from_terminal(session(history=history, completer=completer()).prompt)


def history_file() -> Path:
    """Return the file of the messages that were typed: in XDG_STATE_HOME, or ~/.local/state."""
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")  # noqa: PTH111 - Path's raises
    return Path(home) / "mlx_engine" / "chat_history"


def kept_history() -> History | None:
    """Return the messages of earlier runs, to which new ones are added. Only this user can read their file.

    Return None, with a notice, if the file cannot be written.
    """
    from prompt_toolkit.history import FileHistory

    class Kept(FileHistory):
        def store_string(self, string: str) -> None:
            with contextlib.suppress(OSError):  # a full disk ends no conversation
                super().store_string(string.encode(errors="replace").decode())

    file = history_file()
    try:
        if not file.is_absolute():  # no HOME, and no such user: it would be in a folder "~" of the working directory
            raise OSError("the user has no home")
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.touch(mode=0o600)
        if not file.is_file():  # a link to /dev/null, of which every user needs the permissions as they are
            raise OSError("not a regular file")
        file.chmod(0o600)  # it may be older
        file.read_bytes()
    except OSError as error:
        notice(f"warning: {file}: {error.strerror or error}; messages are not kept for later runs")
        return None
    return Kept(str(file))


@contextlib.contextmanager
def without_echo() -> Iterator[None]:
    """Do not show what is typed meanwhile: it would be in the middle of an answer. The next prompt shows it."""
    try:
        import termios

        terminal = sys.stdin.fileno()
        before = termios.tcgetattr(terminal)
    except Exception:  # no terminal, or none as POSIX has them; `termios.error` is no OSError
        yield
        return
    silent = list(before)
    silent[3] &= ~termios.ECHO
    termios.tcsetattr(terminal, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)


def from_lines(lines: Iterable[bytes]) -> Iterator[str]:
    """Yield the messages in the lines of a pipe. The end of the input ends a message. A byte order mark is left out.

    Raises:
        OptionError: a line is not UTF-8.
    """
    text = ""
    for i, line in enumerate(lines):
        try:
            text += line.decode("utf-8").removeprefix("" if i else BOM).removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise OptionError(option="stdin", expected="UTF-8 text", found=Words(str(error))) from error
        if is_complete(text):
            yield unwrapped(text)
            text = ""
        else:
            text += "\n"
    if text:
        yield unwrapped(text.removesuffix("\n"))


def from_terminal(prompt: Callable[[], str]) -> Iterator[str]:
    """Yield what the user types, until Ctrl-D. Ctrl-C discards the line."""
    while True:
        try:
            text = prompt()
        except EOFError:
            return
        except KeyboardInterrupt:
            notice("(Ctrl-D or quit ends the conversation)")
            continue
        yield unwrapped(text)


def session(
    *,
    history: History | None = None,
    completer: Completer | None = None,
    source: Input | None = None,
    screen: Output | None = None,
) -> PromptSession[str]:
    """Return a line editor; on the process's terminal unless others are given.

    Without a `history`, it has one of this run alone.
    """
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output import create_output
    from prompt_toolkit.shortcuts import CompleteStyle

    bindings = KeyBindings()

    def end_line(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if is_complete(buffer.text):
            buffer.validate_and_handle()
        else:
            buffer.insert_text("\n")

    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    bindings.add("enter")(end_line)
    bindings.add("escape", "enter")(new_line)
    # If stdout is a file, the line editor must draw on stderr.
    screen = screen or create_output(always_prefer_tty=True)
    return PromptSession(
        "> ",
        multiline=True,
        prompt_continuation="  ",
        key_bindings=bindings,
        history=history,
        completer=completer,
        complete_while_typing=False,
        complete_style=CompleteStyle.READLINE_LIKE,
        input=source,
        output=screen,
        reserve_space_for_menu=0,
    )
