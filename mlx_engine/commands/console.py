"""What the commands share: notices on stderr, progress bars, and exit codes instead of tracebacks."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import typer

from mlx_engine.errors import BackendUnavailableError, EngineError, OptionError

P = ParamSpec("P")
T = TypeVar("T")

FAILED, WRONG_USE, INTERRUPTED = 1, 2, 130


def reports_errors(command: Callable[P, T]) -> Callable[P, T]:
    """A user's mistake becomes one message and an exit code; anything else is a bug and keeps its traceback."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return command(*args, **kwargs)
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

    return wrapped


def notice(text: str) -> None:
    """A line for the person who runs the command, not for the program that reads its output."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr while something takes long; the caller reports (done, in all). Nothing where nobody watches."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
