"""Compile parts of the kernels in child processes, so that this process never imports the compiler."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence

from .compile_lock import COMPILING
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
