"""All exported kernels as machine code, made by two processes at a time: this one never imports the compiler."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence

from kernels.cpu.library import joined, opened

# Modules whose kernels are compiled by the same process, in which they share what they call; both take as long.
PARTS = (("attention", "embedding", "gemm", "heads", "jobs", "linear", "program"), ("gemv",))

# Set in a process that compiles, for one that would start others in turn: a file beside the user's program that has the
# name of a module of the standard library is run in every process.
_COMPILING = "MLX_ENGINE_COMPILING"

_CHILD = "import sys; sys.path[:] = {path!r}; from kernels.cpu.exports import main; main({modules!r})"


def build() -> bytes:
    """Compile what `kernels.cpu` exports; some 10 seconds on two cores.

    Raises:
        ImportError: Numba is not installed.
        RuntimeError: a compiling process failed, there is no interpreter to start one with, or this is such a process.
    """
    if os.environ.get(_COMPILING):
        raise RuntimeError("the kernels are being compiled by this process, which was asked to compile them once more")
    for needed in ("numba", "llvmlite"):
        if importlib.util.find_spec(needed) is None:
            raise ImportError(f"the kernels are compiled with {needed}, which is not installed")
    # A bundled application is its own sys.executable: it would start itself, and so on.
    if not sys.executable or getattr(sys, "frozen", False):
        raise RuntimeError("the kernels are compiled by Python processes, and sys.executable does not say which Python")
    with contextlib.ExitStack() as stack:
        children = []
        for modules in PARTS:
            children.append(stack.enter_context(_started(modules)))
            # After Ctrl-C its own exit does not wait.
            stack.callback(children[-1].wait)
            stack.callback(children[-1].kill)
        return joined([_answer(child) for child in children])


def _started(modules: Sequence[str]) -> subprocess.Popen[bytes]:
    # What else lies in the path is ignored when modules are looked for, and cannot be written as code.
    code = _CHILD.format(path=[folder for folder in sys.path if isinstance(folder, str)], modules=modules)
    no_input, pipe, environment = subprocess.DEVNULL, subprocess.PIPE, {**os.environ, _COMPILING: "1"}
    return subprocess.Popen([sys.executable, "-c", code], stdin=no_input, stdout=pipe, stderr=pipe, env=environment)


def _answer(child: subprocess.Popen[bytes]) -> bytes:
    out, said = child.communicate()
    code = opened(out)
    if child.returncode or code is None:
        words = [f"exit code {child.returncode}"]
        if child.returncode > 0:  # what was killed has said nothing about that
            words += said.decode(errors="replace").strip().splitlines()
        raise RuntimeError(f"a process that compiles the kernels failed: {words[-1]}")
    return code
