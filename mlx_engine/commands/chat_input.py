"""The user's side of `chat`: messages of one or more lines, from a terminal or a pipe.

A message ends with its line, unless the line ends with a backslash, or the message begins with three double quotes:
then it ends with the next three. In a terminal Alt-Enter also begins a new line.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from mlx_engine.commands.console import BOM, notice
from mlx_engine.errors import OptionError, Words

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
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
    """Return a message without the quotes around it, or without the backslashes at the ends of its lines."""
    stripped = text.strip()
    if stripped.startswith(QUOTES):
        return stripped.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")
    return text.replace("\\\n", "\n").removesuffix("\\")


def messages() -> Iterator[str]:
    """Yield the messages of the user until the input ends.

    Raises:
        OptionError: there is no standard input, or it is not UTF-8.
    """
    if sys.stdin is None:
        raise OptionError(option="stdin", expected="a terminal or a pipe", found=Words("nothing"))
    return from_terminal(session().prompt) if sys.stdin.isatty() else from_lines(sys.stdin.buffer)


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


def session(*, source: Input | None = None, screen: Output | None = None) -> PromptSession[str]:
    """Return a line editor with a history of the messages typed; on the process's terminal unless others are given."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output import create_output

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
        input=source,
        output=screen,
        reserve_space_for_menu=0,
    )
