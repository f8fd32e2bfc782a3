"""All exported kernels as machine code, made by two processes at a time: this one never imports the compiler."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Sequence

from kernels.cpu.library import joined, opened

# Modules whose kernels are compiled by the same process, in which they share what they call; both take as long.
PARTS = (("attention", "heads", "jobs", "layers"), ("embedding", "linear"))

_CHILD = "import sys; sys.path[:] = {path!r}; from kernels.cpu.exports import main; main({modules!r})"


def build() -> bytes:
    """Compile what `kernels.cpu` exports; some 12 seconds on two cores.

    Raises:
        ImportError: Numba is not installed.
        RuntimeError: a compiling process failed, or there is no interpreter to start one with.
    """
    for needed in ("numba", "llvmlite"):
        if importlib.util.find_spec(needed) is None:
            raise ImportError(f"the kernels are compiled with {needed}, which is not installed")
    if not sys.executable:
        raise RuntimeError("the kernels are compiled by Python processes, and sys.executable does not say which Python")
    children = []
    try:
        for modules in PARTS:
            children.append(_started(modules))
        return joined([_answer(child) for child in children])
    finally:
        for child in children:
            child.kill()
            child.wait()


def _started(modules: Sequence[str]) -> subprocess.Popen[bytes]:
    code = _CHILD.format(path=sys.path, modules=modules)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def _answer(child: subprocess.Popen[bytes]) -> bytes:
    out, said = child.communicate()
    code = opened(out)
    if child.returncode or code is None:
        words = said.decode(errors="replace").strip().splitlines() or [f"exit code {child.returncode}"]
        raise RuntimeError(f"a process that compiles the kernels failed: {words[-1]}")
    return code
