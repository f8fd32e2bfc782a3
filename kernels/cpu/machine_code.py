"""Compile all exported kernels in two child processes, so that this process never imports the compiler."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence

from kernels.cpu.library import joined, opened

# Modules that one process compiles together, so that they share the functions they call; both parts take equal time.
PARTS = (
    ("attention", "convolution", "delta_rule", "embedding", "gemm", "heads", "jobs", "linear", "program", "sum_exp"),
    ("gemv",),
)

# Set in a compiling process, which must not start others in turn. That would happen if a file beside the user's program
# has the name of a standard module: every process runs it.
_COMPILING = "MLX_ENGINE_COMPILING"

_CHILD = "import sys; sys.path[:] = {path!r}; from kernels.cpu.exports import main; main({modules!r})"


def build() -> bytes:
    """Compile the exports of `kernels.cpu`: some 10 seconds on two cores.

    Raises:
        ImportError: Numba is not installed.
        RuntimeError: a compiling process failed, there is no interpreter to start one with, or this is such a process.
    """
    if os.environ.get(_COMPILING):
        raise RuntimeError("the kernels are being compiled by this process, which was asked to compile them once more")
    for needed in ("numba", "llvmlite"):
        if importlib.util.find_spec(needed) is None:
            raise ImportError(f"the kernels are compiled with {needed}, which is not installed")
    # A bundled application is its own sys.executable: it would start itself again and again.
    if not sys.executable or getattr(sys, "frozen", False):
        raise RuntimeError("the kernels are compiled by Python processes, and sys.executable does not say which Python")
    with contextlib.ExitStack() as stack:
        children = []
        for modules in PARTS:
            children.append(stack.enter_context(_started(modules)))
            # After Ctrl-C the exit of Popen does not wait for the process.
            stack.callback(children[-1].wait)
            stack.callback(children[-1].kill)
        return joined([_answer(child) for child in children])


def _started(modules: Sequence[str]) -> subprocess.Popen[bytes]:
    # Other objects in sys.path are ignored by the import system, and cannot be written as code.
    code = _CHILD.format(path=[folder for folder in sys.path if isinstance(folder, str)], modules=modules)
    no_input, pipe, environment = subprocess.DEVNULL, subprocess.PIPE, {**os.environ, _COMPILING: "1"}
    return subprocess.Popen([sys.executable, "-c", code], stdin=no_input, stdout=pipe, stderr=pipe, env=environment)


def _answer(child: subprocess.Popen[bytes]) -> bytes:
    out, errors = child.communicate()
    code = opened(out)
    if child.returncode or code is None:
        words = [f"exit code {child.returncode}"]
        if child.returncode > 0:  # a killed process has printed no reason
            words += errors.decode(errors="replace").strip().splitlines()
        raise RuntimeError(f"a process that compiles the kernels failed: {words[-1]}")
    return code
