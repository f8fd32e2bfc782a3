"""Log events with Python's logging, under the logger name "mlx_engine". An event is a line with a name and fields.

Logging is off by default. `MLX_ENGINE_LOG=info|debug|trace`, `--log-level` or a logging configuration turn it on. The
level `info` logs an event per token, `debug` also one per forward pass, and `trace` also one per operation.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

LOGGER = logging.getLogger("mlx_engine")

TRACE = 5
LEVELS = {"off": logging.WARNING, "info": logging.INFO, "debug": logging.DEBUG, "trace": TRACE}
VARIABLE = "MLX_ENGINE_LOG"

# Called before each event is printed. Programs that stream text to the same terminal set this variable to a function
# that ends the current line of text.
before_event: Callable[[], None] | None = None

# A function of (done, total, names of the unfinished parts) that updates a progress bar.
Bar = Callable[[int, int, str], None]
# Set by programs with progress bars: a function that takes a title, and returns a context manager that shows a progress
# bar. The context manager yields the `Bar`, or None if stderr is not a terminal.
show_bar: Callable[[str], AbstractContextManager[Bar | None]] | None = None

_warned: set[str] = set()


def configure(level: str) -> None:
    """Print the events of a level (a key of `LEVELS`), and those of less detailed levels, to stderr.

    With "off", only warnings, errors and the lines of `note` are printed.
    """
    LOGGER.setLevel(LEVELS[level])
    for handler in [h for h in LOGGER.handlers if isinstance(h, _Lines)]:
        LOGGER.removeHandler(handler)
    LOGGER.addHandler(_Lines())
    LOGGER.propagate = False


def warn(text: str) -> None:
    """Print a warning in one line, unless this process has already printed the same text."""
    if text not in _warned:
        _warned.add(text)
        LOGGER.warning("warning: %s", text)


def note(text: str) -> None:
    """Print a line at every level, such as 'wrote FILE'."""
    LOGGER.warning("%s", text)


def progress_bar(title: str) -> AbstractContextManager[Bar | None]:
    """Return a context manager that shows a progress bar and yields its `Bar`; without a bar, it yields None."""
    return nullcontext() if show_bar is None else show_bar(title)


def event(level: int, name: str, **fields: Any) -> None:
    """Log one event. The log record has the attribute `fields`, which the handler of `configure` prints as `key=value`.

    Before computing a field that takes time, check `LOGGER.isEnabledFor(level)`.
    """
    LOGGER.log(level, "%s", name, extra={"fields": fields})


class _Lines(logging.Handler):
    """Write one line per event to the current `sys.stderr`."""

    def emit(self, record: logging.LogRecord) -> None:
        fields = getattr(record, "fields", {})
        parts = [record.getMessage(), *(f"{key}={shown(value)}" for key, value in fields.items())]
        if before_event is not None:
            before_event()
        sys.stderr.write(" ".join(parts) + "\n")


def shown(value: object) -> str:
    """Format a value: floats with six significant digits, text quoted if it is no identifier, others with `str`."""
    if isinstance(value, float):
        return f"{value:.6g}"
    return repr(value) if isinstance(value, str) and not value.isidentifier() else str(value)
