"""Shared by the commands: notices on stderr, progress bars, exit codes and error messages."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import signal
import sys
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TextIO, TypeVar

import typer

from mlx_engine.errors import BackendUnavailableError, EngineError, OptionError, SourceError, out_of_memory
from mlx_engine.observe import log

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
    """Decorate a command: if it fails or is ended by a signal, print a message and exit with a nonzero code.

    Expected failures are `EngineError`, lack of memory, signals, and errors of writing stdout. All other exceptions are
    bugs, and are raised with their traceback.
    """

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
            notice(f"error: {with_flags(error, command)}")
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
            # The reader of the pipe has closed it (`| head`). Redirect stdout, else Python prints an error at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(FAILED) from None
        except OSError as error:
            # A failure to write stdout has an errno, and no file name.
            if error.filename is not None or error.errno is None:
                raise
            notice(f"error: the output cannot be written: {error.strerror or error}")
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(FAILED) from None

    return wrapped


def with_flags(error: EngineError, command: Callable[..., Any]) -> str:
    """Return the message of an error, with Python names of options replaced by the flags of a command.

    A name of a single word is replaced only at the beginning of the message: elsewhere it may be an ordinary word.
    """
    hints, text = typing.get_type_hints(command, include_extras=True), str(error)
    option = str(getattr(error, "option", "")).partition(" ")[0]  # drop a layer name, as in "quant_layers attn_q"
    if not hints.keys() & {option, option.removesuffix("s")}:  # the Python keyword of a repeated flag is plural
        return text
    for name, hint in hints.items():
        for about in getattr(hint, "__metadata__", ()):
            if isinstance(about, typer.models.OptionInfo):
                # With Annotated, typer stores an option's first flag in the attribute `default`.
                flags = [str(about.default), *(about.param_decls or ())]
                flag = next((one for one in flags if one.startswith("--")), flags[0]).partition("/")[0]
                start = "" if "_" in name else "^"
                text = re.sub(rf"{start}(?<![\w.-]){re.escape(name)}s?(?!\w)", flag, text)
    return text


def escape_what_stdout_cannot_write() -> None:
    """Escape characters that stdout cannot encode: text from a model or a file may be invalid Unicode."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def read_text(text: str | None, file: Path | None, option: str) -> str:
    """Return a text that is given as an argument or a file. If the argument is "-", or neither is given, read stdin.

    Raises:
        OptionError: the text is missing, was given twice, or is not UTF-8.
        SourceError: the file cannot be read.
    """
    if text is not None and file is not None:
        raise OptionError(f"give the {option} either as an argument or as a file", option=option, found=str(file))
    wants_stdin = file is None and (text is None or text == "-")
    if wants_stdin and (sys.stdin is None or (text is None and sys.stdin.isatty())):
        raise OptionError(f"no {option}: give it as an argument, as - for stdin, or as a file", option=option)
    try:
        if file is not None:
            return file.read_bytes().decode("utf-8")
        if wants_stdin:
            return _from_stdin().decode("utf-8")
    except FileNotFoundError:
        raise SourceError(f"{file}: no such file") from None
    except OSError as error:
        raise SourceError(f"{file}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        where = "stdin" if file is None else file
        raise OptionError(f"{option}: {where} is not UTF-8 text: {error}", option=option, found=str(error)) from error
    return checked_text(str(text), option)


def _from_stdin() -> bytes:
    """Return all of stdin. If the text was typed in a terminal without a last line feed, print a line feed."""
    content = sys.stdin.buffer.read()
    if content and not content.endswith(b"\n") and sys.stdin.isatty():
        notice("")
    return content


def checked_text(text: str, option: str) -> str:
    """Return an argument; raise OptionError if it has lone surrogates, which stand for bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"{text[error.start]!r} at index {error.start:,}"
        raise OptionError(f"{option} is not UTF-8 text: a wrong byte {found}", option=option, found=found) from None
    return text


def notice(text: str) -> None:
    """Print a line on stderr, for the user rather than for a program that reads stdout."""
    if sys.stderr is not None:
        print(safe_for(sys.stderr, text), file=sys.stderr, flush=True)


def alarm(text: str) -> None:
    """Print a warning, for example that measured figures are not usable; in red on a terminal."""
    if is_plain(sys.stderr):
        notice(text)
    else:
        print(f"{RED}{safe_for(sys.stderr, text)}{NORMAL}", file=sys.stderr, flush=True)


def safe_for(stream: TextIO | None, text: str) -> str:
    """Return the text; for a terminal, escape control characters, on which the terminal would act."""
    if stream is None or not stream.isatty():
        return text
    return CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def is_plain(stream: TextIO | None) -> bool:
    """Return whether to omit colours and bars: the stream is no terminal, or a dumb one, or NO_COLOR is set."""
    if stream is None or not stream.isatty():
        return True
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"


@contextmanager
def progress_bar(title: str, *, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar, unless `quiet` or `is_plain(stderr)`. Yield a function that takes (done, total)."""
    if quiet or is_plain(sys.stderr):
        # Switch off the bars of `log.progress_bar`, too.
        kept, log.show_bar = log.show_bar, None
        try:
            yield lambda done, total: None
        finally:
            log.show_bar = kept
        return
    with _line(title) as update:
        yield lambda done, total: update(completed=done, total=total)


@contextmanager
def still_bar() -> Iterator[Callable[[int, int, str], None]]:
    """Show a bar, unless `is_plain(stderr)`. Yield a function that takes (done, total, title).

    The bar is redrawn only when this function is called, because a thread that redraws it would disturb measurements.
    """
    if is_plain(sys.stderr):
        yield lambda done, total, title: None
        return
    with _line("measuring", auto_refresh=False) as update:
        yield lambda done, total, title: update(completed=done, total=total, description=title, refresh=True)


@contextmanager
def bar_of_parts(title: str) -> Iterator[log.Bar | None]:
    """Show a bar; yield a function that takes (done, total, unfinished parts). If `is_plain(stderr)`, yield None.

    `main` sets `log.show_bar` to this function, so that packages that do not import `commands` can show the bar.
    """
    if is_plain(sys.stderr):
        yield None
        return
    with _line(title) as update:
        yield lambda done, total, left: update(
            completed=done, total=total, description=f"{title}: {left}" if left else title, refresh=True
        )


# The object that draws all bars, a line for each; None if no bar is shown.
_shown: Progress | None = None


@contextmanager
def _line(title: str, *, auto_refresh: bool = True) -> Iterator[Callable[..., None]]:
    """Show a line with a title and a bar, below the lines that are shown; yield the function that updates it."""
    global _shown
    if _shown is not None:
        task = _shown.add_task(title, total=None)
        try:
            yield functools.partial(_shown.update, task)
        finally:
            _shown.remove_task(task)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=auto_refresh) as _shown:
        try:
            yield functools.partial(_shown.update, _shown.add_task(title, total=None))
        finally:
            _shown = None


