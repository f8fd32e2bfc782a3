"""A lock per part of the kernels: of several processes that need the same code, one compiles it and the others wait."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

# Set in a compiling process, which must not start others in turn. That would happen if a file beside the user's program
# has the name of a standard module: every process runs it.
COMPILING = "MLX_ENGINE_COMPILING"
# Seconds to wait for a process that compiles: it may have been suspended. Compilation takes about 5.
PATIENCE = 60.0


@contextlib.contextmanager
def locked(files: Iterable[Path]) -> Iterator[None]:
    """Hold the locks of these files of machine code; wait for other processes that hold one.

    The system releases the locks of a process that dies. Locks are taken in one order, so that processes cannot wait
    for each other. Where a lock cannot be taken, as in a folder that is read-only, processes compile at the same time.
    """
    with contextlib.ExitStack() as stack:
        # The process that started a compiling process waits for it and holds the locks.
        for file in [] if os.environ.get(COMPILING) else sorted(files):
            with contextlib.suppress(OSError):
                file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                held = stack.enter_context(file.with_suffix(".lock").open("a"))
                _wait(held)
        yield


def _wait(lock: IO[str]) -> None:
    """Take a lock; give up after `PATIENCE`."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            time.sleep(0.05)
