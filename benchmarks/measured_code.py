"""The code that a benchmark measures, as a hash: BENCHMARKS.md marks rows whose code has changed since.

Every row has `code`: the folders that its figures depend on, and the SHA-256 of the files in them at the measurement.
The page compares that hash with a hash of the same folders now, so it needs no git history. Comments and docstrings of
Python files do not count.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

PRODUCTS = ("kernels/cpu", "mlx_engine/backends")
FORWARD_PASS = (*PRODUCTS, "mlx_engine/cache", "mlx_engine/loop", "mlx_engine/models", "mlx_engine/quant")
# By the name of the benchmark and of its file of results.
FOLDERS = {
    "peers": FORWARD_PASS,
    "folders": FORWARD_PASS,
    "llama_quants": FORWARD_PASS,
    "states": FORWARD_PASS,
    "sweep": FORWARD_PASS,
    "baseline": FORWARD_PASS,
    "rows": FORWARD_PASS,
    "batch": FORWARD_PASS,
    "concurrency": FORWARD_PASS,
    "server": (*FORWARD_PASS, "mlx_engine/serve"),
    "bits": FORWARD_PASS,
    "ways": ("kernels/cpu",),
    "chunks": PRODUCTS,
    "crossover": PRODUCTS,
    "ops": PRODUCTS,
    "emulator": ("kernels/emulator", "kernels/metal"),
}

OLDER, CHANGED = "measured by an older version", "the measured code has changed since"


def stamp(benchmark: str) -> dict[str, Any]:
    """Return the folders that a benchmark's figures depend on, and the hash of the code in them now."""
    folders = FOLDERS[benchmark]
    return {"folders": list(folders), "sha256": digest(folders)}


def mark(row: dict[str, Any]) -> str | None:
    """Return a note if the code that the row measures has changed, or if the row has no hash of it; else None."""
    code = row.get("code")
    if code is None:
        return OLDER
    return None if code["sha256"] == digest(code["folders"]) else CHANGED


def digest(folders: Iterable[str]) -> str:
    """Return the SHA-256 of the names and the code of all files in these folders."""
    total = hashlib.sha256()
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*"), key=Path.as_posix):
            name = path.relative_to(ROOT)
            is_hidden = any(part.startswith(".") or part == "__pycache__" for part in name.parts)
            if path.is_file() and path.suffix != ".md" and not is_hidden:
                content = path.read_bytes()
                code = python(content.decode()).encode() if path.suffix == ".py" else content
                total.update(b"%s\n%s\n" % (name.as_posix().encode(), code))
    return total.hexdigest()


@cache
def python(text: str) -> str:
    """Return the syntax tree of a Python file without docstrings, as text that is equal for all versions of Python."""
    return _tree(ast.parse(text))


def _tree(node: Any) -> str:
    if isinstance(node, list):
        return f"[{', '.join(map(_tree, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = dict(ast.iter_fields(node))
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node):
        fields["body"] = node.body[1:]
    # Empty fields are left out, because newer versions of Python have more fields.
    parts = [f"{name}={_tree(value)}" for name, value in fields.items() if value is not None and value != []]
    return f"{type(node).__name__}({', '.join(parts)})"