Self = TypeVar("Self", bound="TextWriter")

DIM, RED, NORMAL = "\x1b[2m", "\x1b[31m", "\x1b[0m"

# The parts of a text: a line end, a tab, a run of spaces, a run of printable ASCII, or any other character.
PARTS = re.compile(r"\r?\n|\t| +|[!-~]+|.", re.DOTALL)
TAB = 8


class TextWriter:
    """Writes text piece by piece. On a terminal, a word that grows past the end of its line moves to the next line.

    A line may also end before or after a character of two columns, because Chinese and Japanese have no spaces between
    words. The terminal breaks words that are longer than a line. Text for a stream that is not a terminal is unchanged.

    In a `with` block, the writer ends its line before the log prints an event on the same terminal.
    """

    def __init__(self, out: TextIO | None) -> None:
        self._out, self._has_colors = out, not is_plain(out)
        self._width = self._column = 0
        self._word: list[str] = []  # the parts of the last word, which may still grow
        self._word_width = 0
        self._is_in_line = False

    def __enter__(self: Self) -> Self:
        if all(stream is not None and stream.isatty() for stream in (self._out, sys.stderr)):
            log.before_event = self.end_line
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        log.before_event = None

    def write(self, text: str, *, dim: bool = False) -> None:
        """Write more text, dimmed if the terminal has colours."""
        text, dim = safe_for(self._out, text), dim and self._has_colors
        if not text:
            return
        self._is_in_line = not text.endswith("\n")
        if self._fit_to_terminal():
            text = "".join(self._placed(part, dim=dim) for part in PARTS.findall(text))
        elif dim:
            text = f"{DIM}{text}{NORMAL}"
        print(text, end="", file=self._out, flush=True)

    def end_line(self) -> None:
        """Begin a new line, unless the text is at the beginning of one."""
        if self._is_in_line:
            self.write("\n")

    def _fit_to_terminal(self) -> bool:
        """Return whether to wrap words. If the width has changed, update the column: the text was rewrapped."""
        width = columns_of(self._out)
        if width != self._width and width:
            self._column %= width
            if self._column < self._word_width:  # the terminal has broken the last word
                self._word, self._word_width = [], 0
        self._width = width
        return width > 0

    def _placed(self, part: str, *, dim: bool) -> str:
        """Return the text to write for a part, and update the position in the line.

        The last column stays free: terminals differ in where the cursor is after a character in that column.
        """
        if part.endswith("\n"):
            self._column, self._word, self._word_width = 0, [], 0
            return part
        width = TAB - self._column % TAB if part == "\t" else width_of(part)
        fits = self._column + width < self._width
        if part[0] in " \t":
            self._word, self._word_width = [], 0
            self._column += width  # spaces that do not fit are left out, and the next word begins a line
            return part if fits else ""
        shown = f"{DIM}{part}{NORMAL}" if dim else part
        if width == 2 and len(part) == 1:
            self._word, self._word_width = [], 0
            self._column = self._column + width if fits else width
            return shown if fits else f"\n{shown}"
        return self._grown(part, shown, width, fits=fits)

    def _grown(self, part: str, shown: str, width: int, *, fits: bool) -> str:
        """Return the text to write for another part of the last word.

        If the word does not fit into this line, the returned text moves the word to the next line.
        """
        grown, earlier = self._word_width + width, "".join(self._word)
        self._word.append(shown)
        before, self._word_width = self._word_width, grown
        if fits:
            self._column += width
            return shown
        if grown < self._width:
            self._column = grown
            return (f"\x1b[{before}D\x1b[K" if before else "") + f"\n{earlier}{shown}"
        begins = not before and self._column > 0
        self._column = 0 if begins else self._column
        for character in part:
            wide = width_of(character)
            self._column = wide + (self._column if self._column + wide <= self._width else 0)
        return f"\n{shown}" if begins else shown


def columns_of(out: TextIO | None) -> int:
    """Return the number of columns of a stream's terminal; 0 if there is no terminal, or a dumb one."""
    if out is None or not out.isatty() or os.environ.get("TERM") == "dumb":
        return 0
    try:
        return os.get_terminal_size(out.fileno()).columns
    except (OSError, ValueError):
        return 0


def width_of(text: str) -> int:
    """Return the number of columns of a text: two for a Chinese character, none for an accent over a letter."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


# The signals that end the process. SIGHUP is sent when the terminal is closed; not every system has this signal.
ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


class EndedBySignal(SystemExit):
    """Raised in the main thread by a signal that ends the process; the exit code is 128 + its number, as in a shell."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.name = signal.Signals(number).name


def exit_on_signals() -> None:
    """Raise `EndedBySignal` at SIGTERM or SIGHUP. A signal that is ignored, as after nohup, stays ignored."""
    for number in ENDING:
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    # At shutdown, systems send both SIGTERM and SIGHUP. The second must not interrupt the removal of temporary files.
    for other in ENDING:
        signal.signal(other, signal.SIG_IGN)
    raise EndedBySignal(number)
