"""SIGTERM and SIGHUP end the process as Ctrl-C does: unfinished files are removed, and compilers are stopped."""

from __future__ import annotations

import signal
from types import FrameType

# SIGHUP comes when the terminal is closed; not every system has it.
ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


class EndedBySignal(SystemExit):
    """Raised in the main thread by a signal that ends the process; the exit code is that of a shell, 128 + number."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.name = signal.Signals(number).name


def exit_on_signals() -> None:
    """Raise `EndedBySignal` at the first of these signals. One that is ignored, as after nohup, stays ignored."""
    for number in ENDING:
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    # A second signal must not interrupt the removal of files: systems send both when they stop.
    for other in ENDING:
        signal.signal(other, signal.SIG_IGN)
    raise EndedBySignal(number)
