"""Shared by the commands: notices on stderr, progress bars, exit codes and error messages."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TextIO, TypeVar

import typer

from mlx_engine.commands.signals import EndedBySignal
from mlx_engine.errors import BackendUnavailableError, EngineError, OptionError, SourceError, Words, out_of_memory

if TYPE_CHECKING:
    from rich.progress import Progress

P = ParamSpec("P")
T = TypeVar("T")

FAILED, WRONG_USE, INTERRUPTED = 1, 2, 130

# The byte order mark that some editors and shells put before UTF-8.
BOM = "\ufeff"

# Control characters, except tab, line feed, and carriage return before a line feed.
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\r(?!\n)")


def reports_errors(command: Callable[P, T]) -> Callable[P, T]:
    """Convert errors caused by user input to a message and an exit code. Other errors are bugs: keep the traceback."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        escape_what_stdout_cannot_write()
        try:
            try:
                return command(*args, **kwargs)
            finally:
                # Flush here: a full disk would otherwise be detected only at exit, too late to report.
                if sys.stdout is not None:
                    sys.stdout.flush()
        except EngineError as error:
            notice(f"error: {error}")
            wrong_use = isinstance(error, OptionError | BackendUnavailableError)
            raise typer.Exit(WRONG_USE if wrong_use else FAILED) from None
        except MemoryError as error:
            notice(f"error: {out_of_memory('memory', error)}")
            raise typer.Exit(FAILED) from None
        except KeyboardInterrupt:
            notice("\ninterrupted")
            raise typer.Exit(INTERRUPTED) from None
        except EndedBySignal as ended:
            with contextlib.suppress(OSError):  # the terminal may be closed
                notice(f"\nended by {ended.name}")
            raise
        except BrokenPipeError:
            # The reader of the pipe has closed it (`| head`). Without this, Python prints another error at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(FAILED) from None
        except OSError as error:
            # An OSError of a system call without a file name comes from writing to stdout. Others are bugs.
            if error.filename is not None or error.errno is None:
                raise
            notice(f"error: the output cannot be written: {error.strerror or error}")
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(FAILED) from None

    return wrapped


def escape_what_stdout_cannot_write() -> None:
    """Escape characters that stdout cannot encode: text from a model or a file may be invalid Unicode."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def read_text(text: str | None, file: Path | None, option: str) -> str:
    """Return the text of an argument, a file, or stdin ("-", or neither argument nor file).

    Raises:
        OptionError: the text was given twice, or is not UTF-8.
        SourceError: the file cannot be read.
    """
    if text is not None and file is not None:
        raise OptionError(option=option, expected="an argument or a file, not both", found=str(file))
    wants_stdin = file is None and (text is None or text == "-")
    if wants_stdin and (sys.stdin is None or (text is None and sys.stdin.isatty())):
        raise OptionError(option=option, expected="an argument, - for stdin, or a file", found=Words("nothing"))
    try:
        if file is not None:
            return file.read_bytes().decode("utf-8")
        if wants_stdin:
            return _from_stdin().decode("utf-8")
    except OSError as error:
        raise SourceError(
            f"{file}: expected a readable file, found {error.strerror or error}; check the path"
        ) from error
    except UnicodeDecodeError as error:
        raise OptionError(option=option, expected="UTF-8 text", found=Words(str(error))) from error
    return checked_text(str(text), option)


def _from_stdin() -> bytes:
    """Return all of stdin. What was typed in a terminal without a last line feed gets one on the screen."""
    content = sys.stdin.buffer.read()
    if content and not content.endswith(b"\n") and sys.stdin.isatty():
        notice("")
    return content


def checked_text(text: str, option: str) -> str:
    """Return an argument; raise OptionError if its bytes are not UTF-8, which Python passes on as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = Words(f"{text[error.start]!r} at index {error.start:,}, a byte that is not UTF-8")
        raise OptionError(option=option, expected="UTF-8 text", found=found) from None
    return text


def notice(text: str) -> None:
    """Print a line on stderr, for the user rather than for a program that reads stdout."""
    if sys.stderr is not None:
        print(safe_for(sys.stderr, text), file=sys.stderr, flush=True)


def safe_for(stream: TextIO | None, text: str) -> str:
    """Return text of a file for a stream: on a terminal, control characters are escaped, because they are commands."""
    if stream is None or not stream.isatty():
        return text
    return CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def is_plain(stream: TextIO | None) -> bool:
    """Return whether to omit colours and progress bars: no terminal, a dumb terminal, or NO_COLOR."""
    if stream is None or not stream.isatty():
        return True
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"


@contextmanager
def progress_bar(title: str, *, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on stderr if it is a terminal, unless `quiet` is set; the caller reports (done, total)."""
    if quiet or is_plain(sys.stderr):
        yield lambda done, total: None
        return
    with _bar(title) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def still_bar() -> Iterator[Callable[[int, int, str], None]]:
    """Show a progress bar that is redrawn only when the caller reports (done, total, title).

    A drawing thread would disturb measurements.
    """
    if is_plain(sys.stderr):
        yield lambda done, total, title: None
        return
    with _bar("{task.description}", auto_refresh=False) as bar:
        task = bar.add_task("measuring", total=None)
        yield lambda done, total, title: bar.update(task, completed=done, total=total, description=title, refresh=True)


def _bar(title: str, *, auto_refresh: bool = True) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=auto_refresh)
