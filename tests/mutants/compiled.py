"""Machine code that a bug in one kernel does not change: the tests of this bug need not compile it again.

The cache of compiled code (`kernels/cpu/build/library.py`) has one digest for the source of all kernels.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from kernels.cpu.build import library

# The variable of the folder for compiled code.
VARIABLE = "NUMBA_CACHE_DIR"
_PRINT_FOLDER = "from kernels.cpu.build.library import folder; print(folder())"


def keep(root: Path, file: str, folder: Path) -> None:
    """Copy this checkout's compiled parts into a cache for a copy of the checkout, but for those that a file changes.

    If the file keeps the copy from finding its folder, nothing is copied.

    Args:
        root: of the copy.
        file: the changed source file, from the root.
        folder: for compiled code; the tests of the copy find it in the environment, as `VARIABLE`.
    """
    environment = {**os.environ, "PYTHONPATH": str(root), VARIABLE: str(folder)}
    command = [sys.executable, "-c", _PRINT_FOLDER]
    # In the copy: Python looks for modules in the current folder first.
    found = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    if found.returncode:  # the bug is in a module that finds the folder
        return
    to = Path(found.stdout.strip())
    to.mkdir(mode=0o700, parents=True, exist_ok=True)
    for code in library.folder().glob("*.code"):
        part = code.stem.rpartition("-")[2]
        if Path(file).stem not in sources(part):
            shutil.copy(code, to / code.name)


def sources(part: str) -> set[str]:
    """Return the modules of `kernels.cpu` from which a part of the library is compiled."""
    format_ = "affine" if library.affine_format(part) else part
    found, left = set[str](), ["exports", *library.BASE.get(part, ("formats", format_))]
    while left:
        module = left.pop()
        if module not in found:
            found.add(module)
            left.extend(_imported(module))
    return found


@cache
def _imported(module: str) -> list[str]:
    """Return the modules of `kernels.cpu` that a module imports."""
    folder = Path(library.__file__).parent
    found = []
    for node in ast.walk(ast.parse((folder / f"{module}.py").read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "kernels.cpu":
            found += [name.name for name in node.names if (folder / f"{name.name}.py").exists()]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kernels.cpu."):
            found.append(str(node.module).rpartition(".")[2])
    return found
