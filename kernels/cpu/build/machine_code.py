"""Compile parts of the kernels in child processes, so that this process never imports the compiler."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

from .library import PACKAGE, opened

# The first thread ends the process when the pipe of its parent does.
_CHILD = """
import os, sys, threading
threading.Thread(target=lambda: (os.read({alive}, 1), os._exit(1)), daemon=True).start()
sys.path[:] = {path!r}
from {package}.build.exports import main
main({part!r})
"""


def build(parts: Sequence[str]) -> dict[str, bytes]:
    """Compile parts of `kernels.cpu`, each in a process of its own; return their machine code by part.

    Raises:
        ImportError: Numba is not installed.
        RuntimeError: a compiling process failed, there is no interpreter to start one with, or this is such a process.
    """
    if os.environ.get(COMPILING):
        raise RuntimeError("the kernels are being compiled by this process, which was asked to compile them once more")
    for needed in ("numba", "llvmlite"):
        if importlib.util.find_spec(needed) is None:
            raise ImportError(f"the kernels are compiled with {needed}, which is not installed")
    # A bundled application is its own sys.executable: it would start itself again and again.
    if not sys.executable or getattr(sys, "frozen", False):
        raise RuntimeError("the kernels are compiled by Python processes, and sys.executable does not say which Python")
    with contextlib.ExitStack() as stack:
        # The pipe ends with this process, however it ends; then the children end, too.
        alive, held = os.pipe()
        stack.callback(os.close, held)
        stack.callback(os.close, alive)
        children = {}
        for part in parts:
            children[part] = child = stack.enter_context(_started(part, alive))
            # After Ctrl-C the exit of Popen does not wait for the process.
            stack.callback(child.wait)
            stack.callback(child.kill)
        return {part: _answer(child) for part, child in children.items()}


def _started(part: str, alive: int) -> subprocess.Popen[bytes]:
    # Other objects in sys.path are ignored by the import system, and cannot be written as code.
    code = _CHILD.format(
        package=PACKAGE, path=[folder for folder in sys.path if isinstance(folder, str)], part=part, alive=alive
    )
    no_input, pipe, environment = subprocess.DEVNULL, subprocess.PIPE, {**os.environ, COMPILING: "1"}
    return subprocess.Popen(
        [sys.executable, "-c", code], stdin=no_input, stdout=pipe, stderr=pipe, env=environment, pass_fds=(alive,)
    )


def _answer(child: subprocess.Popen[bytes]) -> bytes:
    out, errors = child.communicate()
    code = opened(out)
    if child.returncode or code is None:
        words = [f"exit code {child.returncode}"]
        if child.returncode > 0:  # a killed process has printed no reason
            words += errors.decode(errors="replace").strip().splitlines()
        raise RuntimeError(f"a process that compiles the kernels failed: {words[-1]}")
    return code


# ---- locks ----

# A lock per part of the kernels: of several processes that need the same code, one compiles it and the others wait.

# Set in a compiling process, which must not start others in turn. That would happen if a file beside the user's program
# has the name of a standard module: every process runs it.
COMPILING = "MLX_ENGINE_COMPILING"
# Seconds to wait for a process that compiles: it may have been suspended. On two busy cores
# 44 seconds of compilation were measured.
PATIENCE = 120.0


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
