"""The journal: a file of lines that a thread of its own appends, so that a slow or full disk never holds up answers."""

from __future__ import annotations

import logging
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Full, Queue

from mlx_engine.errors import OptionError
from mlx_engine.serve.prometheus import Counter

LOGGER = logging.getLogger("mlx_engine.serve")

# Lines that wait for the disk; further ones are lost and counted.
QUEUE = 1024


class Journal:
    """Appends lines to a file. A line that cannot be written is lost and counted, and the next one is tried.

    Attributes:
        written: a counter of the lines in the file.
        lost: a counter of the others, by reason: the queue was full, the disk, or an error in the server.
    """

    def __init__(self, path: Path, *, warn: Callable[[str], None], queue: int = QUEUE) -> None:
        """Open a file, and start the thread.

        Args:
            path: the file; it is made, for its owner alone, if it does not exist.
            warn: called once, with a text, when a line could not be written for the first time.
            queue: the number of lines that may wait for the disk.

        Raises:
            OptionError: the file cannot be written.
        """
        self._path, self._warn = path, warn
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            self._is_torn = _is_torn(path)
        except OSError as error:
            message = f"--journal: {path} cannot be written: {error.strerror or error}"
            raise OptionError(message, option="--journal", found=str(path)) from error
        self.written = Counter("journal_lines", "Requests that were written to the journal.")
        self.lost = Counter("journal_lost", "Requests that could not be written to the journal, by reason.", "reason")
        for reason in ("queue", "disk", "error"):
            self.lost.add(0, reason)
        self._queue: Queue[Callable[[], bytes] | None] = Queue(queue)
        self._has_warned = False
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def add(self, line: Callable[[], bytes]) -> None:
        """Append a line: the thread calls `line`, which returns it without a line feed. Never wait, never raise."""
        try:
            self._queue.put_nowait(line)
        except Full:
            self.lost.add(1, "queue")
            self._warn_once("the disk is too slow")

    def close(self, seconds: float = 5.0) -> None:
        """Write what waits, for at most so many seconds."""
        try:
            self._queue.put(None, timeout=seconds)
        except Full:
            return
        self._thread.join(seconds)

    def lines(self) -> Iterator[str]:
        """Yield the counters in the text format of Prometheus."""
        yield from self.written.lines()
        yield from self.lost.lines()

    def _run(self) -> None:
        while (line := self._queue.get()) is not None:
            try:
                self._write(line() + b"\n")
                self.written.add()
            except OSError as error:
                self.lost.add(1, "disk")
                self._warn_once(error.strerror or str(error))
            except Exception:
                self.lost.add(1, "error")
                LOGGER.exception("a line of the journal failed")
        os.close(self._file)

    def _write(self, line: bytes) -> None:
        """Write a line. If a part of a line is in the file, end it first: a reader then loses that line alone."""
        rest = b"\n" + line if self._is_torn else line
        while rest:
            rest = rest[os.write(self._file, rest) :]
            self._is_torn = bool(rest)

    def _warn_once(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            lost = "lines are lost until there is room again; /metrics counts them"
            self._warn(f"warning: the journal {self._path} cannot be written: {why}; {lost}")


def _is_torn(path: Path) -> bool:
    """Return whether a file ends inside a line, as a process that was killed leaves it."""
    if not stat.S_ISREG(path.stat().st_mode):
        return False
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"
