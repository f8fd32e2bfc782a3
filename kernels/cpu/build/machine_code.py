"""Compile parts of the kernels in child processes, so that this process never imports Numba and stays small."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, cast

from .library import FIXED, FIXED_END, HOW_TO_COMPILE, PACKAGE, features, opened
from .prebuilt import Target

# The program of a child process. When the parent ends, the system closes the pipe `alive`, and a thread of the child
# ends the child.
_CHILD = """
import os, sys, threading
threading.Thread(target=lambda: (os.read({alive}, 1), os._exit(1)), daemon=True).start()
sys.path[:] = {path!r}
from {package}.build.exports import main
main({parts!r}, {triple!r})
"""

# The largest number of processes that compile at the same time; each takes 300 MB.
MOST = 8
_FORMAT = "a format"
# Maps each part (a set of kernels that are compiled together) to the seconds that a Zen 5 core takes to compile it. The
# first two entries are for the float32 and the fixed-point kernels of a format. START is the time to start a process.
SECONDS = {_FORMAT: 1.7, FIXED_END: 0.8, "products": 4.5, "attention": 6.0, "experts": 1.1, "states": 1.2, FIXED: 2.4}
START = 1.0


def build(parts: Sequence[str], keep: Callable[[str, bytes], None], target: Target | None = None) -> None:
    """Compile parts for `target`, or for this processor; call `keep(part, machine code)` for each compiled part.

    Raises:
        ImportError: Numba is not installed.
        RuntimeError: a compiling process failed, there is no Python interpreter to start processes with, or this
            process is itself a compiling process.
    """
    if os.environ.get(COMPILING):
        raise RuntimeError("the kernels are being compiled by this process, which was asked to compile them once more")
    if importlib.util.find_spec("numba") is None:
        raise ImportError(f"no machine code of {', '.join(parts)}, and {HOW_TO_COMPILE}")
    # In a bundled application, sys.executable is the application, which would start itself again and again.
    if not sys.executable or getattr(sys, "frozen", False):
        raise RuntimeError("the kernels are compiled by Python processes, and sys.executable does not say which Python")
    with contextlib.ExitStack() as stack:
        alive, held = os.pipe()
        stack.callback(os.close, held)
        stack.callback(os.close, alive)
        waiting = stack.enter_context(selectors.DefaultSelector())
        for own in shared_out(parts, n_processes()):
            errors = stack.enter_context(tempfile.TemporaryFile())
            child = stack.enter_context(_started(own, alive, errors, target))
            # Kill the process and wait for it, because the exit of Popen's context does not wait after Ctrl-C.
            stack.callback(child.wait)
            stack.callback(child.kill)
            waiting.register(child.stdout, selectors.EVENT_READ, (child, own, errors))  # type: ignore[arg-type]
        while waiting.get_map():
            for key, _ in waiting.select():
                child, own, errors = key.data
                keep(own.pop(0), _answer(child, errors))
                if not own:
                    waiting.unregister(key.fileobj)


def n_processes() -> int:
    """Return how many processes compile at the same time: one per core that this process may use, at most `MOST`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(cores or 1, MOST)


def shared_out(parts: Sequence[str], n: int) -> list[list[str]]:
    """Distribute parts to at most n processes, slow parts first, so that the processes end at about the same time."""
    shares: list[list[str]] = [[] for _ in range(min(n, len(parts)))]
    for part in sorted(parts, key=seconds_of, reverse=True):
        min(shares, key=lambda share: sum(map(seconds_of, share))).append(part)
    return shares


def usual_seconds(parts: Sequence[str]) -> float:
    """Return an estimate of the seconds that these parts take to compile on this machine."""
    return START + max(sum(map(seconds_of, share)) for share in shared_out(parts, n_processes()))


def seconds_of(part: str) -> float:
    """Return an estimate of the seconds that a core takes to compile a part."""
    return SECONDS.get(part, SECONDS[FIXED_END if part.endswith(FIXED_END) else _FORMAT])


def _started(
    parts: Sequence[str], alive: int, errors: IO[bytes], target: Target | None = None
) -> subprocess.Popen[bytes]:
    # The import system ignores entries of sys.path that are not strings.
    path = [folder for folder in sys.path if isinstance(folder, str)]
    triple = target.triple if target else ""
    code = _CHILD.format(package=PACKAGE, path=path, parts=list(parts), triple=triple, alive=alive)
    # Without highlighting, Numba spends no time on the colours of the many error messages that it catches itself.
    environment = {**os.environ, COMPILING: "1", "NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING": "1"}
    # Pass the CPU features of this process, which runs the code. The child might find others, because the system may
    # permit AMX only to the child.
    environment["NUMBA_CPU_FEATURES"] = target.features if target else features()
    if target:
        environment["NUMBA_CPU_NAME"] = target.processor
    no_input, pipe = subprocess.DEVNULL, subprocess.PIPE
    # The pipe is unbuffered, because a selector does not notice bytes in a buffer. The child is in a new session, so
    # that Ctrl-C does not end the child: its end would be reported as a failed compilation.
    return subprocess.Popen(
        [sys.executable, "-c", code],
        bufsize=0,
        stdin=no_input,
        stdout=pipe,
        stderr=errors,
        env=environment,
        pass_fds=(alive,),
        start_new_session=True,
    )


def _answer(child: subprocess.Popen[bytes], errors: IO[bytes]) -> bytes:
    """Return the next object file that a child process writes; raise RuntimeError if the process failed."""
    out = cast(IO[bytes], child.stdout)
    code = opened(_read(out, int.from_bytes(_read(out, 8), "little")))
    if code is not None:
        return code
    out.close()  # so that a process that still writes to the pipe ends
    words = [f"exit code {child.wait()}"]
    if child.returncode > 0:  # a killed process (negative code) has printed no reason
        errors.seek(0)
        words += errors.read().decode(errors="replace").strip().splitlines()
    raise RuntimeError(f"a process that compiles the kernels failed: {words[-1]}")


def _read(pipe: IO[bytes], n: int) -> bytes:
    """Return the next n bytes of a pipe, or fewer at its end."""
    pieces: list[bytes] = []
    while n > 0 and (piece := pipe.read(min(n, 1 << 20))):
        pieces.append(piece)
        n -= len(piece)
    return b"".join(pieces)


# ---- locks ----

# There is one lock per part. If several processes need the same part, one compiles it and the others wait.

# The environment variable that marks a compiling process, which must not start more compiling processes. If a user's
# program has the name of a standard module, a compiling process imports this program in place of the module, and so
# runs the program, which would start more.
COMPILING = "MLX_ENGINE_COMPILING"
# Seconds to wait for a lock; its holder may be suspended. On two busy cores, compilation took 44 seconds.
PATIENCE = 120.0


@contextlib.contextmanager
def locked(files: Iterable[Path]) -> Iterator[None]:
    """Hold the locks of these files of machine code within this context; wait for other processes that hold one.

    The system releases the locks of a process that dies. All processes take locks in the order of the paths, so there
    is no deadlock. If a lock cannot be taken, for instance in a read-only folder, the process continues without it.
    """
    with contextlib.ExitStack() as stack:
        # A compiling process takes no locks: the process that started it holds them and waits for it.
        for file in [] if os.environ.get(COMPILING) else sorted(files):
            with contextlib.suppress(OSError):
                file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                held = stack.enter_context(file.with_suffix(".lock").open("a"))
                _wait(held)
        yield


def _wait(lock: IO[str]) -> None:
    """Take a lock; after `PATIENCE` seconds, continue without it."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            time.sleep(0.05)
