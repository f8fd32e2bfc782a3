"""What the commands share: notices on stderr, progress bars, and exit codes instead of tracebacks."""

from __future__ import annotations

import functools
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TextIO, TypeVar

import typer

from mlx_engine.errors import BackendUnavailableError, EngineError, OptionError, SourceError

if TYPE_CHECKING:
    from rich.progress import Progress

P = ParamSpec("P")
T = TypeVar("T")

FAILED, WRONG_USE, INTERRUPTED = 1, 2, 130


def reports_errors(command: Callable[P, T]) -> Callable[P, T]:
    """A user's mistake becomes one message and an exit code; anything else is a bug and keeps its traceback."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        escape_what_stdout_cannot_write()
        try:
            try:
                return command(*args, **kwargs)
            finally:
                # What is still buffered may not fit the disk either; at exit it would be too late to say so.
                if sys.stdout is not None:
                    sys.stdout.flush()
        except EngineError as error:
            notice(f"error: {error}")
            wrong_use = isinstance(error, OptionError | BackendUnavailableError)
            raise typer.Exit(WRONG_USE if wrong_use else FAILED) from None
        except KeyboardInterrupt:
            notice("\ninterrupted")
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            # The reader of our output has left (`| head`); Python would complain once more at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(FAILED) from None
        except OSError as error:
            # An error of a file names it, and would be a bug here; without a name it is our own output's.
            if error.filename is not None:
                raise
            notice(f"error: the output cannot be written: {error.strerror or error}")
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(FAILED) from None

    return wrapped


def escape_what_stdout_cannot_write() -> None:
    """Text of a model or a file need not be valid Unicode, and a terminal need not take it."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def read_text(text: str | None, file: Path | None, option: str, *, default: str | None = None) -> str:
    """Text from an argument, from a file, or from stdin: "-", or no argument where there is no default.

    Raises:
        OptionError: it was given twice, or is not UTF-8.
        SourceError: the file cannot be read.
    """
    if text is not None and file is not None:
        raise OptionError(option=option, expected="an argument or a file, not both", found=str(file))
    wants_stdin = file is None and (text == "-" or (text is None and default is None))
    if wants_stdin and (sys.stdin is None or (text is None and sys.stdin.isatty())):
        raise OptionError(option=option, expected="an argument, - for stdin, or a file", found="nothing")
    try:
        if file is not None:
            return file.read_bytes().decode("utf-8")
        if wants_stdin:
            return sys.stdin.buffer.read().decode("utf-8")
    except OSError as error:
        raise SourceError(f"{file}: expected a readable file, found {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise OptionError(option=option, expected="UTF-8 text", found=str(error)) from error
    return text if text is not None else str(default)


def notice(text: str) -> None:
    """A line for the person who runs the command, not for the program that reads its output."""
    if sys.stderr is not None:
        print(text, file=sys.stderr, flush=True)


def is_plain(stream: TextIO | None) -> bool:
    """Whether colours and moving bars are out of place: no terminal, a dumb one, or NO_COLOR."""
    if stream is None or not stream.isatty():
        return True
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on stderr; the caller reports (done, in all). Show nothing where stderr is no terminal."""
    if is_plain(sys.stderr):
        yield lambda done, total: None
        return
    with _bar(title) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def still_bar() -> Iterator[Callable[[int, int, str], None]]:
    """Show a bar that moves only when the caller reports (done, in all, title).

    A thread that draws would disturb what is measured.
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
